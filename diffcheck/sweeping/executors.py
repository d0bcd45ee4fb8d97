"""Where cases run: in this process, or as tasks of a Ray cluster. Results and their order do not depend on it.

An executor is given what cases share once (`share`), takes cases (`submit`) and hands each result back once
(`result`), in whatever order they are asked for; `ahead` says how many layers are worth keeping open at a time.

On a cluster a case takes one GPU, or one CPU slot with `--device cpu`. Ray schedules, retries and moves data: weights
and hidden states go into its object store once and are mapped by all processes of a node; a task whose process or node
died is run again. A task only measures. Records are written by the driver alone, once for each result.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import warnings
from dataclasses import fields, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..errors import EnvironmentMissing, InputError
from ..packages import present
from ..recipe import Recipe
from ..refimpl import IndexerWeights
from .cases import LayerText, Rung, forget, measure

NAMES = ("local", "ray")
CONNECT_SECONDS = 5.0
RETRIES = 5
"""How often a case is run again after its process or node died."""


class Executor(Protocol):
    """See the module."""

    ahead: int

    def share(self, given: LayerText) -> Any:
        """Make what cases share available; the result stands for it in `submit`."""

    def submit(self, shared: Any, recipe: Recipe, rung: Rung) -> Any:
        """Hand in a case; the result stands for it in `result` and `cancel`."""

    def result(self, handle: Any) -> dict[str, Any]:
        """The record of a case, once it is there."""

    def cancel(self, handle: Any) -> None:
        """The result will not be asked for."""

    def close(self) -> None:
        """Let go of everything."""


class LocalExecutor:
    """Measures a case when its result is asked for."""

    ahead = 1

    def __init__(self, device: str) -> None:
        self._device = device

    def share(self, given: LayerText) -> LayerText:
        """The same."""
        return given

    def submit(self, shared: LayerText, recipe: Recipe, rung: Rung) -> tuple[LayerText, Recipe, Rung]:
        """Keep the case for later."""
        return shared, recipe, rung

    def result(self, handle: tuple[LayerText, Recipe, Rung]) -> dict[str, Any]:
        """Measure it now."""
        try:
            return measure(*handle, self._device)
        except torch.cuda.OutOfMemoryError:
            raise EnvironmentMissing(
                f"{handle[1].name}: the GPU has not enough memory for {len(handle[0].x)} tokens and "
                f"{handle[2].last - handle[2].first} rows, expected fewer --rows or another --length"
            ) from None

    def cancel(self, handle: Any) -> None:
        """Nothing runs yet."""

    def close(self) -> None:
        """Forget the stages."""
        forget()


class RayExecutor:
    """Tasks of the cluster that RAY_ADDRESS names, or of one that is started here; EnvironmentMissing without Ray."""

    ahead = 2

    def __init__(self, device: str) -> None:
        if not present("ray"):
            raise EnvironmentMissing("--executor ray needs Ray: pip install 'diffcheck[ray]'")
        ray: Any = importlib.import_module("ray")  # typed for other uses than this one
        self._ray, self._device = ray, device
        self._mine = not ray.is_initialized()
        if self._mine:
            address = os.environ.get("RAY_ADDRESS", "")
            _check_reachable(address)
            try:
                ray.init(log_to_driver=False, logging_level="ERROR", include_dashboard=None if address else False)
            except (ConnectionError, RuntimeError, ValueError) as error:
                said = " ".join(str(error).split())
                raise EnvironmentMissing(f"--executor ray: no cluster ({said[:200]})") from None
        kind = "GPU" if device == "cuda" else "CPU"
        if ray.cluster_resources().get(kind, 0) < 1:
            self.close()
            raise EnvironmentMissing(f"--executor ray: the cluster has no {kind} slot")
        self._task = ray.remote(max_retries=RETRIES, **{f"num_{kind.lower()}s": 1})(run_case)

    def share(self, given: LayerText) -> Any:
        """One copy in the object store."""
        return self._ray.put(pack(given))

    def submit(self, shared: Any, recipe: Recipe, rung: Rung) -> Any:
        """A task; it waits for a slot."""
        return self._task.remote(shared, recipe, rung, self._device, torch.get_num_threads())

    def result(self, handle: Any) -> dict[str, Any]:
        """Wait for a task. EnvironmentMissing if Ray gave it up."""
        try:
            record: dict[str, Any] = self._ray.get(handle)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from None
        except self._ray.exceptions.RayError as error:
            said = " ".join(str(error).split())
            raise EnvironmentMissing(f"--executor ray: a case was lost {RETRIES + 1} times ({said[:200]})") from None
        return record

    def cancel(self, handle: Any) -> None:
        """Stop it, or take it off the queue."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.cancel(handle)

    def close(self) -> None:
        """Leave the cluster, if this is who joined it."""
        if self._mine:
            self._ray.shutdown()


def _check_reachable(address: str) -> None:
    """EnvironmentMissing where nobody listens at HOST:PORT; Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise EnvironmentMissing(f"--executor ray: no cluster at RAY_ADDRESS {address} ({error})") from None


def make_executor(name: str, device: str) -> Executor:
    """The executor of that name; InputError for another, EnvironmentMissing where it cannot be had."""
    if name not in NAMES:
        raise InputError(f"--executor: {name!r}, expected {' or '.join(NAMES)}")
    return LocalExecutor(device) if name == "local" else RayExecutor(device)


def run_case(packed: dict[str, Any], recipe: Recipe, rung: Rung, device: str, threads: int) -> dict[str, Any]:
    """A task: a case on packed inputs; `threads` as the driver has, so that products are summed alike."""
    torch.set_num_threads(threads)
    return measure(unpack(packed), recipe, rung, device)


def pack(given: LayerText) -> dict[str, Any]:
    """The same as numpy arrays of plain dtypes, which an object store hands to processes without copying."""
    weights = {
        f.name: _array(value) for f in fields(IndexerWeights) if (value := getattr(given.weights, f.name)) is not None
    }
    rest = replace(given, weights=None, x=None, qr=None, positions=None)  # type: ignore[arg-type]
    return {"rest": rest, "weights": weights, **{name: _array(getattr(given, name)) for name in _INPUTS}}


def unpack(packed: dict[str, Any]) -> LayerText:
    """What was packed; its tensors share the arrays' memory and must not be written to."""
    weights: dict[str, Any] = {name: _tensor(*value) for name, value in packed["weights"].items()}
    absent: dict[str, Any] = {f.name: None for f in fields(IndexerWeights) if f.name not in weights}
    inputs = {name: _tensor(*packed[name]) for name in _INPUTS}
    unpacked: LayerText = replace(packed["rest"], weights=IndexerWeights(**weights, **absent), **inputs)
    return unpacked


_INPUTS = ("x", "qr", "positions")


def _array(tensor: Tensor) -> tuple[np.ndarray, str, tuple[int, ...]]:
    flat = tensor.contiguous().flatten()
    return flat.view(torch.uint8).numpy(), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def _tensor(array: np.ndarray, dtype: str, shape: tuple[int, ...]) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        flat = torch.from_numpy(array)
    return flat.view(getattr(torch, dtype)).view(shape)
