"""Recorded inputs and the choice of query rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from diffcheck.inputs import DEFAULT_NEEDLE_TOKENS, Needle, choose_queries, load_inputs
from diffcheck.refimpl import IndexerConfig, InputError, load_traces

TOKENS = 40


@pytest.fixture
def config(support):
    return support.config(compress_ratios=(0, 4, 128, 4))


@pytest.fixture
def trace(tmp_path, config, support):
    """Write a trace, the default one with some tensors replaced (None takes one away) and other metadata."""

    def write(metadata=None, **changes):
        x, qr = support.inputs(config, TOKENS)
        tensors = {f"layers.{n}.{name}": t.clone() for n in (1, 3) for name, t in (("x", x), ("qr", qr))}
        tensors |= {name.replace("__", "."): t for name, t in changes.items()}
        path = tmp_path / "trace.safetensors"
        kept = {name: t for name, t in tensors.items() if t is not None}
        save_file(kept, path, metadata={"schema": "diffcheck-trace-1"} | (metadata or {}))
        return path

    return write


def ints(*values):
    return torch.tensor(values, dtype=torch.int64)


def test_trained_checkpoint(mini):
    config = IndexerConfig.from_json(mini / "config.json")
    loaded = load_inputs(mini / "trace.safetensors", config)
    assert sorted(loaded) == [2, 4]
    traces = load_traces(mini / "trace.safetensors")
    for layer, inputs in loaded.items():
        assert torch.equal(inputs.x, traces[layer]["x"])
        assert torch.equal(inputs.qr, traces[layer]["qr"])
        assert (inputs.start, inputs.length, inputs.notes) == (0, 4096, ())
        assert len(inputs.needles) > 64, "all records of the keys that are asked"
        assert "mini-v4" in inputs.source
        for needle, first in zip(inputs.needles, traces[layer].shared["needle_positions"].tolist(), strict=True):
            assert list(needle.entries) == list(range(first // 4, (first + 4) // 4 + 1))
    assert list(load_inputs(mini / "trace.safetensors", config, [4])) == [4]


def test_needles(trace, config):
    path = trace(needle_queries=ints(39, 20), needle_positions=ints(8, 3))
    want = (Needle(query=39, first_token=8, last_token=12), Needle(query=20, first_token=3, last_token=7))
    assert load_inputs(path, config)[1].needles == want
    assert DEFAULT_NEEDLE_TOKENS == 5
    assert load_inputs(path, config, needle_tokens=4)[3].needles[0].last_token == 11
    path = trace(needle_queries=ints(39, 20), needle_positions=ints(8, 3), needle_lengths=ints(1, 18))
    needles = load_inputs(path, config, needle_tokens=7)[1].needles
    assert [(n.first_token, n.last_token, list(n.entries)) for n in needles] == [
        (8, 8, [2]),
        (3, 20, [0, 1, 2, 3, 4, 5]),
    ]
    assert load_inputs(trace(), config)[1].needles == ()


def test_fp32_is_rounded_once_and_noted(trace, config):
    x = torch.randn(TOKENS, config.hidden_size)
    loaded = load_inputs(trace(layers__1__x=x), config)
    assert torch.equal(loaded[1].x, x.bfloat16())
    assert loaded[1].notes == ("layers.1.x was fp32 and is rounded to bf16",)
    assert loaded[3].notes == ()


def test_start_position_and_source(trace, config):
    path = trace({"start_position": "100", "source": "a server"}, needle_queries=ints(139), needle_positions=ints(7))
    inputs = load_inputs(path, config, [1])[1]
    assert (inputs.start, inputs.source) == (100, "a server")
    assert inputs.needles == (Needle(query=139, first_token=7, last_token=11),)


def test_one_request_is_fine(trace, config):
    assert load_inputs(trace(requests=ints(0, TOKENS)), config)[1].length == TOKENS


def test_layers_that_are_not_there(trace, config):
    path = trace(layers__3__x=None, layers__3__qr=None)
    assert list(load_inputs(path, config, [1, 3], strict=False)) == [1]
    with pytest.raises(InputError, match=r"no tensor layers\.3\.x, expected it; the file has layers \[1\]"):
        load_inputs(path, config, [1, 3])
    with pytest.raises(InputError, match=r"holds no layer of \[3\]"):
        load_inputs(path, config, [3], strict=False)
    foreign = trace(layers__2__x=torch.zeros(TOKENS, config.hidden_size, dtype=torch.bfloat16))
    assert list(load_inputs(foreign, config, [1])) == [1]
    with pytest.raises(InputError, match="layer 2 has no indexer in this checkpoint, expected layers among 1, 3"):
        load_inputs(foreign, config, [1], strict=False)
    with pytest.raises(InputError, match="layer 2 has no indexer"):
        load_inputs(foreign, config)


def broken(shape, row, value, dtype=torch.bfloat16):
    tensor = torch.zeros(*shape, dtype=dtype)
    tensor[row, 1] = value
    return tensor


BF16 = torch.bfloat16
QUERIES = {"needle_queries": ints(39, 20), "needle_positions": ints(8, 3)}


@pytest.mark.parametrize(
    ("metadata", "changes", "message"),
    [
        ({"schema": "2"}, {}, "schema is '2', expected 'diffcheck-trace-1'"),
        ({"start_position": "-4"}, {}, "start_position is '-4', expected a number of tokens"),
        ({}, {"layers__1__qr": None}, r"no tensor layers\.1\.qr"),
        (
            {},
            {"layers__1__x": torch.zeros(40, 65, dtype=BF16)},
            r"layers\.1\.x has shape \[40, 65\], expected \[T, 64\]",
        ),
        (
            {},
            {"layers__3__qr": torch.zeros(40, 64, dtype=BF16)},
            r"layers\.3\.qr has shape \[40, 64\], expected \[T, 128\]",
        ),
        ({}, {"layers__1__x": torch.zeros(1, 40, 64, dtype=BF16)}, r"has shape \[1, 40, 64\], expected"),
        (
            {},
            {"layers__1__x": torch.zeros(39, 64, dtype=BF16)},
            "layer 1 has 39 rows of x and 40 of qr, expected the same",
        ),
        (
            {},
            {"layers__1__x": torch.zeros(8, 64, dtype=BF16), "layers__1__qr": torch.zeros(8, 128, dtype=BF16)},
            r"layers have \{1: 8, 3: 40\} tokens, expected the same",
        ),
        (
            {},
            {"layers__1__x": torch.zeros(40, 64, dtype=torch.float16)},
            "dtype torch.float16, expected torch.bfloat16 or",
        ),
        (
            {},
            {"layers__3__x": broken((40, 64), 7, torch.nan)},
            r"layers\.3\.x holds NaN or inf, first in row 7, expected",
        ),
        ({}, {"layers__1__qr": broken((40, 128), 0, -torch.inf)}, r"layers\.1\.qr holds NaN or inf, first in row 0"),
        (
            {},
            {"layers__1__qr": broken((40, 128), 39, 3.4e38, torch.float32)},
            r"layers\.1\.qr holds NaN or inf.*row 39",
        ),
        ({}, {"requests": ints(0, 10, 40)}, "holds 2 requests over 40 tokens, expected one request"),
        ({}, {"needle_queries": ints(39)}, "no tensor needle_positions, expected it"),
        ({}, {"needle_lengths": ints(5)}, "no tensor needle_queries, expected it"),
        ({}, {**QUERIES, "needle_positions": ints(8)}, "2 needle_queries, 1 needle_positions and 1 needle_lengths"),
        ({}, {**QUERIES, "needle_lengths": ints(8)}, "2 needle_queries, 2 needle_positions and 1 needle_lengths"),
        (
            {},
            {**QUERIES, "needle_queries": ints(39, 40)},
            r"needle_queries\[1\] is 40, expected (one of|a position in) 0\.\.39",
        ),
        ({}, {**QUERIES, "needle_queries": ints(-1, 20)}, r"needle_queries\[0\] is -1"),
        ({}, {**QUERIES, "needle_positions": ints(8, -1)}, r"needle 1 covers tokens -1\.\.3"),
        (
            {},
            {**QUERIES, "needle_positions": ints(8, 17)},
            r"needle 1 covers tokens 17\.\.21, expected them in 0\.\.20",
        ),
        ({}, {**QUERIES, "needle_lengths": ints(5, 0)}, r"needle_lengths\[1\] is 0, expected at least 1"),
        ({}, {**QUERIES, "needle_positions": torch.tensor([8.0, 3.0])}, "needle_positions is torch.float32"),
    ],
)
def test_errors(trace, config, metadata, changes, message):
    path = trace(metadata, **changes)
    with pytest.raises(InputError, match=message) as caught:
        load_inputs(path, config)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_files_that_cannot_be_read(tmp_path, config):
    with pytest.raises(InputError, match="no such file"):
        load_inputs(tmp_path / "absent", config)
    (tmp_path / "text").write_text("nothing of the kind")
    with pytest.raises(InputError, match="not readable as safetensors"):
        load_inputs(tmp_path / "text", config)
    save_file({"a": torch.zeros(1)}, tmp_path / "none", metadata={"schema": "diffcheck-trace-1"})
    with pytest.raises(InputError, match="holds no layer, expected"):
        load_inputs(tmp_path / "none", config)


def test_needle_tokens_must_be_positive(trace, config):
    with pytest.raises(InputError, match="needle_tokens is 0, expected at least 1"):
        load_inputs(trace(**QUERIES), config, needle_tokens=0)


def test_choose_queries_by_hand():
    # k = 2: a row sees 3 entries from position 11 on
    assert choose_queries(20, 2, 3).tolist() == [13, 16, 19]
    assert choose_queries(20, 2, 100).tolist() == list(range(11, 20))
    assert choose_queries(20, 2, 1).tolist() == [19]
    assert choose_queries(20, 2, 3, [5, 5]).tolist() == [5, 15, 19]
    assert choose_queries(20, 2, 2, [1, 2, 3]).tolist() == [1, 2, 3]
    assert choose_queries(20, 5, 4).tolist() == [4, 9, 14, 19]  # no row sees more than 5
    assert choose_queries(20, 2, 2, start=100).tolist() == [109, 119]


@given(
    length=st.integers(1, 300),
    k=st.integers(1, 80),
    count=st.integers(1, 320),
    start=st.sampled_from([0, 7, 1000]),
    data=st.data(),
)
def test_choose_queries(length, k, count, start, data):
    must = data.draw(st.lists(st.integers(start, start + length - 1), max_size=12))
    chosen = choose_queries(length, k, count, must, start=start)
    assert chosen.dtype == torch.int64
    rows = chosen.tolist()
    assert rows == sorted(set(rows))
    assert set(must) <= set(rows)
    assert start <= rows[0] <= rows[-1] < start + length
    selective = [t for t in range(start, start + length) if (t + 1) // 4 > k] or list(range(start, start + length))
    assert set(rows) - set(must) <= set(selective)
    assert len(rows) == max(min(count, len(set(selective) | set(must))), len(set(must)))


def test_choose_queries_spreads_evenly():
    rows = choose_queries(10000, 64, 50)
    gaps = rows[1:] - rows[:-1]
    assert int(gaps.max() - gaps.min()) <= 1
    assert int(rows[-1]) == 9999


def test_choose_queries_errors():
    for length, count in ((0, 1), (1, 0)):
        with pytest.raises(InputError, match="expected at least 1 of each"):
            choose_queries(length, 1, count)
    for query in (-1, 20):
        with pytest.raises(InputError, match=f"query {query} is outside"):
            choose_queries(20, 1, 3, [query])


def test_one_of_several_requests(trace, config):
    """Its rows, its needles, and positions that count from its own start; a needle across requests is nobody's."""
    needles = {"needle_queries": ints(9, 30, 39), "needle_positions": ints(2, 4, 20), "needle_lengths": ints(3, 3, 3)}
    path = trace(requests=ints(0, 10, 40), **needles)
    whole = load_inputs(trace(), config)[3]
    path = trace(requests=ints(0, 10, 40), **needles)
    first, second = (load_inputs(path, config, request=n)[3] for n in (0, 1))
    assert torch.equal(first.x, whole.x[:10])
    assert torch.equal(second.qr, whole.qr[10:])
    assert first.needles == (Needle(query=9, first_token=2, last_token=4),)
    assert second.needles == (Needle(query=29, first_token=10, last_token=12),)


@pytest.mark.parametrize(
    ("bounds", "request_number", "message"),
    [
        ((0, 10, 40), None, "choose one with --request 0 to 1"),
        ((0, 10, 40), 2, "has no request 2, expected 0 to 1"),
        ((0, 10, 39), 0, "expected rising token counts from 0 to 40"),
        ((0, 10, 10, 40), 0, "expected rising token counts"),
        ((0, 30, 10, 40), 0, "expected rising token counts"),
        ((40,), 0, "expected rising token counts"),
        ((0, 38, 40), 1, "request 1 has 2 tokens, expected 4"),
    ],
)
def test_requests_that_do_not_fit(trace, config, bounds, request_number, message):
    with pytest.raises(InputError, match=message):
        load_inputs(trace(requests=ints(*bounds)), config, request=request_number)
