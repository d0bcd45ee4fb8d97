"""`diffcheck needle`: from the command line's options to cells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ..capturing.tokens import Tokeniser
from ..cases import build_cases
from ..checkpoint.layer import Checkpoint
from ..checkpoint.model import ModelCheckpoint
from ..errors import EnvironmentMissing, InputError
from ..run import device_of
from .build import (
    DEFAULT_DEPTHS,
    DEFAULT_LENGTHS,
    NeedleTest,
    build_text,
    make_test,
    parse_depth,
    parse_length,
    read_test,
)
from .grid import Cell, run_grid


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedleOptions:
    """What the command line asks for; see `diffcheck needle --help`."""

    checkpoint: Path
    needles: list[str]
    questions: list[str]
    config: Path | None
    haystack: Path | None
    lengths: list[str] | None
    depths: list[str] | None
    layers: list[int] | None
    precisions: list[str]
    thetas: list[str]
    recipe_files: list[Path]
    run_dir: Path | None
    device: str


def run_needles(options: NeedleOptions, say: Callable[[str], None]) -> list[Cell]:
    """Check everything, then run the grid; InputError or EnvironmentMissing says what is wrong."""
    device = device_of(options.device)
    opened = Checkpoint(options.checkpoint)
    model = ModelCheckpoint(opened)
    layers = tuple(n for n in opened.select(options.layers) if n < model.layers_present)
    if not layers:
        raise InputError(f"{model.directory}: no indexer layer among the whole layers 0 to {model.layers_present - 1}")
    cases = build_cases(opened.config, options.precisions, options.thetas, options.recipe_files)
    test = _read(options, model.directory)
    for length in test.lengths:
        for depth in test.depths:
            ids, _ = build_text(test, length, depth)
            wrong = next((token for token in ids if not 0 <= token < model.config.vocab_size), None)
            if wrong is not None:
                raise InputError(f"token id {wrong}, expected 0 to {model.config.vocab_size - 1}")
    return list(run_grid(model, layers, test, cases, device=device, run_dir=options.run_dir, say=say))


def _read(options: NeedleOptions, directory: Path) -> NeedleTest:
    """The test from its file or from the options; a file of token ids needs no tokeniser."""
    try:
        tokeniser: Tokeniser | None = Tokeniser(directory)
    except (EnvironmentMissing, InputError) as error:
        if options.config is None:
            raise type(error)(f"{error}; --config FILE.toml with text_tokens and a .json haystack needs none") from None
        tokeniser, missing = None, error

    def encode(text: str) -> list[int]:
        if tokeniser is None:
            raise missing
        return tokeniser.encode_plain(text)

    prefix = tokeniser.encode("") if tokeniser else []
    if options.config is not None:
        if options.needles or options.questions or options.haystack is not None:
            raise InputError("--config excludes --needle, --question and --haystack: the file has them")
        test = read_test(options.config, encode, prefix)
        if options.lengths is not None:
            test = replace(test, lengths=tuple(map(parse_length, options.lengths)))
        return test if options.depths is None else replace(test, depths=tuple(map(parse_depth, options.depths)))
    return make_test(
        needles=options.needles,
        questions=options.questions,
        haystack=options.haystack,
        lengths=DEFAULT_LENGTHS if options.lengths is None else options.lengths,
        depths=tuple(map(str, DEFAULT_DEPTHS)) if options.depths is None else options.depths,
        encode=encode,
        prefix=prefix,
    )
