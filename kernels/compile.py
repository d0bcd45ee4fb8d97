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
from .logits import (
    KEYS_PER_TILE,
    PREFILL_ROWS,
    QUERY_FORMATS_OF,
    WARPS,
    head_tile,
    paged_logits_kernel,
    ragged_logits_kernel,
)
from .prefill import prefill_logits_kernel
from .quantise_query import ROWS as QUERY_ROWS
from .quantise_query import quantise_query_kernel
from .rounding import INTERPRETED
from .store_key import ROWS as KEY_ROWS
from .store_key import store_key_kernel
from .topk import COLUMNS, topk_kernel

ARCHITECTURES = (90, 100, 120)
"""Compute capabilities times ten."""

HEADS = 64

SPILL_LIMIT = 16
"""Spilled bytes per thread (stores and loads) let pass: ptxas may prefer one spill to more registers."""


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
    """num_warps may be a dict by major compute capability."""

    def options_for(self, architecture: int) -> dict[str, Any]:
        """Launch options on one architecture."""
        major = architecture // 10
        return {name: value[major] if isinstance(value, dict) else value for name, value in self.options.items()}


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
    unfused = {"num_warps": 4, "enable_fp_fusion": False}
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
                types=["*fp32"] * 4
                + ["*fp32", "*fp32", "*i32", "*i32", "*i64", "*u8", "*i16", "*fp32"]
                + ["i32", "i32", "i32", "i32", "fp32", "fp32"],
                constants=shared | {"ROUND_POOL": rounds, "ROUND_NORM": rounds, "WEIGHT_BF16": False, "ROWS": KEY_ROWS},
                options=unfused,
            )
        )
        codes, scales = {"e4m3": ("*u8", "*fp32"), "bf16": ("*i16", "*fp32"), "e2m1": ("*u8", "*u8")}[fmt]
        listed.append(
            Case(
                name=f"quantise_query {recipe}",
                kernel=quantise_query_kernel,
                types=[
                    "*i16",
                    "*i16",
                    "*fp32",
                    "*fp32",
                    codes,
                    scales,
                    "*fp32",
                    "i32",
                    "i32",
                    "fp32",
                    "fp32",
                ],
                constants=shared | {"GATE_BF16": True, "ROWS": QUERY_ROWS},
                options=unfused,
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
                        types=[*query, pointer[fmt], scales, "*i32", "*i32", "*fp32"] + ["i32"] * 6,
                        constants=constants | {"NEXT_N": next_n},
                        options={"num_warps": WARPS[fmt]},
                    )
                )
            listed.append(
                Case(
                    name=f"ragged_logits {q_fmt} x {fmt}",
                    kernel=ragged_logits_kernel,
                    types=[*query, pointer[fmt], scales, "*i32", "*i32", "*fp32", "i32", "i32"],
                    constants=constants | {"ROWS": PREFILL_ROWS, "KEYS": KEYS_PER_TILE},
                    options={"num_warps": WARPS[fmt]},
                )
            )
    listed.append(
        Case(
            name="prefill_logits",
            kernel=prefill_logits_kernel,
            types=["*u8", "*fp32", "*u8", "*fp32", "*i32", "*i32", "*fp32", "i32", "i32"],
            constants={
                "HEADS": HEADS,
                "ROWS": prefill.rows_of(HEADS),
                "KEYS": prefill.KEYS,
                "TILES": prefill.TILES,
            },
            options={"num_warps": prefill.WARPS, "num_stages": prefill.STAGES},
        )
    )
    for starts in (False, True):
        listed.append(
            Case(
                name=f"topk{' starts' if starts else ''}",
                kernel=topk_kernel,
                types=["*fp32", "*i32", "*i32", "*i32", "i32", "i32", "i32"],
                constants={"HAS_STARTS": starts, "COLUMNS": COLUMNS},
                options=fast,
            )
        )
    return listed


def compile_case(case: Case, architecture: int) -> Compiled:
    """Compile one case for sm_<architecture>. Raises RuntimeError in an interpreting process."""
    if INTERPRETED.value:
        raise RuntimeError("TRITON_INTERPRET is set, expected a process that compiles")
    arguments = case.kernel.arg_names
    names = [name for name in arguments if name not in case.constants]
    assert len(names) == len(case.types), f"{case.name}: {len(case.types)} types for {len(names)} arguments"
    signature = dict(zip(names, case.types, strict=True)) | dict.fromkeys(case.constants, "constexpr")
    # what a launch finds for torch tensors: pointers aligned to 16 bytes
    pointers = [name for name in names if signature[name].startswith("*")]
    aligned = {(arguments.index(name),): [["tt.divisibility", 16]] for name in pointers}
    source = ASTSource(
        case.kernel,
        {name: signature[name] for name in arguments},
        {(arguments.index(name),): value for name, value in case.constants.items()},
        aligned,
    )
    with knobs.nvidia.scope(), knobs.compilation.scope(), redirect_stdout(StringIO()) as log:
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True  # a cached cubin comes without ptxas' log
        built = triton.compile(
            source, target=GPUTarget("cuda", architecture, 32), options=case.options_for(architecture)
        )
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


def main() -> int:
    """Compile every case for every architecture and print one line each; 1 if a kernel spills or fails."""
    bad = 0
    print(f"triton {triton.__version__}")
    print(f"{'kernel':36} {'sm':>4} {'registers':>9} {'spills':>6} {'shared':>7}")
    for case in cases():
        for architecture in ARCHITECTURES:
            try:
                out = compile_case(case, architecture)
            except Exception as error:  # one failure must not hide the others
                bad += 1
                print(f"{case.name:36} {architecture:4} {type(error).__name__}: {str(error).splitlines()[:1]}")
                continue
            bad += (out.spill_bytes or 0) > SPILL_LIMIT
            print(f"{out.name:36} {architecture:4} {out.registers!s:>9} {out.spill_bytes!s:>6} {out.shared_bytes:7}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
