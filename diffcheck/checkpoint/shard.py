"""One safetensors file: its header read directly, its tensors through safetensors' memory map.

A header is eight bytes of length and that much JSON, so a directory of 160 shards is understood without
touching data. It is parsed here rather than by safetensors because a message must name the file and what is
wrong: not there, a broken link, a Git LFS pointer, cut off (and at how many bytes), a tensor whose bytes do
not fit its shape. Reading maps the file and copies out one tensor at a time: what stays is what was asked
for, and the map goes when the file is closed.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from diffcheck.refimpl import InputError

_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    "F4": 4,
}
_MAX_HEADER = 100_000_000
"""safetensors' own limit for a header, bytes."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a header: safetensors' dtype name, shape, and size in bytes."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def parse_json(text: str | bytes, where: str) -> Any:
    """JSON in which no object may repeat a key (Python would keep the last and hide the other)."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        parsed = dict(pairs)
        if len(parsed) != len(pairs):
            twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            places = sorted({str(value) for key, value in pairs if key == twice and isinstance(value, str)})
            found = f"in {' and '.join(places)}" if len(places) > 1 else "twice"
            raise InputError(f"{where}: {twice} is listed {found}, expected one place for each tensor")
        return parsed

    try:
        return json.loads(text, object_pairs_hook=unique)
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not readable as JSON ({error})") from None


def read_header(path: Path) -> dict[str, Entry]:
    """Tensors of a safetensors file by name, from its header alone.

    Raises InputError when the file is absent, cut off, or no safetensors file.
    """
    return read_header_and_metadata(path)[0]


def read_header_and_metadata(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Like `read_header`, with the file's metadata strings."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            prefix = file.read(8)
            if prefix.startswith(b"version "):
                raise InputError(f"{path}: is a Git LFS pointer, expected the file itself (run git lfs pull)")
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or (length <= _MAX_HEADER and 8 + length > size):
                raise InputError(
                    f"{path}: truncated, the file ends after {size} bytes, inside its header; "
                    "expected a whole safetensors file"
                )
            if length > _MAX_HEADER or length < 2:
                raise InputError(f"{path}: not a safetensors file (header of {length} bytes), expected one")
            text = file.read(length)
    except OSError as error:
        what = "is a broken link" if path.is_symlink() and not path.exists() else "cannot be read"
        raise InputError(f"{path}: {what} ({error.strerror}), expected a safetensors file") from None
    parsed = parse_json(text, f"{path} (header)")
    if not isinstance(parsed, dict):
        raise InputError(f"{path}: not a safetensors file (its header is no JSON object), expected one")
    metadata = parsed.pop("__metadata__", None) or {}
    header: dict[str, Entry] = {}
    end = 0
    for name, record in parsed.items():
        header[name], last = _entry(path, name, record)
        end = max(end, last)
    if 8 + length + end > size:
        raise InputError(f"{path}: truncated, the file has {size} bytes, expected {8 + length + end} from its header")
    return header, metadata if isinstance(metadata, dict) else {}


def _entry(path: Path, name: str, record: Any) -> tuple[Entry, int]:
    try:
        dtype, shape, (first, last) = record["dtype"], tuple(record["shape"]), record["data_offsets"]
        sound = isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in (*shape, first, last))
        sound = sound and first <= last
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise InputError(f"{path}: header entry of {name} is broken, expected dtype, shape and data_offsets")
    bits = _BITS.get(dtype)
    if bits and math.prod(shape) * bits != (last - first) * 8:
        raise InputError(
            f"{path}: {name} occupies {last - first} bytes, expected {math.prod(shape) * bits // 8} for "
            f"{dtype} {list(shape)}"
        )
    return Entry(dtype, shape, last - first), last


def read_tensors(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Copies of the named tensors of one file; nothing else of it is read.

    Raises InputError when safetensors rejects the file. The names must be in its header.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            # a copy each: a tensor still backed by the map would keep it, and all pages read, alive
            return {name: file.get_tensor(name).clone() for name in names}
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: not readable as safetensors ({error})") from None


def read_rows(path: Path, name: str, rows: int) -> Tensor:
    """A copy of the first `rows` rows of one tensor; raises like `read_tensors`."""
    try:
        with safe_open(str(path), framework="pt") as file:
            part: Tensor = file.get_slice(name)[:rows]
            return part.clone()
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: not readable as safetensors ({error})") from None
