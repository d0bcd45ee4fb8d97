"""Every kernel becomes a cubin for Hopper and both Blackwells without spilling; no GPU is needed."""

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
from diffcheck.kernels.compile import cases, compile_case
chosen = [case for case in cases() if case.name in json.loads(sys.argv[1])]
for case in chosen:
    out = compile_case(case, int(sys.argv[2]))
    print(json.dumps([out.name, out.registers, out.spill_bytes, out.cubin_bytes]))
"""

# one of each kernel and each page format; `python -m diffcheck.kernels.compile` does all cases
REPRESENTATIVES = [
    "store_key reference",
    "store_key sglang-fp4",
    "quantise_query sglang-fp8",
    "paged_logits e4m3 x e4m3 next_n 1",
    "paged_logits e4m3 x bf16 next_n 1",
    "ragged_logits e2m1 x e2m1",
    "topk",
]


@pytest.mark.parametrize("architecture", [90, 100, 120])
def test_kernels_compile_without_spilling(architecture):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(REPRESENTATIVES), str(architecture)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    built = [json.loads(line) for line in done.stdout.splitlines()]
    print(*built, sep="\n")
    assert sorted(row[0] for row in built) == sorted(REPRESENTATIVES)
    for name, registers, spills, cubin_bytes in built:
        assert cubin_bytes > 0
        assert (spills or 0) <= 16, f"{name} spills {spills} bytes with {registers} registers"
