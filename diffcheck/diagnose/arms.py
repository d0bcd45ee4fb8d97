"""Arms: the recipe with one field changed, for every field that has alternatives.

An arm is a hypothesis: "the deployment runs this recipe, but with that value". Arms are made from the Recipe's own
fields: the other value of a switch, the other choices of a named one, formats with one attribute changed, numbers
from lists and, where the observations allow it, from a fit (`hints`). Fields that exist once per side give three arms:
both sides, q only, k only. So a field added to the Recipe is looked for without a line here.

`cause_of` gives the id under which a change is known; a change that has none is `unknown` with its field named.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..formats import BF16, E2M1_REFERENCE, FP16, Format, ScaleType
from ..presets import CHANGES, build
from ..recipe import CHOICES, TWO_SIDED, Recipe, plain
from ..refimpl import IndexerConfig, Yarn

THETAS = (
    1e3, 2e3, 4e3, 5e3, 8e3, 10000.0, 16e3, 20e3, 25e3, 32e3, 40000.0, 50e3, 64e3, 80e3, 100e3, 120e3, 160000.0, 200e3,
    250e3, 320e3, 400e3, 500000.0, 640e3, 800e3, 1e6, 1.6e6, 2e6, 3e6, 5e6, 8e6, 1e7, 3e7, 1e8,
)  # fmt: skip
FEW_THETAS = (10000.0, 40000.0, 160000.0, 500000.0, 1e6)
"""Thetas tried on one side alone at first; the whole list where one of them is among the best."""
EPSILONS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10, 1e-12, 1e-20)
MSCALES = (0.5, 0.7, 0.8, 0.9, 1.05, 1.1, 1.2, 1.4, 2.0)
TOPKS = (64, 128, 256, 512, 1024, 2048)
PUBLISHED_YARN = Yarn(factor=16.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=65536)
MERGED = ("theta", "yarn", "mscale", "pairing", "slice", "position_offset")
"""Two-sided settings that a deployment has once: the same wrong value on both sides is one fault."""
_CAUSES = {
    "theta": "theta", "yarn": "yarn", "mscale": "mscale", "pairing": "pairing", "slice": "slice",
    "rope_dims": "slice", "k_position": "position", "position_offset": "position", "relu": "relu", "eps": "eps",
    "ape": "ape", "ape_shift": "ape", "round_ape": "ape", "overlap": "overlap", "overlap_order": "overlap",
    "round_gate": "gate_dtype", "round_gate_gemm": "gate_dtype", "round_dot": "score_dtype",
    "round_product": "score_dtype", "round_score": "score_dtype", "mask_shift": "mask", "k": "k",
    "q_hadamard": "hadamard_q", "k_hadamard": "hadamard_k", "q_fp4": "fp4_q", "k_fp4": "fp4_k",
    "weight_scale": "scale_bytes", "score_dtype": "score_dtype",
}  # fmt: skip
_SCORE_ROUNDINGS = ("round_dot", "round_product", "round_score")
_SCORE_DTYPES = {
    "fp32": ("none", "none", "none"), "fp16": ("none", "none", "fp16"), "bf16": ("none", "none", "bf16"),
    "fp16 throughout": ("fp16", "fp16", "fp16"), "bf16 throughout": ("bf16", "bf16", "bf16"),
}  # fmt: skip
"""Score types that programs have, as roundings of dot, product and sum."""
_NEVER = ("name", "compute", "ties")
"""Fields without arms: what a correct program may choose (the order among equal scores) or cannot show."""
_SCALES: tuple[ScaleType, ...] = ("ue8m0", "fp32")
_LATE = ("weight_scale", "rope_dims", "ape_shift", "position_offset", "fp4_format", "round_")
"""Fields whose arms stand behind the others where both predict the same."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A hypothesis: `changes` to the recipe, shown as `field` (bare where both sides change) and `value`."""

    field: str
    value: Any
    changes: tuple[tuple[str, Any], ...]

    def apply(self, recipe: Recipe) -> Recipe:
        """The recipe under this hypothesis."""
        return dataclasses.replace(recipe, **dict(self.changes))

    @property
    def preset(self) -> bool:
        """Whether it is a whole preset, no single field."""
        return self.field == "preset"


def cause_of(field: str, old: Any, new: Any) -> str:
    """The id of a changed field in the catalogue of faults, or `unknown`."""
    if field in _CAUSES:
        return _CAUSES[field]
    bare = field[2:] if field.startswith(("q_", "k_")) else field
    if bare in _CAUSES:
        return _CAUSES[bare]
    if bare in ("format", "fp4_format"):
        side = field[0]
        if old is None or new is None or (old.element, old.block) != (new.element, new.block):
            return f"{side}_format"
        return "ties" if old.ties != new.ties else "scale_rule"
    return "unknown"


def make_arms(
    recipe: Recipe,
    fields: Iterable[str],
    config: IndexerConfig,
    hints: Mapping[str, list[Any]] | None = None,
    *,
    short: bool = False,
) -> list[Arm]:
    """All arms of a recipe in the given fields, likelier ones first where two predict the same.

    hints: values by bare or full field name that the observations suggest. short: where both sides are open, numbers
    and formats on one side only from short lists; `more_arms` has the rest.
    """
    reached, hints = set(fields) - set(_NEVER), dict(hints or {})
    arms: dict[tuple[tuple[str, Any], ...], Arm] = {}

    def add(field: str, value: Any, names: tuple[str, ...]) -> None:
        changes = tuple((name, value) for name in names)
        if any(getattr(recipe, name) != value for name in names):
            arms.setdefault(changes, Arm(field, value, changes))

    if reached.issuperset(_SCORE_ROUNDINGS):
        for value, roundings in _SCORE_DTYPES.items():
            changes = tuple(zip(_SCORE_ROUNDINGS, roundings, strict=True))
            if any(getattr(recipe, name) != rounding for name, rounding in changes):
                arms.setdefault(changes, Arm("score_dtype", value, changes))
    open_sides = {bare for bare in TWO_SIDED if reached.issuperset((f"q_{bare}", f"k_{bare}"))}
    for bare in sorted(TWO_SIDED):
        names = (f"q_{bare}", f"k_{bare}")
        if reached.issuperset(names):
            suggested = [*hints.get(bare, ()), *(v for n in names for v in hints.get(n, ()))]
            listed = [v for n in names for v in _alternatives(n, recipe, config)]
            if short and bare.endswith("format"):
                listed = listed[:12]
            for value in [*suggested, *listed]:
                add(bare, value, names)
    for name in Recipe.field_names():
        if name in reached:
            listed = _alternatives(name, recipe, config)
            if short and name[2:] in open_sides:
                listed = _shortened(name[2:], listed)
            for value in [*hints.get(name, ()), *hints.get(name[2:], ()), *listed]:
                add(name, value, (name,))
    return sorted(arms.values(), key=lambda arm: any(late in arm.field for late in _LATE))


def more_arms(recipe: Recipe, arm: Arm, config: IndexerConfig) -> list[Arm]:
    """All values of the field that an arm changes, on the same sides."""
    names = tuple(name for name, _ in arm.changes)
    values = dict.fromkeys(v for name in names for v in _alternatives(name, recipe, config))
    return [Arm(arm.field, v, tuple((n, v) for n in names)) for v in values if v != arm.value]


def _shortened(bare: str, values: list[Any]) -> list[Any]:
    if bare == "theta":
        return [v for v in values if v in FEW_THETAS]
    return values[: {"mscale": 5, "yarn": 3, "fp4_format": 4}.get(bare, len(values))]


def preset_arms(recipe: Recipe, reference: Recipe, config: IndexerConfig) -> list[Arm]:
    """Whole presets: what each of them changes, put on the recipe; the reference's own choices among them."""
    arms = []
    for name in ("reference", "bf16", *CHANGES):
        preset = build(name, config)
        named = set().union(*(build(n, config).differences(reference) for n in ("bf16", *CHANGES)))
        changes = tuple((f, getattr(preset, f)) for f in sorted(named) if getattr(recipe, f) != getattr(preset, f))
        if changes:
            arms.append(Arm("preset", name, changes))
    return arms


def _alternatives(name: str, recipe: Recipe, config: IndexerConfig) -> list[Any]:
    current = getattr(recipe, name)
    bare = name[2:] if name.startswith(("q_", "k_")) else name
    if name in CHOICES:
        return [value for value in CHOICES[name] if value != current]
    if isinstance(current, bool):
        return [not current]
    listed = {
        "theta": THETAS, "eps": EPSILONS, "position_offset": (-4, -3, -2, -1, 1, 2, 3, 4), "ape_shift": (1, 2, 3),
        "mask_shift": (3, 4, -1, 1, -4, -3, 2, -2, 7, 8, -8, 0),
    }  # fmt: skip
    if bare in listed:
        return [type(current)(value) for value in listed[bare] if value != current]
    if bare == "yarn":
        return _yarns(current, config)
    if bare == "mscale":
        factors = {y.factor for y in (config.yarn, PUBLISHED_YARN) if y} | {4.0, 8.0, 32.0, 40.0}
        formulas = [_yarn_mscale(factor) for factor in sorted(factors, key=lambda f: f != PUBLISHED_YARN.factor)]
        return [1.0, *formulas, *(f * f for f in formulas), *(1 / f for f in formulas), *MSCALES]
    if bare == "k":
        return [value for value in (*TOPKS, current * 2, current // 2) if value > 0]
    if bare == "rope_dims":
        return [dims for dims in (current // 2, current * 2) if 2 <= dims <= config.index_head_dim and dims % 2 == 0]
    if bare in ("format", "fp4_format"):
        return _formats(current, config.index_head_dim, step=bare == "fp4_format")
    return []


def _yarn_mscale(factor: float) -> float:
    """YaRN's attention scale 0.1 ln(factor) + 1 (Peng et al. 2023, eq. 22)."""
    return 0.1 * math.log(factor) + 1


def _yarns(current: Yarn | None, config: IndexerConfig) -> list[Yarn | None]:
    base = current or config.yarn or PUBLISHED_YARN
    found: list[Yarn | None] = [None, config.yarn, PUBLISHED_YARN]
    for factor in (0.25, 0.5, 2.0, 2.5, 4.0):
        found.append(dataclasses.replace(base, factor=base.factor * factor))
    for length in (4096, 8192, 32768, 131072, 1048576):
        found.append(dataclasses.replace(base, original_max_position_embeddings=length))
    found.append(dataclasses.replace(base, beta_fast=base.beta_slow, beta_slow=base.beta_fast))
    return [yarn for yarn in dict.fromkeys(found) if yarn != current]


def _formats(current: Format | None, dim: int, *, step: bool) -> list[Format | None]:
    found: list[Format | None] = []
    if current is not None and not current.plain:
        found += [
            dataclasses.replace(current, ties="down" if current.ties == "even" else "even"),
            dataclasses.replace(current, scale="fp32" if current.scale != "fp32" else "ue8m0"),
            *(dataclasses.replace(current, rule=rule) for rule in ("ceil", "floor", "nearest")),
            dataclasses.replace(current, scale="e4m3"),
            dataclasses.replace(current, reciprocal=not current.reciprocal),
            dataclasses.replace(current, scale="fp32", reciprocal=True),
            *(dataclasses.replace(current, amax_floor=f) for f in (1e-4, 0.0, 1e-12, E2M1_REFERENCE.amax_floor)),
            *(dataclasses.replace(current, block=b) for b in (16, 32, 64, 128)),
        ]
    found.append(E2M1_REFERENCE)
    if not step:
        found += [BF16, FP16, None]
        for changes in CHANGES.values():
            found += [changes[f] for f in ("q_format", "k_format") if f in changes]
    for element, block in (("e4m3", 128), ("e2m1", 32), ("int8", 128), ("e5m2", 128), ("e2m3", 32), ("e3m2", 32)):
        for scale in _SCALES:
            found.append(Format(element=element, block=block, scale=scale))
    fits = [f for f in found if f is None or f.plain or (dim % f.block == 0)]
    return [f for f in dict.fromkeys(fits) if f != current]


def shown(value: Any) -> str:
    """A field's value in words."""
    value = plain(value)
    if value is None:
        return "none"
    if isinstance(value, dict):
        return ", ".join(f"{k} {v:g}" for k, v in value.items())
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
