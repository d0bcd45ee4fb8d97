"""assert_stage_close: does a kernel's stage differ from the expected one by more than rounding, and where?

The default rule is the one by which diffcheck names the first wrong stage: after rounding to the expected dtype at
most 5 % of the elements are unequal, and at most 1 % by more than one unit in the last place. A relative error in the
L2 norm misses a constant that was rounded once too often; this does not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..compare import OFF_BY_ULP_SHARE, UNEQUAL_SHARE
from ..metrics import ulp


def assert_stage_close(
    got: Tensor,
    want: Tensor,
    *,
    stage: str = "stage",
    rel: float | None = None,
    visible: Tensor | None = None,
) -> None:
    """AssertionError unless `got` is `want` up to rounding; prints the errors when it is.

    Args:
        got: float, what a kernel computed.
        want: float of the same shape, the expected stage; its dtype decides what rounding is.
        stage: the stage's name, for messages.
        rel: bound of the relative error ||got - want|| / ||want||, instead of counting unequal elements; for stages
            that have no dtype of their own, such as fp32 logits.
        visible: int [rows], for scores [rows, E]: only entries below it are compared.

    Raises:
        AssertionError: says how many elements differ by how much, the first and the worst of them, and the rows and
            columns between which they lie.
        ValueError: shapes do not fit or a dtype is no float.
    """
    if not got.dtype.is_floating_point or not want.dtype.is_floating_point:
        raise ValueError(f"{stage}: {got.dtype} is compared with {want.dtype}, expected floats")
    if got.shape != want.shape:
        raise AssertionError(f"{stage}: shape {list(got.shape)}, expected {list(want.shape)}")
    counted = torch.ones(want.shape, dtype=torch.bool, device=want.device)
    if visible is not None:
        if want.ndim != 2 or visible.shape != want.shape[:1]:
            raise ValueError(
                f"{stage}: visible {list(visible.shape)} for {list(want.shape)}, expected one for each row"
            )
        counted = torch.arange(want.shape[1], device=want.device) < visible[:, None]
    a, b = got.to(want.dtype).double(), want.double()
    unequal = (a != b) & ~(a.isnan() & b.isnan()) & counted
    off = torch.zeros_like(b)
    off[unequal] = (a[unequal] - b[unequal]).abs() / ulp(want[unequal], want.dtype)
    far = unequal & ~(off <= 1)  # NaN, and infinity against a number, are far
    elements = int((b.isfinite() & counted).sum()) or 1
    size = b[counted & b.isfinite()].square().sum().sqrt()
    error = float((a[unequal] - b[unequal]).square().sum().sqrt() / size) if bool(unequal.any()) else 0.0
    shares = int(unequal.sum()) / elements, int(far.sum()) / elements
    summary = (
        f"{stage}: {shares[0]:.3%} of {elements} elements unequal, {shares[1]:.3%} by more than one "
        f"{str(want.dtype).removeprefix('torch.')} ulp, relative error {error:.3g}"
    )
    within = error <= rel if rel is not None else shares[0] <= UNEQUAL_SHARE and shares[1] <= OFF_BY_ULP_SHARE
    if within:
        print(summary)
        return
    bound = f"relative error {rel:g}" if rel is not None else f"{UNEQUAL_SHARE:.0%} and {OFF_BY_ULP_SHARE:.0%}"
    shown = far if rel is None and bool(far.any()) else unequal
    places = shown.nonzero()
    worst = int(off[shown].nan_to_num(nan=torch.inf).argmax())
    lines = [f"{summary}; allowed: {bound}"]
    for label, place in (("first", places[0]), ("worst", places[worst])):
        index = tuple(place.tolist())
        lines.append(
            f"  {label} at {list(index)}: got {float(got[index]):.9g}, expected {float(want[index]):.9g} "
            f"({float(off[index]):.3g} ulp)"
        )
    for name, axis in (("rows", 0), ("columns", want.ndim - 1)):
        where = places[:, axis].unique()
        lines.append(
            f"  {name} {int(where[0])} to {int(where[-1])} ({len(where)} of {want.shape[axis]}) hold all of them"
        )
    raise AssertionError("\n".join(lines))
