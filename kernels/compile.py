"""Compile every kernel for GPUs that are not there: python -m diffcheck.kernels.compile

Triton needs no device to produce a cubin. So continuous integration can prove that each kernel builds for
Hopper (sm_90), datacentre Blackwell (sm_100) and workstation Blackwell (sm_120), and a change that spills
registers is seen on the pull request. The cases are the kernels with the constants that deployments use, at
Flash shapes.

Registers and spilled bytes are read from the log of the ptxas run that made the cubin; shared memory is the
launch's, from Triton's metadata. Not possible in a process that interprets: there is nothing to compile then.
"""

import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import prefill
from .fill import COLUMNS as FILL_COLUMNS
from .fill import fill_outside_kernel
from .logits import QUERY_FORMATS_OF
from .plain_logits import KEYS_PER_TILE, PREFILL_ROWS, head_tile, paged_logits_kernel, ragged_logits_kernel
from .prefill import prefill_logits_kernel
from .quantise_query import ROWS as QUERY_ROWS
from .quantise_query import quantise_query_kernel
from .rounding import INTERPRETED
from .store_key import ROWS as KEY_ROWS
from .store_key import store_key_kernel
from .topk import COLUMNS, LIST, stream_kernel
from .tournament import tournament_kernel
from .tuning import PLAIN, SM90

ARCHITECTURES = (90, 100, 120)
"""Compute capabilities times ten."""

HEADS = 64

SPILL_LIMIT = 16
"""Spilled bytes per thread (stores and loads) let pass: ptxas may prefer one spill to more registers."""

OUTER_SPILLS = 256
"""The same where few registers, for more programs at once, were measured to be worth spills outside the main loop."""

LONG_LIST_SPILLS = 640
"""The same where lists of 2048 are shrunk in 128 registers, which happens a few times a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kernel with the constants of one deployment; `types` are Triton's names, in the order of its
    arguments.
    """

    name: str
    kernel: Any
    types: Sequence[str]
    constants: dict[str, Any]
    options: dict[str, Any]
    """A value of either may be a dict by major compute capability."""
    architectures: Sequence[int] = ARCHITECTURES
    aligned: Sequence[str] = ()
    """Integer arguments that are multiples of 16 in deployments, which a launch finds too."""
    spill_limit: int = SPILL_LIMIT

    def choices_for(self, architecture: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Constants and launch options on one architecture."""
        constants, options = (
            {name: value[architecture // 10] if isinstance(value, dict) else value for name, value in each.items()}
            for each in (self.constants, self.options)
        )
        return constants, options


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """Result of one compilation. registers and spill_bytes (per thread) are None where ptxas does not say."""

    name: str
    architecture: int
    registers: int | None
    spill_bytes: int | None
    shared_bytes: int
    cubin_bytes: int


def cases() -> list[Case]:
    """Every kernel in every format and with every pair of query and key formats."""
    listed = []
    unfused = {"enable_fp_fusion": False}
    fast = {"num_warps": 4}
    for recipe, fmt, rounds, extra in (
        ("reference", "bf16", True, {"FP4_STEP": True}),
        ("sglang-fp8", "e4m3", False, {}),
        ("vllm-fp8", "e4m3", True, {"HADAMARD": False, "POWER_OF_TWO": True}),
        ("sglang-fp4", "e2m1", False, {"TIES_DOWN": True}),
        ("sglang-bf16", "bf16", False, {}),
    ):
        shared = {
            "FMT": fmt,
            "POWER_OF_TWO": False,
            "TIES_DOWN": False,
            "FP4_STEP": False,
            "HADAMARD": True,
        } | extra
        shared |= {"ROUND_ROPE": rounds, "ROUND_HADAMARD": rounds}
        listed.append(
            Case(
                name=f"store_key {recipe}",
                kernel=store_key_kernel,
                types=["*fp32"] * 6 + ["*i32", "*i32", "*i64", "*i32"] + ["i32", "i32", "i32", "i32", "fp32", "fp32"],
                constants=shared
                | {
                    "ROUND_POOL": rounds,
                    "ROUND_NORM": rounds,
                    "WEIGHT_BF16": False,
                    "ROWS": KEY_ROWS,
                },
                options=unfused | {"num_warps": _each("key_warps")},
            )
        )
        listed.append(
            Case(
                name=f"quantise_query {recipe}",
                kernel=quantise_query_kernel,
                types=[
                    *("*i32", "*i16", "*fp32", "*fp32", "*i32", "*i32" if fmt == "e2m1" else "*fp32", "*fp32"),
                    *("i32", "fp32", "fp32"),
                ],
                constants=shared
                | {
                    "GATE_BF16": True,
                    "HEADS": HEADS,
                    "ROWS": QUERY_ROWS,
                    "STAGES": {major: stages[fmt] for major, stages in _each("query_stages").items()},
                },
                options=unfused | {"num_warps": _each("query_warps")},
            )
        )
    pointer = {"e4m3": "*u8", "bf16": "*i16", "e2m1": "*u8"}
    for fmt, query_formats in QUERY_FORMATS_OF.items():
        for q_fmt in query_formats:
            constants = {"FMT": fmt, "Q_FMT": q_fmt, "HEADS": HEADS, "HEAD_TILE": head_tile(HEADS, fmt)}
            query = [pointer[q_fmt], pointer[q_fmt], "*fp32"]
            scales = "*fp32" if fmt == "e4m3" else "*u8"
            for next_n in (1, 2):
                listed.append(
                    Case(
                        name=f"paged_logits {q_fmt} x {fmt} next_n {next_n}",
                        kernel=paged_logits_kernel,
                        types=[*query, pointer[fmt], scales, "*i32", "*i32", "*fp32"] + ["i32"] * 7,
                        constants=constants | {"NEXT_N": next_n},
                        options={"num_warps": {major: warps[fmt] for major, warps in _each("warps").items()}},
                    )
                )
            listed.append(
                Case(
                    name=f"ragged_logits {q_fmt} x {fmt}",
                    kernel=ragged_logits_kernel,
                    types=[*query, pointer[fmt], scales, "*i32", "*i32", "*fp32", "i32", "i32", "i32"],
                    constants=constants | {"ROWS": PREFILL_ROWS, "KEYS": KEYS_PER_TILE},
                    options={"num_warps": {major: warps[fmt] for major, warps in _each("warps").items()}},
                )
            )
    listed.append(
        Case(
            name="prefill_logits",
            kernel=prefill_logits_kernel,
            types=["*u8", "*fp32", "*u8", "*fp32", "*i32", "*i32", "*fp32", "i32", "i32", "i32"],
            constants={
                "HEADS": HEADS,
                "ROWS": prefill.rows_of(HEADS),
                "KEYS": prefill.KEYS,
                "TILES": PLAIN[10].prefill_tiles,
            },
            options={
                "num_warps": _each("prefill_warps"),
                "num_stages": _each("prefill_stages"),
            },
        )
    )
    listed += _hopper_cases()
    for starts in (False, True):
        listed.append(
            Case(
                name=f"fill_outside{' starts' if starts else ''}",
                kernel=fill_outside_kernel,
                types=["*fp32", "*i32", "*i32", "i32", "i32"],
                constants={"HAS_START": starts, "COLUMNS": FILL_COLUMNS},
                options=fast,
            )
        )
    lists = {"COLUMNS": COLUMNS, "LIST": LIST}
    for name, first, last in (
        ("topk", True, True),
        ("select first", True, False),
        ("select next", False, False),
        ("select last", False, True),
    ):
        for starts in (False, True) if name == "topk" else (True,):
            listed.append(
                Case(
                    name=f"{name}{' starts' if starts and name == 'topk' else ''}",
                    kernel=stream_kernel,
                    types=["*fp32"] + ["*i32"] * 7 + ["i32"] * 5,
                    constants=lists | {"HAS_STARTS": starts, "FIRST": first, "LAST": last},
                    options={
                        "num_warps": _each("topk_warps"),
                        "maxnreg": {m: r[last] for m, r in _each("topk_registers").items()},
                    },
                    aligned=("row_stride", "columns", "k"),
                )
            )
    for name, first, last, width in (
        ("scores", True, False, PLAIN[10].tournament_width),
        ("scores at once", True, True, 2 * PLAIN[10].tournament_width),
        ("merge", False, False, PLAIN[10].tournament_width),
        ("last", False, True, PLAIN[10].tournament_width),
    ):
        listed.append(
            Case(
                name=f"tournament {name}",
                kernel=tournament_kernel,
                types=["*fp32" if first else "*i32"] + ["*i32"] * 6 + ["i32"] * 4,
                constants={"FIRST": first, "LAST": last, "HAS_STARTS": False, "WIDTH": width, "LIST": 512},
                options={"num_warps": width // PLAIN[10].tournament_scores, "maxnreg": _each("tournament_registers")},
                aligned=("row_stride", "columns", "k"),
                spill_limit=OUTER_SPILLS,
            )
        )
    return listed


def _each(choice: str) -> dict[int, Any]:
    """A launch choice by major compute capability."""
    return {major: getattr(table, choice) for major, table in PLAIN.items()}


def _hopper_cases() -> list[Case]:
    """The Gluon kernels, for sm_90 only; they are imported here because an interpreting process cannot."""
    if INTERPRETED.value:
        return []
    from . import hopper_decode, hopper_prefill, hopper_query, hopper_select

    def descriptor(dtype: str, rows: int, columns: int, layout: Any) -> str:
        swizzle, width = layout.swizzle_byte_width, layout.element_bitwidth
        shared = f"NVMMASharedLayout(swizzle_byte_width={swizzle}, element_bitwidth={width}, rank=2)"
        return f"tensordesc<{dtype}[{rows}, {columns}],{shared}>"

    listed = []
    for exact in (False, True):
        keys = descriptor("i32" if exact else "fp8e4nv", 64, 32 if exact else 128, hopper_prefill.KEY_LAYOUTS[exact])
        for heads in (32, 64):
            rows = hopper_prefill.rows_of(heads, exact)
            queries = descriptor("fp8e4nv", rows * heads, 128, hopper_prefill.QUERY_LAYOUT)
            listed.append(
                Case(
                    name=f"prefill_sm90 {heads} heads{' exact' if exact else ''}",
                    kernel=hopper_prefill.prefill_sm90_kernel,
                    types=[keys, queries, "*fp8e4nv", "*fp32", "*fp32", "*i32", "*i32", "*fp32"] + ["i32"] * 5,
                    constants={"HEADS": heads, "ROWS": rows, "SLOTS": SM90.prefill_slots[exact], "EXACT": exact},
                    options={"num_warps": 4},
                    architectures=(90,),
                )
            )
        for k in (512, 1024):
            rows = hopper_select.rows_of(HEADS)
            queries = descriptor("fp8e4nv", rows * HEADS, 128, hopper_prefill.QUERY_LAYOUT)
            listed.append(
                Case(
                    name=f"select_sm90 k {k}{' exact' if exact else ''}",
                    kernel=hopper_select.select_sm90_kernel,
                    types=[keys, queries, "*fp8e4nv", "*fp32", "*fp32", "*i32", "*i32", "*fp32", "*i32", "*i64", "*i32"]
                    + ["i32"] * 4,
                    constants={"HEADS": HEADS, "ROWS": rows, "EXACT": exact, "SLOTS": 2}
                    | {"SEGMENT": SM90.select_segment, "TILE": hopper_select.TILE, "LIST": hopper_select.list_size(k)},
                    options={"num_warps": 4, "maxnreg": SM90.select_registers[exact]},
                    architectures=(90,),
                    aligned=("k",),
                    spill_limit=OUTER_SPILLS if k == 512 else LONG_LIST_SPILLS,
                )
            )
    tile = 16 * SM90.query_warps
    for name, fmt, changes in (
        ("e4m3", "e4m3", {}),
        ("trtllm-fp8", "e4m3", {"POWER_OF_TWO": True}),
        ("sglang-fp4", "e2m1", {"TIES_DOWN": True}),
        ("e2m1", "e2m1", {}),
    ):
        listed.append(
            Case(
                name=f"quantise_query_sm90 {name}",
                kernel=hopper_query.quantise_query_sm90_kernel,
                types=[
                    *(descriptor("bf16", tile, 128, hopper_query.LAYOUT), "*bf16", "*fp32", "*fp32", "*i32"),
                    *("*u8" if fmt == "e2m1" else "*fp32", "*fp32", "*i32", "i32", "fp32", "fp32"),
                ],
                constants={"FMT": fmt, "POWER_OF_TWO": False, "TIES_DOWN": False, "HEADS": HEADS}
                | {"ROWS": tile}
                | changes,
                options={"num_warps": SM90.query_warps, "maxnreg": SM90.query_registers, "enable_fp_fusion": False},
                architectures=(90,),
            )
        )
    triton_names = {"torch.float8_e4m3fn": "fp8e4nv", "torch.int32": "i32", "torch.bfloat16": "bf16"}
    pointer = {"e4m3": "*fp8e4nv", "bf16": "*bf16", "e2m1": "*i32"}
    for name, (dtype, _, columns, layout) in hopper_decode.PAGE_VIEWS.items():
        fmt = name.split()[0]
        slots = SM90.decode_slots[name]
        for q_fmt in QUERY_FORMATS_OF[fmt]:
            for next_n, limit in enumerate(SM90.decode_registers[name], start=1):
                listed.append(
                    Case(
                        name=f"decode_sm90 {q_fmt} x {name} next_n {next_n}",
                        kernel=hopper_decode.decode_sm90_kernel,
                        types=[descriptor(triton_names[str(dtype)], 64, columns, layout)]
                        + [descriptor("fp32" if fmt == "e4m3" else "i32", 1, 64, hopper_decode.SCALES_LAYOUT)]
                        + ["*fp32" if fmt == "e4m3" else "*i32", pointer[q_fmt], "*i32", "*fp32"]
                        + ["*i32", "*i32", "*fp32"]
                        + ["i32"] * 5,
                        constants={"FMT": fmt, "Q_FMT": q_fmt, "EXACT": name.endswith("exact"), "NEXT_N": next_n}
                        | {"HEADS": HEADS, "SLOTS": slots, "SLOT_BITS": slots.bit_length() - 1, "REQUESTS": 256}
                        | {"SUMS": SM90.decode_sums.get(name, False)},
                        options={"num_warps": 4, "maxnreg": limit},
                        architectures=(90,),
                    )
                )
    return listed


def compile_case(case: Case, architecture: int) -> Compiled:
    """Compile one case for sm_<architecture>. Raises RuntimeError in an interpreting process."""
    if INTERPRETED.value:
        raise RuntimeError("TRITON_INTERPRET is set, expected a process that compiles")
    constants, options = case.choices_for(architecture)
    arguments = case.kernel.arg_names
    names = [name for name in arguments if name not in constants]
    assert len(names) == len(case.types), f"{case.name}: {len(case.types)} types for {len(names)} arguments"
    signature = dict(zip(names, case.types, strict=True)) | dict.fromkeys(constants, "constexpr")
    # what a launch finds for torch tensors: pointers aligned to 16 bytes
    multiples = [name for name in names if signature[name].startswith("*") or name in case.aligned]
    aligned = {(arguments.index(name),): [["tt.divisibility", 16]] for name in multiples}
    source = _source(case.kernel)(
        case.kernel,
        {name: signature[name] for name in arguments},
        {(arguments.index(name),): value for name, value in constants.items()},
        aligned,
    )
    with knobs.nvidia.scope(), knobs.compilation.scope(), redirect_stdout(StringIO()) as log:
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True  # a cached cubin comes without ptxas' log
        built = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    registers = re.search(r"Used (\d+) registers", log.getvalue())
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log.getvalue())
    return Compiled(
        name=case.name,
        architecture=architecture,
        registers=int(registers[1]) if registers else None,
        spill_bytes=int(spills[1]) + int(spills[2]) if spills else None,
        shared_bytes=built.metadata.shared,
        cubin_bytes=len(built.asm["cubin"]),
    )


def _source(kernel: Any) -> Any:
    """How Triton is told about a kernel: Gluon has a source class of its own."""
    if getattr(kernel, "is_gluon", lambda: False)():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    return ASTSource


def main() -> int:
    """Compile every case for every architecture and print one line each; 1 if a kernel spills or fails."""
    bad = 0
    print(f"triton {triton.__version__}")
    print(f"{'kernel':36} {'sm':>4} {'registers':>9} {'spills':>6} {'shared':>7}")
    for case in cases():
        for architecture in case.architectures:
            try:
                out = compile_case(case, architecture)
            except Exception as error:  # one failure must not hide the others
                bad += 1
                print(f"{case.name:36} {architecture:4} {type(error).__name__}: {str(error).splitlines()[:1]}")
                continue
            bad += (out.spill_bytes or 0) > case.spill_limit
            print(f"{out.name:36} {architecture:4} {out.registers!s:>9} {out.spill_bytes!s:>6} {out.shared_bytes:7}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
