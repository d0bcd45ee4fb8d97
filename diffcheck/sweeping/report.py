"""What a sweep prints: the fronts, what each step along them gains, and a format for each layer."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

TITLES = {"recall": "recall", "needle": "needle survival", "answers": "answers kept"}


def render(console: Console, found: dict[str, Any], *, every: bool = False) -> None:
    """Print the document of a sweep; every: all recipes, not only those on a front."""

    def line(text: str = "") -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    line(f"checkpoint {found['checkpoint']}")
    line(f"inputs     {found['inputs']['source']}; {found['inputs']['rows']} query rows a layer")
    line(
        f"measured   {len(found['recipes'])} recipes on layers {', '.join(map(str, found['layers']))}, "
        f"rungs of {', '.join(map(str, found['rungs']))} rows: {found['cases']['measured']} cases in "
        f"{found['seconds']:.1f} s" + (f", {found['cases']['kept']} found" if found["cases"]["kept"] else "")
    )
    line(f"intervals  95 %, resampling {found['inputs']['resampled']}")
    for note in found["notes"]:
        line(f"note       {note}")
    recipes = {record["name"]: record for record in found["recipes"]}
    for name, front in found["fronts"].items():
        line()
        line(f"Pareto front of bytes an entry against {TITLES[name]}:")
        console.print(_table(name, _merged(front, recipes, name), recipes))
    if every:
        line()
        line("all recipes, by bytes and recall:")
        rest = [
            {"name": r["name"], "gain": None, "over": None}
            for r in sorted(found["recipes"], key=lambda r: (r["bytes_per_entry"], -r["recall"]))
        ]
        console.print(_table("recall", rest, recipes))
    line()
    line(LEGEND)
    line()
    for text in mixed_lines(found):
        line(text)


LEGEND = (
    "recall: share of the reference's selection that is kept, ties forgiven, mean over rows and layers.\n"
    "rows: measured in a layer. worst layer: its mean; worst row: its layer and query position.\n"
    "p best: probability that no recipe of at most its bytes is better.\n"
    "gain: over the cheaper recipe before it on the front, paired. slots: gained against e4m3/128/fp32."
)


def _merged(front: list[dict[str, Any]], recipes: dict[str, dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The front with one line for recipes of equal bytes, share and recall; `equal` says how many more there are."""
    merged: list[dict[str, Any]] = []
    for step in front:
        key = [recipes[step["name"]].get(k) for k in ("bytes_per_entry", "recall", f"{name}_share", "rows_measured")]
        if merged and merged[-1]["key"] == key:
            merged[-1]["equal"] += 1
        else:
            merged.append(step | {"key": key, "equal": 0})
    return merged


def _table(objective: str, front: list[dict[str, Any]], recipes: dict[str, dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1))
    shown = [recipes[step["name"]] for step in front]
    optional = {
        "needles": any(r.get("needle_count") for r in shown),
        "answers": any(r.get("answers_count") for r in shown),
        "slots": any(r["slots_share"] is not None for r in shown),
        "logits": any(r["logits"] for r in shown),
    }
    columns = ["recipe", "B", "slots", "rows", "recall", "95 %", "worst layer", "worst row", "needles", "answers"]
    columns += ["p best", "gain", "logits"]
    kept = [c for c in columns if optional.get(c, True)]
    for column in kept:
        table.add_column(column, justify="left" if column == "recipe" else "right", no_wrap=True)
    for step, record in zip(front, shown, strict=True):
        cells = _cells(objective, step, record)
        table.add_row(*(cells[column] for column in kept))
    return table


def _cells(objective: str, step: dict[str, Any], record: dict[str, Any]) -> dict[str, str]:
    rows, worst, row = sorted(set(record["rows_measured"])), record["worst_layer"], record["worst_row"]
    logits = record["logits"]
    return {
        "recipe": record["name"] + (f" (and {step['equal']} equal)" if step.get("equal") else ""),
        "B": f"{record['bytes_per_entry']:g}",
        "slots": "-" if record["slots_share"] is None else f"{record['slots_share']:+.1%}",
        "rows": f"{rows[0]}" if len(rows) == 1 else f"{rows[0]}-{rows[-1]}",
        "recall": f"{record['recall']:.4f}",
        "95 %": _interval(record["recall_ci"]),
        "worst layer": f"{worst['recall']:.3f} ({worst['layer']})",
        "worst row": f"{row['recall']:.3f} ({row['layer']}, {row['query']})",
        "needles": _kept(record, "needle"),
        "answers": _kept(record, "answers"),
        "p best": f"{record['probability_best'].get(objective, float('nan')):.2f}",
        "gain": "-" if step["gain"] is None else f"{step['gain']:+.4f} {_interval(step['gain_ci'])}".rstrip(),
        "logits": _speed(logits),
    }


def _speed(logits: dict[str, Any] | None) -> str:
    if logits is None:
        return "-"
    if logits.get("ms") is None:
        return str(logits["reason"])
    return f"{logits['ms']:.4f} ms {logits['tb_s']:.2f} TB/s"


def _kept(record: dict[str, Any], name: str) -> str:
    if not record.get(f"{name}_count"):
        return "-"
    return f"{record[f'{name}_kept']}/{record[f'{name}_count']} {_interval(record[f'{name}_ci'])}".rstrip()


def _interval(ci: list[float] | None) -> str:
    return "" if ci is None else f"[{ci[0]:.4f}, {ci[1]:.4f}]"


def mixed_lines(found: dict[str, Any]) -> list[str]:
    """The proposal of a format for each layer, in words."""
    mixed, recipes = found["mixed"], {record["name"]: record for record in found["recipes"]}
    lines = [f"cheapest format for each layer whose recall lies above {found['floor']:g} (lower end of its interval):"]
    by_format = sorted(mixed["by_layer"].items(), key=lambda item: (recipes[item[1]]["bytes_per_entry"], item[1]))
    for name, layers in groupby(by_format, key=lambda item: item[1]):
        numbers = sorted(int(layer) for layer, _ in layers)
        lines.append(f"  {name} ({recipes[name]['bytes_per_entry']:g} B): layers {', '.join(map(str, numbers))}")
    if mixed["below_floor"]:
        lines.append(
            f"  no format reaches it in layers {', '.join(map(str, mixed['below_floor']))}: the best one there"
        )
    uniform = mixed["uniform"]
    one = "none reaches it in every layer" if uniform is None else (
        f"{uniform['name']}, {uniform['bytes_per_entry']:g} B, recall {uniform['recall']:.4f}"
    )  # fmt: skip
    lines.append(
        f"  in all {mixed['bytes_per_entry']:.1f} B an entry, {mixed['bytes_per_context'] / 1e9:.3f} GB for 524,288 "
        f"tokens, recall {mixed['recall']:.4f}; one format for all layers: {one}"
    )
    return lines
