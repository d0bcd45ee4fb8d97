"""store_key and quantise_query against a plain torch composition of the same recipe, code by code."""

import pytest
import torch

from diffcheck.kernels import (
    PAGE_FORMATS,
    allocate_pages,
    dequantise,
    quantise_query,
    read_entries,
    store_key,
    tuning,
)
from diffcheck.refimpl.compressor import rms_norm, softmax_pool
from diffcheck.refimpl.formats import (
    ceil_power_of_two,
    decode_e8m0,
    fp4_step,
    round_to_e2m1,
)
from diffcheck.refimpl.rotation import apply_rope, hadamard

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# ------------------------------------------------------------------------------------------------ tolerances
CODES_EQUAL = {"e4m3": 0.9999, "e2m1": 0.9999, "bf16": 0.999}  # share of codes; every other is a neighbour
SCALE_RTOL = 1e-6  # fp32 scales
SCALES_MOVED = 1e-4  # share of power-of-two scales that may differ, at a binade edge
GATE_RTOL = 1e-6  # folded gates
# bf16 has no scale, so a value that cancels to near zero in the Hadamard sum has units far below what fp32 resolves
# in that sum: such values may differ by eight fp32 roundings of their row's length instead of by one unit
ROW_ROUNDING = 8 * 2.0**-24

STAGES = ("pool", "norm", "rope", "hadamard")
RECIPES = {
    "reference": {"fmt": "bf16", "fp4_step": True, "round_bf16": STAGES},
    "reference, e4m3 cache": {"fmt": "e4m3", "scale": "ue8m0", "fp4_step": True, "round_bf16": STAGES},
    "sglang fp8": {"fmt": "e4m3", "scale": "fp32", "amax_floor": 1e-4, "round_bf16": ()},
    "sglang fp4": {"fmt": "e2m1", "amax_floor": 1e-4, "ties": "down", "round_bf16": ()},
    "sglang bf16": {"fmt": "bf16", "round_bf16": ()},
    "vllm fp8": {"fmt": "e4m3", "scale": "ue8m0", "hadamard": False, "round_bf16": ("rope",)},
    "vllm mxfp4": {"fmt": "e2m1", "hadamard": False, "round_bf16": ("rope",)},
}
QUERY_RECIPES = {
    name: recipe | {"round_bf16": [stage for stage in recipe["round_bf16"] if stage in STAGES[2:]]}
    for name, recipe in RECIPES.items()
} | {
    "fp8, rounded": {"fmt": "e4m3", "round_bf16": STAGES[2:]},
    "fp8, rounded, power of two": {"fmt": "e4m3", "scale": "ue8m0", "round_bf16": STAGES[2:]},
    "sglang fp4, its queries": {"fmt": "e2m1", "amax_floor": 1e-4, "ties": "down", "round_bf16": STAGES[2:]},
    "fp4, rounded": {"fmt": "e2m1", "round_bf16": STAGES[2:]},
}


def to_bf16_if(wanted, x):
    return x.bfloat16().float() if wanted else x


def quantise(x, fmt, *, scale="fp32", amax_floor=None, ties="even"):
    """fp32 [..., 128] -> (codes, scales) of a format, in torch."""
    if fmt == "bf16":
        return x.bfloat16(), None
    if fmt == "e4m3":
        scales = x.abs().amax(-1).clamp_min(amax_floor or 1e-4) / 448
        scales = ceil_power_of_two(scales) if scale == "ue8m0" else scales
        return (x * (1 / scales[..., None])).clamp(-448, 448).to(torch.float8_e4m3fn), scales
    blocks = x.unflatten(-1, (4, 32))
    amax = blocks.abs().amax(-1).clamp_min(amax_floor or 6 * 2.0**-126)
    scales = ceil_power_of_two(amax * torch.tensor(1 / 6))
    y = (blocks / scales[..., None]).clamp(-6, 6)
    # one ulp toward zero takes a value off a midpoint and moves no other value across one
    values = round_to_e2m1(y if ties == "even" else torch.nextafter(y, torch.zeros_like(y)))
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = (values.abs()[..., None] == table).int().argmax(-1) + 8 * torch.signbit(y).int()
    codes = codes.flatten(-2)
    packed = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    return packed, (scales.contiguous().view(torch.int32) >> 23).to(torch.uint8)


def emulate(x, cos, sin, recipe):
    """RoPE to (codes, scales, scales of the FP4 step or None) of one recipe."""
    rounds = recipe.get("round_bf16", STAGES)
    x = to_bf16_if("rope" in rounds, apply_rope(x, cos, sin))
    if recipe.get("hadamard", True):
        x = to_bf16_if("hadamard" in rounds, hadamard(x))
    step = None
    if recipe.get("fp4_step"):
        step = decode_e8m0(quantise(x, "e2m1")[1])
        x = fp4_step(x)
    choices = {name: recipe[name] for name in ("scale", "amax_floor", "ties") if name in recipe}
    return *quantise(x, recipe["fmt"], **choices), step


def emulate_key(inputs, recipe, eps=1e-6):
    """Pool to codes of one recipe, entry by entry."""
    kv, gate, ape, weight = (inputs[name] for name in ("kv", "gate", "ape", "norm_weight"))
    pooled = []
    for row, index in zip(inputs["token_row"].tolist(), inputs["entry_index"].tolist(), strict=True):
        own = slice(row, row + 4)
        slots_kv, slots_gate = kv[own, 128:], gate[own, 128:] + ape[:, 128:]
        if index:
            before = slice(row - 4, row)
            earlier_kv, earlier_gate = kv[before, :128], gate[before, :128] + ape[:, :128]
        else:
            earlier_kv, earlier_gate = torch.zeros(4, 128), torch.full((4, 128), -torch.inf)
        pooled.append(
            softmax_pool(torch.cat((earlier_kv, slots_kv))[None], torch.cat((earlier_gate, slots_gate))[None])
        )
    rounds = recipe.get("round_bf16", STAGES)
    x = to_bf16_if("pool" in rounds, torch.cat(pooled))
    x = to_bf16_if("norm" in rounds, rms_norm(x, weight.float(), eps))
    return emulate(x, inputs["cos"], inputs["sin"], recipe)


def ordinals(codes, fmt):
    """Codes as integers in value order, one per dim; +0 and -0 are the same."""
    if fmt == "bf16":
        bits, sign = codes.view(torch.int16).int() & 0xFFFF, 0x8000
    elif fmt == "e4m3":
        bits, sign = codes.view(torch.uint8).int(), 0x80
    else:
        bits, sign = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).int(), 8
    return torch.where(bits >= sign, sign - bits, bits)


def assert_same_codes(label, recipe, got, want):
    """The acceptance rule; prints the numbers also when they pass."""
    fmt = recipe["fmt"]
    codes, scales = (None if t is None else t.cpu() for t in got)
    want_codes, want_scales, step = want
    if step is None:
        order, want_order = ordinals(codes, fmt), ordinals(want_codes, fmt)
    else:  # neighbours of the FP4 grid are far apart in the format that carries them
        per_dim = step.repeat_interleave(32, -1)
        order, want_order = (
            2
            * torch.sign(y)
            * torch.where(y.abs() < 2, y.abs(), torch.where(y.abs() < 4, 1 + y.abs() / 2, 2 + y.abs() / 4))
            for y in (
                dequantise(codes, scales, fmt) / per_dim,
                dequantise(want_codes, want_scales, fmt) / per_dim,
            )
        )
    distance = (order - want_order).abs()
    if step is None and fmt == "bf16":
        values = want_codes.float()
        resolved = (codes.float() - values).abs() > ROW_ROUNDING * values.norm(dim=-1, keepdim=True)
        print(f"{label}: {int(((distance > 1) & ~resolved).sum())} near zero, farther than a neighbour")
        distance = torch.where(resolved, distance, distance.clamp(max=1))
    moved = torch.zeros(())
    if want_scales is not None and (fmt == "e2m1" or recipe.get("scale") == "ue8m0"):
        # at a binade edge the other power of two is as good: such blocks are counted and left out
        moved = scales != want_scales
        distance = distance.unflatten(-1, (4, 32)) if fmt == "e2m1" else distance
        distance = distance * ~moved[..., None]
    elif want_scales is not None:
        torch.testing.assert_close(scales, want_scales, rtol=SCALE_RTOL, atol=0)
    equal = (distance == 0).float().mean().item()
    print(
        f"{label}: {equal:.6f} of {distance.numel()} codes equal, farthest {distance.max():g}, "
        f"{int(moved.sum())} power-of-two scales differ"
    )
    assert equal >= CODES_EQUAL[fmt], label
    assert distance.max() <= 1, label
    assert moved.float().mean() <= SCALES_MOVED, label


def make_keys(entry_counts, trailing=0):
    """Projections of requests laid one after the other, with `trailing` tokens of an open window each."""
    token_row, entry_index, rows = [], [], 0
    for count in entry_counts:
        token_row += [rows + 4 * i for i in range(count)]
        entry_index += list(range(count))
        rows += 4 * count + trailing
    entries = len(token_row)
    angles = 4 * torch.tensor(entry_index)[:, None] * torch.logspace(0, -5, 32)
    return {
        "kv": torch.randn(rows, 256),
        "gate": 2 * torch.randn(rows, 256),
        "ape": torch.randn(4, 256),
        "norm_weight": torch.rand(128) + 0.5,
        "cos": angles.cos().reshape(entries, 32),
        "sin": angles.sin().reshape(entries, 32),
        "token_row": torch.tensor(token_row, dtype=torch.int32),
        "entry_index": torch.tensor(entry_index, dtype=torch.int32),
    }


def store(inputs, slots, pages, device, **recipe):
    on_device = {name: tensor.to(device) for name, tensor in inputs.items()}
    store_key(**on_device, slots=slots.to(device), pages=pages, **recipe)


@pytest.mark.parametrize("name", RECIPES)
def test_store_key_is_its_recipe(name, device):
    recipe = RECIPES[name]
    inputs = make_keys([65, 3], trailing=2)
    inputs["norm_weight"] = inputs["norm_weight"].bfloat16() if name.startswith("reference") else inputs["norm_weight"]
    slots = torch.randperm(4 * 64)[:68]
    pages = allocate_pages(recipe["fmt"], 4, device)
    store(inputs, slots, pages, device, **recipe)
    got = read_entries(pages, recipe["fmt"], slots.to(device))
    assert_same_codes(f"store_key {name}", recipe, got, emulate_key(inputs, recipe))


@pytest.mark.parametrize("entries", [0, 1, 63, 64])
@pytest.mark.parametrize("trailing", [0, 3])
def test_store_key_of_any_count(entries, trailing, device):
    recipe = {"fmt": "e4m3", "round_bf16": ()}
    inputs = make_keys([entries], trailing=trailing)
    slots = torch.randperm(128)[:entries]
    pages = allocate_pages("e4m3", 2, device)
    store(inputs, slots, pages, device, **recipe)
    written = pages[:, : 64 * 128].unflatten(1, (64, 128)).flatten(0, 1).any(-1).cpu()
    assert set(written.nonzero().flatten().tolist()) == set(slots.tolist())
    if entries:
        got = read_entries(pages, "e4m3", slots.to(device))
        assert_same_codes(f"{entries} entries", recipe, got, emulate_key(inputs, recipe))


def test_store_key_in_any_order_and_alone_gives_the_same_bytes(device):
    inputs = make_keys([33, 7])
    slots = torch.randperm(64)[:40]
    pages = allocate_pages("e4m3", 1, device)
    store(inputs, slots, pages, device, fmt="e4m3")
    order = torch.randperm(40)
    per_entry = ("cos", "sin", "token_row", "entry_index")
    shuffled = {n: t[order].contiguous() if n in per_entry else t for n, t in inputs.items()}
    again = allocate_pages("e4m3", 1, device)
    store(shuffled, slots[order], again, device, fmt="e4m3")
    assert torch.equal(pages, again)
    alone = allocate_pages("e4m3", 1, device)
    for e in range(0, 40, 13):
        one = {n: t[e : e + 1].contiguous() if n in per_entry else t for n, t in inputs.items()}
        store(one, slots[e : e + 1], alone, device, fmt="e4m3")
        single = read_entries(alone, "e4m3", slots[e : e + 1].to(device))
        many = read_entries(pages, "e4m3", slots[e : e + 1].to(device))
        assert torch.equal(single[0].view(torch.uint8), many[0].view(torch.uint8))
        assert torch.equal(single[1], many[1])


@pytest.mark.parametrize("fmt", PAGE_FORMATS)
def test_store_key_leaves_other_slots_alone(fmt, device):
    inputs = make_keys([3])
    pages = torch.full_like(allocate_pages(fmt, 2, device), 0xAB)
    store(inputs, torch.tensor([-1, 70, 128]), pages, device, fmt=fmt)  # 128 is outside the pool
    touched = torch.full_like(pages, 0xAB)
    form = PAGE_FORMATS[fmt]
    start = 6 * form.value_bytes
    touched[1, start : start + form.value_bytes] = pages[1, start : start + form.value_bytes]
    start = form.scales_offset + 6 * form.scale_bytes
    touched[1, start : start + form.scale_bytes] = pages[1, start : start + form.scale_bytes]
    assert torch.equal(pages, touched)
    assert not (pages[1] == 0xAB).all()


@pytest.mark.parametrize("fmt", PAGE_FORMATS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_store_key_shows_poison(fmt, poison, device):
    inputs = make_keys([4])
    inputs["kv"][9, 200] = poison  # own window of entry 2; last columns: not seen by entry 3
    slots = torch.arange(4)
    pages = allocate_pages(fmt, 1, device)
    store(inputs, slots, pages, device, fmt=fmt, round_bf16=())
    keys = dequantise(*read_entries(pages, fmt, slots.to(device)), fmt).cpu()
    assert (~keys[2].isfinite()).all() if fmt == "bf16" else keys[2].isnan().all()
    assert keys[[0, 1, 3]].isfinite().all()


def test_store_key_of_rows_outside_is_nan(device):
    inputs = make_keys([3])
    inputs["token_row"] = torch.tensor([10, 1, 4], dtype=torch.int32)  # past the end; previous window before row 0
    inputs["entry_index"] = torch.tensor([0, 1, 1], dtype=torch.int32)
    pages = allocate_pages("e4m3", 1, device)
    store(inputs, torch.arange(3), pages, device, fmt="e4m3")
    keys = dequantise(*read_entries(pages, "e4m3", torch.arange(3, device=device)), "e4m3")
    assert keys.isnan().all(-1).tolist() == [True, True, False]


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_store_key_of_less_than_a_window_is_nan(tokens, device):
    inputs = make_keys([1])
    inputs["kv"], inputs["gate"] = inputs["kv"][:tokens], inputs["gate"][:tokens]
    pages = allocate_pages("e4m3", 1, device)
    store(inputs, torch.zeros(1, dtype=torch.int64), pages, device, fmt="e4m3")
    keys = dequantise(*read_entries(pages, "e4m3", torch.zeros(1, dtype=torch.int64, device=device)), "e4m3")
    assert keys.isnan().all()


@pytest.mark.parametrize("row", [-1, -(2**31), 9, 2**31 - 1])
@pytest.mark.parametrize("index", [0, 1])
def test_store_key_of_any_row_outside_is_nan(row, index, device):
    inputs = make_keys([3])
    inputs["token_row"] = torch.tensor([row, 4, 8], dtype=torch.int32)
    inputs["entry_index"] = torch.tensor([index, 0, 1], dtype=torch.int32)
    pages = allocate_pages("e4m3", 1, device)
    store(inputs, torch.arange(3), pages, device, fmt="e4m3")
    keys = dequantise(*read_entries(pages, "e4m3", torch.arange(3, device=device)), "e4m3")
    assert keys.isnan().all(-1).tolist() == [True, False, False]


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("floor", [None, 0.0, 1e-4])
def test_zero_rows_have_zero_codes(fmt, floor, device):
    inputs = make_keys([1])
    inputs["kv"].zero_()
    pages = allocate_pages(fmt, 1, device)
    store(inputs, torch.zeros(1, dtype=torch.int64), pages, device, fmt=fmt, amax_floor=floor)
    codes, scales = read_entries(pages, fmt, torch.zeros(1, dtype=torch.int64, device=device))
    assert not (dequantise(codes, scales, fmt).cpu() != 0).any()
    usual = {"e4m3": 1e-4 / 448, "e2m1": 2.0**-126 if floor is None else 2.0**-15}[fmt]
    values = scales.cpu() if fmt == "e4m3" else decode_e8m0(scales.cpu())
    want = {0.0: 0.0 if fmt == "e4m3" else 2.0**-126}.get(floor, usual)
    torch.testing.assert_close(values, torch.full_like(values, want), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", QUERY_RECIPES)
@pytest.mark.parametrize("heads", [16, 48, 64])
def test_quantise_query_is_its_recipe(name, heads, device):
    recipe = QUERY_RECIPES[name]
    q, gate = torch.randn(5, heads, 128).bfloat16(), torch.randn(5, heads)
    gate = gate.bfloat16() if heads == 48 else gate
    angles = torch.tensor([0, 1, 7, 1000, 65000])[:, None] * torch.logspace(0, -5, 32)
    scale = 128**-0.5 * heads**-0.5
    query = quantise_query(
        q.to(device),
        gate.to(device),
        angles.cos().to(device),
        angles.sin().to(device),
        gate_scale=scale,
        **recipe,
    )
    want = emulate(q.float(), angles.cos(), angles.sin(), recipe)
    assert_same_codes(f"quantise_query {name}", recipe, (query.codes, query.scales), want)
    want_gate = gate.float() * torch.tensor(scale, dtype=torch.float32)
    if recipe["fmt"] == "e4m3":
        want_gate = want_gate * want[1]
    torch.testing.assert_close(query.gate.cpu(), want_gate, rtol=GATE_RTOL, atol=0)
    assert query.fmt == recipe["fmt"]


def test_queries_may_start_anywhere_in_memory(device):
    """A view that is aligned to nothing but its own bf16 gives the same codes."""
    q, gate = torch.randn(2, 32, 128).bfloat16().to(device), torch.randn(2, 32, device=device)
    table = torch.rand(2, 32, device=device)
    moved = torch.empty(q.numel() + 1, dtype=torch.bfloat16, device=device)[1:].view(q.shape).copy_(q)
    assert moved.is_contiguous()
    assert moved.data_ptr() % 4
    want, got = (quantise_query(x, gate, table, table, gate_scale=0.5) for x in (q, moved))
    assert torch.equal(got.codes.view(torch.uint8), want.codes.view(torch.uint8))
    assert torch.equal(got.gate, want.gate)


@pytest.mark.parametrize(("ties", "rounded"), [("even", [0, 1, 1, 2, 2, 4, 4]), ("down", [0, 0.5, 1, 1.5, 2, 3, 4])])
@pytest.mark.parametrize("fp4_step", [False, True])
def test_ties_are_the_recipes(ties, rounded, fp4_step, device):
    """Every midpoint of e2m1 in a row that no rotation touches; the FP4 step is ties to even anyway."""
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])  # 6 makes the scale 1
    q = torch.cat((midpoints, -midpoints)).repeat(8).bfloat16().expand(1, 16, 128).contiguous()
    ones, zeros = torch.ones(1, 32, device=device), torch.zeros(1, 32, device=device)
    query = quantise_query(
        q.to(device), ones[:, :16].contiguous(), ones, zeros, gate_scale=1.0, fmt="e2m1", ties=ties,
        hadamard=False, fp4_step=fp4_step,
    )  # fmt: skip
    want = torch.tensor([0, 1, 1, 2, 2, 4, 4, 6.0] if fp4_step else [*rounded, 6.0])
    want = torch.cat((want, -want)).repeat(8).expand(1, 16, 128)
    assert torch.equal(dequantise(query.codes, query.scales, "e2m1").cpu(), want)


@pytest.mark.parametrize("fmt", PAGE_FORMATS)
@pytest.mark.parametrize("rounds", [(), STAGES[2:]])
def test_quantise_query_shows_poison(fmt, rounds, device):
    q = torch.randn(1, 16, 128).bfloat16()
    q[0, 3, 5], q[0, 7, 100], q[0, 9, 10] = float("nan"), float("inf"), float("-inf")  # dim 10 is not turned
    ones, zeros = torch.ones(1, 32, device=device), torch.zeros(1, 32, device=device)
    query = quantise_query(
        q.to(device), torch.ones(1, 16, device=device), ones, zeros, gate_scale=1.0, fmt=fmt, round_bf16=rounds
    )
    values = dequantise(query.codes, query.scales, fmt)[0].cpu()
    assert (~values.isfinite()).all(-1).nonzero().flatten().tolist() == [3, 7, 9]
    assert (~values.isfinite()).any(-1).nonzero().flatten().tolist() == [3, 7, 9]
    assert query.gate.isnan().cpu().nonzero()[:, 1].tolist() == ([3, 7, 9] if fmt == "e4m3" else [])
    if fmt == "e4m3":
        assert query.scales[0, [3, 7, 9]].isnan().all()
        assert (query.codes[0, [3, 7, 9]].view(torch.uint8) == 0x7F).all()
    if fmt == "e2m1":
        assert not query.codes[0, [3, 7, 9]].any()


@pytest.mark.parametrize("fmt", PAGE_FORMATS)
def test_reruns_are_bitwise_equal(fmt, device):
    inputs = make_keys([9])
    q, gate = torch.randn(2, 16, 128).bfloat16().to(device), torch.randn(2, 16, device=device)
    table = torch.rand(2, 32, device=device)
    runs = []
    for _ in range(3):
        pages = allocate_pages(fmt, 1, device)
        store(inputs, torch.arange(9), pages, device, fmt=fmt)
        query = quantise_query(q, gate, table, table, gate_scale=0.5, fmt=fmt)
        runs.append((pages, query.codes.view(torch.uint8), query.gate))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))


def test_errors_name_what_was_found(device):
    inputs = make_keys([2])
    pages, slots = allocate_pages("e4m3", 1, device), torch.arange(2)
    for change, message in (
        ({"fmt": "fp8"}, "page format is 'fp8'"),
        ({"fmt": "bf16"}, "bf16 pages are"),
        ({"scale": "ue8"}, "scale is 'ue8', expected one of fp32, ue8m0"),
        ({"ties": "up"}, "ties is 'up'"),
        ({"round_bf16": ("rop",)}, "expected a subset of"),
        ({"round_bf16": "rope"}, "expected a subset of"),
        ({"amax_floor": -1.0}, "amax_floor is -1.0"),
        ({"amax_floor": float("nan")}, "amax_floor is nan"),
    ):
        with pytest.raises(ValueError, match=message):
            store(inputs, slots, pages, device, **({"fmt": "e4m3"} | change))
    with pytest.raises(ValueError, match=r"slots is torch\.int32"):
        store(inputs, slots.int(), pages, device, fmt="e4m3")
    with pytest.raises(ValueError, match=r"kv is torch.float32 \[8, 255\]"):
        store(inputs | {"kv": inputs["kv"][:, 1:]}, slots, pages, device, fmt="e4m3")
    q = torch.zeros(1, 16, 128, device=device)
    with pytest.raises(ValueError, match=r"q is torch\.float32"):
        quantise_query(q, q[..., 0], q[0, :1, :32], q[0, :1, :32], gate_scale=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", RECIPES)
def test_flash_shapes(name, device):
    """8192 entries, 64 heads, pages whose byte offset passes 2^31; 20 reruns."""
    recipe = RECIPES[name]
    fmt = recipe["fmt"]
    inputs = make_keys([8000, 192])
    total = 2**31 // PAGE_FORMATS[fmt].page_bytes + 200
    pages = torch.zeros(total, PAGE_FORMATS[fmt].page_bytes, dtype=torch.uint8, device=device)
    slots = (total - 128) * 64 + torch.randperm(128 * 64)
    store(inputs, slots, pages, device, **recipe)
    last = pages[total - 128 :].clone()
    got = read_entries(last, fmt, (slots - (total - 128) * 64).to(device))
    assert_same_codes(f"store_key {name}", recipe, got, emulate_key(inputs, recipe))
    assert not pages[: total - 128].any()
    for _ in range(20):
        pages[total - 128 :] = 0
        store(inputs, slots, pages, device, **recipe)
        assert torch.equal(pages[total - 128 :], last)


@pytest.mark.gpu
@pytest.mark.parametrize("name", QUERY_RECIPES)
def test_flash_queries(name, device):
    """256 tokens of 64 heads; 20 reruns."""
    recipe = QUERY_RECIPES[name]
    q, gate = torch.randn(256, 64, 128).bfloat16(), torch.randn(256, 64)
    angles = torch.randint(0, 100000, (256, 1)) * torch.logspace(0, -5, 32)
    arguments = [t.to(device) for t in (q, gate, angles.cos(), angles.sin())]
    query = quantise_query(*arguments, gate_scale=0.01, **recipe)
    want = emulate(q.float(), angles.cos(), angles.sin(), recipe)
    assert_same_codes(f"quantise_query {name}", recipe, (query.codes, query.scales), want)
    for _ in range(20):
        again = quantise_query(*arguments, gate_scale=0.01, **recipe)
        assert torch.equal(again.codes.view(torch.uint8), query.codes.view(torch.uint8))
        assert torch.equal(again.gate, query.gate)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8, rounded", "fp4, rounded"])
def test_queries_on_two_streams_and_in_a_graph(name, device):
    """More tiles than programs, of another number each time; Hopper's programs draw them from a counter."""
    recipe = QUERY_RECIPES[name]
    gate, angles = torch.randn(700, 64, device=device), torch.randn(700, 32)
    cos, sin = angles.cos(), angles.sin()
    queries = [torch.randn(700, 64, 128).bfloat16() for _ in range(3)]
    wanted = [emulate(q.float(), cos, sin, recipe) for q in queries]
    queries, cos, sin = [q.to(device) for q in queries], cos.to(device), sin.to(device)

    def run(q):
        n = len(q)
        return quantise_query(q, gate[:n], cos[:n], sin[:n], gate_scale=0.01, **recipe)

    firsts = [run(q) for q in queries]
    for first, want in zip(firsts, wanted, strict=True):
        assert_same_codes(name, recipe, (first.codes, first.scales), want)
    streams, graph = [torch.cuda.Stream(device) for _ in range(2)], torch.cuda.CUDAGraph()
    with torch.cuda.stream(streams[0]):
        run(queries[0])
    with torch.cuda.graph(graph, stream=streams[0]):
        replayed = run(queries[0])
    torch.cuda.synchronize()
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(40_000_000)  # until all launches are in their queues, which then run beside each other
    got = []  # all kept, so that no memory comes back with the right codes in it
    for turn in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                got.append((turn % 3, run(queries[turn % 3][: 700 - 7 * turn]).codes))
        with torch.cuda.stream(streams[1]):
            replayed.codes.view(torch.uint8).fill_(0xAB)
            graph.replay()
            got.append((0, replayed.codes.clone()))
    torch.cuda.synchronize()
    for which, codes in got:
        want = firsts[which].codes[: len(codes)]
        assert torch.equal(codes.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_hopper_queries_end_with_their_last_row(tokens, fmt, device):
    """16 heads, so that the last tile of 64 rows is not full: nothing is written past the outputs' ends."""
    q = torch.randn(tokens, 16, 128, device=device).bfloat16()
    if not tuning.on_hopper(q):
        pytest.skip("no Hopper here")
    from diffcheck.kernels.hopper_query import quantise_query_sm90

    gate, table = torch.randn(tokens, 16, device=device), torch.rand(tokens, 32, device=device)
    codes = torch.full((tokens + 8, 16, 128 if fmt == "e4m3" else 64), 0xAB, dtype=torch.uint8, device=device)
    gates = torch.full((tokens + 8, 16), 0.25, device=device)
    outputs = codes, gates.clone() if fmt == "e4m3" else codes[..., :4].clone(), gates
    before = [output.clone() for output in outputs]
    quantise_query_sm90(q, gate, table, table, 0.5, fmt, False, 1e-4, False, *(output[:tokens] for output in outputs))
    for output, old in zip(outputs, before, strict=True):
        assert torch.equal(output[tokens:], old[tokens:])
        assert not (output[:tokens] == old[:tokens]).flatten(1).all(1).any()
