"""Evidence from a server's answer: its returned selection, beside inputs from a trace or from a text.

The answer holds `observed_topk` alone, so the inputs of the same tokens are needed: recorded ones (a trace with x and
qr), or those of the reference's forward pass over the text. Rows meet by position. An answer covers prompt and reply
but the last token; inputs of the prompt alone are enough, as no row sees a later token.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ..capturing import TextInputs, capture_trace, load_text_inputs
from ..capturing.response import Answer, read_response
from ..checkpoint.layer import Checkpoint
from ..errors import InputError
from ..inputs.source import LayerInputs, load_inputs
from ..refimpl import Trace, save_traces
from ..refimpl.trace import open_trace
from ..reporting.words import PROXY_MARK
from ..run import device_of
from .report import Diagnosis, LayerDiagnosis, diagnose

Say = Callable[[str], None]
UNEXPLAINED = ("topk_drop", "unknown")
"""Causes that rest on exact inputs: each entry out of place counts, whatever put it there."""
DRIFT = 0.1
"""Share of a selection that may differ without a cause where the inputs are not the server's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputsFrom:
    """Where the inputs come from: one of `trace` (with `request`), `text` and `tokens`; the last two by a forward pass.

    run_dir keeps finished layers of the forward pass and its trace.
    """

    trace: Path | None = None
    request: int | None = None
    text: Path | None = None
    tokens: Path | None = None
    run_dir: Path | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        if sum(given is not None for given in (self.trace, self.text, self.tokens)) != 1:
            raise InputError("--response needs the inputs of its request: one of --trace, --text and --tokens")
        if self.trace is None and self.request is not None:
            raise InputError("--request chooses one of a trace's requests, expected --trace")
        if self.trace is not None and self.run_dir is not None:
            raise InputError("--run-dir belongs to --text or --tokens")


def diagnose_answer(
    checkpoint: Path,
    response: Path,
    inputs: InputsFrom,
    *,
    layers: list[int] | None = None,
    recipe: str | None = None,
    say: Say = lambda line: None,
) -> Diagnosis:
    """Diagnose the selection in a saved JSON answer; see `diagnose` for layers and recipe.

    Layers that only the answer or only the inputs have are not diagnosed, which a note says. InputError for an answer
    or inputs that cannot be read, that cannot be of one request, or that lack a layer asked for.

    A server's hidden states differ from those of the forward pass over a text by what its precision does, so there a
    difference without a cause is a finding only where it moves more than DRIFT of the selection.
    """
    config = Checkpoint(checkpoint).config
    answer = read_response(response, config)
    absent = [layer for layer in layers or () if layer not in answer.layers]
    if absent:
        raise InputError(f"{response}: holds no layer {absent[0]}, expected one of {sorted(answer.layers)}")
    notes = [f"{what}: not compared" for what in answer.unknown]
    with tempfile.TemporaryDirectory(prefix="diffcheck-") as scratch:
        if inputs.trace is not None:
            source, name = inputs.trace, str(inputs.trace)
        else:
            text = load_text_inputs(checkpoint, text=inputs.text, tokens=inputs.tokens, layers=layers)
            name = str(inputs.text or inputs.tokens)
            _check_lengths(name, answer, len(text.tokens))
            source = _capture(text, inputs, Path(scratch), say)
            notes.append(f"inputs: {text.source}; the server's own differ from them by what its precision does")
        recorded = load_inputs(source, config, layers, request=inputs.request)
        if any(PROXY_MARK in layer.source for layer in recorded.values()):
            raise InputError(f"{name}: holds a {PROXY_MARK} for hidden states, expected what the server had")
        common = sorted(answer.layers.keys() & recorded.keys())
        if not common:
            raise InputError(
                f"{name}: holds layers {sorted(recorded)}, the answer {sorted(answer.layers)}, expected a common one"
            )
        if layers is None:
            notes += [f"layer {n}: in the answer, not in the inputs" for n in answer.layers if n not in recorded]
            notes += [f"layer {n}: in the inputs, not in the answer" for n in recorded if n not in answer.layers]
        end = recorded[common[0]].start + recorded[common[0]].length
        _check_lengths(name, answer, end)
        if answer.tokens > end:
            notes.append(f"tokens {end} to {answer.tokens - 1} of the answer: not compared, the inputs end before them")
        with open_trace(source) as file:
            metadata = {key: text for key, text in file.metadata.items() if key == "recipe"}
        combined = Path(scratch) / "evidence.safetensors"
        save_traces(combined, [_joined(answer.layers[n], recorded[n], n, metadata) for n in common])
        found = diagnose(checkpoint, combined, layers=layers, recipe=recipe)
    if inputs.trace is None:
        found = replace(found, layers=[_allow_drift(layer) for layer in found.layers])
    return replace(found, trace=f"answer {response} on inputs of {name}", notes=[*found.notes, *notes])


def _allow_drift(layer: LayerDiagnosis) -> LayerDiagnosis:
    """The layer without findings that the server's own hidden states could explain; notes keep what was seen."""
    share = layer.unequal.get("topk", 0.0)
    if share > DRIFT:
        return layer
    drift = [finding for finding in layer.findings if finding.cause in UNEXPLAINED]
    notes = [
        f"{share:.1%} of the selection differs ({finding.cause}, {finding.rows_affected} of {finding.rows} rows); the "
        "server's own hidden states may explain it: a trace with its x and qr would decide"
        for finding in drift
    ]
    return replace(layer, findings=[f for f in layer.findings if f not in drift], notes=[*notes, *layer.notes])


def _capture(text: TextInputs, inputs: InputsFrom, scratch: Path, say: Say) -> Path:
    directory = inputs.run_dir or scratch
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--run-dir: cannot use {directory} ({error.strerror})") from None
    trace = directory / "trace.safetensors"
    capture_trace(text, trace, device=device_of(inputs.device), run_dir=directory / "layers", say=say)
    return trace


def _check_lengths(name: str, answer: Answer, end: int) -> None:
    """InputError unless inputs that end before token `end` can be of the answer's request."""
    if answer.prompt_tokens is not None and end < answer.prompt_tokens:
        raise InputError(
            f"{name}: has {end} tokens, expected at least the {answer.prompt_tokens} of the answer's prompt "
            "(a chat template adds some)"
        )
    if answer.tokens < end - 1:
        raise InputError(f"{name}: has {end} tokens, the answer covers {answer.tokens}, expected it to cover {end - 1}")


def _joined(answer: Trace, inputs: LayerInputs, layer: int, metadata: dict[str, str]) -> Trace:
    rows = slice(inputs.start, inputs.start + inputs.length)
    selection = {name: answer[name][rows] for name in ("queries", "observed_topk")}
    return Trace({"x": inputs.x, "qr": inputs.qr, **selection}, layer=layer, start=inputs.start, metadata=metadata)
