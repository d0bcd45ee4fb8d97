"""`diffcheck run --text`: the options of a run whose trace is made first."""

from __future__ import annotations

import atexit
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from ..digests import digest
from ..errors import InputError
from ..run import DEFAULT_QUERIES, Options, device_of
from .text import TextInputs, capture_trace, load_text_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRun:
    """A checked text. `planned`: options as if its hidden states were made up, for planning before they are there."""

    options: Options
    inputs: TextInputs
    planned: Options

    @property
    def digest(self) -> str:
        """Stands for the token ids and how their hidden states are made."""
        return f"{digest(json.dumps(self.inputs.tokens))}, {self.inputs.kind}"

    def capture(self, run_dir: Path | None, *, resume: bool) -> Options:
        """Make the trace, and the options to go on with.

        run_dir keeps finished layers and trace.safetensors; without it both go when the process ends. InputError for a
        directory that holds finished layers without `resume`.
        """
        if run_dir is None:
            directory = Path(tempfile.mkdtemp(prefix="diffcheck-"))
            atexit.register(shutil.rmtree, directory, ignore_errors=True)
        else:
            directory = run_dir
        layers_dir = directory / "layers"
        try:
            layers_dir.mkdir(parents=True, exist_ok=True)
            if not resume and any(layers_dir.iterdir()):
                raise InputError(f"{directory}: holds finished layers, expected --resume or an empty directory")
        except OSError as error:
            raise InputError(f"--run-dir: cannot use {directory} ({error.strerror})") from None
        trace = directory / "trace.safetensors"
        capture_trace(
            self.inputs,
            trace,
            device=device_of(self.options.device),
            run_dir=layers_dir,
            queries=self.options.queries or DEFAULT_QUERIES,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
        return replace(self.options, layers=list(self.inputs.layers), trace=trace)


def read_text_run(options: Options, *, text: Path | None, tokens: Path | None, kind: str) -> TextRun:
    """Check a text and what is asked of it; InputError says what is wrong. Nothing is computed yet."""
    if options.trace is not None or options.length is not None:
        raise InputError("--text and --tokens exclude --trace and --length: the text is the input")
    if options.needle_depth is not None or options.needle_strength is not None:
        raise InputError("--needle-depth and --needle-strength plant into made-up inputs, not into a text")
    inputs = load_text_inputs(options.checkpoint, text=text, tokens=tokens, layers=options.layers, kind=kind)
    planned = replace(options, layers=list(inputs.layers), length=len(inputs.tokens), source=inputs.source)
    return TextRun(options=options, inputs=inputs, planned=planned)
