"""A run directory: one record per finished case, kept line by line, so that a long run can be interrupted and resumed.

    with Journal.open(directory, identity={"checkpoint": ...}, resume=True) as journal:
        for key, case in cases.items():
            if key not in journal.records:
                journal.append(key, measure(case))

`records.jsonl` begins with the run's identity: what must be equal for old records to be worth keeping. Each further
line is {"key": ..., "record": ...}, on the disk before `append` returns. A line that a kill cut short is dropped when
the directory is opened again. Two processes cannot hold one directory; the lock goes with the process that held it.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from .errors import InputError

RECORDS = "records.jsonl"


class Journal:
    """The records of one run directory, open for appending; see the module."""

    def __init__(self, directory: Path, file: IO[bytes], records: dict[str, Any]) -> None:
        self.directory, self.records, self._file = directory, records, file

    @classmethod
    def open(cls, directory: Path, *, identity: Mapping[str, Any], resume: bool) -> Journal:
        """Open or make `directory`; `identity` is plain JSON.

        InputError if another process holds it, if it has records and `resume` is False, if it is of a run with
        another identity (the message names what differs), or if it cannot be written or read.
        """
        mine: dict[str, Any] = json.loads(json.dumps(identity))
        try:
            directory.mkdir(parents=True, exist_ok=True)
            file = (directory / RECORDS).open("a+b")
        except OSError as error:
            raise InputError(f"{directory}: {error.strerror}, expected a directory for records") from None
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InputError(f"{directory}: another run is using it, expected a directory of its own") from None
            records = _read(directory, file, mine, resume)
        except InputError:
            file.close()
            raise
        return cls(directory, file, records)

    def append(self, key: str, record: Any) -> None:
        """Keep one finished case; it is on the disk when this returns."""
        assert key not in self.records, f"{key} is recorded already"
        _write(self._file, {"key": key, "record": record})
        self.records[key] = record

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _read(directory: Path, file: IO[bytes], identity: dict[str, Any], resume: bool) -> dict[str, Any]:
    file.seek(0)
    data = file.read()
    complete = data[: data.rfind(b"\n") + 1]
    if len(complete) < len(data):
        file.truncate(len(complete))
    try:
        lines = [json.loads(line) for line in complete.splitlines()]
        before = lines[0]["identity"] if lines else identity
        records = {line["key"]: line["record"] for line in lines[1:]}
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{directory / RECORDS}: expected the records of a run, one JSON object a line") from None
    if before != identity:
        name = next(n for n in [*identity, *before] if identity.get(n) != before.get(n))
        raise InputError(
            f"{directory}: {name} was {before.get(name)!r} there and is {identity.get(name)!r} now, "
            "expected the same run or a new directory"
        )
    if records and not resume:
        raise InputError(f"{directory}: holds {len(records)} records, expected --resume or an empty directory")
    if not lines:
        _write(file, {"identity": identity})
    return records


def _write(file: IO[bytes], line: dict[str, Any]) -> None:
    file.write(json.dumps(line).encode() + b"\n")
    file.flush()
    os.fsync(file.fileno())
