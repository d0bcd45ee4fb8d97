"""Every kernel becomes a cubin for Hopper and both Blackwells without spilling; no GPU is needed."""

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
from diffcheck.kernels.compile import cases, compile_case
for case in cases():
    if int(sys.argv[1]) in case.architectures:
        out = compile_case(case, int(sys.argv[1]))
        print(json.dumps([out.name, out.registers, out.spill_bytes, case.spill_limit, out.cubin_bytes]))
"""
EVERYWHERE = {"store_key", "quantise_query", "paged_logits", "ragged_logits", "prefill_logits", "fill_outside", "topk"}
EVERYWHERE |= {"tournament"}
HOPPER = {"prefill_sm90", "decode_sm90", "select_sm90", "quantise_query_sm90"}


@pytest.mark.parametrize("architecture", [90, 100, 120])
def test_kernels_compile_without_spilling(architecture):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(architecture)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    built = [json.loads(line) for line in done.stdout.splitlines()]
    print(*built, sep="\n")
    assert {row[0].split()[0] for row in built} >= EVERYWHERE | (HOPPER if architecture == 90 else set())
    for name, registers, spills, limit, cubin_bytes in built:
        assert cubin_bytes > 0
        assert (spills or 0) <= limit, f"{name} spills {spills} bytes with {registers} registers"
