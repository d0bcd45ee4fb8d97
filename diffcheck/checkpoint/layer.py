"""The weights of one layer's indexer out of a checkpoint, checked before anything is computed with them.

`Checkpoint` is opened once: the config and the index are read, no shard. `load` then opens the shards that
hold the six or seven tensors of one layer, checks names, dtypes and shapes in their headers, copies those
tensors out and checks their values. The cost is what a layer needs (13 MB for V4-Flash), however large the
shards.

What is refused, with one line that names the tensor and what was expected: an indexer with a tensor missing;
fp8 (or fp4) without its scale, or a plain weight with one; a shape or dtype that the config does not imply;
NaN or inf; a scale that is NaN, not positive, or above 2^64 (`SCALE_BOUND`; a scale is near the block's largest
weight over 448, so that a trained one is far below; a tiny one only says that its block is zero).

What is *not* refused, because only a person can tell, is a scale of a wrong meaning: `implausible_scale`
recognises an e8m0 byte that was copied as a number (112.0 for 2^-15).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from diffcheck.refimpl import IndexerConfig, IndexerWeights, InputError, dequantise_weight
from diffcheck.refimpl.config import INDEXER_RATIO

from .index import Location, TensorIndex, open_index
from .names import INDEXER_TENSORS, SHARDED_BY_HEAD, layer_name
from .shard import Entry, read_rows, read_tensors

SCALE_BOUND = 2.0**64
"""Largest weight scale that is accepted."""
IMPLAUSIBLE_RMS = 10.0
"""RMS of a dequantised weight beyond which its scales cannot be meant; a trained one is near in^-0.5."""
_PLAIN = ("BF16", "F32", "F16")
_PACKED = ("I8", "U8")
_QUANTISED = ("F8_E4M3", *_PACKED)
_SCALES = ("F8_E8M0", "U8", "F32")


def resolve_directory(path: str | Path) -> tuple[Path, str | None]:
    """The directory that holds config.json, and a file name when `path` is one .safetensors file in it.

    Accepts a checkpoint directory, a Hugging Face cache snapshot, the cache's `models--org--name` folder (its
    refs/main, or its only snapshot) and one safetensors file beside a config.json. Raises InputError
    otherwise.
    """
    path = Path(path)
    try:
        if path.is_file():
            if path.suffix == ".safetensors" and (path.parent / "config.json").is_file():
                return path.parent, path.name
            raise InputError(f"{path}: is a file, expected a directory with config.json and safetensors shards")
        if not path.is_dir():
            raise InputError(f"{path}: no such directory, expected a checkpoint directory")
        if not any(path.iterdir()):
            raise InputError(f"{path}: is empty, expected config.json and safetensors shards")
        if (path / "snapshots").is_dir() and not (path / "config.json").exists():
            path = _snapshot(path)
        if not (path / "config.json").exists():
            raise InputError(f"{path}: no config.json, expected a checkpoint directory")
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: cannot be read ({error}), expected a checkpoint directory") from None
    return path, None


def _snapshot(repository: Path) -> Path:
    snapshots = sorted(entry for entry in (repository / "snapshots").iterdir() if entry.is_dir())
    main = repository / "refs" / "main"
    if main.is_file():
        chosen = repository / "snapshots" / main.read_text(encoding="utf-8").strip()
        if chosen in snapshots:
            return chosen
        raise InputError(f"{repository}: refs/main names {chosen.name}, which is not in snapshots")
    if len(snapshots) != 1:
        raise InputError(f"{repository}: has {len(snapshots)} snapshots and no refs/main, expected the path of one")
    return snapshots[0]


@dataclass(frozen=True, slots=True)
class _Part:
    """One field of IndexerWeights: its place (one per rank if it is split) and what the headers say of it."""

    name: str
    places: tuple[Location, ...]
    entries: tuple[Entry, ...]

    @property
    def where(self) -> str:
        return f"{self.places[0].file}: {self.places[0].name}"

    @property
    def dtype(self) -> str:
        return self.entries[0].dtype


class Checkpoint:
    """A checkpoint directory, opened without reading a shard.

    `config` and `directory` are what they say; `indexer_layers` are the layers that have an indexer by the
    config, `present_layers` those of them with any indexer tensor in the index, `absent_layers` the rest.

    Raises InputError (one line) for a path, config.json or index that cannot be used.
    """

    def __init__(self, path: str | Path) -> None:
        self.directory, only = resolve_directory(path)
        self.config = IndexerConfig.from_json(self.directory / "config.json")
        self.index: TensorIndex = open_index(self.directory, only)
        self.indexer_layers = self.config.indexer_layers
        self.present_layers = tuple(n for n in self.indexer_layers if self._held(n))
        self.absent_layers = tuple(n for n in self.indexer_layers if n not in self.present_layers)

    def fingerprint(self) -> str:
        """A hash of config, tensor places, and the size and time of every shard; another checkpoint has another."""
        found = hashlib.sha256((self.directory / "config.json").read_bytes())
        found.update(repr(sorted(self.index.locations.items())).encode())
        for file in self.index.files:
            path = self.directory / file
            if path.exists():
                status = path.stat()
                found.update(f"{file} {status.st_size} {status.st_mtime_ns}".encode())
        return found.hexdigest()

    def _held(self, layer: int) -> list[str]:
        return [field for field in INDEXER_TENSORS if layer_name(layer, field) in self.index.locations]

    def select(self, layers: Iterable[int] | None = None) -> tuple[int, ...]:
        """The layers to work on, ascending: those asked for, or (None) all that are present.

        Raises InputError for a layer without an indexer (with its ratio) or without tensors here, and when
        the checkpoint has no indexer layer at all.
        """
        if not self.indexer_layers:
            raise InputError(
                f"{self.directory}: no indexer layer, compress ratios are "
                f"{sorted(set(self.config.compress_ratios))}, expected one of {INDEXER_RATIO}"
            )
        if layers is None:
            if not self.present_layers:
                raise InputError(
                    f"{self.directory}: no tensors of any indexer layer, expected names like "
                    f"{layer_name(self.indexer_layers[0], 'wq_b')}"
                )
            return self.present_layers
        chosen = sorted(set(layers))
        for layer in chosen:
            self._check_layer(layer)
        return tuple(chosen)

    def _check_layer(self, layer: int) -> None:
        ratios = self.config.compress_ratios
        if not 0 <= layer < len(ratios):
            raise InputError(f"{self.directory}: no layer {layer}, expected 0 to {len(ratios) - 1}")
        if ratios[layer] != INDEXER_RATIO:
            listed = ", ".join(map(str, self.indexer_layers)) or "none"
            raise InputError(
                f"{self.directory}: layer {layer} has no indexer, its compress ratio is {ratios[layer]}; "
                f"expected one of ratio {INDEXER_RATIO}: {listed}"
            )
        if layer not in self.present_layers:
            raise InputError(
                f"{self.directory}: layer {layer} has no tensors here, expected {layer_name(layer, 'wq_b')}; "
                f"present are {', '.join(map(str, self.present_layers)) or 'none'}"
            )

    def bytes_needed(self, layer: int) -> int:
        """Bytes of tensor data that `load(layer)` reads; reads headers only and raises like `load`."""
        parts = self._locate(layer)
        return sum(entry.nbytes for part in parts.values() for entry in part.entries)

    def load(self, layer: int) -> IndexerWeights:
        """The indexer weights of one layer, as stored (on CPU), ranks joined.

        Raises InputError for whatever the module docstring lists, a shard that is absent or broken, and a
        layer that `select` refuses.
        """
        parts = self._locate(layer)
        by_file: dict[str, list[str]] = {}
        for part in parts.values():
            for place in part.places:
                by_file.setdefault(place.file, []).append(place.name)
        read = {
            Location(file, name): tensor
            for file, names in by_file.items()
            for name, tensor in read_tensors(self.directory / file, names).items()
        }
        tensors: dict[str, Tensor | None] = {"wq_b_scale": None}
        for field, part in parts.items():
            ranks = [read.pop(place) for place in part.places]
            tensors[field] = ranks[0] if len(ranks) == 1 else _join(ranks)
        scale = tensors["wq_b_scale"]
        if scale is not None and scale.dtype == torch.uint8:
            tensors["wq_b_scale"] = scale.view(torch.float8_e8m0fnu)
        for field, tensor in tensors.items():
            if tensor is not None:
                check = _check_scale if field == "wq_b_scale" else _check_finite
                check(tensor, f"{self.directory}/{parts[field].where}")
        weights = IndexerWeights(**tensors)  # type: ignore[arg-type]
        weights.check(self.config, where=f"{self.directory}: layer {layer}")
        return weights

    def verify(self) -> None:
        """Read the headers of all shards that are there, so that a tensor in two of them is found.

        `load` opens only the shards it needs and finds a second copy only in those. Takes half a second for
        163 shards with 66,000 tensors. Raises InputError for the first contradiction or unreadable shard.
        """
        for file in self.index.files:
            if self.index.has(file):
                self.index.header(file)

    def scale_problem(self, layer: int) -> str | None:
        """`implausible_scale` on all scales and the first rows of wq_b of one layer; a few KB are read.

        Raises InputError like `load`, except for values that only the whole tensors show.
        """
        parts = self._locate(layer)
        if "wq_b_scale" not in parts:
            return None
        # one rank is enough: what makes scales wrong makes all of them wrong
        wq_b, scale = (parts[field].places[0] for field in ("wq_b", "wq_b_scale"))
        block = self.config.weight_block
        scales = read_tensors(self.directory / scale.file, [scale.name])[scale.name]
        if scales.dtype == torch.uint8:
            scales = scales.view(torch.float8_e8m0fnu)
        _check_scale(scales, f"{self.directory}/{parts['wq_b_scale'].where}")
        rows = read_rows(self.directory / wq_b.file, wq_b.name, block[0])
        return implausible_scale(rows, scales[: len(rows)], block)

    def _locate(self, layer: int) -> dict[str, _Part]:
        """Places and header entries of a layer's tensors, all names, dtypes and shapes checked."""
        self.select([layer])
        held = self._held(layer)
        for field in INDEXER_TENSORS:
            if field not in held and field != "wq_b_scale":
                raise InputError(
                    f"{self.directory}: {layer_name(layer, field)} is missing, layer {layer} has "
                    f"{len(held)} of its indexer tensors; expected all or none"
                )
        parts = {}
        for field in held:
            places = self.index.locations[layer_name(layer, field)]
            if len(places) > 1 and field not in SHARDED_BY_HEAD:
                places = places[:1]
            entries = tuple(self.index.entry(place) for place in places)
            parts[field] = _Part(layer_name(layer, field), places, entries)
        self._check_headers(parts)
        self.index.check_single(frozenset(layer_name(layer, field) for field in held))
        return parts

    def _check_headers(self, parts: dict[str, _Part]) -> None:
        wq_b, config = parts["wq_b"], self.config
        head_dim, lora = config.index_head_dim, config.q_lora_rank
        rows = config.index_n_heads * head_dim
        packed = wq_b.dtype in _PACKED
        shapes = {
            "wq_b": (rows, lora // 2 if packed else lora),
            "weights_proj": (config.index_n_heads, config.hidden_size),
            "wkv": (2 * head_dim, config.hidden_size),
            "wgate": (2 * head_dim, config.hidden_size),
            "ape": (INDEXER_RATIO, 2 * head_dim),
            "norm": (head_dim,),
        }
        block = (1, 32) if packed else config.weight_block
        if wq_b.dtype in _QUANTISED:
            shapes["wq_b_scale"] = (-(-rows // block[0]), -(-lora // block[1]))
            if "wq_b_scale" not in parts:
                raise InputError(
                    f"{self.directory}/{wq_b.where} is {wq_b.dtype} without a scale, expected "
                    f"{wq_b.name.removesuffix('weight')}scale {list(shapes['wq_b_scale'])}"
                )
            if lora % 128:
                raise InputError(
                    f"{self.directory}: q_lora_rank is {lora}, expected a multiple of 128 for a {wq_b.dtype} "
                    "wq_b (its activation is quantised per 128 inputs)"
                )
        elif "wq_b_scale" in parts and wq_b.dtype in _PLAIN:
            raise InputError(
                f"{self.directory}/{parts['wq_b_scale'].where} is the scale of a {wq_b.dtype} weight, "
                "expected an fp8 weight or no scale"
            )
        for field, part in parts.items():
            allowed: Sequence[str] = _PLAIN
            if field == "wq_b":
                allowed = (*_QUANTISED, *_PLAIN)
            elif field == "wq_b_scale":
                allowed = _SCALES
            for entry in part.entries:
                if entry.dtype not in allowed or entry.dtype != part.dtype:
                    raise InputError(
                        f"{self.directory}/{part.where} has dtype {entry.dtype}, expected "
                        + " or ".join(allowed)
                        + (" (the same in every rank)" if len(part.entries) > 1 else "")
                    )
            self._check_shape(part, shapes[field])

    def _check_shape(self, part: _Part, expected: tuple[int, ...]) -> None:
        ranks = len(part.entries)
        each = expected if ranks == 1 else (expected[0] // ranks, *expected[1:])
        for place, entry in zip(part.places, part.entries, strict=True):
            if entry.shape != each:
                share = f", one of {ranks} shares of {list(expected)}" if ranks > 1 else ""
                raise InputError(
                    f"{self.directory}/{place.file}: {place.name} has shape {list(entry.shape)}, "
                    f"expected {list(each)}{share}"
                )


def _join(ranks: list[Tensor]) -> Tensor:
    # torch has no cat for the small float types, bytes have
    dtype = ranks[0].dtype
    if dtype.itemsize > 1:
        return torch.cat(ranks)
    return torch.cat([tensor.view(torch.uint8) for tensor in ranks]).view(dtype)


def _check_finite(tensor: Tensor, where: str) -> None:
    if tensor.dtype == torch.float8_e4m3fn:
        bad = (tensor.view(torch.uint8) & 0x7F).eq_(0x7F)  # e4m3fn has NaN and no inf
    elif tensor.dtype.is_floating_point:
        bad = ~torch.isfinite(tensor)
    else:
        return
    if bad.any():
        first = torch.nonzero(bad)[0].tolist()
        raise InputError(f"{where} holds {int(bad.sum())} NaN or inf values, first at {first}, expected finite weights")


def _check_scale(scale: Tensor, where: str) -> None:
    value = scale.float()
    bad = ~((value > 0) & (value <= SCALE_BOUND))  # NaN is neither
    if bad.any():
        first = tuple(torch.nonzero(bad)[0].tolist())
        found = f"{float(value[first]):g}"
        if scale.dtype == torch.float8_e8m0fnu:
            found = f"byte {int(scale.view(torch.uint8)[first])} ({found})"
        raise InputError(
            f"{where} holds {int(bad.sum())} scales out of range, first {found} at {list(first)}, "
            "expected above 0 and at most 2^64"
        )


def implausible_scale(wq_b: Tensor, scale: Tensor | None, block: tuple[int, int]) -> str | None:
    """What is suspicious about the scales of a weight [out, in] (or of its first rows); None if nothing.

    A quantised weight whose dequantised RMS exceeds IMPLAUSIBLE_RMS has wrong scales; fp32 ones that are all
    integers up to 254 are e8m0 bytes that somebody copied as numbers.
    """
    if scale is None:
        return None
    rms = float(dequantise_weight(wq_b, scale, block).square().mean().sqrt())
    if rms <= IMPLAUSIBLE_RMS:
        return None
    value = scale.float()
    text = f"dequantised RMS is {rms:.3g}, trained weights are below 1"
    if scale.dtype == torch.float32 and bool(((value == value.round()) & (value > 0) & (value < 255)).all()):
        middle = int(value.median())
        meant = f"byte {middle} means 2^{middle - 127}"
        return f"{text}: scales like {middle}.0 are e8m0 bytes taken as numbers ({meant})"
    return f"{text}: the scales cannot be meant"


def load_layer(checkpoint: str | Path, layer: int) -> tuple[IndexerConfig, IndexerWeights]:
    """Config and indexer weights of one layer; raises InputError as Checkpoint and its load do."""
    opened = Checkpoint(checkpoint)
    return opened.config, opened.load(layer)
