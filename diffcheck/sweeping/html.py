"""A sweep as one page: bytes against recall as an SVG, then every recipe in a table. It needs no network."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from .report import TITLES, mixed_lines

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 380, 64, 16, 16, 44
LABEL_GAP = 26.0
STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --soft: #6b6b6b; --line: #d5d5d5; --front: #b3470f; --dot: #2b6cb0;
  --page: #fff }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --soft: #a0a0a0; --line: #3c3c3c; --front: #ffa060;
  --dot: #7fb4ee; --page: #161616 } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 2rem auto;
  max-width: 70rem; padding: 0 1rem }
svg { width: 100%; max-width: 760px; height: auto; display: block }
svg text { fill: var(--soft); font-size: 12px }
svg .axis { stroke: var(--line) } svg .ci { stroke: var(--dot); opacity: .5 } svg .dot { fill: var(--dot) }
svg .front { fill: none; stroke: var(--front); stroke-width: 1.5 } svg .dot.on { fill: var(--front) }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: 13px }
td, th { text-align: right; padding: .2rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap }
td:first-child, th:first-child { text-align: left } tr.on td:first-child { color: var(--front); font-weight: 600 }
pre { white-space: pre-wrap } .soft { color: var(--soft) }
"""


def page(found: dict[str, Any]) -> str:
    """The document of a sweep as HTML, of some 30 kB for 40 recipes."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>diffcheck sweep: {escape(found['checkpoint'])}</title><style>{STYLE}</style></head><body>",
        f"<h1>{len(found['recipes'])} index-key formats on {escape(found['checkpoint'])}</h1>",
        f'<p class="soft">{escape(found["inputs"]["source"])}; {found["inputs"]["rows"]} query rows on layers '
        f"{', '.join(map(str, found['layers']))}; intervals resample {escape(found['inputs']['resampled'])}.</p>",
        *(f"<p>{escape(note)}</p>" for note in found["notes"]),
        f"<pre>{escape(chr(10).join(mixed_lines(found)))}</pre>",
    ]
    for name, front in found["fronts"].items():
        share = "recall" if name == "recall" else f"{name}_share"
        points = [r for r in found["recipes"] if r.get(share) is not None]
        if points:
            ci = "recall_ci" if name == "recall" else f"{name}_ci"
            chosen = {step["name"] for step in front}
            parts += [f"<h2>Bytes an entry against {TITLES[name]}</h2>", _scatter(points, share, ci, chosen)]
    on_front = {step["name"] for step in found["fronts"][found["objective"]]}
    parts += ["<h2>All recipes</h2>", _table(found, on_front), "</body></html>"]
    return "\n".join(parts) + "\n"


def _scatter(points: list[dict[str, Any]], share: str, ci: str, front: set[str]) -> str:
    """Points with their intervals, and the front as steps."""
    most: float = max(p["bytes_per_entry"] for p in points) * 1.06
    low: float = min(min(p[share], (p[ci] or [1.0])[0]) for p in points)
    least, top = max(0.0, low - 0.02), 1.0
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(value: float) -> float:
        return LEFT + width * value / most

    def y(value: float) -> float:
        return TOP + height * (top - value) / (top - least)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="bytes an entry against the share kept">']
    for step in range(6):
        value = least + (top - least) * step / 5
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3f}</text>')
    labelled = -LABEL_GAP
    for size in sorted({p["bytes_per_entry"] for p in points}):
        if x(size) - labelled < LABEL_GAP:
            continue
        labelled = x(size)
        parts.append(f'<text x="{x(size):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{size:g}</text>')
    parts.append(f'<text x="{LEFT + width / 2}" y="{HEIGHT - 8}" text-anchor="middle">bytes an entry</text>')
    chosen = sorted((p for p in points if p["name"] in front), key=lambda p: (p["bytes_per_entry"], p[share]))
    path = " ".join(
        f"{'M' if i == 0 else 'H'}{x(p['bytes_per_entry']):.1f}{' ' if i == 0 else ' V'}{y(p[share]):.1f}"
        for i, p in enumerate(chosen)
    )
    parts.append(f'<path class="front" d="{path} H{WIDTH - RIGHT}"/>')
    for p in points:
        place = x(p["bytes_per_entry"])
        if p[ci]:
            parts.append(f'<line class="ci" x1="{place:.1f}" x2="{place:.1f}" y1="{y(p[ci][0]):.1f}" '
                         f'y2="{y(p[ci][1]):.1f}"/>')  # fmt: skip
        kind = "dot on" if p["name"] in front else "dot"
        parts.append(
            f'<circle class="{kind}" cx="{place:.1f}" cy="{y(p[share]):.1f}" r="4">'
            f"<title>{escape(p['name'])}: {p['bytes_per_entry']:g} B, {p[share]:.4f}</title></circle>"
        )
    return "\n".join([*parts, "</svg>"])


def _table(found: dict[str, Any], front: set[str]) -> str:
    columns = ["recipe", "B", "slots", "rows", "recall", "95 %", "worst layer", "worst row", "p best"]
    shares = [name for name in ("needle", "answers") if any(r.get(f"{name}_count") for r in found["recipes"])]
    heads = "".join(f"<th>{column}</th>" for column in [*columns, *(TITLES[name] for name in shares)])
    rows = []
    for r in sorted(found["recipes"], key=lambda r: (r["bytes_per_entry"], -r["recall"])):
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in _cells(r, found["objective"], shares))
        rows.append(f"<tr{' class=on' if r['name'] in front else ''}>{cells}</tr>")
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _cells(r: dict[str, Any], objective: str, shares: list[str]) -> Iterator[str]:
    yield from (r["name"], f"{r['bytes_per_entry']:g}")
    yield "-" if r["slots_share"] is None else f"{r['slots_share']:+.1%}"
    yield str(max(r["rows_measured"]))
    yield f"{r['recall']:.4f}"
    yield "-" if r["recall_ci"] is None else "{:.4f} to {:.4f}".format(*r["recall_ci"])
    yield f"{r['worst_layer']['recall']:.3f} ({r['worst_layer']['layer']})"
    yield f"{r['worst_row']['recall']:.3f} ({r['worst_row']['layer']}, {r['worst_row']['query']})"
    yield f"{r['probability_best'].get(objective, float('nan')):.2f}"
    for name in shares:
        yield f"{r[f'{name}_kept']}/{r[f'{name}_count']}" if r.get(f"{name}_count") else "-"
