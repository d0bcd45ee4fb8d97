"""A Recipe: every choice that decides the indexer's numbers, in one frozen record.

The reference, a deployment, a precision, a RoPE-theta setting and a suspected fault are all the same thing: a Recipe.
`Recipe.reference(config)` is derived from the checkpoint; everything else is that Recipe with some fields replaced,
and a report prints the replaced fields.

Fields named q_* and k_* exist once per side; `replace` also takes the bare name and sets both, e.g.
`recipe.replace(theta=10000.0)`. Fields named round_* say what a stage's result is rounded to: "bf16", "fp16" or
"none" (left in the compute type).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from .custom import CustomFormat, Storage
from .formats import BF16, E2M1_REFERENCE, Format
from .grammar import parse_format
from .refimpl import IndexerConfig, InputError, Yarn

Rounding = Literal["none", "bf16", "fp16"]
DIGEST_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """See the module docstring. Field by field, in pipeline order:

    name: for people. compute: "fp32", or "fp64" for checks.

    Query projection: activation_quant (e4m3 per 128 inputs when the stored weight is quantised), weight_scale (scales
    of a quantised wq_b: "stored"; "byte" takes an e8m0 byte as a number; "none" leaves them out), round_q.

    RoPE: *_theta, *_yarn (None: no interpolation), *_mscale (factor on cos and sin), rope_dims, *_pairing
    ("interleaved" pairs 2i, 2i+1; "half" pairs i, i + R/2), *_slice (rotate the "last" or the "first" rope_dims),
    k_position (an entry's angle is that of its "first" token 4i, its "last" 4i+3, or its own "index" i),
    *_position_offset (added to the position, in tokens), round_rope_table (of cos and sin), round_q_rope, round_k_rope.

    Rotation and FP4 step: *_hadamard, round_*_hadamard, *_fp4 (fake quantisation to *_fp4_format, rounded to bf16).

    Storage: q_format, k_format.

    Pool: round_pool_gemm (of kv and gate projections), ape, ape_shift (added to a token's place in its window),
    round_ape, overlap (pool over the previous window too), overlap_order (which half of the columns is the previous
    window's), round_pool_sum (softmax weights, products and sum), round_pool; eps, round_k_norm.

    Gate: round_gate_gemm, round_gate. Scores: round_dot, relu, round_product, round_score.

    Selection: mask_shift (entry j is visible iff j < (t + 1 + mask_shift) // 4; 3 would let a token read its own
    unfinished group), k, ties (which index wins among equal scores).
    """

    name: str
    compute: Literal["fp32", "fp64"] = "fp32"

    activation_quant: bool = True
    weight_scale: Literal["stored", "byte", "none"] = "stored"
    round_q: Rounding = "bf16"

    rope_dims: int
    q_theta: float
    k_theta: float
    q_yarn: Yarn | None
    k_yarn: Yarn | None
    q_mscale: float = 1.0
    k_mscale: float = 1.0
    q_pairing: Literal["interleaved", "half"] = "interleaved"
    k_pairing: Literal["interleaved", "half"] = "interleaved"
    q_slice: Literal["last", "first"] = "last"
    k_slice: Literal["last", "first"] = "last"
    k_position: Literal["first", "last", "index"] = "first"
    q_position_offset: int = 0
    k_position_offset: int = 0
    round_rope_table: Rounding = "none"
    round_q_rope: Rounding = "bf16"
    round_k_rope: Rounding = "bf16"

    q_hadamard: bool = True
    k_hadamard: bool = True
    round_q_hadamard: Rounding = "bf16"
    round_k_hadamard: Rounding = "bf16"
    q_fp4: bool = True
    k_fp4: bool = True
    q_fp4_format: Format = E2M1_REFERENCE
    k_fp4_format: Format = E2M1_REFERENCE
    q_format: Storage | None = BF16
    k_format: Storage | None = BF16

    round_pool_gemm: Rounding = "none"
    ape: bool = True
    ape_shift: int = 0
    round_ape: Rounding = "none"
    overlap: bool = True
    overlap_order: Literal["previous-first", "own-first"] = "previous-first"
    round_pool_sum: Rounding = "none"
    round_pool: Rounding = "bf16"
    eps: float
    round_k_norm: Rounding = "bf16"

    round_gate_gemm: Rounding = "bf16"
    round_gate: Rounding = "bf16"

    round_dot: Rounding = "bf16"
    relu: bool = True
    round_product: Rounding = "bf16"
    round_score: Rounding = "bf16"

    mask_shift: int = 0
    k: int
    ties: Literal["lower", "higher"] = "lower"

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise InputError(f"recipe: {name} is {getattr(self, name)!r}, expected one of {list(allowed)}")

    @classmethod
    def reference(cls, config: IndexerConfig) -> Recipe:
        """What the published inference code computes for this checkpoint."""
        return cls(
            name="reference",
            rope_dims=config.rope_head_dim,
            q_theta=config.compress_rope_theta,
            k_theta=config.compress_rope_theta,
            q_yarn=config.yarn,
            k_yarn=config.yarn,
            eps=config.rms_norm_eps,
            k=config.index_topk,
        )

    @classmethod
    def ideal(cls, config: IndexerConfig) -> Recipe:
        """The same formulas without any rounding or fake quantisation, in fp32."""
        recipe = cls.reference(config)
        roundings = {f: "none" for f in recipe.field_names() if f.startswith("round_")}
        return recipe.replace(
            name="ideal", activation_quant=False, fp4=False, q_format=None, k_format=None, **roundings
        )

    @classmethod
    def preset(cls, name: str, config: IndexerConfig) -> Recipe:
        """A deployment's recipe by name (see `diffcheck.presets`); InputError for an unknown name."""
        from .presets import build

        return build(name, config)

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """All field names, in pipeline order."""
        return tuple(f.name for f in dataclasses.fields(cls))

    def replace(self, **changes: Any) -> Recipe:
        """A copy with fields replaced; a bare two-sided name (theta, hadamard, …) sets both q_* and k_*."""
        names = set(self.field_names())
        full: dict[str, Any] = {}
        for name, value in changes.items():
            sides = [side + name for side in ("q_", "k_") if side + name in names]
            if name in names:
                full[name] = value
            elif sides:
                full |= dict.fromkeys(sides, value)
            else:
                raise InputError(f"recipe: unknown field {name!r}, expected one of {sorted(names | TWO_SIDED)}")
        return dataclasses.replace(self, **full)

    def differences(self, other: Recipe) -> dict[str, Any]:
        """This recipe's values of the fields in which it differs from `other` (the name left out)."""
        return {
            name: getattr(self, name)
            for name in self.field_names()
            if name != "name" and getattr(self, name) != getattr(other, name)
        }

    def structure_differs(self, other: Recipe) -> bool:
        """Whether more than formats and roundings differ: what no choice of precision explains.

        These are the fields of STRUCTURE, and a Hadamard rotation on one side only (on both or neither the exact
        scores are the same).
        """
        one_sided = self.q_hadamard != self.k_hadamard and other.q_hadamard == other.k_hadamard
        return one_sided or not STRUCTURE.isdisjoint(self.differences(other))

    @classmethod
    def from_json(cls, fields: object, config: IndexerConfig) -> Recipe:
        """The recipe that `to_json` wrote; fields that it lacks are the reference's. InputError for anything else."""
        reference = cls.reference(config)
        if not isinstance(fields, dict):
            raise InputError(f"recipe is {fields!r:.80}, expected an object of recipe fields")
        changes: dict[str, Any] = {}
        for name, value in fields.items():
            if name not in cls.field_names():
                raise InputError(f"recipe: unknown field {name!r}, expected one of {', '.join(cls.field_names())}")
            try:
                if name.endswith("_format") and value is not None:
                    value = parse_format(value) if isinstance(value, str) else Format(**value)
                elif name.endswith("_yarn") and value is not None:
                    value = Yarn(**value)
                else:
                    kind = type(getattr(reference, name))
                    value = kind(value) if kind is float and type(value) in (int, float) else value
                    if value is not None and kind is not type(None) and type(value) is not kind:
                        raise ValueError(f"expected a value like {getattr(reference, name)!r}")
            except (TypeError, ValueError, AttributeError) as error:
                raise InputError(f"recipe: {name} is {value!r:.80}: {error}") from None
            changes[name] = value
        return dataclasses.replace(reference, **changes)

    def to_json(self) -> dict[str, Any]:
        """All fields as plain JSON values."""
        return {name: plain(getattr(self, name)) for name in self.field_names()}


CHOICES: dict[str, tuple[Any, ...]] = {
    name: get_args(hint) for name, hint in get_type_hints(Recipe).items() if get_origin(hint) is Literal
}
"""Allowed values of the fields that have only a few."""
STRUCTURE = frozenset(
    side + name
    for name in ("theta", "yarn", "mscale", "pairing", "slice", "position_offset")
    for side in ("q_", "k_")
) | {
    "rope_dims", "k_position", "ape", "ape_shift", "overlap", "overlap_order", "weight_scale", "eps", "relu",
    "mask_shift", "k",
}  # fmt: skip
"""Fields of configuration and structure: a deployment has no choice about them."""
EMULATED_ONLY: dict[str, Any] = {
    "weight_scale": "stored", "q_position_offset": 0, "k_position_offset": 0, "ape_shift": 0,
    "overlap_order": "previous-first", "q_fp4_format": E2M1_REFERENCE, "k_fp4_format": E2M1_REFERENCE,
}  # fmt: skip
"""Fields that exist to name faults, with the only values that a kernel has."""
TWO_SIDED = frozenset(
    n[2:] for n in Recipe.field_names() if n.startswith("q_") and "k_" + n[2:] in Recipe.field_names()
)
"""Names that exist on both sides, without their q_ or k_."""


def plain(value: Any) -> Any:
    """A recipe field's value as plain JSON: formats by their short form (custom ones with a digest), YaRN an object."""
    if isinstance(value, CustomFormat):
        return f"{value} [{value.digest[:DIGEST_SHOWN]}]"
    if isinstance(value, Format):
        return str(value)
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
