"""Run directories: what is kept, what is refused."""

import subprocess
import sys
from pathlib import Path

import pytest

from diffcheck.errors import InputError
from diffcheck.journal import RECORDS, Journal

IDENTITY = {"checkpoint": "a", "layers": [2, 4]}


def begin(directory: Path, *, resume: bool = False, **changes: object) -> Journal:
    return Journal.open(directory, identity=IDENTITY | changes, resume=resume)


def test_records_survive_and_keep_their_order(tmp_path: Path) -> None:
    with begin(tmp_path / "run") as journal:
        journal.append("2 bf16", {"jaccard": 0.5})
        journal.append("2 fp8", {"jaccard": None})
    with begin(tmp_path / "run", resume=True) as journal:
        assert list(journal.records.items()) == [("2 bf16", {"jaccard": 0.5}), ("2 fp8", {"jaccard": None})]
        journal.append("4 bf16", 1)
    with begin(tmp_path / "run", resume=True) as journal:
        assert list(journal.records) == ["2 bf16", "2 fp8", "4 bf16"]


@pytest.mark.parametrize("cut", range(1, 20))
def test_a_line_cut_short_is_dropped_and_written_anew(tmp_path: Path, cut: int) -> None:
    with begin(tmp_path) as journal:
        journal.append("one", 1)
        journal.append("two", 2)
    file = tmp_path / RECORDS
    file.write_bytes(file.read_bytes()[:-cut])
    with begin(tmp_path, resume=True) as journal:
        assert journal.records == {"one": 1}
        journal.append("two", 2)
    with begin(tmp_path, resume=True) as journal:
        assert journal.records == {"one": 1, "two": 2}


def test_old_records_need_resume(tmp_path: Path) -> None:
    begin(tmp_path).__exit__(None, None, None)
    with begin(tmp_path) as journal:  # nothing was recorded yet
        journal.append("one", 1)
    with pytest.raises(InputError, match="holds 1 records, expected --resume"):
        begin(tmp_path)


def test_another_run_is_refused_by_what_differs(tmp_path: Path) -> None:
    begin(tmp_path).__exit__(None, None, None)
    with pytest.raises(InputError, match=r"layers was \[2, 4\] there and is \[2\] now"):
        begin(tmp_path, resume=True, layers=[2])
    with pytest.raises(InputError, match="seed was None there and is 1 now"):
        begin(tmp_path, resume=True, seed=1)


def test_two_runs_in_one_directory_are_refused(tmp_path: Path) -> None:
    with begin(tmp_path), pytest.raises(InputError, match="another run is using it"):
        begin(tmp_path, resume=True)
    begin(tmp_path, resume=True)  # the lock went with the first


def test_a_killed_run_leaves_its_records_and_no_lock(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from diffcheck.journal import Journal\n"
        "journal = Journal.open(Path(sys.argv[1]), identity={}, resume=False)\n"
        "journal.append('one', 1); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    with Journal.open(tmp_path, identity={}, resume=True) as journal:
        assert journal.records == {"one": 1}


@pytest.mark.parametrize("text", ["[]\n", "no JSON\n", '{"key": "a", "record": 1}\n'])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / RECORDS).write_text(text)
    with pytest.raises(InputError, match="expected the records of a run"):
        begin(tmp_path, resume=True)
    assert (tmp_path / RECORDS).read_text() == text


def test_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="expected a directory"):
        begin(tmp_path / "file")
