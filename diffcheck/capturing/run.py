"""`diffcheck run --text`: the options of a run whose trace is made first."""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from ..errors import InputError
from ..run import DEFAULT_QUERIES, Options, device_of, plan
from .text import capture_trace, load_text_inputs


def inputs_from_text(
    options: Options, *, text: Path | None, tokens: Path | None, kind: str, run_dir: Path | None, dry_run: bool = False
) -> Options:
    """The options with the trace of a text; captures it unless it is a dry run. All that can be wrong is checked first.

    run_dir keeps finished layers and trace.safetensors; without it both go when the process ends.
    """
    if options.trace is not None or options.length is not None:
        raise InputError("--text and --tokens exclude --trace and --length: the text is the input")
    if options.needle_depth is not None or options.needle_strength is not None:
        raise InputError("--needle-depth and --needle-strength plant into made-up inputs, not into a text")
    inputs = load_text_inputs(options.checkpoint, text=text, tokens=tokens, layers=options.layers, kind=kind)
    planned = replace(options, layers=list(inputs.layers), length=len(inputs.tokens), source=inputs.source)
    plan(planned)
    if dry_run:
        return planned
    if run_dir is None:
        directory = Path(tempfile.mkdtemp(prefix="diffcheck-"))
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
    else:
        directory = run_dir
    layers_dir = directory / "layers"
    try:
        layers_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--run-dir: cannot use {directory} ({error.strerror})") from None
    trace = directory / "trace.safetensors"
    capture_trace(
        inputs,
        trace,
        device=device_of(options.device),
        run_dir=layers_dir,
        queries=options.queries or DEFAULT_QUERIES,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    return replace(options, layers=list(inputs.layers), trace=trace)
