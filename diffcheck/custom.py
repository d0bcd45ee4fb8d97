"""Storage formats written in Python: an object with `encode`, `decode` and `bytes`.

    encode(x fp32 [..., D]) -> anything      what is stored, for all vectors at once
    decode(stored) -> [..., D]               what a reader gets back, any float dtype
    bytes(D) -> number                       bytes of one vector, scales included

It is named `path.py:object`, or by the name under which an installed package offers it in the entry point group
`diffcheck.formats`; a class is called without arguments. Keys of a text come in one call, in the order of their entries
([E, D]), queries in calls of some rows ([rows, H, D]). Both methods must be pure functions: the same x must give the
same result in another process.

A format's digest is that of its file (or of its package's version), so that records of an older version are not taken
for those of a newer one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import InputError
from .formats import Format
from .loading import load_object

GROUP = "diffcheck.formats"
METHODS = ("encode", "decode", "bytes")
FILE = re.compile(r"(?P<path>[^,]+?\.py):(?P<attribute>[A-Za-z_]\w*)")
"""How a format in a file is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomFormat:
    """A user's format under the name it was asked for by; two are equal when name and digest are."""

    name: str
    digest: str
    codec: Any = field(compare=False, repr=False)

    def bytes_per_entry(self, dim: int) -> float:
        """Storage of one vector of `dim` values in bytes; InputError if the object says something else."""
        size = self._call(self.codec.bytes, dim)
        if isinstance(size, bool) or not isinstance(size, int | float) or not 0 < size < float("inf"):
            raise InputError(f"format {self.name}: bytes({dim}) is {size!r:.80}, expected a number of bytes")
        return float(size)

    def fake_quantise(self, x: Tensor) -> Tensor:
        """What a reader gets back after x was stored: fp32, same shape as x."""
        back = self._call(self.codec.decode, self._call(self.codec.encode, x.float()))
        if not isinstance(back, Tensor) or back.shape != x.shape or not back.is_floating_point():
            got = f"{back.dtype} {list(back.shape)}" if isinstance(back, Tensor) else type(back).__name__
            raise InputError(f"format {self.name}: decode gives {got}, expected float {list(x.shape)}")
        return back.float()

    def _call(self, function: Callable[[Any], Any], value: Any) -> Any:
        try:
            return function(value)
        except InputError:
            raise
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            said = " ".join(str(error).split())
            raise InputError(f"format {self.name}: {function.__name__} fails: {type(error).__name__}: {said}") from None

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Callable[[str, str], CustomFormat], tuple[str, str]]:
        # modules of files cannot be pickled, so another process loads the format anew, wherever it runs
        match = FILE.fullmatch(self.name)
        return _load_again, (self.name, f"{Path(match['path']).resolve()}:{match['attribute']}" if match else self.name)


Storage = Format | CustomFormat
"""What keys or queries can be stored in."""


def offered() -> dict[str, EntryPoint]:
    """Formats that installed packages offer, not loaded yet."""
    return {point.name: point for point in entry_points(group=GROUP)}


def load_custom(name: str) -> CustomFormat:
    """The format `path.py:object`, or the one a package offers by this name; InputError if it cannot be had."""
    if match := FILE.fullmatch(name):
        path = Path(match["path"])
        made = load_object(path, match["attribute"], what="format", expected="an object with encode, decode and bytes")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        return _checked(name, digest, made)
    points = offered()
    if name not in points:
        raise InputError(f"unknown format {name!r}, expected path.py:object or one of {sorted(points)}")
    point = points[name]
    try:
        made = point.load()
    except Exception as error:
        said = " ".join(str(error).split())
        raise InputError(f"format {name} ({point.value}) cannot be loaded: {said}") from None
    return _checked(name, f"{point.value} {point.dist.version if point.dist else ''}".strip(), made)


def _load_again(name: str, absolute: str) -> CustomFormat:
    return replace(load_custom(absolute), name=name)


def _checked(name: str, digest: str, made: Any) -> CustomFormat:
    try:
        codec = made() if isinstance(made, type) else made
    except Exception as error:
        raise InputError(f"format {name}: cannot be made: {type(error).__name__}: {error}") from None
    lacking = [method for method in METHODS if not callable(getattr(codec, method, None))]
    if lacking:
        raise InputError(f"format {name}: has no {', '.join(lacking)}, expected encode, decode and bytes")
    return CustomFormat(name=name, digest=digest, codec=codec)
