"""Record what the indexers of a model in this process see, with PyTorch hooks; nothing of the model is changed.

    with diffcheck.capture(model, layers=[2, 4]) as recorded:
        model(input_ids)
    recorded.save("trace.safetensors")

Works on modules shaped like transformers' `DeepseekV4Indexer`: called with (hidden states [B, T, hidden], low-rank
query [B, T, q_lora], positions [B, T], …), returning the selected entries [B, T, k], and with a submodule `scorer`
that returns the scores [B, T, E]. Calls are joined in order, so prefill in chunks and decode steps give one trace; the
rows of a batch are requests.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..refimpl import Trace, save_traces

_INDEXER = re.compile(r"(?:.*\.)?layers\.(\d+)\..*\bindexer")


class Recorded:
    """What was seen so far: `traces()` by layer, `save(path)` for all of it."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._calls: dict[int, list[dict[str, Tensor]]] = defaultdict(list)

    def traces(self, request: int = 0) -> dict[int, Trace]:
        """One request's traces by layer: x, qr, scores and observed_topk, from its first recorded token on.

        Raises InputError when nothing was recorded, there is no such request, or its calls do not follow each other.
        """
        if not self._calls:
            raise InputError("nothing was recorded, expected a call of the model inside the block")
        return {layer: self._trace(layer, calls, request) for layer, calls in sorted(self._calls.items())}

    def save(self, path: str | Path, request: int = 0) -> None:
        """Write one request's traces to a file; InputError as `traces`."""
        save_traces(path, list(self.traces(request).values()))

    def _trace(self, layer: int, calls: list[dict[str, Tensor]], request: int) -> Trace:
        size = min(len(call["x"]) for call in calls)
        if not 0 <= request < size:
            raise InputError(f"request is {request}, expected 0 to {size - 1}")
        mine = [{name: tensor[request] for name, tensor in call.items()} for call in calls]
        positions = torch.cat([call["positions"] for call in mine])
        start = int(positions[0])
        if not torch.equal(positions, torch.arange(start, start + len(positions))):
            raise InputError(f"layer {layer}: the recorded calls are not one stream of tokens, expected one text each")
        tensors = {name: torch.cat([call[name] for call in mine]) for name in ("x", "qr")}
        for name, fill in (("scores", -torch.inf), ("observed_topk", -1)):
            if all(name in call for call in mine):
                width = max(call[name].shape[1] for call in mine)
                padded = [
                    torch.nn.functional.pad(call[name], (0, width - call[name].shape[1]), value=fill) for call in mine
                ]
                tensors[name] = torch.cat(padded)
        if "scores" in tensors:
            hidden = torch.arange(tensors["scores"].shape[1]) >= ((positions + 1) // 4)[:, None]
            tensors["scores"] = tensors["scores"].masked_fill(hidden, -torch.inf)
        return Trace(tensors, layer=layer, start=start, metadata={"source": self.source})


@contextmanager
def capture(model: torch.nn.Module, *, layers: Sequence[int] | None = None) -> Iterator[Recorded]:
    """Record the indexers of `model` inside the block (all of them, or those of `layers`); see the module docstring.

    Raises InputError when the model has no indexer among those layers.
    """
    found = {}
    for name, module in model.named_modules():
        match = _INDEXER.fullmatch(name)
        if match and (layers is None or int(match[1]) in layers):
            found[int(match[1])] = module
    missing = sorted(set(layers or found) - set(found))
    if missing or not found:
        raise InputError(
            f"{type(model).__name__}: no indexer in layers {missing or 'at all'}, expected modules named "
            "layers.N.….indexer"
        )
    recorded, handles = Recorded(f"hooks on {type(model).__name__}"), []
    for layer, module in found.items():
        handles += _attach(module, recorded._calls[layer])
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()
        for layer in [n for n, calls in recorded._calls.items() if not calls]:
            del recorded._calls[layer]


def _attach(module: torch.nn.Module, calls: list[dict[str, Tensor]]) -> list[Any]:
    names = ("hidden_states", "q_residual", "position_ids")

    def before(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(names, args, strict=False)) | {n: kwargs[n] for n in names if n in kwargs}
        x, qr, positions = (given[n].detach() for n in names)
        positions = positions.expand(x.shape[0], -1)
        calls.append({"x": x.cpu().clone(), "qr": qr.cpu().clone(), "positions": positions.cpu().clone()})

    def after(_: torch.nn.Module, __: Any, output: Any) -> None:
        calls[-1]["observed_topk"] = output.detach().long().cpu().clone()

    def scored(_: torch.nn.Module, __: Any, output: Any) -> None:
        calls[-1]["scores"] = output.detach().cpu().clone()

    handles: list[Any] = [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after),
    ]
    scorer = getattr(module, "scorer", None)
    if isinstance(scorer, torch.nn.Module):
        handles.append(scorer.register_forward_hook(scored))
    return handles
