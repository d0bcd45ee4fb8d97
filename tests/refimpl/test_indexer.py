"""The reference end to end: streams, query subsets, blocks of rows, refused input.

| what | tolerance |
|--|--|
| one call, chunks of any size, token by token | equal bits in every stage and in the state |
| a subset of the queries; another memory budget | equal bits |
| refused input | InputError that names the tensor |

The numbers themselves are checked against the oracle (tests/oracles) and against transformers.
"""

import dataclasses

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diffcheck.refimpl import KEY_STAGES, QUERY_STAGES, V4_FLASH, V4_PRO, InputError, indexer, run_indexer


def streamed(support, cfg, weights, x, qr, chunks):
    """Run chunk after chunk and put the pieces together; returns the last trace's state too."""
    start, state, pieces = 0, None, []
    for length in chunks:
        part = slice(start, start + length)
        piece = run_indexer(cfg, weights, x[part], qr[part], start=start, state=state)
        assert piece.entry_start == start // 4
        assert piece["pool"].shape[0] == (start + length) // 4 - start // 4
        state = piece.state
        pieces.append(piece)
        start += length
    assert start == len(x)
    return pieces, state


def assert_equals_one_call(support, cfg, weights, x, qr, chunks):
    whole = run_indexer(cfg, weights, x, qr)
    pieces, state = streamed(support, cfg, weights, x, qr, chunks)
    for name in KEY_STAGES:
        support.assert_same_bits(torch.cat([p[name] for p in pieces]), whole[name], name)
    for name in QUERY_STAGES[:-2]:
        support.assert_same_bits(torch.cat([p[name] for p in pieces]), whole[name], name)
    for piece in pieces:
        rows = piece.queries
        entries = piece["scores"].shape[1]
        assert entries == (piece.start + len(rows)) // 4
        support.assert_same_bits(piece["scores"], whole["scores"][rows, :entries], "scores")
        assert whole["scores"][rows, entries:].isneginf().all()
        width = piece["topk"].shape[1]
        assert width == min(cfg.index_topk, entries)
        support.assert_same_bits(piece["topk"], whole["topk"][rows, :width], "topk")
        assert (whole["topk"][rows, width:] == -1).all()
    assert state.position == whole.state.position
    support.assert_same_bits(state.keys, whole.state.keys, "state.keys")
    support.assert_same_bits(state.keys, whole["k_quant"], "state.keys")
    support.assert_same_bits(state.pool.kv, whole.state.pool.kv, "state.pool.kv")
    support.assert_same_bits(state.pool.gate, whole.state.pool.gate, "state.pool.gate")


@pytest.mark.parametrize("stored", ["fp8", "bf16"])
@pytest.mark.parametrize("tokens", [1, 3, 4, 12, 13, 14, 15])
def test_token_by_token(support, tokens, stored):
    cfg = support.config()
    weights = support.weights(cfg, stored=stored)
    x, qr = support.inputs(cfg, tokens)
    assert_equals_one_call(support, cfg, weights, x, qr, [1] * tokens)


@pytest.mark.parametrize("phase", range(1, 8))
@pytest.mark.parametrize("remainder", range(4))
def test_two_chunks_of_every_phase(support, phase, remainder):
    cfg = support.config()
    weights = support.weights(cfg)
    x, qr = support.inputs(cfg, 12 + remainder)
    assert_equals_one_call(support, cfg, weights, x, qr, [phase, 12 + remainder - phase])


@settings(max_examples=25, deadline=None)
@given(chunks=st.lists(st.integers(1, 11), min_size=1, max_size=7), seed=st.integers(0, 3))
@example(chunks=[1, 2, 3, 4, 5, 6, 7], seed=0)
@example(chunks=[130, 1, 127, 2], seed=0)
def test_any_chunks(support, chunks, seed):
    cfg = support.config(index_n_heads=2)
    weights = support.weights(cfg, seed=seed, stored=support.STORED[seed])
    x, qr = support.inputs(cfg, sum(chunks), seed=seed)
    assert_equals_one_call(support, cfg, weights, x, qr, chunks)


def test_chunks_that_cross_every_tile(support, monkeypatch):
    """More rows than a row tile, more entries than a pool tile and an entry tile, several blocks of rows."""
    cfg = support.config(index_head_dim=32, rope_head_dim=16, index_n_heads=4, index_topk=20)
    weights = support.weights(cfg)
    x, qr = support.inputs(cfg, 2300)
    monkeypatch.setattr(indexer, "BUDGET_BYTES", 4 << 20)
    assert_equals_one_call(support, cfg, weights, x, qr, [700, 1, 2, 1300, 128, 169])


def test_two_threads_change_nothing_between_chunks(support):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        cfg = support.config(hidden_size=256, q_lora_rank=256)
        weights = support.weights(cfg)
        x, qr = support.inputs(cfg, 150)
        assert_equals_one_call(support, cfg, weights, x, qr, [3, 1, 1, 100, 45])
    finally:
        torch.set_num_threads(threads)


def test_a_tail_view_of_a_larger_tensor_gives_the_same_bits(support):
    """Views that start anywhere in memory, as slices of a capture do."""
    cfg = support.config()
    weights = support.weights(cfg)
    x, qr = support.inputs(cfg, 21)
    base_x, base_qr = torch.zeros(30, 65).bfloat16(), torch.zeros(30, 131).bfloat16()
    base_x[5:26, 1:], base_qr[5:26, 3:] = x, qr
    got = run_indexer(cfg, weights, base_x[5:26, 1:], base_qr[5:26, 3:])
    support.assert_same_trace(got, run_indexer(cfg, weights, x, qr))


@pytest.mark.parametrize("budget", [1, 200_000, 256 << 20])
def test_query_subsets_and_blocks_of_rows(support, monkeypatch, budget):
    cfg = support.config()
    weights = support.weights(cfg)
    x, qr = support.inputs(cfg, 40)
    whole = run_indexer(cfg, weights, x, qr)
    monkeypatch.setattr(indexer, "BUDGET_BYTES", budget)
    rows = torch.tensor([39, 0, 17, 17, 3])
    some = run_indexer(cfg, weights, x, qr, queries=rows)
    assert some.queries.tolist() == rows.tolist()
    for name in QUERY_STAGES:
        support.assert_same_bits(some[name], whole[name][rows], name)
    for name in KEY_STAGES:
        support.assert_same_bits(some[name], whole[name], name)


def test_queries_are_absolute_positions_in_a_continuation(support):
    cfg = support.config()
    weights = support.weights(cfg)
    x, qr = support.inputs(cfg, 30)
    whole = run_indexer(cfg, weights, x, qr)
    first = run_indexer(cfg, weights, x[:13], qr[:13])
    rest = run_indexer(cfg, weights, x[13:], qr[13:], start=13, state=first.state, queries=torch.tensor([29, 13]))
    support.assert_same_bits(rest["scores"], whole["scores"][[29, 13]], "scores")
    assert rest["queries"].tolist() == [29, 13]
    assert rest.entry_start == 3
    assert rest["pool"].shape[0] == 4
    with pytest.raises(InputError, match=r"13\.\.29"):
        run_indexer(cfg, weights, x[13:], qr[13:], start=13, state=first.state, queries=torch.tensor([12]))


def test_a_call_leaves_its_state_alone(support):
    """Two continuations of one state, as of a shared prefix."""
    cfg = support.config()
    weights = support.weights(cfg)
    x, qr = support.inputs(cfg, 20)
    prefix = run_indexer(cfg, weights, x[:10], qr[:10])
    first = run_indexer(cfg, weights, x[10:], qr[10:], start=10, state=prefix.state)
    again = run_indexer(cfg, weights, x[10:], qr[10:], start=10, state=prefix.state)
    support.assert_same_trace(first, again)


def test_shapes_types_and_constants(support):
    cfg = support.config(index_topk=3)
    weights = support.weights(cfg)
    x, qr = support.inputs(cfg, 22)
    trace = run_indexer(cfg, weights, x, qr)
    shapes = {name: list(t.shape) for name, t in trace.items()}
    for name in ("q", "q_rope", "q_hadamard", "q_quant"):
        assert shapes[name] == [22, 4, 128]
    for name in KEY_STAGES:
        assert shapes[name] == [5, 128]
    assert (shapes["gate"], shapes["scores"], shapes["topk"]) == ([22, 4], [22, 5], [22, 3])
    assert {t.dtype for n, t in trace.items() if n not in ("topk", "queries")} == {torch.bfloat16}
    assert trace["topk"].dtype == torch.int64
    assert list(trace.state.pool.kv.shape) == [6, 256]
    assert trace.state.pool.kv.dtype == torch.float32
    assert cfg.gate_scale == 128**-0.5 * 4**-0.5


def test_the_first_entry_has_no_previous_window(support):
    """Its own four tokens alone decide it; the second entry reads the window before."""
    cfg = support.config()
    weights = support.weights(cfg, stored="fp32")
    x, qr = support.inputs(cfg, 12)
    pool = run_indexer(cfg, weights, x, qr)["pool"]
    first = torch.zeros(4, 256)
    assert torch.equal(run_indexer(cfg, weights, x[:4], qr[:4])["pool"][0], pool[0])
    changed = x.clone()
    changed[0] += 1
    moved = (run_indexer(cfg, weights, changed, qr)["pool"] != pool).any(dim=1).tolist()
    assert moved == [True, True, False]
    state = run_indexer(cfg, weights, x[:3], qr[:3]).state.pool
    assert torch.equal(state.kv[:4], first)
    assert state.gate[:4].isneginf().all()


def test_inputs_that_are_refused(support):
    cfg = support.config()
    weights = support.weights(cfg)
    x, qr = support.inputs(cfg, 8)
    state = run_indexer(cfg, weights, x, qr).state
    poisoned = x.clone()
    poisoned[3, 3] = torch.nan
    bad = {
        "x has dtype": (x.float(), qr, {}),
        "qr has dtype": (x, qr.float(), {}),
        "x has shape": (x[:, :-1], qr, {}),
        "qr has shape": (x, qr[None], {}),
        "x holds NaN or inf": (poisoned, qr, {}),
        "x has 8 rows and qr 7": (x, qr[:-1], {}),
        "at least 1": (x[:0], qr[:0], {}),
        "start is 8 without a state": (x, qr, {"start": 8}),
        "start is 4 but the state ends at token 8": (x, qr, {"start": 4, "state": state}),
        "start is 0 but the state ends at token 8": (x, qr, {"state": state}),
        r"positions in 8\.\.15": (x, qr, {"start": 8, "state": state, "queries": torch.tensor([16])}),
        r"positions in 0\.\.7": (x, qr, {"queries": torch.tensor([-1])}),
        "non-empty": (x, qr, {"queries": torch.tensor([], dtype=torch.int64)}),
    }
    for message, (bad_x, bad_qr, options) in bad.items():
        with pytest.raises(InputError, match=message):
            run_indexer(cfg, weights, bad_x, bad_qr, **options)
    with pytest.raises(InputError, match="wkv"):
        run_indexer(cfg, dataclasses.replace(weights, wkv=weights.wkv[1:]), x, qr)


def test_tf32_is_off_inside_and_restored_after(support, monkeypatch):
    from diffcheck.refimpl import linear

    seen = []
    product = linear.row_tiled_product

    def spy(x, weight):
        seen.append(torch.backends.cuda.matmul.allow_tf32)
        return product(x, weight)

    monkeypatch.setattr(indexer, "row_tiled_product", spy)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        cfg = support.config()
        run_indexer(cfg, support.weights(cfg), *support.inputs(cfg, 4))
        assert torch.backends.cuda.matmul.allow_tf32 is True
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert seen
    assert not any(seen)


def test_published_geometries():
    assert V4_FLASH.indexer_layers == tuple(range(2, 43, 2))
    assert V4_PRO.indexer_layers == tuple(range(2, 61, 2))
    assert (len(V4_FLASH.compress_ratios), len(V4_PRO.compress_ratios)) == (43, 61)
    assert (V4_FLASH.index_topk, V4_PRO.index_topk) == (512, 1024)
    assert (V4_FLASH.hidden_size, V4_FLASH.q_lora_rank) == (4096, 1024)
    assert (V4_PRO.hidden_size, V4_PRO.q_lora_rank) == (7168, 1536)
    for cfg in (V4_FLASH, V4_PRO):
        assert (cfg.index_n_heads, cfg.index_head_dim, cfg.rope_head_dim) == (64, 128, 64)
        assert (cfg.compress_rope_theta, cfg.rms_norm_eps) == (160000.0, 1e-6)
        assert cfg.yarn is not None
        assert dataclasses.astuple(cfg.yarn) == (16.0, 32.0, 1.0, 65536)
