"""Precisions in short: formats of index queries and keys, spelled where a precision's name could stand.

    precision  =  side                          the same for queries and keys
               |  "k=" side | "q=" side         a side that is not named stays the reference's
               |  "k=" side ",q=" side          (in either order)
    side       =  {"qat+" | "had+" | "nohad+"} format
    format     =  element ["/" block "/" scale [":" option {"," option}]]  |  path.py:object  |  name
    option     =  "ceil" | "floor" | "nearest"  how a ue8m0 scale becomes a power of two
               |  "ties=even" | "ties=down" | "floor=" number | "reciprocal"

`qat+` applies the reference's FP4 step first (the model was trained with it), `had+` and `nohad+` say whether the side
is Hadamard-rotated; the reference rotates. Without `qat+` the FP4 step is left out. Elements, scales and options are
those of `formats`; a bare element of 8 bits means /128/fp32, one of 4 or 6 bits /32/ue8m0, and bf16, fp16 and fp32 have
neither. With fp32 (and no `qat+`) the reference's roundings to bf16 between pool, or projection, and storage are left
out too: values that were rounded to bf16 would be bf16 whatever they are stored in. `name` and `path.py:object` are
formats of one's own (`custom`).

Everything else of the recipe is the reference's, or that of a sweep's base. A comma separates precisions in a list, but
not before an option or the other side (`split_precisions`). Errors name the column of the wrong character.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from .custom import FILE, Storage, load_custom, offered
from .errors import InputError
from .formats import ELEMENTS, PLAIN_BYTES, SCALE_BYTES, Format
from .refimpl.formats import E2M1_AMAX_FLOOR

if TYPE_CHECKING:
    from .recipe import Recipe

PREFIXES = ("qat+", "nohad+", "had+")
RULES = ("ceil", "floor", "nearest")
_WORD = re.compile(r"[A-Za-z0-9_.\-]*")
_NUMBER = re.compile(r"[0-9.eE+\-]*")
_CONTINUES = re.compile(r"ceil|floor|nearest|reciprocal|ties=.*|floor=.*")
_UNROUNDED = {
    "k": ("round_pool", "round_k_norm", "round_k_rope", "round_k_hadamard"),
    "q": ("round_q", "round_q_rope", "round_q_hadamard"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """How one side is stored; hadamard None leaves it as it is in the recipe that this is applied to."""

    format: Storage
    qat: bool = False
    hadamard: bool | None = None

    def changes(self, side: str) -> dict[str, Any]:
        """Recipe fields of side "q" or "k"."""
        found: dict[str, Any] = {f"{side}_fp4": self.qat, f"{side}_format": self.format}
        if self.hadamard is not None:
            found[f"{side}_hadamard"] = self.hadamard
        if isinstance(self.format, Format) and self.format.element == "fp32" and not self.qat:
            found |= dict.fromkeys(_UNROUNDED[side], "none")
        return found

    def __str__(self) -> str:
        rotation = {None: "", True: "had+", False: "nohad+"}[self.hadamard]
        return f"{'qat+' if self.qat else ''}{rotation}{self.format}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """A parsed precision; a side that is None stays as it is."""

    text: str
    k: Side | None = None
    q: Side | None = None

    def apply(self, recipe: Recipe) -> Recipe:
        """The recipe with these formats, named as it was spelled."""
        changes: dict[str, Any] = {"name": self.text}
        for name, side in (("k", self.k), ("q", self.q)):
            changes |= side.changes(name) if side else {}
        return recipe.replace(**changes)


def parse_precision(text: str, *, dim: int | None = None, known: Iterable[str] = ()) -> Precision:
    """Read one precision. InputError names the column (from 1) of the wrong character and what was expected there.

    dim: length of the vectors, which blocks must divide. known: other names that could have stood here, for errors.
    """
    scan = _Scan(text, dim, tuple(known))
    if not text.startswith(("k=", "q=")):
        side = scan.side(first=True)
        scan.end()
        return Precision(text=text, k=side, q=side)
    found: dict[str, Side] = {}
    while True:
        name = scan.choice(("k=", "q="), "one of")[0]
        if name in found:
            scan.fail("the other side" if len(found) == 1 else "the end", scan.at - 2)
        found[name] = scan.side(first=False)
        if scan.done:
            return Precision(text=text, **found)
        scan.literal(",")


def parse_format(text: str, *, dim: int | None = None) -> Format:
    """A built-in format, as `str` of one shows it or with the defaults of a bare element. InputError as above.

    A floor is shown with three digits; one that shows like the reference's is the reference's.
    """
    scan = _Scan(text, dim, ())
    found = scan.format(custom=False)
    assert isinstance(found, Format), "custom formats were excluded"
    scan.end()
    return found


def parse_storage(text: str, *, dim: int | None = None) -> Storage:
    """A format, built in or custom; a file that it names is run. InputError as above."""
    scan = _Scan(text, dim, ())
    found = scan.format(custom=True)
    scan.end()
    return found


def split_precisions(text: str) -> list[str]:
    """The precisions of a comma separated list: a part that cannot begin one continues the one before it.

    Those parts are options of a format (after a colon), and `k=` or `q=` after the other side.
    """
    found: list[str] = []
    for part in (piece.strip() for piece in text.split(",")):
        if found and ((_CONTINUES.fullmatch(part) and ":" in found[-1]) or _other_side(found[-1], part)):
            found[-1] += "," + part
        elif part:
            found.append(part)
    return found


def _other_side(before: str, part: str) -> bool:
    sides = re.findall(r"(?:^|,)([kq])=", before)
    return part[:2] in ("k=", "q=") and before[:2] in ("k=", "q=") and part[0] not in sides


class _Scan:
    """Reads one text from left to right; `at` is the next character."""

    def __init__(self, text: str, dim: int | None, known: tuple[str, ...]) -> None:
        self.text, self.dim, self.known, self.at = text, dim, known, 0
        self.what = "unknown precision or preset" if known else "format"

    @property
    def done(self) -> bool:
        return self.at == len(self.text)

    def wrong(self, expected: str, at: int | None = None) -> InputError:
        at = self.at if at is None else at
        what = repr(self.text[at]) if at < len(self.text) else "the end"
        return InputError(f"{self.what} {self.text!r}, column {at + 1} ({what}): expected {expected}")

    def fail(self, expected: str, at: int | None = None) -> NoReturn:
        raise self.wrong(expected, at)

    def end(self) -> None:
        if not self.done:
            self.fail("the end")

    def literal(self, wanted: str, expected: str = "") -> None:
        if not self.text.startswith(wanted, self.at):
            self.fail(expected or repr(wanted))
        self.at += len(wanted)

    def choice(self, names: Iterable[str], kind: str) -> str:
        """One of the names; an error points at the first character with which none of them goes on."""
        rest = self.text[self.at :]
        options = list(names)
        # a name that is not all of a word is none of it
        got = max((n for n in options if rest.startswith(n)), key=len, default="")
        if got and (not got[-1].isalnum() or _word(rest) == got):
            self.at += len(got)
            return got
        common = max((_common(rest, name) for name in options), default=0)
        near = [name for name in options if common and name.startswith(rest[:common])]
        raise self.wrong(f"{kind} {', '.join([*near, *(n for n in options if n not in near)])}", self.at + common)

    def side(self, *, first: bool) -> Side:
        qat, hadamard = False, None
        while prefix := next((p for p in PREFIXES if self.text.startswith(p, self.at)), None):
            if qat if prefix == "qat+" else hadamard is not None:
                self.fail("a format, or a prefix that is not there yet")
            qat, hadamard = qat or prefix == "qat+", hadamard if prefix == "qat+" else prefix == "had+"
            self.at += len(prefix)
        return Side(format=self.format(custom=True, first=first and not self.at), qat=qat, hadamard=hadamard)

    def format(self, *, custom: bool, first: bool = False) -> Storage:
        if custom and (match := FILE.match(self.text, self.at)):
            self.at = match.end()
            return load_custom(match[0])
        names = [*ELEMENTS, *PLAIN_BYTES]
        packages = offered() if custom else {}
        name = self.choice([*names, *packages, *(self.known if first else ())], "one of")
        if name not in names:
            if name not in packages:
                self.fail("the end, or a format")
            return load_custom(name)
        if name in PLAIN_BYTES:
            return Format(element=name)
        if not self.text.startswith("/", self.at):
            if not self.done and self.text[self.at] not in ",":
                self.fail("'/', as in e4m3/128/fp32")
            return default_format(name)
        self.at += 1
        block = self._block()
        self.at += 1
        scale = self.choice(SCALE_BYTES, "a type of scale, one of")
        options = self._options() if self.text.startswith(":", self.at) else {}
        return Format(element=name, block=block, scale=scale, **options)  # type: ignore[arg-type]

    def _block(self) -> int:
        begin = self.at
        while not self.done and self.text[self.at] in "0123456789":
            self.at += 1
        if begin == self.at:
            self.fail("the number of values that share a scale")
        if not self.text.startswith("/", self.at):
            self.fail("'/' and the type of the scale" if self.done else "a digit, or '/' and the type of the scale")
        block = int(self.text[begin : self.at])
        if block < 1 or (self.dim is not None and self.dim % block):
            self.fail(f"a block that divides {self.dim or 'the head dim'}", begin)
        return block

    def _options(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while True:
            self.at += 1  # the colon or comma
            begin = self.at
            name, value = self._option()
            if name in found:
                self.fail(f"another option, there is a value of {name} already", begin)
            found[name] = value
            rest = self.text[self.at :]
            if not rest.startswith(",") or rest[1:3] in ("k=", "q="):
                return found

    def _option(self) -> tuple[str, Any]:
        name = self.choice(("floor=", "ties=", *RULES, "reciprocal"), "one of")
        if name in RULES:
            return "rule", name
        if name == "reciprocal":
            return "reciprocal", True
        if name == "ties=":
            return "ties", self.choice(("even", "down"), "one of")
        number = _NUMBER.match(self.text, self.at)
        assert number is not None, "it matches the empty text too"
        try:
            floor = float(number[0])
        except ValueError:
            floor = -1.0
        if not 0 <= floor < float("inf"):
            self.fail("a number that amax is not to fall below, such as 1e-4")
        self.at = number.end()
        return "amax_floor", E2M1_AMAX_FLOOR if number[0] == f"{E2M1_AMAX_FLOOR:.3g}" else floor


def default_format(element: str) -> Format:
    """What a bare element means: 8 bits as serving engines store them, fewer as OCP microscaling does."""
    if element in PLAIN_BYTES:
        return Format(element=element)
    small = ELEMENTS[element].bits < 8
    return Format(element=element, block=32, scale="ue8m0") if small else Format(element=element)


def _word(text: str) -> str:
    match = _WORD.match(text)
    assert match is not None, "it matches the empty text too"
    return match[0]


def _common(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
