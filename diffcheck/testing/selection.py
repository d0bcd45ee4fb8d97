"""assert_selection: is this a right top-k of these scores, ties aside, and if not, what went wrong first?

The rule is that of the tie-tolerant metrics. Of a row that sees V entries, W = min(k, V) must be selected: all
different, all visible. Let tau be the W-th best visible score and e what is allowed. Entries above tau + e must be
among them, entries below tau - e must not, and those between may fill what is left. NaN ranks below every number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..metrics import check_rows, ordering_keys, ulp

SHOWN = 6
"""How many entries or rows a message lists."""


def assert_selection(
    selected: Tensor,
    *,
    scores: Tensor,
    k: int,
    visible: Tensor | None = None,
    ulps: float = 0.0,
    tolerance: float | Tensor = 0.0,
    positions: Tensor | None = None,
) -> None:
    """AssertionError unless each row selects the best k of its visible entries.

    Args:
        selected: int32 or int64 [rows, places], entries in any order, -1 in empty places.
        scores: float [rows, E], what the rows were selected by. Invisible ones are not read.
        k: how many entries a row may select.
        visible: int [rows], entry j is visible to a row if j < visible; None: all are.
        ulps: scores that differ by so many units in the last place of their dtype (at the k-th score) are equally
            good; 0: only equal ones are. 1 suits the reference's bf16 scores.
        tolerance: the same in units of the scores, a number or float [rows]; added to `ulps`.
        positions: int [rows], token positions, named in messages.

    Raises:
        AssertionError: says which rows are wrong, and of the first one what was dropped and what was kept instead,
            with scores, ranks and the margin at the k-th place.
        ValueError: shapes or dtypes do not fit, k is below 1, or what is allowed is negative or NaN.
    """
    rows, entries = scores.shape if scores.ndim == 2 else (0, 0)
    if visible is None:
        visible = torch.full((rows,), entries, device=scores.device)
    keys = ordering_keys(scores, visible)
    check_rows(visible, selected)
    if selected.ndim != 2 or selected.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"selected is {selected.dtype} {list(selected.shape)}, expected int32 or int64 [rows, places]")
    if k < 1:
        raise ValueError(f"k is {k}, expected at least 1")
    allowed = torch.as_tensor(tolerance, dtype=torch.float64, device=scores.device).expand(rows)
    if ulps < 0 or not bool((allowed >= 0).all()):
        raise ValueError(f"ulps is {ulps} and tolerance {tolerance}, expected numbers of at least 0")
    wanted = visible.long().clamp(max=k)
    if keys.shape[1] == 0 or not rows:
        best = keys.new_full((rows, 1), -torch.inf)
    else:
        best = keys.sort(dim=1, descending=True).values
    tau = best.gather(1, (wanted - 1).clamp_min(0)[:, None])[:, 0].double()
    if ulps:
        step = ulp(tau, scores.dtype)
        allowed = allowed + torch.where(step.isfinite(), ulps * step, 0.0)
    chosen = selected.long()
    ranged = (chosen >= 0) & (chosen < visible.long()[:, None])
    width = keys.shape[1]
    held = torch.zeros(rows, width + 1, dtype=torch.bool, device=scores.device)
    held.scatter_(1, torch.where(ranged, chosen, width), True)
    held = held[:, :width]
    seen = torch.arange(width, device=scores.device) < visible[:, None]
    # compared with the ends of the band: a distance from -inf to -inf is no number
    dropped = seen & ~held & (keys.double() > (tau + allowed)[:, None])
    worse = held & (keys.double() < (tau - allowed)[:, None])
    places = (chosen >= 0).sum(1)
    foreign = ((chosen >= 0) & ~ranged) | (chosen < -1)
    repeated = ranged.sum(1) - held.sum(1)
    short = places != wanted
    bad = foreign.any(1) | (repeated > 0) | short | dropped.any(1) | worse.any(1)
    if not bool(bad.any()):
        return
    row = int(bad.nonzero()[0])
    where = f"row {row}" if positions is None else f"row {row} (position {int(positions[row])})"
    others = [int(r) for r in bad.nonzero()[1:, 0]]
    lines = [
        f"selection is wrong in {int(bad.sum())} of {rows} rows (top {k}), first in {where}, "
        f"which sees {int(visible[row])} entries:"
    ]
    lines += [f"  {line}" for line in _structure(chosen[row], int(visible[row]), int(wanted[row]), entries)]
    lines += [
        f"  {line}"
        for line in _choice(
            keys[row], scores[row], held[row], seen[row], dropped[row], worse[row], float(tau[row]), float(allowed[row])
        )
    ]
    if others:
        lines.append(f"  also wrong: {_listed('row', others)}")
    raise AssertionError("\n".join(lines))


def _structure(chosen: Tensor, visible: int, wanted: int, entries: int) -> list[str]:
    """What is wrong with the places of a row, whatever the scores."""
    lines = []
    taken = [int(entry) for entry in chosen if entry >= 0]
    impossible = [int(entry) for entry in chosen if not -1 <= entry < entries]
    unseen = [entry for entry in taken if visible <= entry < entries]
    twice = sorted({entry for entry in taken if taken.count(entry) > 1})
    if impossible:
        lines.append(f"selects {_listed('entry', impossible)}, of {entries} (0 to {entries - 1}, or -1 for none)")
    if unseen:
        lines.append(f"selects {_listed('entry', unseen)}, which it must not see")
    if twice:
        lines.append(f"selects {_listed('entry', twice)} more than once")
    if len(taken) != wanted:
        lines.append(f"fills {len(taken)} places, expected {wanted}")
    return lines


def _choice(
    keys: Tensor, scores: Tensor, held: Tensor, seen: Tensor, dropped: Tensor, worse: Tensor, tau: float, allowed: float
) -> list[str]:
    """What a row dropped and what it kept instead; of a row with empty places, the best that it left out."""
    out = seen & ~held
    missed = _by_score(keys, dropped, best_first=True)
    if not missed:  # the k-th itself was dropped, or a place is empty
        missed = _by_score(keys, out & (keys.double() >= tau - allowed), best_first=True)[:1]
    lines = []
    if missed:
        lines.append(f"drops entry {missed[0]}: {_judged(keys, scores, seen, missed[0])}")
    kept = _by_score(keys, worse if bool(worse.any()) else held, best_first=False)
    if kept:
        lines.append(f"keeps entry {kept[0]}: {_judged(keys, scores, seen, kept[0])}")
    lower = keys[seen & (keys.double() < tau)]
    margin = f", next lower {float(lower.max()):.9g} (margin {tau - float(lower.max()):.3g})" if len(lower) else ""
    lines.append(f"k-th score {tau:.9g}{margin}; allowed at a tie: {allowed:.3g}")
    count = int(dropped.sum())
    if count > 1:
        lines.append(f"in all it drops {count} that are better than the k-th: {_listed('entry', missed)}")
    return lines


def _by_score(keys: Tensor, chosen: Tensor, *, best_first: bool) -> list[int]:
    found = chosen.nonzero()[:, 0]
    order = keys[found].sort(descending=best_first, stable=True).indices
    return [int(entry) for entry in found[order]]


def _judged(keys: Tensor, scores: Tensor, seen: Tensor, entry: int) -> str:
    rank = int(((keys > keys[entry]) & seen).sum())
    return f"score {float(scores[entry]):.9g}, rank {rank}"


def _listed(what: str, numbers: list[int]) -> str:
    plural = {"entry": "entries", "row": "rows"}[what] if len(numbers) > 1 else what
    more = f", … ({len(numbers)} in all)" if len(numbers) > SHOWN else ""
    return f"{plural} {', '.join(map(str, numbers[:SHOWN]))}{more}"
