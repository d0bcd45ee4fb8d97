"""A summary in Markdown for a job's page or a comment on a pull request: short, with the rest folded away.

What is folded is cut to the worst rows, so that the whole stays below the 65,536 characters of a GitHub comment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .aggregate import Group, groups
from .html import STATUS
from .words import Record, error, is_measured, number, regression_words, step_lines

MOST_ROWS = 40
MOST_FAILURES = 10
COLUMNS = (
    "precision", "tokens", "verdict", "needles lost", "head kept", "tail kept", "Jaccard, tied (worst layer)",
    "J with own recipe", "format error", "kernel error", "first stage",
)  # fmt: skip


def markdown(document: Record) -> str:
    """The summary of a run's document (or of a merged one)."""
    headline = document["headline"]
    lines = [f"### diffcheck: {STATUS[headline['status']].lower()}", "", cell(headline["sentence"]), ""]
    if document["gates"]:
        lines += _gates(document["gates"])
    regressions = [regression_words(found) for found in document.get("baseline", {}).get("regressions", ())]
    if regressions:
        shown = regressions[:MOST_FAILURES]
        more = [f"and {len(regressions) - len(shown)} more"] if len(regressions) > len(shown) else []
        lines += ["Worse than the baseline:", "", *(f"- {cell(line)}" for line in shown + more), ""]
    whole = groups(document["cases"])
    what_if = {case["theta_setting"] for case in document["cases"] if case["what_if"]}
    lines += _table(COLUMNS, [_row(group) for group in whole if group.theta not in what_if])
    extra = [[f"{g.precision}, theta {g.theta}", *_row(g)[1:]] for g in whole if g.theta in what_if]
    lines += _folded("What if theta were another", COLUMNS, extra)
    lines += _folded("Worst layers", ("case", "Jaccard, tied", "verdict", "first stage"), _worst(document["cases"]))
    words = [*step_lines(document), *document["notes"]]
    if words:
        lines += ["<details><summary>Steps and notes</summary>", "", *(f"- {cell(word)}" for word in words[:MOST_ROWS])]
        lines += ["", "</details>", ""]
    environment = document["environment"]
    torch = environment["packages"].get("torch")
    lines.append(
        f"{len(document['cases'])} cases, inputs: {cell(document['inputs']['source'])}. "
        f"diffcheck {environment['diffcheck']}, torch {torch}, {cell(environment['device'])}, {document['finished']}."
    )
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    """Text that may stand in a table cell: one line, no markup of its own."""
    text = " ".join(text.split())
    for character, safe in (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|"), ("`", "\\`"), ("*", "\\*"), ("[", "\\[")):
        text = text.replace(character, safe)
    return text.replace("_", "\\_")


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    head = [f"| {' | '.join(columns)} |", f"|{'--|' * len(columns)}"]
    return [*head, *(f"| {' | '.join(map(cell, row))} |" for row in rows), ""]


def _folded(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    shown = f"{title}, {MOST_ROWS} of {len(rows)} rows" if len(rows) > MOST_ROWS else title
    return [f"<details><summary>{shown}</summary>", "", *_table(columns, rows[:MOST_ROWS]), "</details>", ""]


def _gates(gates: Sequence[Record]) -> list[str]:
    rows = []
    for gate in gates:
        failed = gate["failed"][:MOST_FAILURES]
        more = [f"and {len(gate['failed']) - len(failed)} more"] if len(gate["failed"]) > len(failed) else []
        said = "; ".join(failed + more) or ("" if gate["measured"] else "nothing was measured")
        result = "passed" if gate["passed"] else "FAILED"
        rows.append([gate["gate"], result, str(gate["measured"]), gate["passing"] or "", said])
    return _table(("gate", "result", "cases", "would have passed", "failed in"), rows)


def _row(group: Group) -> list[str]:
    head = [group.precision, str(group.length), group.verdict]
    if group.jaccard_tied is None:
        return head + [""] * (len(COLUMNS) - len(head))
    return [
        *head,
        f"{group.needles_lost} of {group.needles_selected_reference}",
        *map(number, (group.head, group.tail, group.jaccard_tied, group.jaccard_kernel)),
        *map(error, (group.format_error, group.kernel_error)),
        group.first_stage or "-",
    ]


def _worst(cases: Sequence[Record]) -> list[list[str]]:
    known = sorted((case for case in cases if is_measured(case)), key=lambda case: case["jaccard_tied"])
    return [
        [
            f"layer {c['layer']}, {c['precision']}, theta {c['theta_setting']}, {c['length']} tokens",
            number(c["jaccard_tied"]),
            c["verdict"],
            c["first_stage"] or "-",
        ]
        for c in known
        if c["verdict"] != "same"
    ]
