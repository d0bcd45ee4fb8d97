"""The pipeline: equal to the reference port, and honest about what a recipe's fields reach.

| what | tolerance |
|--|--|
| `Recipe.reference` against `run_indexer`, every stage, dtype and state | equal bits |
| a pipeline that has run other recipes against a fresh one | equal bits |
| a stage that does not read a changed field, directly or through its inputs | equal bits |
| single stages against plain formulas | stated at the test |
"""

import dataclasses
from collections import Counter

import pytest
import torch

from diffcheck import Format, Recipe, evaluate
from diffcheck.formats import E2M1_REFERENCE, fake_quantise
from diffcheck.pipeline import Pipeline
from diffcheck.refimpl import STAGES, InputError, Trace, indexer, run_indexer
from diffcheck.refimpl.rotation import apply_rope, inverse_frequencies, rope_table
from diffcheck.stages import GRAPH, INTERNAL

E4M3 = Format(element="e4m3")
COARSE = Format(element="e2m1", block=64, scale="ue8m0")

ALTERNATIVES = {
    "name": "other",
    "compute": "fp64",
    "activation_quant": False,
    "weight_scale": "byte",
    "round_q": "fp16",
    "rope_dims": 32,
    "q_theta": 10000.0,
    "k_theta": 10000.0,
    "q_yarn": None,
    "k_yarn": None,
    "q_mscale": 1.25,
    "k_mscale": 1.25,
    "q_pairing": "half",
    "k_pairing": "half",
    "q_slice": "first",
    "k_slice": "first",
    "k_position": "last",
    "q_position_offset": 1,
    "k_position_offset": -4,
    "round_rope_table": "bf16",
    "round_q_rope": "fp16",
    "round_k_rope": "fp16",
    "q_hadamard": False,
    "k_hadamard": False,
    "round_q_hadamard": "fp16",
    "round_k_hadamard": "fp16",
    "q_fp4": False,
    "k_fp4": False,
    "q_fp4_format": COARSE,
    "k_fp4_format": COARSE,
    "q_format": E4M3,
    "k_format": E4M3,
    "round_pool_gemm": "bf16",
    "ape": False,
    "ape_shift": 1,
    "round_ape": "bf16",
    "overlap": False,
    "overlap_order": "own-first",
    "round_pool_sum": "bf16",
    "round_pool": "fp16",
    "eps": 0.5,
    "round_k_norm": "fp16",
    "round_gate_gemm": "fp16",
    "round_gate": "fp16",
    "round_dot": "fp16",
    "relu": False,
    "round_product": "fp16",
    "round_score": "fp16",
    "mask_shift": 3,
    "k": 3,
    "ties": "higher",
}
"""Another value for every field of a recipe."""

READERS = {
    field: [name for name, stage in GRAPH.items() if field in stage.fields or field == "compute"]
    for field in Recipe.field_names()
}


def reach(names):
    """Stages that read one of `names`, directly or through other stages, and those names."""
    reached = set(names)
    for name, stage in GRAPH.items():  # in pipeline order
        if reached & set(stage.inputs):
            reached.add(name)
    return reached


def test_every_field_has_an_alternative_and_a_reader():
    assert set(ALTERNATIVES) == set(Recipe.field_names())
    assert [field for field, readers in READERS.items() if not readers] == ["name"]
    assert {field for stage in GRAPH.values() for field in stage.fields} <= set(Recipe.field_names())
    assert tuple(name for name in GRAPH if name not in INTERNAL) == STAGES


@pytest.fixture(scope="module")
def layer(support):
    cfg = support.config(index_topk=4)
    return cfg, support.weights(cfg), *support.inputs(cfg, 38)


@pytest.fixture(scope="module")
def pipeline(layer):
    return Pipeline(*layer)


@pytest.fixture(scope="module")
def bases(layer):
    """The recipes from which a field is changed: all roundings, and none."""
    reference = Recipe.reference(layer[0])
    return {"reference": reference, "ideal": Recipe.ideal(layer[0]).replace(activation_quant=True)}


@pytest.mark.parametrize("stored", ["fp8", "fp4", "bf16", "fp32"])
@pytest.mark.parametrize("tokens", [1, 3, 7, 40])
def test_the_reference_recipe_is_the_reference(support, stored, tokens):
    cfg = support.config()
    weights = support.weights(cfg, stored=stored)
    x, qr = support.inputs(cfg, tokens)
    got = evaluate(Recipe.reference(cfg), cfg, weights, x, qr)
    support.assert_same_trace(got, run_indexer(cfg, weights, x, qr))
    assert set(got) == {*STAGES, "x", "qr", "queries"}


@pytest.mark.parametrize("split", [1, 4, 6, 17])
def test_the_reference_recipe_in_a_continuation_with_queries(support, split):
    cfg = support.config(rms_norm_eps=1e-3, compress_rope_theta=5000.0, yarn=None, rope_head_dim=32)
    weights = support.weights(cfg)
    x, qr = support.inputs(cfg, 31)
    recipe = Recipe.reference(cfg)
    ours = evaluate(recipe, cfg, weights, x[:split], qr[:split])
    port = run_indexer(cfg, weights, x[:split], qr[:split])
    support.assert_same_trace(ours, port)
    for queries in (None, torch.tensor([30, split, 20])):
        rest = {"start": split, "queries": queries}
        got = evaluate(recipe, cfg, weights, x[split:], qr[split:], state=ours.state, **rest)
        want = run_indexer(cfg, weights, x[split:], qr[split:], state=port.state, **rest)
        support.assert_same_trace(got, want)
        assert got.start == want.start == split


@pytest.mark.parametrize("name", ["reference", "ideal", "sglang-fp8", "vllm-mxfp4", "trtllm-fp8", "llama.cpp"])
def test_any_recipe_in_chunks(support, layer, name):
    cfg, weights, x, qr = layer
    recipe = Recipe.preset(name, cfg)
    whole = evaluate(recipe, cfg, weights, x, qr)
    state, start = None, 0
    for length in (5, 1, 1, 12, 19):
        part = slice(start, start + length)
        piece = evaluate(recipe, cfg, weights, x[part], qr[part], start=start, state=state)
        entries = piece["scores"].shape[1]
        support.assert_same_bits(piece["scores"], whole["scores"][part, :entries], "scores")
        support.assert_same_bits(piece["k_quant"], whole["k_quant"][start // 4 : (start + length) // 4], "k_quant")
        state, start = piece.state, start + length
    support.assert_same_bits(state.keys, whole.state.keys, "state.keys")


@pytest.mark.parametrize("budget", [1, 100_000])
def test_blocks_of_rows_change_nothing(support, layer, monkeypatch, budget):
    monkeypatch.setattr(indexer, "BUDGET_BYTES", budget)
    cfg, weights, x, qr = layer
    for name in ("reference", "ideal", "sglang-fp8"):
        got = evaluate(Recipe.preset(name, cfg), cfg, weights, x, qr)
        monkeypatch.setattr(indexer, "BUDGET_BYTES", 256 << 20)
        support.assert_same_trace(got, evaluate(Recipe.preset(name, cfg), cfg, weights, x, qr))
        monkeypatch.setattr(indexer, "BUDGET_BYTES", budget)


def changed_stages(support, a, b):
    return {name for name in GRAPH if not support.same_bits(a[name], b[name])}


@pytest.fixture(scope="module")
def results(layer, bases):
    """Stages of each base, and of each base with one field changed, every one from a fresh pipeline."""

    def fresh(recipe):
        pipeline = Pipeline(*layer)
        return {name: pipeline.stage(recipe, name) for name in GRAPH}

    return {
        (base, field): fresh(recipe if field is None else recipe.replace(**{field: ALTERNATIVES[field]}))
        for base, recipe in bases.items()
        for field in (None, *ALTERNATIVES)
    }


@pytest.mark.parametrize("field", ALTERNATIVES)
def test_a_field_changes_its_readers_and_nothing_else(support, results, field):
    """Every declared reader changes on one of the bases, and only what depends on the readers does."""
    moved = {
        base: changed_stages(support, results[base, None], results[base, field]) for base in ("reference", "ideal")
    }
    for changed in moved.values():
        assert changed <= reach(READERS[field])
    if field == "name":
        return
    missed = set(READERS[field]) - (moved["reference"] | moved["ideal"])
    if field == "compute":
        missed.discard("topk")  # would mean that fp32 selects wrongly
    assert not missed, f"{field} is said to matter to {missed}"


class Counting(Pipeline):
    """A pipeline that counts how often each stage is computed."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.computed = Counter()

    def _compute(self, name, recipe, inputs):
        self.computed[name] += 1
        return super()._compute(name, recipe, inputs)


def test_a_shared_pipeline_gives_what_a_fresh_one_gives(support, layer, bases, results):
    """In two orders, so that each recipe is met after most others; nothing is computed twice."""
    everything = [(base, field) for base in bases for field in (None, *ALTERNATIVES)]
    for order in (everything, everything[::-1]):
        pipeline = Counting(*layer)
        for base, field in order:
            recipe = bases[base] if field is None else bases[base].replace(**{field: ALTERNATIVES[field]})
            for name in GRAPH:
                support.assert_same_bits(
                    pipeline.stage(recipe, name), results[base, field][name], f"{base}, {field}: {name}"
                )
        before = pipeline.computed.copy()
        pipeline.trace(bases["reference"])
        assert pipeline.computed == before


@pytest.mark.parametrize("field", ALTERNATIVES)
def test_only_what_a_change_can_reach_is_computed(layer, bases, field):
    pipeline = Counting(*layer)
    pipeline.trace(bases["reference"])
    before = pipeline.computed.copy()
    assert before == Counter(dict.fromkeys(GRAPH, 1))
    pipeline.trace(bases["reference"].replace(**{field: ALTERNATIVES[field]}))
    again = pipeline.computed - before
    assert set(again) == reach(READERS[field])
    assert set(again.values()) <= {1}


def test_savings_count_each_stage_of_each_recipe_once(layer, bases):
    pipeline, reference = Pipeline(*layer), bases["reference"]
    assert pipeline.savings() == (0, 0)
    for _ in range(2):
        pipeline.trace(reference)
        assert pipeline.savings() == (len(GRAPH), len(GRAPH))
    pipeline.trace(reference.replace(k=2))
    assert pipeline.savings() == (2 * len(GRAPH), len(GRAPH) + 1)
    pipeline.trace(reference.replace(relu=False))
    assert pipeline.savings() == (3 * len(GRAPH), len(GRAPH) + 3)


class Spy:
    """A recipe that notes which fields are read."""

    def __init__(self, recipe):
        self.recipe, self.read = recipe, set()

    def __getattr__(self, name):
        self.read.add(name)
        return getattr(self.recipe, name)


@pytest.mark.parametrize("name", GRAPH)
def test_a_stage_reads_the_fields_that_it_declares(pipeline, bases, name):
    """An undeclared field would make a shared result stale; a declared one that is not read costs time."""
    declared, read = {"compute", *GRAPH[name].fields}, set()
    for base in bases.values():
        for field in ALTERNATIVES:
            recipe = base.replace(**{field: ALTERNATIVES[field]})
            spy = Spy(recipe)
            inputs = {n: pipeline.stage(recipe, n) for n in GRAPH[name].inputs}
            GRAPH[name].function(pipeline.call, spy, inputs, pipeline.call.rows)
            read |= spy.read
    assert read <= declared
    assert declared - read <= {"compute"}


def test_stages_leave_their_inputs_alone(layer, bases):
    """Inputs are shared between recipes; a stage that works in place would spoil them."""
    pipeline = Pipeline(*layer)
    for recipe in bases.values():
        for stage in GRAPH.values():
            inputs = {n: pipeline.stage(recipe, n) for n in stage.inputs}
            before = {n: t.clone() for n, t in inputs.items()}
            stage.function(pipeline.call, recipe, dict(inputs), pipeline.call.rows)
            assert all(torch.equal(t, before[n]) for n, t in inputs.items())


def test_a_stage_on_the_preceding_stages_of_another_recipe(support, layer, bases):
    pipeline = Pipeline(*layer)
    reference, ideal = bases["reference"], bases["ideal"]
    got = pipeline.stage(reference, "k_quant", given=ideal)
    call = pipeline.call
    want = GRAPH["k_quant"].function(call, reference, {"k_hadamard": pipeline.stage(ideal, "k_hadamard")}, call.rows)
    support.assert_same_bits(got, want, "k_quant")
    assert not support.same_bits(got, pipeline.stage(reference, "k_quant"))
    # what no trace holds belongs to the stage itself
    own = pipeline.stage(reference.replace(round_pool_gemm="bf16"), "pool", given=reference)
    assert not support.same_bits(own, pipeline.stage(reference, "pool"))
    support.assert_same_bits(pipeline.stage(reference, "pool", given=ideal), pipeline.stage(reference, "pool"), "pool")


# Single stages against plain formulas, on the reference's own preceding stages.


@pytest.fixture(scope="module")
def reference(bases):
    return bases["reference"]


def test_every_rounding_of_the_scores_acts(support, pipeline, reference):
    """A wider gate must not make the product skip its rounding."""
    q, k = (pipeline.stage(reference, name).double() for name in ("q_quant", "k_quant"))
    dots = torch.einsum("thd,ed->the", q, k).float()
    visible = pipeline.stage(reference, "scores").isfinite()
    for gate_rounding in ("bf16", "fp16", "none"):
        recipe = reference.replace(round_gate=gate_rounding)
        gate = pipeline.stage(recipe, "gate").float()
        products = (dots.bfloat16().float().relu() * gate.unsqueeze(-1)).bfloat16()
        want = products.double().sum(dim=1).bfloat16()
        got = pipeline.stage(recipe, "scores")
        # the sum's order may move a value that lies between two bf16
        assert (got != want)[visible].float().mean() < 0.01, gate_rounding


@pytest.mark.parametrize("dot", ["none", "bf16", "fp16"])
@pytest.mark.parametrize("product", ["none", "bf16"])
@pytest.mark.parametrize("score", ["none", "fp16"])
@pytest.mark.parametrize("relu", [True, False])
def test_scores_of_every_combination(pipeline, reference, dot, product, score, relu):
    recipe = reference.replace(round_dot=dot, round_product=product, round_score=score, relu=relu, round_gate="none")
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}

    def through(x, rounding):
        return x if rounding == "none" else x.to(kinds[rounding]).double()

    q, k, gate = (pipeline.stage(recipe, name).double() for name in ("q_quant", "k_quant", "gate"))
    dots = through(torch.einsum("thd,ed->the", q, k), dot)
    dots = dots.relu() if relu else dots
    terms = through(dots * gate.unsqueeze(-1), product)
    got = pipeline.stage(recipe, "scores")
    assert got.dtype == (torch.float32 if score == "none" else torch.float16)
    visible = got.isfinite()
    # one fp16 step where the score is fp16, else the rounding errors of fp32 sums
    allowed = terms.abs().sum(1) * (2.0**-10 if score == "fp16" else 1e-6)
    assert ((got.double() - terms.sum(1)).abs() <= allowed + 1e-12)[visible].all()


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.parametrize("where", ["last", "first"])
def test_rope_of_every_layout(pipeline, reference, side, pairing, where):
    """By complex numbers in fp64; 1e-6 of the pair's magnitude."""
    recipe = reference.replace(pairing=pairing, slice=where, round_q_rope="none", round_k_rope="none", mscale=1.5)
    before = pipeline.stage(recipe, "q" if side == "q" else "k_norm").double()
    got = pipeline.stage(recipe, f"{side}_rope").double()
    rotated, kept = (slice(64, 128), slice(0, 64)) if where == "last" else (slice(0, 64), slice(64, 128))
    assert torch.equal(got[..., kept], before[..., kept])

    def pairs(x):
        x = x[..., rotated]
        a, b = (x[..., 0::2], x[..., 1::2]) if pairing == "interleaved" else (x[..., :32], x[..., 32:])
        return torch.complex(a, b)

    table = inverse_frequencies(recipe.q_theta, 64, recipe.q_yarn).double()
    positions = pipeline.queries if side == "q" else 4 * torch.arange(before.shape[0])
    angles = positions.double()[:, None] * table
    turn = torch.polar(torch.full_like(angles, 1.5), angles)
    want = pairs(before) * (turn.unsqueeze(1) if side == "q" else turn)
    assert ((pairs(got) - want).abs() <= 3e-6 * want.abs() + 1e-30).all()


def test_key_positions(support, pipeline, reference):
    """An entry's first token is 4i, its last 4i + 3, its index i."""
    table = inverse_frequencies(reference.k_theta, 64, reference.k_yarn)
    before = pipeline.stage(reference, "k_norm")
    entry = torch.arange(before.shape[0])
    for name, position in (("first", 4 * entry), ("last", 4 * entry + 3), ("index", entry)):
        got = pipeline.stage(reference.replace(k_position=name), "k_rope")
        support.assert_same_bits(got, apply_rope(before, *rope_table(position, table)).bfloat16(), name)


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("offset", [-8, -1, 3])
def test_position_offsets(support, pipeline, reference, side, offset):
    """Added in tokens to the position that the recipe gives."""
    table = inverse_frequencies(reference.k_theta, 64, reference.k_yarn)
    before = pipeline.stage(reference, "q" if side == "q" else "k_norm")
    position = pipeline.queries if side == "q" else 4 * torch.arange(before.shape[0])
    got = pipeline.stage(reference.replace(**{f"{side}_position_offset": offset}), f"{side}_rope")
    support.assert_same_bits(got, apply_rope(before, *rope_table(position + offset, table)).bfloat16(), side)
    assert not torch.equal(got, pipeline.stage(reference, f"{side}_rope"))


@pytest.mark.parametrize("order", ["previous-first", "own-first"])
@pytest.mark.parametrize("shift", [0, 1, 3])
def test_pool_with_columns_and_places_changed(pipeline, reference, order, shift):
    """Slot by slot in fp64; 1e-6 of the largest value."""
    recipe = reference.replace(overlap_order=order, ape_shift=shift, round_pool="none")
    call = pipeline.call
    kv, gate = (call.x.double() @ w.double().T for w in (call.weights.wkv, call.weights.wgate))
    previous, own = (slice(0, 128), slice(128, 256)) if order == "previous-first" else (slice(128, 256), slice(0, 128))
    got = pipeline.stage(recipe, "pool")
    for entry in range(len(got)):
        slots = []
        for token in range(4 * entry - 4, 4 * entry + 4):
            if token >= 0:
                columns = own if token >= 4 * entry else previous
                ape = call.weights.ape.double()[(token + shift) % 4, columns]
                slots.append((kv[token, columns], gate[token, columns] + ape))
        values, gates = (torch.stack(parts) for parts in zip(*slots, strict=True))
        want = (values * gates.softmax(0)).sum(0)
        assert (got[entry] - want).abs().max() < 1e-6 * kv.abs().max()


@pytest.mark.parametrize(("stored", "factor"), [("fp8", None), ("fp4", None), ("bf16", 1.0)])
def test_misread_weight_scales(support, stored, factor):
    """An e8m0 byte b taken as a number is b where 2^(b-127) was meant; a plain weight has no scale."""
    cfg = support.config()
    weights = support.weights(cfg, stored=stored)
    pipeline = Pipeline(cfg, weights, *support.inputs(cfg, 9))
    reference = Recipe.reference(cfg).replace(round_q="none")
    right = pipeline.stage(reference, "q")
    if factor:
        assert pipeline.stage(reference.replace(weight_scale="byte"), "q").equal(right)
        return
    # every block gets the same byte, so that the ratio is one number
    scale = torch.full_like(weights.wq_b_scale.view(torch.uint8), 120)
    same = dataclasses.replace(weights, wq_b_scale=scale.view(torch.float8_e8m0fnu))
    pipeline = Pipeline(cfg, same, *support.inputs(cfg, 9))
    right = pipeline.stage(reference, "q")
    for choice, ratio in (("byte", 120 * 2.0**7), ("none", 2.0**7)):
        got = pipeline.stage(reference.replace(weight_scale=choice), "q")
        assert torch.allclose(got, right * ratio, rtol=1e-5, atol=1e-5 * float(right.abs().max() * ratio))


def test_the_fp4_step_in_another_format(pipeline, reference):
    """The step's own format gives the reference's bits; another one its own fake quantisation, rounded to bf16."""
    before = pipeline.stage(reference, "k_hadamard")
    assert torch.equal(fake_quantise(before, E2M1_REFERENCE).bfloat16(), pipeline.stage(reference, "k_quant"))
    got = pipeline.stage(reference.replace(k_fp4_format=COARSE), "k_quant")
    assert torch.equal(got, fake_quantise(before, COARSE).bfloat16())


def test_an_observed_stage_is_read_instead_of_the_computed_one(support, layer, reference):
    """Downstream follows the observation, the stage itself stays what the recipe computes; a second one counts."""
    pipeline = Pipeline(*layer)
    before = {name: pipeline.stage(reference, name) for name in ("k_norm", "k_rope", "k_quant", "scores", "q_quant")}
    for factor in (2.0, 4.0):
        pipeline.observe("k_norm", before["k_norm"] * factor)
        support.assert_same_bits(pipeline.stage(reference, "k_norm"), before["k_norm"], "k_norm")
        support.assert_same_bits(pipeline.stage(reference, "k_rope"), before["k_rope"] * factor, "k_rope")
        support.assert_same_bits(pipeline.stage(reference, "q_quant"), before["q_quant"], "q_quant")
        seen = before["scores"].isfinite()
        assert torch.equal(pipeline.stage(reference, "scores")[seen], before["scores"][seen] * factor)


def test_a_narrowed_pipeline_has_some_rows_and_shares_the_keys(support, layer, reference):
    pipeline = Pipeline(*layer)
    whole, rows = pipeline.trace(reference), torch.tensor([3, 20, 37])
    pipeline.observe("q", whole["q"] * 2)
    narrow = pipeline.narrowed(rows)
    assert torch.equal(narrow.queries, rows)
    assert narrow.stage(reference, "k_quant") is pipeline.stage(reference, "k_quant")
    for name in ("q_quant", "scores", "topk"):
        support.assert_same_bits(narrow.stage(reference, name), pipeline.stage(reference, name)[rows], name)


def test_scratch_forgets_what_was_computed_inside(layer, bases):
    pipeline = Counting(*layer)
    pipeline.trace(bases["reference"])
    for count in (1, 2):
        with pipeline.scratch():
            pipeline.stage(bases["reference"].replace(theta=5.0, round_pool_gemm="bf16"), "scores")
        assert pipeline.computed["scores"] == 1 + count
        assert pipeline.computed["kv_gate"] == 2, "projections are kept"
    pipeline.trace(bases["reference"])
    assert pipeline.computed["scores"] == 3


def test_pool_without_the_previous_window(pipeline, reference):
    """Four slots only; 1e-6 of the largest value against fp64."""
    recipe = reference.replace(overlap=False, round_pool="none")
    call = pipeline.call
    kv, gate = ((call.x.double() @ w.double().T)[:, 128:] for w in (call.weights.wkv, call.weights.wgate))
    entries = len(kv) // 4
    kv, gate = (t[: 4 * entries].view(entries, 4, 128) for t in (kv, gate))
    want = (kv * (gate + call.weights.ape.double()[:, 128:]).softmax(1)).sum(1)
    assert (pipeline.stage(recipe, "pool") - want).abs().max() < 1e-6 * kv.abs().max()


def test_pool_roundings_are_visible(pipeline, reference):
    """After a rounding to bf16 the sum lies on bf16 values although nothing rounds the stage."""
    free = reference.replace(round_pool="none")
    rounded = pipeline.stage(free.replace(round_pool_sum="bf16"), "pool")
    assert rounded.dtype == torch.float32
    assert torch.equal(rounded.bfloat16().float(), rounded)
    plain = pipeline.stage(free, "pool")
    assert not torch.equal(plain.bfloat16().float(), plain)
    gemm = pipeline.stage(reference.replace(round_pool_gemm="fp16"), "kv_gate")
    assert torch.equal(gemm.half().float(), gemm)


def test_pool_in_bf16_rounds_weights_products_and_sum(pipeline, reference):
    recipe = reference.replace(round_pool_sum="bf16", round_pool_gemm="bf16")
    call, dim = pipeline.call, 128
    kv, gate = pipeline.stage(recipe, "kv_gate").chunk(2, dim=1)
    gate = gate + call.weights.ape.repeat(10, 1)[: len(gate)]
    for i in (1, 5, 8):
        before, own = slice(4 * i - 4, 4 * i), slice(4 * i, 4 * i + 4)
        values = torch.cat((kv[before, :dim], kv[own, dim:]))
        weights = torch.cat((gate[before, :dim], gate[own, dim:])).softmax(0).bfloat16().float()
        want = (values * weights).bfloat16().float().sum(0).bfloat16()
        # in another order an fp32 sum may fall on the other side of a midpoint
        assert (pipeline.stage(recipe, "pool")[i] != want).float().mean() < 0.02


def test_fp64_stays_fp64_where_nothing_rounds(pipeline, bases):
    exact = bases["ideal"].replace(compute="fp64")
    kinds = {name: pipeline.stage(exact, name).dtype for name in GRAPH if name != "topk"}
    assert set(kinds.values()) == {torch.float64}, kinds


@pytest.mark.parametrize("shift", [-4, -1, 0, 1, 3, 8])
def test_mask_shift(pipeline, reference, shift):
    recipe = reference.replace(mask_shift=shift, round_score="none")
    entries = 38 // 4
    visible = ((torch.arange(38) + 1 + shift) // 4).clamp(0, entries)
    assert torch.equal(pipeline.stage(recipe, "scores").isfinite().sum(1), visible)
    assert torch.equal((pipeline.stage(recipe, "topk") >= 0).sum(1), visible.clamp(max=4))


def test_ties_take_the_lower_or_the_higher_index(layer):
    """Equal keys, so that all scores of a row are equal."""
    cfg, weights, x, qr = layer
    same = x[:1].expand(38, -1).contiguous()
    pipeline = Pipeline(cfg, weights, same, qr)
    recipe = Recipe.reference(cfg).replace(k_theta=1e9, k_yarn=None, ape=False, round_k_rope="bf16", overlap=False)
    scores = pipeline.stage(recipe, "scores")
    scores.masked_fill_(scores.isfinite(), 1.0)  # the stage's own tensor: topk reads it
    lower, higher = (pipeline.stage(recipe.replace(ties=t), "topk") for t in ("lower", "higher"))
    assert lower[-1].tolist() == [0, 1, 2, 3]
    assert higher[-1].tolist() == [8, 7, 6, 5]
    assert lower[8].tolist() == [0, 1, -1, -1]
    assert higher[8].tolist() == [1, 0, -1, -1]


def test_what_is_stored(pipeline, reference):
    """Plain formats give their own type, block formats fp32, and None leaves the stage before."""
    for fmt, dtype in (
        (Format(element="fp16"), torch.float16),
        (E4M3, torch.float32),
        (None, torch.bfloat16),
    ):
        got = pipeline.stage(reference.replace(k_format=fmt), "k_quant")
        assert got.dtype == dtype
        # the FP4 step comes first, and fp16 holds what it leaves
        if fmt is None or fmt.plain:
            assert torch.equal(got.double(), pipeline.stage(reference, "k_quant").double())
    bare = pipeline.stage(reference.replace(fp4=False, format=None), "k_quant")
    assert bare is pipeline.stage(reference, "k_hadamard")


def test_inputs_are_checked_as_by_the_reference(support, layer):
    cfg, weights, x, qr = layer
    recipe = Recipe.reference(cfg)
    with pytest.raises(InputError, match="x has dtype"):
        evaluate(recipe, cfg, weights, x.float(), qr)
    with pytest.raises(InputError, match="without a state"):
        evaluate(recipe, cfg, weights, x, qr, start=4)
    with pytest.raises(InputError, match="wq_b_scale is absent"):
        evaluate(recipe, cfg, dataclasses.replace(weights, wq_b_scale=None), x, qr)


def test_a_trace_says_where_it_lies(layer):
    got = Pipeline(*layer, queries=torch.tensor([37, 2])).trace(Recipe.ideal(layer[0]))
    assert isinstance(got, Trace)
    assert got.queries.tolist() == [37, 2]
    assert got["q"].shape == (2, 4, 128)
    assert got["x"].shape == (38, 64)
    assert got.state.position == 38
