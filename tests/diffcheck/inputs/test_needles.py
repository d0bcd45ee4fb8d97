"""Planted needles: what is promised is measured again, by formulas of the reference and not of the planter."""

import dataclasses
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffcheck.fixture import Geometry
from diffcheck.inputs import (
    NeedlePlan,
    Planter,
    Unreachable,
    default_needles,
    plant_needle,
    plant_needles,
    synthetic_hidden,
)
from diffcheck.inputs.ideal import IdealSequence
from diffcheck.inputs.needles import find_crossing
from diffcheck.inputs.weights import WeightMaker
from diffcheck.refimpl import IndexerConfig, IndexerWeights, InputError, dequantise_weight
from diffcheck.refimpl.compressor import rms_norm, softmax_pool
from diffcheck.refimpl.rotation import apply_rope, hadamard, inverse_frequencies, rope_table

TINY = Geometry(
    hidden_size=64, q_lora_rank=128, index_topk=16, compress_ratios=(0, 0, 4), index_n_heads=4, index_head_dim=32,
    qk_rope_head_dim=16, num_nextn_predict_layers=0,
)  # fmt: skip
MIDDLE = dataclasses.replace(
    TINY, hidden_size=256, index_n_heads=16, index_head_dim=128, qk_rope_head_dim=64, index_topk=32
)
GEOMETRIES = {"tiny": (TINY, 400), "middle": (MIDDLE, 700)}
STRENGTHS = (-1.0, 0.0, 0.5, 1.0)


def make(name, seed=0):
    geometry, tokens = GEOMETRIES[name]
    config = IndexerConfig.from_dict(geometry.config_json())
    maker = WeightMaker(config, seed)

    def tensor(kind):
        return maker.tensor(2, f"attn.indexer.{kind}")

    weights = IndexerWeights(
        wq_b=tensor("wq_b.weight"),
        wq_b_scale=tensor("wq_b.scale"),
        weights_proj=tensor("weights_proj.weight"),
        wkv=tensor("compressor.wkv.weight"),
        wgate=tensor("compressor.wgate.weight"),
        ape=tensor("compressor.ape"),
        norm=tensor("compressor.norm.weight"),
    )
    return config, weights, *synthetic_hidden(config, length=tokens, seed=seed)


@pytest.fixture(scope="module", params=list(GEOMETRIES))
def case(request):
    return make(request.param)


def slow_row(config, weights, x, qr, query, dtype=torch.float64):
    """Ideal scores of a row, slot by slot and with the Hadamard rotation, as the formula reads."""
    inv_freq = inverse_frequencies(config.compress_rope_theta, config.rope_head_dim, config.yarn)
    x = x.to(dtype)
    kv, gate = x @ weights.wkv.to(dtype).T, x @ weights.wgate.to(dtype).T
    dim = config.index_head_dim
    q = dequantise_weight(weights.wq_b, weights.wq_b_scale, config.weight_block).to(dtype) @ qr[query].to(dtype)
    q = q.view(1, config.index_n_heads, dim).float()
    q = hadamard(apply_rope(q, *rope_table(torch.tensor([query]), inv_freq)))[0].to(dtype)
    head_gates = weights.weights_proj.to(dtype) @ x[query] * dim**-0.5 * config.index_n_heads**-0.5
    values, logits = [], []
    for j in range((query + 1) // 4):
        slots = [(t, slice(0, dim)) for t in range(4 * j - 4, 4 * j)]
        slots += [(t, slice(dim, 2 * dim)) for t in range(4 * j, 4 * j + 4)]
        values.append(torch.stack([kv[t, part] if t >= 0 else torch.zeros(dim).to(kv) for t, part in slots]))
        logits.append(
            torch.stack(
                [
                    gate[t, part] + weights.ape[t % 4, part] if t >= 0 else torch.full((dim,), -torch.inf).to(kv)
                    for t, part in slots
                ]
            )
        )
    pooled = softmax_pool(torch.stack(values), torch.stack(logits))
    keys = rms_norm(pooled, weights.norm, config.rms_norm_eps).float()
    keys = hadamard(apply_rope(keys, *rope_table(4 * torch.arange(len(keys)), inv_freq))).to(dtype)
    return (head_gates[:, None] * (q @ keys.T).relu()).sum(0)


def test_ideal_scores(case):
    config, weights, x, qr = case
    ideal = IdealSequence(config, weights, x, qr)
    for query in (3, 4, 150, len(x) - 1):
        want = slow_row(config, weights, x, qr, query)
        torch.testing.assert_close(ideal.scores(query), want, rtol=1e-4, atol=1e-5)
        scores = want.tolist()
        score, rank = ideal.measure(query, len(scores) // 2)
        assert score == pytest.approx(scores[len(scores) // 2], abs=1e-5)
        assert rank == sum(s > scores[len(scores) // 2] for s in scores)


@pytest.mark.parametrize("query_in_window", [False, True])
@pytest.mark.parametrize("entry", [0, 60])
def test_gradient_against_finite_differences(case, entry, query_in_window):
    config, weights, x, qr = case
    ideal = IdealSequence(config, weights, x, qr)
    query = 4 * entry + 3 if query_in_window else len(x) - 2
    rows = x[4 * entry : 4 * entry + 4].double()
    gradient = ideal.gradient(query, entry, rows)
    assert gradient.dtype == torch.float64
    assert gradient.shape == rows.shape

    def score(rows):
        row = rows[3] if query_in_window else x[query]
        key = ideal.key(entry, ideal.windows(entry, rows))
        return float((ideal.gates(row) * (ideal.query(query) @ key).relu()).sum())

    generator = torch.Generator().manual_seed(entry)
    for _ in range(8):
        step = torch.randn(rows.shape, generator=generator, dtype=torch.float64)
        step *= 1e-5 / step.norm()
        measured = (score(rows + step) - score(rows - step)) / 2
        assert measured == pytest.approx(float((gradient * step).sum()), rel=1e-5, abs=1e-13)
    if query_in_window:  # without the gates' share the derivative would be another one
        key = ideal.key(entry, ideal.windows(entry, rows))
        share = weights.weights_proj.double().T @ (ideal.query(query) @ key).relu() * config.gate_scale
        assert share.norm() > 1e-3 * gradient[3].norm()


@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", list(GEOMETRIES))
def test_the_target_is_reached(name, seed, strength):
    config, weights, x, qr = make(name, seed)
    original = x.clone()
    reached = 0
    for query, depth in ((len(x) - 1, 0.4), (len(x) - 6, 0.0), (len(x) - 9, 0.8)):
        try:
            needle = plant_needle(config, weights, x, qr, query=query, depth=depth, strength=strength, lines=16)
        except Unreachable:
            continue
        reached += 1
        assert torch.equal(x, original)
        assert needle.entry == int(depth * ((query + 1) // 4 - 1))
        changed = (needle.x != x).any(1).nonzero().flatten()
        assert set(changed.tolist()) <= set(range(needle.first_token, needle.last_token + 1))
        assert needle.x.dtype == torch.bfloat16
        # the bar is that of the other entries of the row before planting
        before = slow_row(config, weights, x, qr, query)
        others = torch.cat((before[: needle.entry], before[needle.entry + 1 :])).sort(descending=True).values
        tau, maximum = float(others[config.index_topk - 1]), float(others[0])
        assert (needle.tau, needle.maximum) == pytest.approx((tau, maximum), rel=1e-4)
        assert needle.target == pytest.approx(tau + strength * (maximum - tau), abs=1e-4 * maximum)
        assert needle.unrounded == pytest.approx(needle.target, rel=1e-9, abs=1e-12)
        after = slow_row(config, weights, needle.x, qr, query)
        assert needle.score == pytest.approx(float(after[needle.entry]), rel=1e-4)
        assert needle.reached == pytest.approx(strength, abs=0.02)
        near = 1e-4 * maximum
        assert (after > needle.score + near).sum() <= needle.rank <= (after > needle.score - near).sum()
        assert 0 < needle.change < 16
    assert reached >= 2


def test_strength_decides_the_rank(case):
    config, weights, x, qr = case
    k = config.index_topk
    found = {}
    for strength in (-0.5, 0.0, 0.5, 1.0):
        needle = plant_needle(config, weights, x, qr, query=len(x) - 1, depth=0.5, strength=strength, lines=16)
        found[strength] = needle.rank
    print(f"k {k}: ranks {found}")
    assert found[-0.5] > k
    assert k - 2 <= found[0.0] <= k + 1  # entry j + 1 moves too
    assert 1 <= found[0.5] < k
    assert found[1.0] <= 2


def test_one_line_is_the_definition(case):
    config, weights, x, qr = case
    planter = Planter(config, weights, x, qr)
    needle = planter.plant(query=len(x) - 1, depth=0.7, strength=0.0)
    rows = x[needle.first_token : needle.last_token + 1].double()
    gradient = IdealSequence(config, weights, x, qr).gradient(len(x) - 1, needle.entry, rows)
    assert needle.lines == 1
    want = (rows + needle.alpha * gradient).bfloat16()
    assert torch.equal(needle.x[needle.first_token : needle.last_token + 1], want)
    start, _ = IdealSequence(config, weights, x, qr).measure(len(x) - 1, needle.entry)
    assert (needle.alpha > 0) == (start < needle.target)


def test_a_query_inside_its_own_window(case):
    config, weights, x, qr = case
    query = 4 * (len(x) // 4) - 1
    needle = plant_needle(config, weights, x, qr, query=query, depth=1.0, strength=0.5, lines=16)
    assert needle.first_token <= query <= needle.last_token
    # its head gates changed with it, so the bar is measured in the row after planting
    after = slow_row(config, weights, needle.x, qr, query)
    others = after[: needle.entry].sort(descending=True).values
    tau, maximum = float(others[config.index_topk - 1]), float(others[0])
    assert (needle.tau, needle.maximum) == pytest.approx((tau, maximum), rel=1e-4)
    assert (float(after[needle.entry]) - tau) / (maximum - tau) == pytest.approx(0.5, abs=0.03)
    before = slow_row(config, weights, x, qr, query)
    assert abs(float(before[: needle.entry].max()) - maximum) > 1e-3 * maximum


def test_several_needles(case):
    config, weights, x, qr = case
    plans = default_needles(len(x), config.index_topk, count=4)
    assert len(plans) == 4
    planted_x, needles = plant_needles(config, weights, x, qr, plans)
    again = IdealSequence(config, weights, planted_x, qr)
    for plan, needle in zip(plans, needles, strict=True):
        assert needle.x is planted_x
        assert (needle.query, needle.entry, needle.strength) == (plan.query, plan.entry, plan.strength)
        score, _ = again.measure(needle.query, needle.entry)
        # needles planted later change rows that this query sees, but not its own
        assert score == pytest.approx(needle.score, rel=1e-4)
    changed = set((planted_x != x).any(1).nonzero().flatten().tolist())
    assert changed <= {t for needle in needles for t in range(needle.first_token, needle.last_token + 1)}


def test_keys_are_refreshed(case):
    config, weights, x, qr = case
    planter = Planter(config, weights, x, qr)
    for depth in (0.2, 1.0):
        planter.plant(query=len(x) - 1, depth=depth, strength=0.2, lines=16)
    fresh = IdealSequence(config, weights, planter.x, qr)
    torch.testing.assert_close(planter.ideal.scores(len(x) - 1), fresh.scores(len(x) - 1), rtol=1e-4, atol=1e-5)


def test_neighbouring_needles_are_refused(case):
    config, weights, x, qr = case
    query = len(x) - 1
    last = (query + 1) // 4 - 1
    plans = [NeedlePlan(query=query, depth=(j + 0.5) / last, strength=0.0) for j in (10, 11)]
    with pytest.raises(InputError, match=r"are at entries 10 and 11, expected them at least 2 apart"):
        plant_needles(config, weights, x, qr, plans)
    same = [plans[0], dataclasses.replace(plans[0], query=query - 1)]
    with pytest.raises(InputError, match="at least 2 apart"):
        plant_needles(config, weights, x, qr, same)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": -1}, r"needle query is -1, expected a token position in 0\.\.399"),
        ({"query": 400}, "needle query is 400"),
        ({"query": 66}, "query 66 sees 16 entries, expected more than index_topk 16.*vacuous"),
        ({"depth": -0.01}, "needle depth is -0.01, expected 0..1"),
        ({"depth": 1.01}, "needle depth is 1.01, expected 0..1 .*not visible"),
        ({"depth": float("nan")}, "needle depth is nan"),
        ({"strength": float("inf")}, "needle strength is inf, expected a finite number"),
        ({"lines": 0}, "lines is 0, expected at least 1"),
    ],
)
def test_errors(changes, message):
    config, weights, x, qr = make("tiny")
    with pytest.raises(InputError, match=message) as caught:
        plant_needle(config, weights, x, qr, **({"query": 399, "depth": 0.5, "strength": 0.5} | changes))
    assert "\n" not in str(caught.value)
    if "lines" not in changes:
        plan = NeedlePlan(**({"query": 399, "depth": 0.5, "strength": 0.5} | changes))
        with pytest.raises(InputError, match=message):
            plant_needles(config, weights, x, qr, [plan])


def test_the_first_row_that_is_not_vacuous():
    config, weights, x, qr = make("tiny")
    assert plant_needle(config, weights, x, qr, query=67, depth=0.5, strength=0.1, lines=16).tau > -torch.inf


def test_what_cannot_be_reached_is_refused(case):
    config, weights, x, qr = case
    planter = Planter(config, weights, x, qr)
    for lines in (1, 3):
        with pytest.raises(Unreachable, match=rf"reaches strength 1000 in {lines} line\(s\), expected less"):
            planter.plant(query=len(x) - 1, depth=0.5, strength=1000.0, lines=lines)
    assert torch.equal(planter.x, x)


def test_a_row_without_spread_or_gradient():
    config, weights, x, qr = make("tiny")
    alone = dataclasses.replace(config, index_topk=1)
    with pytest.raises(InputError, match="the best other score equals the 1-th, expected a spread"):
        plant_needle(alone, weights, x, qr, query=399, depth=0.5, strength=0.5)
    planter = Planter(config, weights, x, qr)
    # a window whose key meets no head: the relu is flat there
    planter.ideal.gradient = lambda query, entry, rows: torch.zeros_like(rows)
    with pytest.raises(Unreachable, match="the gradient of its score is zero"):
        planter.plant(query=399, depth=0.5, strength=0.5)


def test_inputs_that_do_not_fit():
    config, weights, x, qr = make("tiny")
    with pytest.raises(InputError, match="qr has shape"):
        Planter(config, weights, x, qr[:, :64])
    with pytest.raises(InputError, match="wkv has shape"):
        Planter(config, dataclasses.replace(weights, wkv=weights.wkv[:5]), x, qr)
    planter = Planter(config, weights, x, qr)
    for query, entry in ((400, 0), (-1, 0), (10, 2), (10, -1)):
        with pytest.raises(InputError, match=f"entry {entry} is not visible to query {query}"):
            planter.measure(query, entry)


def test_find_crossing():
    def crossing(excess, smallest=0.01, largest=64.0):
        return find_crossing(excess, smallest, largest)

    assert crossing(lambda a: a - 3) == (pytest.approx(3), True)
    assert crossing(lambda a: a + 3) == (pytest.approx(-3), True)
    assert crossing(lambda a: a * 0) == (0.0, True)
    # not monotone: down first, then up through zero, then down again; the first crossing counts
    alpha, found = crossing(lambda a: -1 - a + a**2 if a < 8 else -5)
    assert (alpha, found) == (pytest.approx((1 + 5**0.5) / 2), True)
    # levels off at -0.1: nine tenths of what can be gained are there at 0.01 * 2^9
    assert crossing(lambda a: -0.1 - 0.9 / (1 + 2 * a)) == (5.12, False)
    assert crossing(lambda a: -1 - a) == (0.0, False)
    assert crossing(lambda a: a - 100) == (pytest.approx(0.01 * 2**12), False)


@given(length=st.integers(20, 5000), k=st.integers(1, 300), count=st.integers(1, 40), strengths=st.integers(1, 4))
def test_default_needles(length, k, count, strengths):
    if length // 4 <= k:
        with pytest.raises(InputError, match=f"expected more than index_topk {k}"):
            default_needles(length, k, count=count)
        return
    plans = default_needles(length, k, count=count, strengths=range(strengths))
    assert 1 <= len(plans) <= count
    queries = [plan.query for plan in plans]
    assert len(set(queries)) == len(queries)
    assert max(queries) == length - 1
    assert all((query + 1) // 4 > k for query in queries)
    entries = [plan.entry for plan in plans]
    assert all(right - left >= 2 for left, right in pairwise(entries))
    assert all(0 <= plan.depth <= 1 for plan in plans)
    assert [plan.strength for plan in plans] == [float(i % strengths) for i in range(len(plans))]
    for plan in plans:
        plan.check(length, k)
    if length > 60:
        assert 4 * max(entries) + 3 < min(queries)


def test_default_needles_are_spread():
    plans = default_needles(32768, 512)
    depths = [plan.depth for plan in plans]
    assert len(plans) == 8
    assert depths[0] < 0.1
    assert depths[-1] > 0.85
    assert min(plan.query for plan in plans) > 0.93 * 32768
    with pytest.raises(InputError, match="count is 0"):
        default_needles(32768, 512, count=0)
    with pytest.raises(InputError, match="with 0 strengths"):
        default_needles(32768, 512, strengths=())


def test_scores_relate_to_contents():
    """A row scores the entries of its own topic above the others: queries and keys read the same latents."""
    config, weights, x, qr = make("middle")
    scores = IdealSequence(config, weights, x, qr)
    centred = x.float() - x.float().mean(0)
    pooled = torch.nn.functional.normalize(centred[: len(x) // 4 * 4].view(-1, 4, x.shape[1]).mean(1), dim=1)
    found = []
    for query in range(500, 700, 10):
        row = scores.scores(query).float()
        likeness = pooled[: len(row)] @ centred[query]
        found.append(float(torch.corrcoef(torch.stack((row, likeness)))[0, 1]))
    print(f"correlation of scores with likeness: mean {sum(found) / len(found):.2f}")
    assert sum(found) / len(found) > 0.15
