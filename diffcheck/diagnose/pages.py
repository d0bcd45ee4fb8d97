"""Cache pages: which layout they are in, and whether every entry is the one that belongs there.

Keys are known up to quantisation from the trace's x, so each layout is tried and the one under which entries point the
way they should (cosine with the expected key, median over entries) is the one the pages were written in. Under it each
entry is compared: rows of zero bytes were never written (or, where it is the pages with the highest numbers, were
written elsewhere: an offset that overflowed); entries that match another place of the same page were permuted; pages
that match another layer's keys are that layer's; pages that match nothing while others do are stale.

What is right is then handed on as the deployment's k_quant, so that a wrong theta or scale rule is found from pages
alone. A fingerprint says what the bytes themselves tell: power-of-two scales, and whether values lie on the grid of an
FP4 step. Letters: E entries, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..pipeline import Pipeline
from ..recipe import Recipe
from ..refimpl.compressor import WINDOW
from ..refimpl.formats import fp4_step
from .evidence import Evidence
from .layouts import PLANAR, Layout, decode, layouts_of

PAGE = 64
FITS = 0.3
"""Median cosine from which a layout holds the expected keys, even if theta is wrong: chance is 0 +- 0.1."""
FITS_IN_PAGE = 0.8
"""The same of the best match in an entry's page: chance is 0.5 where keys are alike."""
CLEAR = 0.25
"""How much better another place must match before an entry is said to belong there."""


@dataclass(slots=True, kw_only=True)
class PageReport:
    """What pages show. keys: fp32 [E, D] in the layout that fits; known: bool [E], entries that are as they should be.

    others: keys in the other layouts, for a reader that was wrong about the layout. faults: (cause, value, where,
    entries) each.
    """

    layout: Layout | None
    keys: Tensor | None
    known: Tensor
    others: dict[str, Tensor] = field(default_factory=dict)
    faults: list[tuple[str, str, str, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


Foreign = Callable[[], list[tuple[int, Tensor]]]
"""() -> (layer, expected keys fp32 [E of this call, D]) of other layers."""


def read_pages(evidence: Evidence, pipeline: Pipeline, recipe: Recipe, foreign: Foreign) -> PageReport:
    """Judge the pages of a trace. InputError for a page size that no layout has."""
    pages, slots = evidence.pages, evidence.slots
    assert pages is not None, "the caller has pages"
    assert slots is not None, "slots come with pages"
    where, slots = _physical(pages, slots)
    entries = len(slots)
    first = evidence.start // WINDOW
    there = slots >= 0
    judged = there & (torch.arange(entries) >= evidence.first_known)
    # pages of nothing but zeros say nothing about the layout
    telling = judged & pages[slots.clamp_min(0) // PAGE].ne(0).any(1)
    telling = telling if bool(telling.any()) else judged
    candidates = layouts_of(pages.shape[1])
    decoded = {layout.name: decode(pages, slots.clamp_min(0), layout) for layout in candidates}
    with pipeline.scratch():
        expected = {
            name: _placed(pipeline.stage(recipe, name).float(), first, entries) for name in ("k_hadamard", "k_rope")
        }

    def closest(keys: Tensor) -> Tensor:
        return max((_cosine(keys, x) for x in expected.values()), key=lambda c: _median(c, telling))

    cosines = {name: closest(keys) for name, (keys, _) in decoded.items()}
    best = max(candidates, key=lambda layout: _median(cosines[layout.name], telling))
    own = _median(cosines[best.name], telling)
    fit: Callable[[Tensor, Tensor], Tensor] = _cosine
    if own < FITS:
        # where every page is out of order a key's own place is left to chance, but its page is not
        fit = _best_in_page
        paged = {n: max(_median(fit(d[0], x), telling) for x in expected.values()) for n, d in decoded.items()}
        best = max(candidates, key=lambda layout: paged[layout.name])
        if paged[best.name] < FITS_IN_PAGE:
            return _nothing_fits(decoded, candidates, judged, foreign, first, entries)
    keys, scales = decoded[best.name]
    target = max(expected.values(), key=lambda x: _median(fit(keys, x), telling))
    report = PageReport(
        layout=best, keys=keys, known=judged.clone(),
        others={n: d[0] for n, d in decoded.items() if n != best.name},
    )  # fmt: skip
    declared = (evidence.page_format or "").lower()
    if best.order != PLANAR and not all(word in declared for word in best.order.lower().split()[:1]):
        text = f"pages hold {best.name} keys where planar ones are expected"
        report.faults.append(("page_layout", best.name, text, int(judged.sum())))
    report.notes.append(
        f"pages: {best.name}, median cosine with the expected keys {own:.3f}; "
        f"{_fingerprint(keys[judged], scales, judged)}"
    )
    _check_entries(report, pages, slots, where, keys, target, cosines[best.name], foreign, first)
    return report


def _physical(pages: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """(page numbers for the report, slots into the dump): a dump may hold only the pages of this request, in order."""
    where = slots // PAGE
    if len(slots) and int(slots.max()) >= pages.shape[0] * PAGE:
        logical = torch.arange(len(slots))
        if pages.shape[0] * PAGE >= len(slots):
            return where, torch.where(slots >= 0, logical // PAGE * PAGE + slots % PAGE, -1)
        slots = torch.where(slots < pages.shape[0] * PAGE, slots, -1)
    return where, slots


def _placed(keys: Tensor, first: int, entries: int) -> Tensor:
    """Keys of this call in their places among all entries; NaN before."""
    out = torch.full((entries, keys.shape[1]), torch.nan)
    out[first : first + len(keys)] = keys
    return out


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of each row, 0 where a row is no vector."""
    product = (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1)).clamp_min(1e-30)
    return torch.where(product.isfinite(), product, 0.0)


def _median(cosine: Tensor, judged: Tensor) -> float:
    return float(cosine[judged].median()) if bool(judged.any()) else 0.0


def _fingerprint(keys: Tensor, scales: Tensor | None, judged: Tensor) -> str:
    parts = []
    if scales is not None:
        used = scales[judged]
        used = used[used > 0]
        powers = torch.frexp(used)[0] == 0.5
        parts.append("scales are powers of two" if len(used) and bool(powers.all()) else "scales are no powers of two")
    on_grid = (fp4_step(keys) == keys).all(1)
    share = float(on_grid[keys.abs().amax(1) > 0].float().mean()) if len(keys) else 0.0
    parts.append(
        f"{share:.0%} of the entries lie on the e2m1 grid" + (": the FP4 step was applied" if share > 0.9 else "")
    )
    return ", ".join(parts)


def _nothing_fits(
    decoded: dict[str, tuple[Tensor, Tensor | None]],
    candidates: list[Layout],
    judged: Tensor,
    foreign: Foreign,
    first: int,
    entries: int,
) -> PageReport:
    """No layout holds this layer's keys: another layer's, or none that is known."""
    report = PageReport(layout=None, keys=None, known=torch.zeros(entries, dtype=torch.bool))
    count = int(judged.sum())
    best: tuple[float, int, str] = (FITS, -1, "")
    for layer, keys in foreign():
        target = _placed(keys, first, entries)
        for layout in candidates:
            best = max(best, (_median(_cosine(decoded[layout.name][0], target), judged), layer, layout.name))
    if best[1] >= 0:
        text = f"pages hold layer {best[1]}'s keys ({best[2]}, median cosine {best[0]:.2f})"
        report.faults.append(("foreign_layer", str(best[1]), text, count))
    elif all(float(d[0][judged].abs().nan_to_num(1.0).max()) == 0 for d in decoded.values()):
        report.faults.append(("stale_page", "zeros", "no page was ever written: all bytes are zero", count))
    else:
        report.faults.append(("stale_page", "all", "no page holds this layer's keys in any known layout", count))
    return report


def _check_entries(
    report: PageReport,
    pages: Tensor,
    slots: Tensor,
    where: Tensor,
    keys: Tensor,
    target: Tensor,
    cosine: Tensor,
    foreign: Foreign,
    first: int,
) -> None:
    """Entries that are zero, in another place, of another layer, or of nothing that is known."""
    judged = report.known.clone()
    zero = judged & (keys == 0).all(1) & (target.nan_to_num(0).abs().amax(1) > 0)
    value = _best_in_page(keys, target)
    # not the median at the entries' own places: where every page is permuted, that is chance
    typical = _median(value, judged & ~zero)
    moved = judged & ~zero & (value > cosine + CLEAR) & (value > 0.7 * typical)
    poor = judged & ~zero & ~moved & (cosine < min(0.5 * typical, typical - CLEAR))
    report.known &= ~zero & ~poor
    if bool(moved.any()):
        text = f"{int(moved.sum())} entries stand in another slot of their page, first {int(torch.nonzero(moved)[0])}"
        report.faults.append(("page_layout", "permuted within pages", text, int(moved.sum())))
        # in a page out of order the other entries cannot be judged either
        spoilt = torch.isin(where, where[moved].unique())
        report.known &= ~spoilt
        zero, poor = zero & ~spoilt, poor & ~spoilt
    if bool(poor.any()):
        mine, unit = (torch.nn.functional.normalize(x.nan_to_num(0.0), dim=1) for x in (keys[poor], target))
        value, place = (mine @ unit.T).max(1)
        found = value > torch.maximum(cosine[poor] + CLEAR, torch.tensor(0.7 * typical))
        rest = torch.nonzero(poor).flatten()
        _strangers(report, rest, place, found, where, keys, foreign, first, judged)
    _zeros(report, where, zero, judged)


def _best_in_page(keys: Tensor, target: Tensor) -> Tensor:
    """Cosine [E] of each entry with the closest of all expected keys of its page."""
    padding = (0, 0, 0, -len(keys) % PAGE)
    mine, expected = (
        torch.nn.functional.pad(torch.nn.functional.normalize(x.nan_to_num(0.0), dim=1), padding)
        for x in (keys, target)
    )
    pages, places = (x.unflatten(0, (-1, PAGE)) for x in (mine, expected))
    best: Tensor = (pages @ places.transpose(1, 2)).amax(2)
    return best.flatten()[: len(keys)]


def _zeros(report: PageReport, where: Tensor, zero: Tensor, judged: Tensor) -> None:
    if not bool(zero.any()):
        return
    bad, good = where[zero].unique(), where[judged & ~zero].unique()
    whole = not bool(torch.isin(bad, good).any())
    listed = ", ".join(map(str, bad[:6].tolist()))
    text = f"{int(zero.sum())} entries are zero, in pages {listed}"
    beyond = whole and len(good) and int(bad.min()) > int(good.max())
    report.faults.append(
        ("page_offset" if beyond else "stale_page", f"pages from {int(bad.min())}" if beyond else "zeros",
         text + (": all pages from there on" if beyond else ": never written"), int(zero.sum()))
    )  # fmt: skip


def _strangers(
    report: PageReport,
    rest: Tensor,
    place: Tensor,
    found: Tensor,
    where: Tensor,
    keys: Tensor,
    foreign: Foreign,
    first: int,
    judged: Tensor,
) -> None:
    """Entries that belong to no place of their own page."""
    bad = where[rest].unique()
    for layer, other in foreign():
        target = _placed(other, first, len(keys))
        cosine = _cosine(keys[rest], target[rest])
        if float(cosine.median()) > FITS:
            text = f"{len(rest)} entries hold layer {layer}'s keys, in pages {', '.join(map(str, bad[:6].tolist()))}"
            report.faults.append(("foreign_layer", str(layer), text, len(rest)))
            return
    good = where[judged & ~torch.isin(where, bad)].unique()
    listed = ", ".join(map(str, bad[:6].tolist()))
    shuffled = bool((where[1:].diff() < 0).any())
    if shuffled and len(bad) > 1 and len(good) and int(bad.min()) > int(good.max()):
        text = f"{len(rest)} entries match nothing, in all pages from {int(bad.min())} on"
        report.faults.append(("page_offset", f"pages from {int(bad.min())}", text, len(rest)))
        return
    text = f"{len(rest)} entries in pages {listed} are not this text's"
    if bool(found.any()):
        text += f"; some match entries {int(place[found].min())} to {int(place[found].max())}"
    report.faults.append(("stale_page", f"pages {listed}", text, len(rest)))
