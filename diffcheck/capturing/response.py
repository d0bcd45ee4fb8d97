"""The selection that a server returns with its answer, as observed_topk of a trace.

SGLang (`--enable-return-indexer-topk`, request field return_indexer_topk): meta_info.indexer_topk, base64 of int32
[tokens, layers, k]. vLLM's proposal: choices[i].indexer_topk, base64 of the same as .npy. Tokens are all but the last
one of prompt and answer; indices count compressed entries from the request's start, -1 is an empty place.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import InputError
from ..refimpl import IndexerConfig, Trace
from ..refimpl.compressor import WINDOW
from ..refimpl.config_json import load_json

FIELD = "indexer_topk"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Traces by layer with observed_topk int64 [tokens, k] and queries; how many tokens they cover.

    prompt_tokens: those of the prompt, where the answer says. unknown: what it holds of layers that the config lacks.
    """

    layers: dict[int, Trace]
    tokens: int
    prompt_tokens: int | None = None
    unknown: tuple[str, ...] = ()


def read_response(path: str | Path, config: IndexerConfig) -> Answer:
    """The selection in a saved JSON answer.

    The layer axis may hold the layers with an indexer, or all layers and then some that the config does not know.
    Raises InputError for a file that is no such answer, a size that does not fit, and indices that no compressed entry
    of the request has.
    """
    path = Path(path)
    answer = load_json(path, "a server's JSON answer")
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    encoded, info = _find(path, answer)
    values = _decode(path, encoded)
    indices = _shaped(path, values, info, config)
    tokens, layers, _ = indices.shape
    numbers = config.indexer_layers if layers == len(config.indexer_layers) else range(layers)
    queries = torch.arange(tokens)
    # the group that the last token begins counts too: a deployment that sees it has a fault, not a malformed answer
    entries = -(-tokens // WINDOW)
    traces = {}
    for place, layer in enumerate(numbers):
        if layer not in config.indexer_layers:
            continue
        selected = torch.from_numpy(indices[:, place].astype(np.int64))
        if int(selected.max()) >= entries or int(selected.min()) < -1:
            odd = int(selected.max()) if int(selected.max()) >= entries else int(selected.min())
            raise InputError(
                f"{path}: layer {layer} selects {odd} of {entries} entries, expected compressed entries of the request"
            )
        traces[layer] = Trace(
            {"observed_topk": selected, "queries": queries}, layer=layer, metadata={"source": f"answer {path.name}"}
        )
    prompt, known = info.get("prompt_tokens"), len(config.compress_ratios)
    return Answer(
        layers=traces,
        tokens=tokens,
        prompt_tokens=prompt if type(prompt) is int else None,
        unknown=tuple(f"layer {n} of the answer, which the checkpoint's config lacks" for n in range(known, layers)),
    )


def _find(path: Path, answer: Any) -> tuple[str, Mapping[str, Any]]:
    """The encoded field and the object that may tell the numbers of tokens."""
    if isinstance(answer, Mapping):
        info = answer.get("meta_info")
        if isinstance(info, Mapping) and isinstance(info.get(FIELD), str):
            return info[FIELD], info
        choices = answer.get("choices")
        for choice in choices if isinstance(choices, list) else []:
            for holder in (choice, choice.get("meta_info")) if isinstance(choice, Mapping) else ():
                if isinstance(holder, Mapping) and isinstance(holder.get(FIELD), str):
                    usage = answer.get("usage")
                    return holder[FIELD], usage if isinstance(usage, Mapping) else {}
    raise InputError(
        f"{path}: no meta_info.{FIELD} and no choices[].{FIELD}, expected an answer to a request with return_{FIELD}"
    )


def _decode(path: Path, encoded: str) -> np.ndarray:
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"{path}: {FIELD} is no base64 ({error})") from None
    if data.startswith(b"\x93NUMPY"):
        try:
            array: np.ndarray = np.load(io.BytesIO(data), allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise InputError(f"{path}: {FIELD} is no readable .npy ({error})") from None
        if array.dtype.kind not in "iu":
            raise InputError(f"{path}: {FIELD} holds {array.dtype}, expected integers")
        return array
    if len(data) % 4 or not data:
        raise InputError(f"{path}: {FIELD} has {len(data)} bytes, expected int32 values")
    return np.frombuffer(data, dtype="<i4")


def _shaped(path: Path, values: np.ndarray, info: Mapping[str, Any], config: IndexerConfig) -> np.ndarray:
    """The values as [tokens, layers, k], not empty."""
    k, own, known = config.index_topk, len(config.indexer_layers), len(config.compress_ratios)
    counts = [info.get(name) for name in ("prompt_tokens", "completion_tokens")]
    tokens = sum(counts) - 1 if all(type(c) is int for c in counts) else None  # type: ignore[arg-type]
    expected = f"expected tokens x {own} layers (or {known}) x {k}"
    if values.ndim == 3:
        rows, layers, places = values.shape
        if not (rows and places) or (layers != own and layers < known) or tokens not in (None, rows):
            of = "" if tokens is None else f" for {tokens} tokens"
            raise InputError(f"{path}: {FIELD} has shape {list(values.shape)}{of}, {expected}")
        return values
    for layers in (own, known):
        if layers and values.size % (layers * k) == 0 and tokens in (None, values.size // (layers * k)):
            return values.reshape(-1, layers, k)
    if tokens and tokens > 0 and values.size % (tokens * k) == 0 and values.size // (tokens * k) > known:
        return values.reshape(tokens, -1, k)
    of = "" if tokens is None else f" for {tokens} tokens"
    raise InputError(f"{path}: {FIELD} has {values.size} values{of}, {expected}")
