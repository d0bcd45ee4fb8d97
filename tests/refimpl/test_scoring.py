"""Scores and selection.

| what | tolerance |
|--|--|
| visibility, hand-computed | equal |
| bits of a score, whatever rows and entries are computed with it | equal |
| top-k against a sort | equal |
| peak memory of many queries with a budget of 4 MiB | PEAK_MIB, below a [T, H, E] tensor even in bf16 |
"""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffcheck.refimpl.scoring import index_scores, select_topk, visible_entries
from diffcheck.testing import assert_selection

PEAK_MIB = {
    # 256 queries x 64 heads x 2048 entries are 128 MiB in fp32 and 64 in bf16, and never exist at once
    "scores": (60, {"budget": 4, "dim": 32, "tokens": 8192, "queries": 256, "pipeline": False}),
    # the four q stages are 32 MiB and held once more while their blocks are joined; an fp32 copy of q is 16
    "queries": (140, {"budget": 16, "dim": 128, "tokens": 1024, "queries": 512, "pipeline": False}),
    "queries of a pipeline": (140, {"budget": 16, "dim": 128, "tokens": 1024, "queries": 512, "pipeline": True}),
}
"""What may be allocated above the start, and the size of the problem."""


def operands(rows, heads, entries, seed=0):
    rng = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, heads, 128, generator=rng).bfloat16()
    k = torch.randn(entries, 128, generator=rng).bfloat16()
    gate = torch.randn(rows, heads, generator=rng).bfloat16()
    return q, k, gate


def test_a_token_sees_the_entry_that_it_completes():
    assert visible_entries(torch.arange(10)).tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    q, k, gate = operands(10, 2, 5)
    scores = index_scores(q, k, gate, torch.arange(10))
    assert scores.dtype == torch.bfloat16
    assert scores.isneginf().logical_not().sum(1).tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]


def test_one_score_by_hand():
    """Two heads, one of them negative: relu before the gate, a gate may be negative."""
    q = torch.zeros(1, 3, 128)
    q[0, 0, 0], q[0, 1, 0], q[0, 2, 0] = 2.0, -5.0, 1.5
    k = torch.zeros(1, 128)
    k[0, 0] = 3.0
    gate = torch.tensor([[0.5, 100.0, -1.0]])
    scores = index_scores(q.bfloat16(), k.bfloat16(), gate.bfloat16(), torch.tensor([3]))
    assert scores.tolist() == [[6 * 0.5 - 4.5]]


def test_each_rounding_by_hand():
    """dot 257 is no bf16 value (256); 256 * 1.0078125 = 258 is one; 258 + 0.75 is none (258)."""
    q = torch.zeros(1, 2, 128)
    q[0, 0, :2] = torch.tensor([256.0, 1.0])
    q[0, 1, 0] = 0.75
    k = torch.zeros(1, 128)
    k[0, :2] = 1.0
    gate = torch.tensor([[1.0078125, 1.0]])
    scores = index_scores(q.bfloat16(), k.bfloat16(), gate.bfloat16(), torch.tensor([3]))
    assert scores.item() == 258.0
    # without the rounding of the dot the product would be 259.0078 -> 260
    # the gate product: 3 * 1.0078125 = 3.0234375 lies between 3.015625 and 3.03125
    q[0, 0, :2] = torch.tensor([3.0, 0.0])
    q[0, 1, 0] = 256.0
    gate = torch.tensor([[1.0078125, 0.01171875]])  # 256 * 0.01171875 = 3
    scores = index_scores(q.bfloat16(), k.bfloat16(), gate.bfloat16(), torch.tensor([3]))
    assert scores.item() == 6.03125  # 3.03125 (even) + 3 = 6.03125


@pytest.mark.parametrize(("rows", "heads", "entries"), [(5, 4, 3), (70, 4, 530), (9, 64, 1100), (3, 300, 600)])
def test_a_scores_bits_do_not_depend_on_company(support, rows, heads, entries):
    q, k, gate = operands(rows, heads, entries)
    positions = torch.arange(4 * entries - rows, 4 * entries)
    whole = index_scores(q, k, gate, positions)
    for i in {0, 1, rows // 2, rows - 1}:
        alone = index_scores(q[i : i + 1], k, gate[i : i + 1], positions[i : i + 1])
        support.assert_same_bits(alone[0], whole[i], f"row {i}")
    for fewer in {1, entries // 2, entries - 1}:
        part = index_scores(q, k[:fewer], gate, positions)
        seen = part[:, : min(fewer, int(visible_entries(positions).min()))]
        support.assert_same_bits(seen, whole[:, : seen.shape[1]], f"{fewer} entries")


def test_invisible_keys_are_not_read():
    """NaN in a key that no row may see must not leave a trace."""
    q, k, gate = operands(6, 3, 4)
    clean = index_scores(q, k, gate, torch.arange(6))
    k[1:] = torch.nan
    assert torch.equal(index_scores(q, k, gate, torch.arange(6))[:, :1], clean[:, :1])


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(-3, 3), min_size=6, max_size=6), min_size=1, max_size=5),
    k=st.integers(1, 9),
    data=st.data(),
)
def test_topk_is_a_sort_with_the_lower_index_first(rows, k, data):
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        scores = torch.tensor(rows, dtype=dtype)
        visible = torch.tensor(data.draw(st.lists(st.integers(0, 6), min_size=len(rows), max_size=len(rows))))
        got = select_topk(scores, visible, k).tolist()
        for row, values, count in zip(got, rows, visible.tolist(), strict=True):
            best = sorted(range(count), key=lambda j, v=values: (-v[j], j))[: min(k, 6)]
            assert row == best + [-1] * (min(k, 6) - len(best))


def test_topk_on_special_values():
    """-0 ties with 0; -inf ranks above NaN, which is taken only when nothing else is left."""
    nan, inf = torch.nan, torch.inf
    scores = torch.tensor([[nan, -0.0, -inf, 0.0, 1.0, inf]])
    assert select_topk(scores, torch.tensor([6]), 6).tolist() == [[5, 4, 1, 3, 2, 0]]
    assert select_topk(scores, torch.tensor([4]), 6).tolist() == [[1, 3, 2, 0, -1, -1]]
    assert select_topk(scores.bfloat16(), torch.tensor([6]), 3).tolist() == [[5, 4, 1]]


def test_topk_on_subnormals_and_neighbours():
    tiny = torch.tensor([[0.0, 2.0**-149, -(2.0**-149), 2.0**-126, 1.0, 1.0 + 2.0**-23, 1.0 - 2.0**-24]])
    assert select_topk(tiny, torch.tensor([7]), 7).tolist() == [[5, 4, 6, 3, 1, 0, 2]]


def test_topk_kept_values_beat_the_rest():
    scores = torch.randn(50, 700, generator=torch.Generator().manual_seed(0)).bfloat16()
    visible = torch.randint(0, 701, (50,), generator=torch.Generator().manual_seed(1))
    chosen = select_topk(scores, visible, 64)
    assert_selection(chosen, scores=scores, k=64, visible=visible)
    for row, values in zip(chosen, scores, strict=True):
        assert values[row[row >= 0]].diff().le(0).all()


def test_no_entries_at_all():
    q, k, gate = operands(3, 2, 0)
    assert index_scores(q, k, gate, torch.arange(3)).shape == (3, 0)
    assert select_topk(torch.empty(3, 0), torch.zeros(3, dtype=torch.int64), 4).shape == (3, 0)


MEMORY = """
import torch
from diffcheck import Recipe, evaluate
from diffcheck.refimpl import IndexerConfig, IndexerWeights, indexer, run_indexer

def peak():  # of this process alone: ru_maxrss would start at the size of the parent
    return 1024 * int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])

indexer.BUDGET_BYTES = {budget} << 20
H, D, tokens, queries, pipeline = 64, {dim}, {tokens}, {queries}, {pipeline}
config = IndexerConfig(
    hidden_size=64, q_lora_rank=128, index_n_heads=H, index_head_dim=D, rope_head_dim=32, index_topk=64,
    compress_ratios=(4,), compress_rope_theta=160000.0, yarn=None, rms_norm_eps=1e-6,
)
weights = IndexerWeights(
    wq_b=torch.randn(H * D, 128).bfloat16(), wq_b_scale=None, weights_proj=torch.randn(H, 64).bfloat16(),
    wkv=torch.randn(2 * D, 64).bfloat16(), wgate=torch.randn(2 * D, 64).bfloat16(), ape=torch.randn(4, 2 * D),
    norm=torch.ones(D).bfloat16(),
)
x, qr = torch.randn(tokens, 64).bfloat16(), torch.randn(tokens, 128).bfloat16()
queries = torch.arange(tokens - queries, tokens)
x.float() @ weights.wkv.float().T  # wakes the matrix library
open("/proc/self/clear_refs", "w").write("5")  # forget the peak of the imports
before = peak()
if pipeline:
    evaluate(Recipe.reference(config), config, weights, x, qr, queries=queries)
else:
    run_indexer(config, weights, x, qr, queries=queries)
print(peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
@pytest.mark.parametrize("case", PEAK_MIB)
def test_memory_stays_within_the_budget(case, tmp_path):
    limit, options = PEAK_MIB[case]
    script = MEMORY
    for name, value in options.items():
        script = script.replace(f"{{{name}}}", str(value))
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    used = int(done.stdout) / 2**20
    print(f"{case}: {used:.0f} MiB above the start")
    assert used < limit
