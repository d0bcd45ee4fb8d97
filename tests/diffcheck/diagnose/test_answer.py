"""`diffcheck diagnose --response`: a server's answer and the inputs of its request, in one step."""

import base64
import io
import json
import re

import numpy as np
import pytest
import torch

from diffcheck import Recipe, load_layer
from diffcheck.capturing import capture_trace, load_text_inputs
from diffcheck.pipeline import Pipeline
from diffcheck.refimpl import Trace, load_traces, save_traces

TOKENS, PROMPT = 440, 420


@pytest.fixture(scope="module")
def ids(mini, tmp_path_factory):
    path = tmp_path_factory.mktemp("ids") / "ids.json"
    path.write_text(json.dumps(json.loads((mini / "tokens.json").read_text())[:TOKENS]))
    return path


@pytest.fixture(scope="module")
def recorded(mini, ids):
    """x and qr of the ids, by layer: what a server with the published numerics has."""
    out = ids.parent / "captured.safetensors"
    capture_trace(load_text_inputs(mini, text=None, tokens=ids, layers=None), out)
    return {n: {k: t[k] for k in ("x", "qr")} for n, t in load_traces(out).items()}


@pytest.fixture(scope="module")
def selection(mini, recorded):
    """int32 [tokens, layers, k] as a deployment with these recipe fields would return it."""

    def select(changes):
        chosen = []
        for layer, inputs in sorted(recorded.items()):
            config, weights = load_layer(mini, layer)
            recipe = Recipe.reference(config).replace(**changes)
            chosen.append(Pipeline(config, weights, inputs["x"], inputs["qr"]).trace(recipe)["topk"])
        return torch.stack(chosen, 1).numpy().astype("<i4")

    made = {}
    return lambda **changes: made.setdefault(json.dumps(changes), select(changes))


@pytest.fixture
def answer(tmp_path):
    def write(chosen, prompt=PROMPT, npy=False):
        """An answer that covers all but its last token."""
        path, file = tmp_path / "answer.json", io.BytesIO()
        np.save(file, chosen)
        encoded = base64.b64encode(file.getvalue() if npy else chosen.tobytes()).decode()
        counts = {} if prompt is None else {"prompt_tokens": prompt, "completion_tokens": len(chosen) + 1 - prompt}
        path.write_text(json.dumps({"text": "x", "meta_info": counts | {"indexer_topk": encoded}}))
        return path

    return write


@pytest.fixture
def trace(recorded, tmp_path):
    def write(first=0, last=TOKENS, layers=(2, 4), shared=None, metadata=None):
        path = tmp_path / "inputs.safetensors"
        save_traces(
            path,
            [
                Trace(
                    {k: t[first:last].clone() for k, t in recorded[n].items()}, layer=n, start=first, shared=shared,
                    metadata=metadata,
                )
                for n in layers
            ],
        )  # fmt: skip
        return path

    return write


def test_a_right_answer(cli, mini, selection, answer, trace, tmp_path):
    out_file = tmp_path / "out.json"
    where, inputs = answer(selection()), trace()
    status, out, err = cli("--checkpoint", mini, "--response", where, "--trace", inputs, "--json", out_file)
    assert (status, err) == (0, "")
    assert f"trace      answer {where} on inputs of {inputs}" in out
    assert "observed topk" in out
    for layer in (2, 4):
        assert f"layer {layer}: no fault found" in out
    assert [x["observed"] for x in json.loads(out_file.read_text())["layers"]] == [["topk"], ["topk"]]


@pytest.mark.parametrize("npy", [False, True])
def test_theta_is_named(cli, mini, selection, answer, trace, tmp_path, npy):
    where, out_file = answer(selection(theta=40000.0), npy=npy), tmp_path / "out.json"
    status, out, _ = cli("--checkpoint", mini, "--response", where, "--trace", trace(), "--json", out_file)
    assert status == 1
    findings = json.loads(out_file.read_text())["findings"]
    assert [(f["layer"], f["cause"], f["value"]) for f in findings] == [(2, "theta", 40000.0), (4, "theta", 40000.0)]
    assert out.count("best matching cause: theta 40000 instead of 160000") == 2


def test_a_text_goes_through_the_model(cli, mini, ids, selection, answer, tmp_path):
    """The forward pass makes the inputs; a run directory keeps them."""
    run = ("--checkpoint", mini, "--tokens", ids, "--run-dir", tmp_path / "run")
    status, out, err = cli(*run, "--response", answer(selection()))
    assert status == 0, out
    assert "layer 4 of 0..4" in err
    assert "note: inputs: forward pass of the reference, 440 tokens of ids.json" in out
    status, out, err = cli(*run, "--response", answer(selection(theta=40000.0)))
    assert status == 1
    assert "layers 0 to 4 are done" in err
    assert out.count("best matching cause: theta 40000 instead of 160000") == 2
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["layers", "trace.safetensors"]


def with_noise(tensor, size):
    rng = torch.Generator().manual_seed(0)
    return (tensor.float() * (1 + size * torch.randn(tensor.shape, generator=rng))).bfloat16()


@pytest.mark.parametrize(("changes", "status"), [({}, 0), ({"theta": 10000.0}, 1)])
def test_a_servers_own_hidden_states(cli, mini, ids, recorded, answer, trace, changes, status):
    """They differ by rounding from the forward pass: no fault beside a text, one beside exact inputs."""
    chosen = np.full((TOKENS, 2, 64), -1, dtype="<i4")
    config, weights = load_layer(mini, 2)
    x, qr = (with_noise(recorded[2][name], 0.003) for name in ("x", "qr"))
    chosen[:, 0] = Pipeline(config, weights, x, qr).trace(Recipe.reference(config).replace(**changes))["topk"].numpy()
    run = ("--checkpoint", mini, "--response", answer(chosen), "--layer", 2)
    got, out, _ = cli(*run, "--tokens", ids)
    assert got == status, out
    named = re.search(r"best matching cause: theta (\S+) instead of 160000", out)
    assert bool(named) == bool(changes), out
    assert named is None or abs(float(named[1]) / changes["theta"] - 1) < 0.05
    if not changes:
        assert re.search(r"note: 0\.\d% of the selection differs \(unknown, \d+ of 245 rows\)", out)
        assert cli(*run, "--trace", trace(layers=(2,)))[0] == 1


def test_another_text_is_not_excused(cli, mini, ids, selection, answer, tmp_path):
    other = json.loads((mini / "tokens.json").read_text())[TOKENS : 2 * TOKENS]
    (tmp_path / "other.json").write_text(json.dumps(other))
    status, out, _ = cli(
        "--checkpoint", mini, "--response", answer(selection()), "--layer", 2, "--tokens", tmp_path / "other.json"
    )
    assert status == 1, out


def test_a_group_seen_before_it_is_complete(cli, mini, selection, answer, trace):
    """The last row's own group is no entry of the request yet: a fault to name, not a malformed answer."""
    chosen = selection(mask_shift=3)
    rows = range(PROMPT + 1, TOKENS + 1, 4)
    length = next(n for n in rows if chosen[n - 1].max() == n // 4)
    assert length % 4 == 1
    chosen = chosen[:length]
    status, out, _ = cli("--checkpoint", mini, "--response", answer(chosen), "--trace", trace(last=len(chosen)))
    assert status == 1
    assert out.count("mask") >= 2, out


def test_inputs_of_the_prompt_alone(cli, mini, selection, answer, trace):
    status, out, _ = cli("--checkpoint", mini, "--response", answer(selection()), "--trace", trace(last=PROMPT))
    assert status == 0
    assert "note: tokens 420 to 439 of the answer: not compared, the inputs end before them" in out
    # the last token of a reply is never fed, so an answer ends one row before a whole text
    status, _, err = cli("--checkpoint", mini, "--response", answer(selection()[:-1]), "--trace", trace())
    assert (status, err) == (0, "")


def test_inputs_of_a_later_chunk(cli, mini, selection, answer, trace):
    """Rows meet by position, so the rows of another chunk would not fit."""
    run = ("--checkpoint", mini, "--trace", trace(first=200), "--recipe", "reference", "--response")
    status, out, _ = cli(*run, answer(selection()))
    assert status == 0, out
    status, out, _ = cli(*run, answer(selection(k_theta=40000.0)))
    assert status == 1
    assert "theta 40000" in out


def test_layers_without_a_partner_are_said(cli, mini, selection, answer, trace):
    everything = np.full((TOKENS, 7, 64), -1, dtype="<i4")
    everything[:, [2, 4]] = selection(theta=40000.0)
    status, out, _ = cli("--checkpoint", mini, "--response", answer(everything), "--trace", trace(layers=(4,)))
    assert status == 1
    assert "layer 4: first wrong stage" in out
    assert "note: layer 2: in the answer, not in the inputs" in out
    for layer in (5, 6):
        assert f"note: layer {layer} of the answer, which the checkpoint's config lacks: not compared" in out


def test_one_request_of_several(cli, mini, recorded, selection, answer, trace):
    shared = {"requests": torch.tensor([0, 20, TOKENS])}
    run = ("--checkpoint", mini, "--trace", trace(shared=shared), "--layer", 4, "--response")
    bad(cli(*run, answer(selection())), "holds 2 requests", "--request 0 to 1")
    config, weights = load_layer(mini, 4)
    own = Pipeline(config, weights, recorded[4]["x"][20:], recorded[4]["qr"][20:])
    chosen = own.trace(Recipe.reference(config).replace(theta=40000.0))["topk"].numpy().astype("<i4")
    both = np.stack((np.full_like(chosen, -1), chosen), 1)
    status, out, _ = cli(*run, answer(both, prompt=400), "--request", 1)
    assert status == 1
    assert "theta 40000 instead of 160000" in out


def test_the_recipe_of_the_inputs_counts(cli, mini, selection, answer, trace):
    inputs = trace(layers=(4,), metadata={"recipe": "vllm-fp8"})
    status, out, _ = cli("--checkpoint", mini, "--response", answer(selection()), "--trace", inputs)
    assert "recipe     vllm-fp8" in out
    assert status == 1, "the answer is the reference's, not vllm-fp8's"


def bad(result, *parts):
    status, _, err = result
    assert status == 2, err
    assert len(err.strip().splitlines()) == 1, err
    for part in parts:
        assert part in err


def test_bad_input_is_one_line(cli, mini, selection, answer, trace, tmp_path):
    run, chosen = ("--checkpoint", mini), selection()
    whole = (*run, "--trace", trace(), "--response")
    bad(cli(*whole, tmp_path / "none"), "no such file")
    bad(cli(*whole, answer(chosen[:300], prompt=None)), "440 tokens", "covers 300", "439")
    bad(cli(*whole, answer(chosen, prompt=None), "--layer", 3), "holds no layer 3", "[2, 4]")
    bad(cli(*whole, answer(chosen[:, :1], prompt=440)), "values for 440 tokens", "2 layers (or 5) x 64")
    bad(cli(*whole, answer(chosen[:, [0, 1, 1]], npy=True)), "shape [440, 3, 64]", "2 layers (or 5) x 64")
    bad(cli(*whole, answer(np.where(chosen == 9, 999, chosen))), "selects 999 of 110 entries")
    half = answer(chosen)
    half.write_text(half.read_text()[: half.stat().st_size // 2])
    bad(cli(*whole, half), "answer.json", "not readable as JSON")
    content = json.loads(answer(chosen).read_text())
    content["meta_info"]["indexer_topk"] = content["meta_info"]["indexer_topk"][:-9]
    half.write_text(json.dumps(content))
    bad(cli(*whole, half), "answer.json", "indexer_topk")
    short = trace(last=400)
    bad(cli(*run, "--trace", short, "--response", answer(chosen)), "has 400 tokens", "420 of the answer's prompt")
    proxy = trace(metadata={"source": "PROXY: embedding rows"})
    bad(cli(*run, "--trace", proxy, "--response", answer(chosen)), "holds a PROXY")
    (tmp_path / "ids.json").write_text(json.dumps([5] * 400))
    where = ("--response", answer(chosen))
    status, _, err = cli(*run, *where, "--tokens", tmp_path / "ids.json")
    bad((status, "", err), "ids.json: has 400 tokens")
    assert "layer 0" not in err, "nothing was computed"
    bad(cli(*run, *where), "one of --trace, --text and --tokens")
    bad(cli(*run, *where, "--trace", proxy, "--tokens", tmp_path / "ids.json"), "one of --trace, --text and --tokens")
    bad(cli(*run, *where, "--tokens", tmp_path / "ids.json", "--request", 0), "--request")
    bad(cli(*run, *where, "--trace", proxy, "--run-dir", tmp_path / "run"), "--run-dir")
    bad(cli(*run, "--trace", proxy, "--tokens", tmp_path / "ids.json"), "go with --response")
    bad(cli(*run), "--trace FILE, or --response FILE")
