"""Where commands write: tables on stdout, progress on stderr, reports as JSON files."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from ..errors import InputError


def say(line: str) -> None:
    """One line of progress on stderr."""
    print(line, file=sys.stderr, flush=True)


def stdout() -> Console:
    """Standard output; wide enough for the table where it is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=200)


class Steps:
    """Progress on stderr: a bar on a terminal, else one plain line a step."""

    def __init__(self, total: int) -> None:
        self._bar = Progress(console=Console(stderr=True), transient=True) if sys.stderr.isatty() else None
        self._total, self._count = total, 0

    def __enter__(self) -> Steps:
        if self._bar:
            self._bar.start()
            self._task = self._bar.add_task("cases", total=self._total)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def doing(self, line: str) -> None:
        """Something slow begins; only a terminal shows it."""
        if self._bar:
            self._bar.update(self._task, description=line)

    def done(self, line: str) -> None:
        """One more step is done; `line` says which."""
        self._count += 1
        if self._bar:
            self._bar.update(self._task, advance=1, description=line)
        else:
            print(f"[{self._count}/{self._total}] {line}", file=sys.stderr)


def check_writable(path: Path, option: str = "--json") -> None:
    """Fail before any work if the report could not be written."""
    directory = path.parent
    if path.is_dir() or not directory.is_dir() or not os.access(path if path.exists() else directory, os.W_OK):
        raise InputError(f"{option}: cannot write {path}, expected a file in a directory that exists and is writable")
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise InputError(f"{option}: cannot write {path} ({error.strerror})") from None


def _without_nan(value: object) -> object:
    """The value with null for every number that JSON has no spelling for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    return [_without_nan(item) for item in value] if isinstance(value, list | tuple) else value


def write_json(path: Path, document: object) -> None:
    """Write beside the target and rename, so that an interrupt leaves no half document."""
    text = json.dumps(_without_nan(document), indent=1, allow_nan=False)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(path)
