"""All tensors of a layer out of a checkpoint, for the forward pass; one layer is read at a time.

Ranks of DeepSeek's converter are refused: experts, heads and vocabulary are spread over them in several ways.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Sequence
from pathlib import Path

from torch import Tensor

from diffcheck.refimpl import InputError
from diffcheck.refimpl.model import ModelConfig

from .index import Location
from .layer import Checkpoint
from .names import split_layer
from .shard import read_tensors


class ModelCheckpoint:
    """The whole model of an opened checkpoint: `config`, `layers_present` from 0 on, and `load` for the forward pass.

    Raises InputError for a config that lacks a value of the whole model, rank files, and a checkpoint without the
    embedding or layer 0 (one that holds indexers only).
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.directory = checkpoint, checkpoint.directory
        if checkpoint.index.source == "ranks" and len(checkpoint.index.files) > 1:
            raise InputError(f"{self.directory}: has rank files, expected whole tensors for the forward pass")
        self.config = ModelConfig.from_json(self.directory / "config.json")
        self._places: dict[int | None, dict[str, Location]] = defaultdict(dict)
        for name, places in checkpoint.index.locations.items():
            inside = split_layer(name)
            layer, rest = inside if inside else (None, name)
            self._places[layer][rest] = places[0]
        if "embed.weight" not in self._places[None] or "attn.wq_b.weight" not in self._places[0]:
            raise InputError(
                f"{self.directory}: no embed.weight or no layer 0, expected the whole model "
                "(made-up hidden states need the indexer's tensors only)"
            )

    @property
    def layers_present(self) -> int:
        """How many layers from 0 on have their attention's tensors here."""
        count = 0
        while "attn.wq_b.weight" in self._places.get(count, {}) and count < self.config.layers:
            count += 1
        return count

    def load(self, layer: int | None, only: Container[str] | None = None) -> dict[str, Tensor]:
        """Tensors of a layer by their names inside it, as stored, on the CPU; `only` those named.

        None: those outside the layers, of which the head is left out unless named.
        """
        by_file: dict[str, dict[str, str]] = defaultdict(dict)
        for rest, place in self._places[layer].items():
            if (rest in only) if only is not None else (layer is not None or rest != "head.weight"):
                by_file[place.file][place.name] = rest
        return self._read(by_file)

    def load_head(self) -> dict[str, Tensor]:
        """The tensors that turn the last streams into logits."""
        return self.load(None, only=[name for name in self._places[None] if name != "embed.weight"])

    def _read(self, by_file: dict[str, dict[str, str]]) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for file, names in by_file.items():
            header = self.checkpoint.index.header(file)
            for stored in names:
                if stored not in header:
                    raise InputError(f"{self.directory / file}: does not hold {stored}, expected there by the index")
            read = read_tensors(self.directory / file, names)
            tensors |= {names[stored]: tensor for stored, tensor in read.items()}
        return tensors


def open_model(path: str | Path, layers: Sequence[int] | None = None) -> ModelCheckpoint:
    """Open a checkpoint for the forward pass up to the last of `layers`; InputError if a layer before it is absent."""
    model = ModelCheckpoint(Checkpoint(path))
    if layers and max(layers) >= model.layers_present:
        raise InputError(
            f"{model.directory}: holds layers 0 to {model.layers_present - 1}, expected all up to layer {max(layers)}"
        )
    return model
