"""Every stage of the reference against an oracle that shares no code with it.

| what | tolerance |
|--|--|
| q, pool, gate (sums in another order) | at most 1 bf16 step, on at most 0.2 % of the elements |
| k_norm (mean in another order) | the same |
| scores, on the reference's own q_quant, k_quant and gate | the same |
| everything elementwise, on the reference's own preceding stage; topk | equal bits |
| q_quant, k_quant and scores from end to end | relative L2 0.02 |
"""

import ml_dtypes
import numpy as np
import pytest
import torch

from diffcheck.refimpl import run_indexer

MAX_STEPS = 1
MAX_SHARE = 0.002
END_TO_END_L2 = {"q_quant": 0.02, "k_quant": 0.02, "scores": 0.02}
"""An element that moves by one bf16 step may cross a midpoint of e2m1, whose steps are far larger."""

CASES = {
    "fp8": {"stored": "fp8", "tokens": 30, "q_lora_rank": 256},
    "fp8, long positions": {"stored": "fp8", "tokens": 27, "skip": 400},
    "fp4": {"stored": "fp4", "tokens": 21},
    "bf16, lora of no block": {"stored": "bf16", "tokens": 24, "q_lora_rank": 96},
    "fp32": {"stored": "fp32", "tokens": 17},
    "other geometry": {"stored": "fp32", "tokens": 22, "index_head_dim": 64, "rope_head_dim": 32},
    "odd constants": {"stored": "fp8", "tokens": 22, "compress_rope_theta": 1000.0, "rms_norm_eps": 0.1},
}


def to_numpy(tensor):
    """The same values as a numpy array, bf16 and e4m3 as ml_dtypes have them."""
    special = {torch.bfloat16: ml_dtypes.bfloat16, torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn}
    if tensor is None:
        return None
    if tensor.dtype == torch.float8_e8m0fnu:
        return tensor.view(torch.uint8).numpy()
    if tensor.dtype in special:
        width = {2: torch.uint16, 1: torch.uint8}[tensor.element_size()]
        return tensor.contiguous().view(width).numpy().view(special[tensor.dtype])
    return tensor.numpy()


def steps(a, b):
    """How many bf16 values lie between the elements of two bf16 arrays."""
    places = []
    for array in (a, b):
        code = array.view(np.uint16).astype(np.int64)
        places.append(np.where(code >= 0x8000, 0x8000 - code, code))
    return np.abs(places[0] - places[1])


def assert_close(got, want, what):
    distance = steps(got, want)
    share = (distance > 0).mean()
    print(f"{what}: {share:.4%} off by up to {distance.max()}")
    assert distance.max() <= MAX_STEPS, f"{what}: {distance.max()} bf16 steps apart"
    assert share <= MAX_SHARE, f"{what}: {share:.2%} of elements differ"


def assert_equal(got, want, what):
    assert got.shape == want.shape
    assert got.dtype == want.dtype, what
    wrong = got.view(np.uint8) != want.view(np.uint8)
    assert not wrong.any(), f"{what}: {wrong.mean():.3%} of bytes differ"


@pytest.fixture(scope="module", params=CASES, ids=list(CASES))
def case(request, support):
    """(config, weights, x, qr, queries, trace as numpy arrays)."""
    options = dict(CASES[request.param])
    stored, tokens, skip = options.pop("stored"), options.pop("tokens"), options.pop("skip", 0)
    cfg = support.config(**options)
    weights = support.weights(cfg, seed=len(request.param), stored=stored)
    x, qr = support.inputs(cfg, tokens + skip, seed=tokens)
    queries = torch.arange(skip, skip + tokens)
    trace = run_indexer(cfg, weights, x, qr, queries=queries)
    return cfg, weights, x, qr, queries, {name: to_numpy(tensor) for name, tensor in trace.items()}


def frequencies(oracle, cfg):
    yarn = cfg.yarn
    return oracle.inverse_frequencies(
        cfg.compress_rope_theta,
        cfg.rope_head_dim,
        yarn.factor,
        yarn.beta_fast,
        yarn.beta_slow,
        yarn.original_max_position_embeddings,
    )


def test_projections_and_pool_agree_up_to_summation_order(case, oracle):
    cfg, w, x, qr, queries, got = case
    q = oracle.q(to_numpy(qr[queries]), to_numpy(w.wq_b), to_numpy(w.wq_b_scale), cfg.index_n_heads)
    assert_close(got["q"], q, "q")
    pool = oracle.pool(to_numpy(x), to_numpy(w.wkv), to_numpy(w.wgate), to_numpy(w.ape))
    assert_close(got["pool"], pool, "pool")
    gate = oracle.gate(to_numpy(x[queries]), to_numpy(w.weights_proj), cfg.index_head_dim)
    assert_close(got["gate"], gate, "gate")
    assert_close(got["k_norm"], oracle.k_norm(got["pool"], to_numpy(w.norm), cfg.rms_norm_eps), "k_norm")


def test_elementwise_stages_have_the_same_bits(case, oracle):
    cfg, _, _, _, queries, got = case
    table = frequencies(oracle, cfg)
    assert_equal(got["q_rope"], oracle.rope(got["q"], queries.numpy(), table), "q_rope")
    entries = oracle.RATIO * np.arange(len(got["pool"]))
    assert_equal(got["k_rope"], oracle.rope(got["k_norm"], entries, table), "k_rope")
    for side in "qk":
        rotated = oracle.hadamard(got[f"{side}_rope"])
        assert_equal(got[f"{side}_hadamard"], rotated, f"{side}_hadamard")
        assert_equal(got[f"{side}_quant"], oracle.fp4_step(got[f"{side}_hadamard"]), f"{side}_quant")


def test_scores_and_selection_on_the_same_operands(case, oracle):
    cfg, _, _, _, queries, got = case
    scores = oracle.scores(got["q_quant"], got["k_quant"], got["gate"], queries.numpy())
    assert np.array_equal(np.isneginf(got["scores"].astype(np.float32)), np.isneginf(scores.astype(np.float32)))
    visible = ~np.isneginf(scores.astype(np.float32))
    assert_close(got["scores"][visible], scores[visible], "scores")
    topk = oracle.topk(got["scores"].astype(np.float32), queries.numpy(), cfg.index_topk)
    assert np.array_equal(got["topk"], topk)


def test_end_to_end_on_the_oracles_own_stages(case, oracle):
    cfg, w, x, qr, queries, got = case
    table, positions = frequencies(oracle, cfg), queries.numpy()
    want = {}
    q = oracle.q(to_numpy(qr[queries]), to_numpy(w.wq_b), to_numpy(w.wq_b_scale), cfg.index_n_heads)
    want["q_quant"] = oracle.fp4_step(oracle.hadamard(oracle.rope(q, positions, table)))
    pool = oracle.pool(to_numpy(x), to_numpy(w.wkv), to_numpy(w.wgate), to_numpy(w.ape))
    k_norm = oracle.k_norm(pool, to_numpy(w.norm), cfg.rms_norm_eps)
    k_rope = oracle.rope(k_norm, oracle.RATIO * np.arange(len(pool)), table)
    want["k_quant"] = oracle.fp4_step(oracle.hadamard(k_rope))
    gate = oracle.gate(to_numpy(x[queries]), to_numpy(w.weights_proj), cfg.index_head_dim)
    want["scores"] = oracle.scores(want["q_quant"], want["k_quant"], gate, positions)
    for name, limit in END_TO_END_L2.items():
        a, b = (array.astype(np.float32) for array in (got[name], want[name]))
        a, b = a[np.isfinite(b)], b[np.isfinite(b)]
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        print(f"{name}: relative L2 {error:.2e}")
        assert error <= limit, name


def test_the_gate_constant_is_not_rounded_before_the_product(oracle):
    """One rounding after the fp32 product; rounding the constant first moves a few per cent of the values."""
    from diffcheck.refimpl.indexer import head_gates

    linear = torch.randn(200, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    scale = 128**-0.5 * 64**-0.5
    ours = head_gates(linear, scale).bfloat16()
    assert_equal(to_numpy(ours), oracle.gate_from_linear(to_numpy(linear), 128), "gate")
