"""JUnit XML, which CI systems show as tests: one suite a gate, one test case for each case that it could count.

A case that a gate does not count (a what-if theta, refused, without the field) is skipped and says why; a gate that
measured nothing has a failure of its own, as it fails the run. Cases that no gate counted because there is none, or
because they broke off, are a suite of their own, and so is a comparison with a baseline. So there is a failure or an
error exactly where `run` exits with 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any
from xml.etree import ElementTree as ET

from .words import Record, regression_words

_NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(documents: Sequence[Record]) -> str:
    """The results of one or several runs' documents."""
    root = ET.Element("testsuites", name="diffcheck")
    for number, document in enumerate(documents, 1):
        run = f"run {number}: " if len(documents) > 1 else ""
        if document["gates"]:
            for gate in document["gates"]:
                _suite(root, document, f"{run}{gate['gate']}", list(_gate_cases(document, gate)))
            broken = [case for case in document["cases"] if case["verdict"] == "failed"]
            if broken:
                _suite(root, document, f"{run}cases that broke off", list(_plain_cases(broken)))
        else:
            _suite(root, document, f"{run}cases", list(_plain_cases(document["cases"])))
        if "baseline" in document:
            _suite(root, document, f"{run}baseline", list(_baseline_cases(document["baseline"])))
    for name in ("tests", "failures", "errors", "skipped"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    root.set("time", f"{sum(document['seconds'] for document in documents):.3f}")
    ET.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def name_of(case: Record) -> str:
    """What gates call a case."""
    return f"layer {case['layer']} {case['precision']} theta {case['theta_setting']}"


def _suite(root: ET.Element, document: Record, name: str, cases: list[ET.Element]) -> None:
    suite = ET.SubElement(root, "testsuite", name=_clean(name), tests=str(len(cases)))
    for attribute, child in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(attribute, str(sum(case.find(child) is not None for case in cases)))
    suite.set("time", f"{sum(float(case.get('time', '0')) for case in cases):.3f}")
    suite.set("timestamp", document["finished"].split("+")[0])
    properties = ET.SubElement(suite, "properties")
    environment = document["environment"]
    facts = {
        "verdict": document["headline"]["sentence"],
        "checkpoint": document["checkpoint"]["path"],
        "inputs": document["inputs"]["source"],
        "device": environment["device"],
        "diffcheck": environment["diffcheck"],
        "torch": environment["packages"].get("torch") or "",
    }
    for key, value in facts.items():
        ET.SubElement(properties, "property", name=key, value=_clean(value))
    suite.extend(cases)


def _gate_cases(document: Record, gate: Record) -> Iterator[ET.Element]:
    classname = f"diffcheck.{gate['field']}"
    checked = {result["case"]: result for result in gate["checked"]}
    for case in document["cases"]:
        result = checked.pop(name_of(case), None)
        if result is not None:
            yield _checked(classname, result, gate, case.get("seconds"))
        else:
            yield _test(classname, name_of(case), "skipped", _why_skipped(case, gate["field"]))
    for result in checked.values():  # probes
        yield _checked(classname, result, gate, None)
    if not gate["measured"]:
        yield _test(classname, "anything", "failure", "nothing was measured")


def _checked(classname: str, result: Record, gate: Record, seconds: float | None) -> ET.Element:
    if result["passed"]:
        return _test(classname, result["case"], None, "", seconds)
    value = result.get("reason") or f"{gate['field']} {result['value']:.6g}"
    would = f"; {gate['passing']} would have passed" if gate["passing"] else ""
    return _test(classname, result["case"], "failure", f"{value}, expected {gate['gate']}{would}", seconds)


def _plain_cases(cases: Sequence[Record]) -> Iterator[ET.Element]:
    for case in cases:
        if case["verdict"] == "failed":
            outcome, why = "error", str(case["reason"])
        elif case["verdict"] in ("vacuous", "refused"):
            outcome, why = "skipped", _why_skipped(case, "")
        else:
            outcome, why = None, ""
        yield _test("diffcheck.case", name_of(case), outcome, why, case.get("seconds"))


def _baseline_cases(baseline: Record) -> Iterator[ET.Element]:
    worse: dict[str, list[str]] = {}
    for regression in baseline["regressions"]:
        worse.setdefault(regression["case"], []).append(regression_words(regression))
    for case in baseline["cases"]:
        said = worse.get(name_of(case))
        yield _test("diffcheck.baseline", name_of(case), "failure" if said else None, "; ".join(said or ()))


def _why_skipped(case: Record, field: str) -> str:
    if case["verdict"] == "vacuous":
        return "vacuous: no query sees more than k entries"
    if case["verdict"] == "refused" or case.get("reason"):
        return f"{case['verdict']}: {case.get('reason')}"
    if case.get(field) is None:
        return f"no value of {field}"
    return "a what-if theta does not count" if case["what_if"] else "the gate does not apply here"


def _test(classname: str, name: str, outcome: str | None, message: str, seconds: float | None = None) -> ET.Element:
    attributes: dict[str, Any] = {"classname": _clean(classname), "name": _clean(name), "time": f"{seconds or 0:.3f}"}
    test = ET.Element("testcase", attributes)
    if outcome is not None:
        child = ET.SubElement(test, outcome, message=_clean(message))
        if outcome != "skipped":
            child.set("type", classname.removeprefix("diffcheck."))
            child.text = _clean(f"{name}: {message}")
    return test


def _clean(text: str) -> str:
    return _NOT_XML.sub("?", text)
