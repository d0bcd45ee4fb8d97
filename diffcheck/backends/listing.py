"""`diffcheck backends`: what can run here, and what each backend can run."""

from __future__ import annotations

from rich.console import Console

from ..presets import CHANGES, PRECISIONS, build
from ..refimpl import V4_FLASH
from .base import STEPS
from .chain import Chain
from .registry import all_backends


def render_backends(console: Console, device: str) -> None:
    """Print every backend with its state on `device` ("auto" takes CUDA where there is one), at V4-Flash geometry."""
    from ..run import device_of

    place = device_of(device)
    console.print(f"on {place}; recipes are those that can run at V4-Flash geometry", highlight=False)
    found, broken = all_backends()
    for name, backend in found.items():
        reason = backend.unavailable(place)
        console.print(
            f"{name}: {'not available: ' + reason if reason else 'available'}", highlight=False, soft_wrap=True
        )
        console.print(f"  version  {backend.version() or 'not installed'}", highlight=False, soft_wrap=True)
        if isinstance(backend, Chain):
            who = [f"{step} by {' or '.join(k.name for k in backend.candidates[step])}" for step in STEPS]
            console.print(f"  steps    {', '.join(who)}", highlight=False, soft_wrap=True)
        console.print(f"  stages   {' '.join(backend.stages)}", highlight=False, soft_wrap=True)
        able = [r for r in (*PRECISIONS, *CHANGES) if not backend.refusal(build(r, V4_FLASH), V4_FLASH)]
        console.print(f"  recipes  {', '.join(able) or 'none'}", highlight=False, soft_wrap=True)
    for name, reason in broken.items():
        console.print(f"{name}: not available: {reason}", highlight=False, soft_wrap=True)
