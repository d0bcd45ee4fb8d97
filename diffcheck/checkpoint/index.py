"""Which file holds which tensor, and every way in which a directory can contradict itself about that.

Three sources, the first that is there:

1. `model.safetensors.index.json`: trusted for where a tensor is, and then held against the headers of the
   shards that are opened. Opening a checkpoint reads this file and no shard.
2. `model{rank}-mp{world}.safetensors`, DeepSeek's converter: all ranks are needed. The same name in every
   rank is legal here and only here: some tensors are split on dim 0, the others repeated.
3. The headers of `model*.safetensors` (or of all `*.safetensors` when there is no such file, trace files left
   out). A gap in the numbering `-00001-of-00003` is an error: nothing says what the absent shard held.

A path in an index must stay inside the directory by its text. Where a *link* inside the directory points is
the user's business: Hugging Face's cache keeps each shard of a snapshot as a link to `../../blobs/`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from diffcheck.refimpl import InputError

from .names import canonical_name
from .shard import Entry, parse_json, read_header, read_header_and_metadata

INDEX_FILE = "model.safetensors.index.json"
_RANK_FILE = re.compile(r"model(\d+)-mp(\d+)\.safetensors")
_NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")


@dataclass(frozen=True, slots=True)
class Location:
    """A tensor's file, relative to the directory, and its name there."""

    file: str
    name: str


@dataclass(slots=True)
class TensorIndex:
    """Places of all tensors of a checkpoint directory.

    `source` says what the places were read from (`index.json`, `headers`, `ranks`); `locations` has for each
    canonical name one place, or one per rank in rank order; `files` names the shards in order.
    """

    directory: Path
    source: str
    locations: Mapping[str, tuple[Location, ...]]
    files: tuple[str, ...]
    _headers: dict[str, dict[str, Entry]] = field(default_factory=dict, repr=False)
    _unindexed: list[tuple[str, str, str]] | None = field(default=None, repr=False)

    def header(self, file: str) -> dict[str, Entry]:
        """Header of one shard by stored name, read once; checked against the index.

        Raises InputError when the shard is absent or broken, or when it also holds a tensor that the index
        (or another shard) places elsewhere.
        """
        if file not in self._headers:
            if not self.has(file):
                count = sum(any(place.file == file for place in places) for places in self.locations.values())
                raise InputError(
                    f"{self.directory / file}: absent or a broken link, expected {count} tensors there by {self.source}"
                )
            header = read_header(self.directory / file)
            for name, elsewhere in self.misplaced(file, header):
                raise InputError(
                    f"{self.directory}: {name} is in two shards, {elsewhere} (by {self.source}) and {file}, "
                    "expected one"
                )
            self._headers[file] = header
        return self._headers[file]

    def misplaced(self, file: str, header: Mapping[str, Entry]) -> Iterator[tuple[str, str]]:
        """Tensors of a shard that the index places in another file, with that file."""
        for name in header:
            canonical = canonical_name(name)
            places = self.locations.get(canonical, ()) if canonical else ()
            if places and not any(place.file == file for place in places):
                yield name, places[0].file

    def check_single(self, wanted: Container[str]) -> None:
        """Raise InputError when a second shard holds one of the `wanted` canonical names.

        Reads the headers of the other shards that are there; one that cannot be read is not needed and no error.
        """
        if self._unindexed is None:
            self._unindexed = []
            for file in self.files:
                if file not in self._headers and self.has(file):
                    with contextlib.suppress(InputError):
                        copies = self.misplaced(file, read_header(self.directory / file))
                        self._unindexed += [(name, elsewhere, file) for name, elsewhere in copies]
        for name, elsewhere, file in self._unindexed:
            if canonical_name(name) in wanted:
                raise InputError(
                    f"{self.directory}: {name} is in two shards, {elsewhere} (by {self.source}) and {file}, "
                    "expected one"
                )

    def has(self, file: str) -> bool:
        """True when the shard is there (a link that leads somewhere counts)."""
        return (self.directory / file).is_file()

    def entry(self, location: Location) -> Entry:
        """Header entry of one place; raises InputError when its file does not hold the tensor after all."""
        header = self.header(location.file)
        if location.name not in header:
            raise InputError(
                f"{self.directory / location.file}: does not hold {location.name}, expected there by {self.source}"
            )
        return header[location.name]


def open_index(directory: Path, only: str | None = None) -> TensorIndex:
    """Find the tensors of a checkpoint directory, or of its one file `only`.

    Raises InputError for an index that is broken or leaves the directory, a tensor in two places, an
    incomplete set of shards or ranks, and a directory without weights.
    """
    if only is not None:
        return _from_headers(directory, [only])  # what its siblings hold is not asked
    if (directory / INDEX_FILE).is_file():
        return _from_index(directory)
    names = sorted(path.name for path in directory.glob("*.safetensors"))
    names = [name for name in names if name.startswith("model")] or names
    ranks = [name for name in names if _RANK_FILE.fullmatch(name)]
    if ranks:
        if len(ranks) < len(names):
            other = next(name for name in names if name not in ranks)
            raise InputError(f"{directory}: has both {ranks[0]} and {other}, expected one set of weights")
        return _from_ranks(directory, ranks)
    if not names:
        raise InputError(f"{directory}: no weights, expected {INDEX_FILE} or *.safetensors files")
    _check_numbering(directory, names)
    return _from_headers(directory, names)


def _from_index(directory: Path) -> TensorIndex:
    path = directory / INDEX_FILE
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}), expected JSON") from None
    parsed = parse_json(text, str(path))
    weight_map = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{path}: has no weight_map, expected an object of tensor names and shard files")
    locations: dict[str, tuple[Location, ...]] = {}
    for name, file in weight_map.items():
        if not _stays_inside(file):
            raise InputError(f"{path}: {name} is in {file!r:.200}, expected a file inside the directory")
        _place(locations, Location(file, name), directory)
    return TensorIndex(directory, INDEX_FILE, locations, tuple(sorted(set(weight_map.values()))))


def _stays_inside(file: object) -> bool:
    if not isinstance(file, str) or not file or "\0" in file or "\\" in file:
        return False
    path = PurePosixPath(file)
    return not path.is_absolute() and ".." not in path.parts


def _place(locations: dict[str, tuple[Location, ...]], place: Location, directory: Path) -> None:
    canonical = canonical_name(place.name)
    if canonical is None:
        return
    if canonical in locations:
        first = locations[canonical][0]
        shards = "two shards" if first.file != place.file else "one shard twice"
        names = place.name if place.name == first.name else f"{place.name} (also called {first.name})"
        raise InputError(f"{directory}: {names} is in {shards}, {first.file} and {place.file}, expected one")
    locations[canonical] = (place,)


def _from_headers(directory: Path, files: list[str]) -> TensorIndex:
    locations: dict[str, tuple[Location, ...]] = {}
    headers: dict[str, dict[str, Entry]] = {}
    for file in files:
        header, metadata = read_header_and_metadata(directory / file)
        if metadata.get("schema", "").startswith("diffcheck-trace"):
            continue
        headers[file] = header
        for name in header:
            _place(locations, Location(file, name), directory)
    if not locations:
        raise InputError(f"{directory}: no weights in {', '.join(files)[:200]}, expected a checkpoint's tensors")
    return TensorIndex(directory, "headers", locations, tuple(headers), headers)


def _check_numbering(directory: Path, files: list[str]) -> None:
    numbered = [match for match in map(_NUMBERED.fullmatch, files) if match]
    if len(numbered) < len(files):
        return
    stem, total = numbered[0][1], int(numbered[0][3])
    present = {(match[1], int(match[2])) for match in numbered}
    for number in range(1, total + 1):
        if (stem, number) not in present:
            raise InputError(
                f"{directory}: shard {stem}-{number:05d}-of-{total:05d}.safetensors is absent and so is "
                f"{INDEX_FILE}, expected all {total} shards or the index"
            )


def _from_ranks(directory: Path, files: list[str]) -> TensorIndex:
    by_rank = {}
    worlds = set()
    for file in files:
        match = _RANK_FILE.fullmatch(file)
        assert match, "the caller has matched these names"
        by_rank[int(match[1])] = file
        worlds.add(int(match[2]))
    world = max(worlds)
    if len(worlds) > 1:
        raise InputError(f"{directory}: rank files of {sorted(worlds)} ranks, expected one set")
    for rank in range(world):
        if rank not in by_rank:
            raise InputError(f"{directory}: model{rank}-mp{world}.safetensors is absent, expected all {world} ranks")
    if len(by_rank) != len(files) or max(by_rank) >= world:
        raise InputError(
            f"{directory}: rank files {', '.join(files)[:200]}, expected ranks 0 to {world - 1}, each once"
        )
    ordered = tuple(by_rank[rank] for rank in range(world))
    headers = {file: read_header(directory / file) for file in ordered}
    places: dict[str, list[Location]] = {}
    for file in ordered:
        mine: dict[str, tuple[Location, ...]] = {}
        for name in headers[file]:
            _place(mine, Location(file, name), directory)
        for canonical, (place,) in mine.items():
            places.setdefault(canonical, []).append(place)
    return TensorIndex(directory, "ranks", {name: tuple(p) for name, p in places.items()}, ordered, headers)
