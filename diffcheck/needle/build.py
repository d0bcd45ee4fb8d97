"""Texts with needles in them: filler, a needle at a depth, and the questions at the end.

    [special tokens] filler … needle … filler  question 1 [answer 1] question 2 …

With several needles there are several turns: each needle has its question, all questions come at the end in order, and
an answer stands between two of them. The first needle is at the depth asked for, the others evenly spaced behind it,
wrapping around. Lengths are exact in tokens; a depth counts filler tokens.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..capturing.tokens import read_text, read_tokens
from ..errors import InputError
from .haystack import filler

Encode = Callable[[str], list[int]]
DEFAULT_LENGTHS = ("2k", "4.5k", "10k", "22k")
DEFAULT_DEPTHS = (0.1, 0.5, 0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedleText:
    """A needle, the question that must find it and the answer given before the next turn, each as token ids."""

    needle: tuple[int, ...]
    question: tuple[int, ...]
    answer: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedleTest:
    """What to run: needles in order of their turns, filler ids, ids before everything, lengths in tokens, depths."""

    needles: tuple[NeedleText, ...]
    filler: tuple[int, ...] = field(repr=False)
    prefix: tuple[int, ...] = ()
    lengths: tuple[int, ...]
    depths: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where a needle and its question lie: token positions, both ends included."""

    needle: tuple[int, int]
    question: tuple[int, int]


def build_text(test: NeedleTest, length: int, depth: float) -> tuple[list[int], tuple[Placed, ...]]:
    """`length` token ids with the needles at `depth`, and where everything lies; InputError if it does not fit."""
    tail: list[int] = []
    questions = []
    for turn, needle in enumerate(test.needles):
        questions.append((len(tail), len(tail) + len(needle.question) - 1))
        tail += needle.question
        if turn + 1 < len(test.needles):
            tail += needle.answer
    room = length - len(test.prefix) - len(tail) - sum(len(n.needle) for n in test.needles)
    if room < len(test.needles):
        raise InputError(
            f"--lengths: {length} tokens leave {max(room, 0)} for filler beside needles and questions, "
            f"expected at least {len(test.needles)}"
        )
    count = len(test.needles)
    offsets = [round(((depth + i / count) % 1.0 if i else depth) * room) for i in range(count)]
    around = -(-room // len(test.filler))
    hay = list(test.filler * around)[:room]
    ids, spans, used = list(test.prefix), [(0, 0)] * count, 0
    for i in sorted(range(count), key=lambda n: (offsets[n], n)):
        ids += hay[used : offsets[i]]
        used = offsets[i]
        spans[i] = (len(ids), len(ids) + len(test.needles[i].needle) - 1)
        ids += test.needles[i].needle
    ids += hay[used:]
    start = len(ids)
    placed = tuple(
        Placed(needle=span, question=(start + first, start + last))
        for span, (first, last) in zip(spans, questions, strict=True)
    )
    return ids + tail, placed


def parse_length(text: str) -> int:
    """Tokens: "2048", "2k" (2000) or "4.5k" (4500); InputError otherwise."""
    number = text.strip().lower()
    factor = 1000 if number.endswith("k") else 1
    try:
        length = float(number.removesuffix("k")) * factor
    except ValueError:
        length = 0
    if not 4 <= length < 1e9 or length != int(length):
        raise InputError(f"--lengths: {text!r}, expected tokens such as 2048 or 4.5k")
    return int(length)


def parse_depth(text: str) -> float:
    """A number from 0 to 1; InputError otherwise."""
    try:
        depth = float(text)
    except ValueError:
        depth = -1.0
    if not 0 <= depth <= 1:
        raise InputError(f"--depths: {text!r}, expected 0 to 1")
    return depth


def make_test(
    *,
    needles: Sequence[str],
    questions: Sequence[str],
    haystack: Path | None,
    lengths: Sequence[str],
    depths: Sequence[str],
    encode: Encode,
    prefix: Sequence[int] = (),
) -> NeedleTest:
    """A test from the command line's texts; one question serves all needles. InputError says what does not fit."""
    if not needles or not questions:
        raise InputError("expected --needle and --question (or --config FILE.toml)")
    if len(questions) not in (1, len(needles)):
        raise InputError(f"{len(needles)} needles and {len(questions)} questions, expected one question each or one")
    asked = list(questions) * len(needles) if len(questions) == 1 else list(questions)
    texts = [
        NeedleText(needle=_ids(encode, f" {needle} ", "--needle"), question=_ids(encode, f" {question}", "--question"))
        for needle, question in zip(needles, asked, strict=True)
    ]
    return _test(texts, _filler(haystack, encode), lengths, depths, prefix)


def read_test(path: Path, encode: Encode, prefix: Sequence[int] = ()) -> NeedleTest:
    """A test from a TOML file; texts may be given as token ids instead, in keys that end in _tokens.

        lengths = ["2k", "10k"]
        depths = [0.1, 0.5, 0.9]
        haystack = "book.txt"            # or a .json list of ids; default: generated filler
        [[needle]]
        text = "The code of the vault is 4711."
        question = "What is the code of the vault?"
        answer = "4711."                 # stands before the next needle's question

    InputError says which key is wrong.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file, expected a needle test (TOML)") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path}: not readable as TOML ({error})") from None
    unknown = set(raw) - {"lengths", "depths", "haystack", "needle"}
    if unknown:
        raise InputError(f"{path}: unknown key {sorted(unknown)[0]!r}, expected lengths, depths, haystack, [[needle]]")
    tables = raw.get("needle")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise InputError(f"{path}: no [[needle]] tables, expected at least one")
    texts = [_needle_text(path, table, encode) for table in tables]
    haystack = raw.get("haystack")
    hay = _filler(path.parent / str(haystack) if haystack else None, encode)
    lengths, depths = raw.get("lengths", DEFAULT_LENGTHS), raw.get("depths", DEFAULT_DEPTHS)
    if not isinstance(lengths, list | tuple) or not isinstance(depths, list | tuple):
        raise InputError(f"{path}: lengths and depths must be lists")
    return _test(texts, hay, [str(n) for n in lengths], [str(d) for d in depths], prefix)


def _needle_text(path: Path, table: dict[str, Any], encode: Encode) -> NeedleText:
    parts: dict[str, tuple[int, ...]] = {}
    allowed = {"text", "question", "answer", "text_tokens", "question_tokens", "answer_tokens"}
    if set(table) - allowed:
        raise InputError(f"{path}: unknown key {sorted(set(table) - allowed)[0]!r} in [[needle]]")
    for name in ("text", "question", "answer"):
        value, ids = table.get(name), table.get(f"{name}_tokens")
        if ids is not None:
            if not isinstance(ids, list) or any(type(token) is not int for token in ids):
                raise InputError(f"{path}: {name}_tokens is {ids!r:.80}, expected a list of token ids")
            parts[name] = tuple(ids)
        elif isinstance(value, str):
            parts[name] = _ids(encode, f" {value} " if name == "text" else f" {value}", f"{path}: {name}")
        elif name != "answer":
            raise InputError(f"{path}: a [[needle]] has no {name}, expected a text (or {name}_tokens)")
    return NeedleText(needle=parts["text"], question=parts["question"], answer=parts.get("answer", ()))


def _ids(encode: Encode, text: str, what: str) -> tuple[int, ...]:
    ids = tuple(encode(text))
    if not ids or not text.strip():
        raise InputError(f"{what}: is empty, expected a text")
    return ids


def _filler(path: Path | None, encode: Encode) -> tuple[int, ...]:
    if path is None:
        return tuple(encode(filler(2000) + " "))
    ids = read_tokens(path) if path.suffix == ".json" else encode(read_text(path))
    return tuple(ids)


def _test(
    texts: Sequence[NeedleText],
    hay: tuple[int, ...],
    lengths: Sequence[str],
    depths: Sequence[str],
    prefix: Sequence[int],
) -> NeedleTest:
    for text in texts:
        if not text.needle or not text.question:
            raise InputError("a needle and its question need at least one token each")
    if not lengths or not depths:
        raise InputError("expected at least one length and one depth")
    return NeedleTest(
        needles=tuple(texts),
        filler=hay,
        prefix=tuple(prefix),
        lengths=tuple(dict.fromkeys(parse_length(text) for text in lengths)),
        depths=tuple(dict.fromkeys(parse_depth(text) for text in depths)),
    )
