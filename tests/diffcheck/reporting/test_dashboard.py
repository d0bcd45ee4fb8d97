"""The dashboard in docs/grafana asks only for metrics and labels that `--metrics` writes."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from diffcheck.reporting.prometheus import CASE_GAUGES, metrics

DOCS = Path(__file__).parents[3] / "docs"
DASHBOARD = json.loads((DOCS / "grafana" / "diffcheck.json").read_text())
PANELS = DASHBOARD["panels"]
EXPRESSIONS = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
FUNCTIONS = {"min", "max", "sum", "count", "sort", "by", "or", "vector", "time"}


@pytest.fixture(scope="module")
def labels(run_document):
    """Every metric that there can be, with its labels: a run that has needles, mass, probes and gates."""
    cases = [case | {"attention_mass_lost": 0.1} for case in run_document["cases"]]
    probe = {"backend": "mine", "entries": 12000, "topk_wrong_rows": 0}
    text = metrics(run_document | {"cases": cases, "probes": [probe]})
    return {family.name: set(family.samples[0].labels) for family in text_string_to_metric_families(text)}


def test_every_case_metric_is_among_them(labels):
    assert {f"diffcheck_{name}" for name in CASE_GAUGES} <= set(labels)


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS, ids=[title for title, _ in EXPRESSIONS])
def test_expressions(labels, title, expression):
    names = re.findall(r"diffcheck_\w+", expression)
    assert names
    for name in names:
        assert name in labels, name
    for name, selector in re.findall(r"(diffcheck_\w+)\{([^}]*)\}", expression):
        for label in re.findall(r"(\w+)[=!]~?", selector):
            assert label in labels[name], f"{name} has no {label}"
    for group in re.findall(r"by \(([^)]*)\) \((diffcheck_\w+)", expression):
        assert set(group[0].split(", ")) <= labels[group[1]]
    assert expression.count("(") == expression.count(")")
    bare = re.sub(r'\{[^}]*\}|"[^"]*"|by \([^)]*\)|diffcheck_\w+', "", expression)
    assert set(re.findall(r"[a-z_]+", bare)) <= FUNCTIONS


def test_legends_use_labels_that_are_left():
    for panel in PANELS:
        for target in panel["targets"]:
            wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            grouped = re.search(r"by \(([^)]*)\)", target["expr"])
            if grouped:
                assert wanted <= set(grouped[1].split(", ")), panel["title"]


def test_variables_and_layout(labels):
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps([panel["targets"] for panel in PANELS])))
    assert used == set(variables) == {"datasource", "checkpoint", "precision"}
    for name in ("checkpoint", "precision"):
        metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variables[name]["definition"]).groups()
        assert label in labels[metric]
    assert len({panel["id"] for panel in PANELS}) == len({panel["title"] for panel in PANELS}) == len(PANELS)
    places = set()
    for panel in PANELS:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        mine = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not places & mine, f"{panel['title']} lies over another panel"
        places |= mine


def test_the_documentation_lists_every_metric(labels):
    listed = set(re.findall(r"^\| `(diffcheck_\w+)`", (DOCS / "monitoring.md").read_text(), flags=re.MULTILINE))
    assert listed == set(labels)
