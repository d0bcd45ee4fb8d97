"""Argument checks shared by the wrappers: one clear line, raised before anything is launched."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from .rounding import INTERPRETED


def check_tensor(
    name: str, tensor: Tensor, dtypes: torch.dtype | tuple[torch.dtype, ...], shape: Sequence[int | None]
) -> None:
    """Raise ValueError unless the tensor has one of the dtypes, the shape (None: any size) and is
    contiguous.
    """
    allowed = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    fits = tensor.ndim == len(shape) and all(
        want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
    )
    if tensor.dtype not in allowed or not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        kinds = " or ".join(map(str, allowed))
        raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {kinds} [{wanted}]")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}, expected a contiguous tensor")


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Raise ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(choices)}")


def check_stages(round_bf16: Collection[str], stages: Sequence[str]) -> None:
    """Raise ValueError unless round_bf16 names only the given stages."""
    unknown = [stage for stage in round_bf16 if stage not in stages]
    if isinstance(round_bf16, str) or unknown:
        raise ValueError(f"round_bf16 is {round_bf16!r}, expected a subset of ({', '.join(stages)})")


def recipe_constants(
    fmt: str, scale: str, ties: str, fp4_step: bool, hadamard: bool, round_bf16: Collection[str], stages: Sequence[str]
) -> dict[str, Any]:
    """A recipe as the constants of a kernel that quantises, with ROUND_.. for each of its stages.

    Raises ValueError for a scale, ties or stage that do not exist.
    """
    check_choice("scale", scale, ("fp32", "ue8m0"))
    check_choice("ties", ties, ("even", "down"))
    check_stages(round_bf16, stages)
    return {
        "FMT": fmt,
        "POWER_OF_TWO": scale == "ue8m0",
        "TIES_DOWN": ties == "down",
        "FP4_STEP": fp4_step,
        "HADAMARD": hadamard,
    } | {f"ROUND_{stage.upper()}": stage in round_bf16 for stage in stages}


def check_devices(**tensors: Tensor | None) -> None:
    """Raise ValueError unless all tensors are on one device that the kernels can run on."""
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        places = ", ".join(f"{name} {device}" for name, device in devices.items())
        raise ValueError(f"tensors are on different devices ({places}), expected one")
    if not INTERPRETED.value and next(iter(devices.values())).type != "cuda":
        raise ValueError(
            "tensors are on the CPU, expected CUDA (or TRITON_INTERPRET=1 in the environment before triton is imported)"
        )


def scale_floor(fmt: str, amax_floor: float | None) -> float:
    """The amax floor to use: the given one, or the usual one of the format. Raises ValueError if negative."""
    if amax_floor is None:
        return 6.0 * 2.0**-126 if fmt == "e2m1" else 1e-4
    if not amax_floor >= 0.0:
        raise ValueError(f"amax_floor is {amax_floor}, expected a number >= 0")
    return amax_floor
