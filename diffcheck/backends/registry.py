"""Which backends there are: the built-in ones, those of other packages, and one in a file.

Another package offers a backend by an entry point in the group `diffcheck.backends`; `--backend path.py:object` takes
one from a file. The object is a `Backend`, or `Kernels` (the emulation then fills the steps that it lacks), or a class
or function without arguments that makes one.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..loading import load_object
from .base import STEPS, Backend, Kernels
from .chain import Chain
from .deep_gemm import DeepGemmKernels
from .emulated import EmulatedBackend
from .sglang import SglangKernels
from .triton import TritonKernels
from .vllm import VllmKernels

GROUP = "diffcheck.backends"


def builtin_backends() -> dict[str, Backend]:
    """The backends of this package; none of them needs to be available."""
    triton, gemm, sglang, sglang_v1 = TritonKernels(), DeepGemmKernels(), SglangKernels(), SglangKernels("v1")
    # what SGLang runs on Hopper; its FP4 logits need a newer GPU, so there this project's kernel scores the pages
    production: dict[str, tuple[Kernels, ...]] = {"keys": (sglang,), "queries": (sglang,), "logits": (gemm, triton)}
    return {
        "emulated": EmulatedBackend(),
        "triton": Chain.of("triton", triton),
        "deep_gemm": Chain.of("deep_gemm", gemm),
        "sglang": Chain("sglang", production | {"topk": (sglang,)}),
        "sglang-topk-v1": Chain("sglang-topk-v1", production | {"topk": (sglang_v1,)}),
        "vllm": Chain.of("vllm", VllmKernels()),
    }


def all_backends() -> tuple[dict[str, Backend], dict[str, str]]:
    """Built-in backends and those that other packages offer; and of those that cannot be loaded, why."""
    found, broken = builtin_backends(), {}
    for point in entry_points(group=GROUP):
        try:
            found[point.name] = _offered(point)
        except InputError as error:
            broken[point.name] = str(error)
    return found, broken


def find_backend(name: str) -> Backend:
    """The backend of that name, or the object of "path.py:object"; InputError if there is none or it cannot be loaded.

    Only the one asked for is loaded, so a broken package disturbs no other run.
    """
    path, _, attribute = name.rpartition(":")
    if path.endswith(".py"):
        made = load_object(Path(path), attribute, what="--backend", expected="a backend or kernels")
        return as_backend(attribute, made)
    builtin = builtin_backends()
    if name in builtin:
        return builtin[name]
    points = {point.name: point for point in entry_points(group=GROUP)}
    if name in points:
        return _offered(points[name])
    known = ", ".join([*builtin, *points])
    raise InputError(f"unknown backend {name!r}, expected auto, {known} or path.py:object")


def _offered(point: EntryPoint) -> Backend:
    try:
        return as_backend(point.name, point.load())
    except Exception as error:
        said = " ".join(str(error).split())
        raise InputError(f"backend {point.name} ({point.value}) cannot be loaded: {said}") from None


def as_backend(name: str, offered: Any) -> Backend:
    """An offered object as a backend; InputError says what it lacks."""
    made = offered() if isinstance(offered, type) or not hasattr(offered, "unavailable") else offered
    lacking = [m for m in ("name", "unavailable", "version", "refusal") if not hasattr(made, m)]
    if not lacking and hasattr(made, "run"):
        backend: Backend = made
        return backend
    steps = set(getattr(made, "steps", None) or ())
    if not lacking and steps and steps <= set(STEPS):
        return Chain.of(made.name, made)
    raise InputError(f"backend {name!r} lacks {', '.join(lacking) or 'run or steps'}, expected a Backend or Kernels")
