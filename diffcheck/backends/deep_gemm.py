"""DeepGEMM's fp8 index logits as a step, for the `deep_gemm` package that SGLang's wheel `sgl-deep-gemm` installs.

The step takes what the others leave: e4m3 queries whose scale is folded into the gates, and pages in the layout of
`kernels.PAGE_FORMATS["e4m3"]`, which is the package's own. Each query row is passed as a request of its own with one
token, over the same pages.

What the package leaves to its caller is done here. Its cleaning of columns beyond a row's length does not work with
the two-dimensional lengths that its scheduler asks for, and without cleaning those columns hold whatever was in memory
or on unwritten page rows, so they are always overwritten. Rows that see nothing never reach the kernels: a call in
which all rows are empty has no work to start from, and an empty range that ends before it starts wraps around.

The kernels are compiled at the first call of a shape, which needs a CUDA toolkit. The FP4 logits of the same package
exist for compute capability 10 only; on Hopper there is nothing to call, so e2m1 is refused.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from ..custom import CustomFormat, Storage
from ..packages import installed_version, present
from ..recipe import Recipe
from ..refimpl import IndexerConfig
from .base import KeyCache, fixed_refusal

if TYPE_CHECKING:
    from ..kernels import QuantisedQuery

PACKAGE = "deep_gemm"
INSTALL = "pip install sgl-deep-gemm"
DISTRIBUTIONS = ("sgl-deep-gemm", "deep-gemm")
"""Distributions that install the package, SGLang's build first."""
ENTRIES = ("get_num_sms", "get_paged_mqa_logits_metadata", "fp8_paged_mqa_logits", "fp8_mqa_logits")
"""Functions that are called."""
HEADS = (32, 64)
"""Numbers of heads that its Hopper kernels have."""
CAPABILITIES = (9, 10)
"""Major compute capabilities that the package has kernels for."""
ROWS_PER_CALL = 1024
"""Query rows of one paged call: bounds the block tables, and the number of batch sizes that are compiled."""
FIXED: dict[str, Any] = {
    "compute": "fp32",
    "round_gate": "none",
    "round_dot": "none",
    "relu": True,
    "round_product": "none",
    "round_score": "none",
}
"""Recipe fields for which the logits kernels have only one value."""


class DeepGemmKernels:
    """`fp8_paged_mqa_logits` as step, and `fp8_mqa_logits` beside it."""

    name: str = "deep_gemm"
    steps: tuple[str, ...] = ("logits",)

    def unavailable(self, device: str) -> str | None:
        """None on a Hopper or Blackwell GPU where the package can be imported and has the functions."""
        if not present(PACKAGE):
            return f"package {PACKAGE} is missing: {INSTALL}"
        if device != "cuda":
            return "needs a CUDA device"
        try:
            load_package()
        except ImportError as error:
            return str(error)
        if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] not in CAPABILITIES:
            major, minor = torch.cuda.get_device_capability()
            return f"needs a GPU of compute capability 9 or 10, this one has {major}.{minor}"
        return None

    def version(self) -> str | None:
        """Version of the distribution that is installed, with its name; the package is not imported."""
        found = ((name, installed_version(name)) for name in DISTRIBUTIONS)
        return next((f"{version} ({name})" for name, version in found if version), None)

    def refusal(self, step: str, recipe: Recipe, config: IndexerConfig) -> str | None:
        """Everything but fp32 sums of e4m3 products over 32 or 64 heads of 128."""
        if step not in self.steps:
            return "DeepGEMM has no kernel for this step"
        return logits_refusal(recipe, config)

    def paged_logits(self, query: QuantisedQuery, cache: KeyCache, visible: Tensor) -> Tensor:
        """The decode kernel, every query row as a request of its own; fp32 [rows, E], -inf at and beyond `visible`."""
        package = load_package()

        def score(codes: Tensor, pages: Tensor, gate: Tensor, lengths: Tensor, tables: Tensor, width: int) -> Any:
            plan = package.get_paged_mqa_logits_metadata(lengths, pages.shape[1], package.get_num_sms())
            return package.fp8_paged_mqa_logits(codes, pages, gate, lengths, tables, plan, width, clean_logits=False)

        return score_rows(score, query, cache, visible)

    def ragged_logits(
        self, query: QuantisedQuery, keys: Tensor, key_scales: Tensor, start: Tensor, end: Tensor
    ) -> Tensor:
        """The prefill kernel: fp32 [rows, N], -inf outside [start, end) of a row.

        keys: float8_e4m3fn [N, 128]; key_scales: fp32 [N]; start, end: integer [rows], cut to 0 … N.
        """
        package = load_package()
        first, last = (bound.clamp(0, len(keys)).to(torch.int32) for bound in (start, end))
        scores = torch.full((len(first), len(keys)), -torch.inf, device=keys.device)
        rows = (first < last).nonzero().squeeze(1)
        if len(rows):
            kv = (keys.contiguous(), key_scales.contiguous())
            first, last = first[rows], last[rows]
            raw = package.fp8_mqa_logits(query.codes[rows], kv, query.gate[rows], first, last, clean_logits=False)
            column = torch.arange(len(keys), device=keys.device)
            outside = (column < first[:, None]) | (column >= last[:, None])
            scores[rows] = as_tensor(raw)[: len(rows), : len(keys)].masked_fill(outside, -torch.inf)
        return scores


def load_package() -> ModuleType:
    """The package with all functions that are called; ImportError says in one line what is wrong."""
    package = import_or_explain(PACKAGE, INSTALL)
    lacking = [name for name in ENTRIES if not callable(getattr(package, name, None))]
    if lacking:
        raise ImportError(f"package {PACKAGE} has no {', '.join(lacking)}: {INSTALL}")
    return package


def import_or_explain(module: str, install: str) -> ModuleType:
    """The module; ImportError says in one line that its package is missing, or why it cannot be imported."""
    package = module.partition(".")[0]
    try:
        importlib.import_module(package)
        return importlib.import_module(module)
    except Exception as error:  # these load libraries and look for a toolkit, which fails in many ways
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise ImportError(f"package {package} is missing: {install}") from None
        said = " ".join(str(error).split()) or "no message; it needs a CUDA toolkit, see CUDA_HOME"
        raise ImportError(f"package {package} cannot be imported: {type(error).__name__}: {said}") from None


def logits_refusal(recipe: Recipe, config: IndexerConfig) -> str | None:
    """Why DeepGEMM's fp8 logits cannot score this recipe exactly; None if they can."""
    if reason := fixed_refusal(recipe, FIXED):
        return reason
    if config.index_n_heads not in HEADS or config.index_head_dim != 128:
        return f"{config.index_n_heads} heads of {config.index_head_dim}, the kernel needs 32 or 64 heads of 128"
    formats = {"queries": recipe.q_format, "keys": recipe.k_format}
    return next((f"{side}: {why}" for side, fmt in formats.items() if (why := format_refusal(fmt))), None)


def format_refusal(fmt: Storage | None) -> str | None:
    """Why DeepGEMM's fp8 logits cannot read a storage format; None if they can. Both scale types are stored as fp32."""
    if fmt is None:
        return "unquantised values have no cache format"
    if isinstance(fmt, CustomFormat):
        return f"the kernel scores e4m3 with one scale per 128, not {fmt}"
    if fmt.element == "e2m1":
        return f"DeepGEMM scores e2m1 on compute capability 10 only, which is not supported here ({fmt})"
    if fmt.element != "e4m3" or fmt.block != 128 or fmt.scale not in ("fp32", "ue8m0"):
        return f"the kernel scores e4m3 with one scale per 128, not {fmt}"
    return None


def score_rows(score: Any, query: QuantisedQuery, cache: KeyCache, visible: Tensor) -> Tensor:
    """fp32 [rows, E] from a paged scorer with DeepGEMM's arguments, -inf at and beyond `visible`.

    score(q [B, 1, H, 128], pages uint8 [P, 64, 1, 132], gate [B, H], lengths int32 [B, 1], block tables int32 [B, W],
    width) -> fp32 [B, at least width], where columns beyond a row's length hold anything. It gets no empty rows.
    """
    from ..kernels import ENTRIES_PER_PAGE, PAGE_FORMATS

    assert (query.fmt, cache.fmt) == ("e4m3", "e4m3"), "refused before"
    entries, device = len(cache.slots), cache.pages.device
    pages = cache.pages.view(-1, ENTRIES_PER_PAGE, 1, PAGE_FORMATS["e4m3"].bytes_per_entry)
    scores = torch.full((len(visible), entries), -torch.inf, device=device)
    # a length beyond the row's width would be written past its end
    seen = visible.clamp(0, entries).to(torch.int32)
    kept = seen.nonzero().squeeze(1)
    for begin in range(0, len(kept), ROWS_PER_CALL):
        rows = kept[begin : begin + ROWS_PER_CALL]
        lengths = seen[rows, None]
        tables = cache.block_table.expand(len(rows), -1).contiguous()
        raw = as_tensor(score(query.codes[rows].unsqueeze(1), pages, query.gate[rows], lengths, tables, entries))
        hidden = torch.arange(entries, device=device) >= lengths
        scores[rows] = raw[: len(rows), :entries].masked_fill(hidden, -torch.inf)
    return scores


def as_tensor(result: Any) -> Tensor:
    """A result as torch tensor: some builds hand out another library's tensor, which speaks DLPack."""
    return result if isinstance(result, Tensor) else from_dlpack(result)
