"""Files that servers leave: tensor dumps as SGLang's dumper writes them, returned top-k, plain files, and broken ones.

The dumps here are made as the dumper makes them: one .pt a pass with the outputs of leaf modules by their names, the
batch's positions beside them, one directory a rank.
"""

import base64
import io
import json
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from diffcheck.capturing.dumps import read_plain, read_sglang_dump
from diffcheck.capturing.response import read_response
from diffcheck.errors import InputError
from diffcheck.refimpl import load_traces, save_traces

HIDDEN, LORA = 64, 128


@pytest.fixture
def config(support):
    return support.config(compress_ratios=(0, 4, 128, 4))


def states(tokens, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return {
        layer: {
            "x": torch.randn(tokens, HIDDEN, generator=rng).bfloat16(),
            "qr": torch.randn(tokens, LORA, generator=rng).bfloat16(),
            "q": torch.randn(tokens, 4 * 128, generator=rng).bfloat16(),
        }
        for layer in (1, 3)
    }


def write_pass(directory, number, rows, positions, *, leave_out=(), rank="TP0_PP0_Rank0_pid77"):
    """`rows`: {layer: {x, qr, q}}, already those of this pass."""
    folder = directory / rank
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {"model.embed_tokens": torch.zeros(len(positions), HIDDEN)}
    for layer, of in rows.items():
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.input_layernorm"] = [of["x"], torch.zeros_like(of["x"])] if number % 2 else of["x"]
        tensors[f"{prefix}.self_attn.q_norm"] = of["qr"]
        tensors[f"{prefix}.self_attn.indexer.wq_b"] = of["q"]
        tensors[f"{prefix}.mlp.gate"] = torch.zeros(len(positions), 8)
    tensors["model.layers.2.self_attn.q_norm"] = torch.zeros(len(positions), LORA)
    tensors["model.forward_batch_info.positions"] = torch.tensor(positions)
    tensors["model.forward_batch_info.input_ids"] = torch.zeros(len(positions), dtype=torch.int64)
    torch.save({n: t for n, t in tensors.items() if not n.endswith(tuple(leave_out))}, folder / f"Pass{number:05d}.pt")


def part(rows, first, last):
    return {layer: {name: t[first:last] for name, t in of.items()} for layer, of in rows.items()}


def test_chunks_and_decode_steps_of_one_request(config, tmp_path):
    text = states(23)
    for number, (first, last) in enumerate(((0, 9), (9, 18), (18, 19), (19, 20), (20, 23))):
        write_pass(tmp_path, number, part(text, first, last), list(range(first, last)))
    dump = read_sglang_dump(tmp_path, config)
    (request,) = dump.requests
    assert dump.missing == ()
    assert sorted(request) == [1, 3]
    for layer, trace in request.items():
        assert trace.start == 0
        for name in ("x", "qr"):
            assert torch.equal(trace[name], text[layer][name])
        assert torch.equal(trace["q"], text[layer]["q"].view(23, 4, 128))
    assert "model.layers.N.mlp.gate" in dump.ignored
    assert "model.layers.N.self_attn.q_norm" in dump.ignored, "layer 2 has no indexer"
    save_traces(tmp_path / "t.safetensors", list(request.values()))
    assert sorted(load_traces(tmp_path / "t.safetensors")) == [1, 3]


def test_two_requests_in_one_batch(config, tmp_path):
    """Ragged prefill, then decode steps of both, in turn: each token goes to the request that it continues."""
    a, b = states(8, seed=1), states(13, seed=2)

    def join(*parts):
        return {n: {k: torch.cat([p[n][k] for p in parts]) for k in ("x", "qr", "q")} for n in (1, 3)}

    write_pass(tmp_path, 0, join(part(a, 0, 6), part(b, 0, 11)), [*range(6), *range(11)])
    write_pass(tmp_path, 1, join(part(b, 11, 12), part(a, 6, 7)), [11, 6])
    write_pass(tmp_path, 2, join(part(a, 7, 8), part(b, 12, 13)), [7, 12])
    dump = read_sglang_dump(tmp_path, config)
    assert len(dump.requests) == 2
    for request, text in zip(dump.requests, (a, b), strict=True):
        assert torch.equal(request[3]["x"], text[3]["x"])
        assert torch.equal(request[1]["qr"], text[1]["qr"])


def test_a_cached_prefix_is_said_to_be_missing(config, tmp_path):
    text = states(12)
    write_pass(tmp_path, 0, part(text, 4, 12), list(range(4, 12)))
    dump = read_sglang_dump(tmp_path, config)
    assert dump.requests[0][1].start == 4
    assert "layer 1, request 0: tokens 0 to 3 (a cached prefix)" in dump.missing


def test_ranks(config, tmp_path):
    """TP0 of every pipeline stage is read; its tensor-parallel neighbours, and a share of q, are not."""
    text = states(8)
    write_pass(tmp_path, 0, {1: text[1]}, list(range(8)), rank="TP0_PP0_Rank0_pid1")
    write_pass(tmp_path, 0, {3: text[3] | {"q": text[3]["q"][:, :256]}}, list(range(8)), rank="TP0_PP1_Rank2_pid3")
    write_pass(tmp_path, 0, {1: states(8, seed=9)[1]}, list(range(8)), rank="TP1_PP0_Rank1_pid2")
    dump = read_sglang_dump(tmp_path, config)
    assert torch.equal(dump.requests[0][1]["x"], text[1]["x"])
    assert torch.equal(dump.requests[0][3]["x"], text[3]["x"])
    assert "q" not in dump.requests[0][3]
    assert len(dump.requests) == 1, "the neighbour's rows are the same request once more"
    one = read_sglang_dump(tmp_path / "TP1_PP0_Rank1_pid2", config)
    assert not torch.equal(one.requests[0][1]["x"], text[1]["x"])
    assert one.missing == ("layer 3: not in the dump",)


def test_what_is_missing_is_listed(config, tmp_path):
    text = states(8)
    write_pass(tmp_path, 0, text, list(range(8)), leave_out=["1.self_attn.q_norm", "positions"])
    dump = read_sglang_dump(tmp_path, config)
    assert dump.missing == (
        "pass 0: positions, taken to be one request from token 0 on",
        "layer 1, request 0: qr (q_norm's output; a fused kernel hides it)",
    )
    assert "qr" not in dump.requests[0][1]
    assert "qr" in dump.requests[0][3]


def test_nothing_usable(config, tmp_path):
    write_pass(tmp_path, 0, states(8), list(range(8)), leave_out=["q_norm"])
    with pytest.raises(InputError, match="no layer with an indexer has x and qr"):
        read_sglang_dump(tmp_path, config)
    with pytest.raises(InputError, match="no such directory"):
        read_sglang_dump(tmp_path / "none", config)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"no Pass00000\.pt"):
        read_sglang_dump(tmp_path / "empty", config)


def test_widths_of_another_model(config, tmp_path):
    text = {1: states(8)[1] | {"x": torch.zeros(8, 65)}}
    write_pass(tmp_path, 0, text, list(range(8)))
    with pytest.raises(InputError, match=r"x of layer 1 has shape \[8, 65\], expected \[T, 64\]"):
        read_sglang_dump(tmp_path, config)


class Nasty:
    """What a pickle could do: leave a mark."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (open, (str(self.mark), "w"))


@pytest.mark.parametrize("kind", ["pickle", "garbage", "truncated", "list"])
def test_nothing_of_a_file_is_executed(config, tmp_path, kind):
    path = tmp_path / "Pass00000.pt"
    if kind == "pickle":
        torch.save({"model.layers.1.input_layernorm": Nasty(tmp_path / "mark")}, path)
    elif kind == "garbage":
        path.write_bytes(b"not a zip at all" * 9)
    elif kind == "truncated":
        torch.save({"a": torch.zeros(100)}, path)
        path.write_bytes(path.read_bytes()[:200])
    else:
        torch.save([torch.zeros(3)], path)
    with pytest.raises(InputError, match=r"Pass00000\.pt: (holds|not readable)"):
        read_sglang_dump(tmp_path, config)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("kind", ["safetensors", "flat", "nested", "nested names"])
def test_plain_files(tmp_path, kind):
    x, qr = torch.randn(9, HIDDEN), torch.randn(9, LORA)
    flat = {"layers.1.x": x, "layers.1.qr": qr, "layers.3.x": x, "extra": torch.zeros(2)}
    path = tmp_path / ("t.safetensors" if kind == "safetensors" else "t.pt")
    if kind == "safetensors":
        save_file({name: t.clone() for name, t in flat.items()}, path)
    elif kind == "flat":
        torch.save(flat, path)
    elif kind == "nested":
        torch.save({1: {"x": x, "qr": qr}, 3: {"x": x}, "extra": torch.zeros(2)}, path)
    else:
        torch.save({"layers.1": {"x": x, "qr": qr}, "layers.3": {"x": x}, "extra": torch.zeros(2)}, path)
    dump = read_plain(path)
    assert torch.equal(dump.requests[0][1]["qr"], qr)
    assert dump.missing == ("layer 3: qr",)
    assert dump.ignored == ("extra",)


@pytest.mark.parametrize(
    ("content", "message"), [({"a": torch.zeros(1)}, "no tensor named layers.N.x"), ([1], "holds list")]
)
def test_bad_plain_files(tmp_path, content, message):
    torch.save(content, tmp_path / "t.pt")
    with pytest.raises(InputError, match=message):
        read_plain(tmp_path / "t.pt")
    (tmp_path / "t.safetensors").write_bytes(b"junk")
    with pytest.raises(InputError, match="not readable as safetensors"):
        read_plain(tmp_path / "t.safetensors")


def selection(config, tokens, layers):
    """int32 [tokens, layers, k] of entries that each token sees."""
    rng = np.random.default_rng(0)
    k = config.index_topk
    made = np.full((tokens, layers, k), -1, dtype=np.int32)
    for t in range(tokens):
        for layer in range(layers):
            seen = rng.permutation((t + 1) // 4)[:k]
            made[t, layer, : len(seen)] = seen
    return made


def encoded(array):
    return base64.b64encode(array.tobytes()).decode()


@pytest.mark.parametrize("layers", [2, 4], ids=["indexer layers", "all layers"])
@pytest.mark.parametrize("kind", ["sglang", "sglang chat", "vllm"])
def test_responses(config, tmp_path, layers, kind):
    chosen = selection(config, 40, layers)
    if kind == "sglang":
        answer = {
            "text": "x",
            "meta_info": {"prompt_tokens": 33, "completion_tokens": 8, "indexer_topk": encoded(chosen)},
        }
    elif kind == "sglang chat":
        answer = {"choices": [{"meta_info": {"indexer_topk": encoded(chosen)}}]}
        answer["usage"] = {"prompt_tokens": 33, "completion_tokens": 8}
    else:
        file = io.BytesIO()
        np.save(file, chosen)
        answer = {"choices": [{"indexer_topk": base64.b64encode(file.getvalue()).decode()}]}
    path = tmp_path / "answer.json"
    path.write_text(json.dumps(answer))
    traces = read_response(path, config).layers
    assert sorted(traces) == [1, 3]
    place = {2: {1: 0, 3: 1}, 4: {1: 1, 3: 3}}[layers]
    for layer, trace in traces.items():
        assert trace["observed_topk"].dtype == torch.int64
        assert np.array_equal(trace["observed_topk"].numpy(), chosen[:, place[layer]])
        assert trace["queries"].tolist() == list(range(40))


def test_token_counts_decide_where_sizes_are_ambiguous(config, tmp_path):
    """80 x 2 layers and 40 x 4 layers have the same bytes; the numbers of tokens tell them apart."""
    chosen = selection(config, 40, 4)
    answer = {"meta_info": {"prompt_tokens": 40, "completion_tokens": 1, "indexer_topk": encoded(chosen)}}
    (tmp_path / "a.json").write_text(json.dumps(answer))
    assert read_response(tmp_path / "a.json", config).layers[3]["observed_topk"].shape == (40, 4)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("[", "not readable as JSON"),
        ("{}", "no meta_info.indexer_topk"),
        ('{"choices": [1, {"meta_info": 3}]}', "no meta_info.indexer_topk"),
        ('{"meta_info": {"indexer_topk": "%%%"}}', "is no base64"),
        ('{"meta_info": {"indexer_topk": "QUJD"}}', "has 3 bytes, expected int32"),
        ('{"meta_info": {"indexer_topk": "QUJDRA=="}}', "has 1 values, expected tokens x 2"),
    ],
)
def test_bad_responses(config, tmp_path, answer, message):
    (tmp_path / "a.json").write_text(answer)
    with pytest.raises(InputError, match=message):
        read_response(tmp_path / "a.json", config)


def test_positions_of_tokens_instead_of_entries_are_refused(config, tmp_path):
    chosen = selection(config, 40, 2)
    chosen[39, 1, 0] = 37
    (tmp_path / "a.json").write_text(json.dumps({"meta_info": {"indexer_topk": encoded(chosen)}}))
    with pytest.raises(InputError, match="layer 3 selects 37 of 10 entries"):
        read_response(tmp_path / "a.json", config)


def test_a_pickled_npy_is_refused(config, tmp_path):
    file = io.BytesIO()
    np.save(file, np.array([pickle.dumps], dtype=object), allow_pickle=True)
    answer = {"choices": [{"indexer_topk": base64.b64encode(file.getvalue()).decode()}]}
    (tmp_path / "a.json").write_text(json.dumps(answer))
    with pytest.raises(InputError, match=r"no readable \.npy"):
        read_response(tmp_path / "a.json", config)
