"""The verdict in one sentence for each kind of run, and the words that it is made of."""

import copy
import re

import pytest

from diffcheck.reporting import words


@pytest.fixture
def document(run_document):
    """A document to be changed: the reference and fp8 only, no gates."""
    found = copy.deepcopy(run_document) | {"gates": []}
    found["cases"] = [case for case in found["cases"] if case["precision"] in ("reference", "fp8")]
    return found


def case(document, precision, layer=2):
    return next(c for c in document["cases"] if (c["precision"], c["layer"], c["what_if"]) == (precision, layer, False))


def test_formats_are_no_fault(document):
    found = words.headline(document)
    mine = [case(document, "fp8", layer) for layer in (2, 4)]
    worst = min(mine, key=lambda c: c["jaccard_tied"])
    lost, needles = (sum(c[name] for c in mine) for name in ("needles_lost", "needles_selected_reference"))
    assert found["status"] == "differs"
    assert found["sentence"] == (
        "No fault: only formats and roundings differ, most in fp8, first seen at q_quant, "
        f"losing {lost} of {needles} needles, "
        f"Jaccard {worst['jaccard_tied']:.3f} at worst (layer {worst['layer']})."
    )


def test_same(document):
    document["cases"] = [c for c in document["cases"] if c["precision"] == "reference"]
    assert words.headline(document) == {
        "status": "same", "sentence": "Selects what the reference selects in all 2 cases.",
    }  # fmt: skip


def test_a_what_if_theta_is_no_fault_but_a_declared_one_is(document):
    assert {c["verdict"] for c in document["cases"] if c["what_if"]} == {"config"}
    assert words.headline(document)["status"] == "differs"
    for each in document["cases"]:
        each["what_if"] = False
    found = words.headline(document)
    assert found["status"] == "fault"
    assert re.match(r"Wrong setting: \w+ runs theta 10000 instead of 160000, first seen at", found["sentence"])


def test_a_kernel_comes_before_a_setting(run_document):
    document = copy.deepcopy(run_document)
    meaning = "top-k drops winners: a dropped entry scores more than a kept one"
    broken = {"verdict": "kernel", "jaccard_kernel": 0.25, "backend": "mine"}
    finding = {"stage": "topk", "cause": "topk_drop", "meaning": meaning, "rows": 3}
    case(document, "fp8", 4).update(broken, findings=[finding])
    found = words.headline(document)
    assert found["status"] == "fault"
    assert found["sentence"] == (
        "Gate jaccard_tied>=0.9 failed. Kernel fault: fp8 on mine departs from its own recipe in layer 4 "
        f"(Jaccard 0.250 with it in layer 4): {meaning}."
    )
    step = {"step": "keys", "backend": "mine", "isolated": {"equal": 0.5}, "cumulative": {"equal": 0.5}}
    right = {"step": "queries", "backend": "mine", "isolated": {"equal": 1.0}, "cumulative": {"equal": 1.0}}
    case(document, "fp8", 4).update(findings=[], steps=[right, step])
    assert words.headline(document)["sentence"].endswith("in layer 4): worst step keys by mine.")


def test_nothing_measured(document):
    for each in document["cases"]:
        each.update(verdict="vacuous", jaccard_tied=None)
    assert words.headline(document) == {
        "status": "untested",
        "sentence": "Nothing was tested: no query sees more than k entries, so everything is selected.",
    }
    document["cases"][0].update(verdict="refused", reason="no such format")
    assert words.headline(document)["sentence"] == "Nothing was compared: no such format."
    document["cases"] = []
    assert words.headline(document)["sentence"] == "Nothing was compared: no case was finished."


def test_probes_and_proxies_are_named(document):
    counts = dict.fromkeys(("count", "unique", "in_range", "causal", "order", "unrepeatable", "tied"), 0)
    document["probes"] = [
        {"probe": "clustered scores", "backend": "mine", "rows": 4, "entries": 262144, "k": 512, "wrong_values": 9,
         "topk_wrong_rows": 4, "causes": ["topk_drop"]} | counts,
    ]  # fmt: skip
    document["inputs"]["proxy"] = True
    found = words.headline(document)
    assert found["status"] == "fault"
    assert found["sentence"].startswith("PROXY inputs, not hidden states. No fault: only formats")
    assert "; probe: mine top-k, 4 x 262144 clustered scores, k 512: WRONG, top-k drops winners" in found["sentence"]


def test_what_failed_is_no_success(document):
    """A gate, a broken-off case, an interrupt or a regression: none of them may look like `same` or `differs`."""
    document["cases"] = [c for c in document["cases"] if c["precision"] == "reference"]
    assert words.headline(document)["status"] == "same"
    gate = {"gate": "jaccard>=2", "passed": False}
    assert words.headline(document | {"gates": [gate]})["status"] == "failed"
    assert words.headline(document | {"partial": True})["status"] == "failed"
    regression = {"case": "layer 2 reference theta checkpoint", "field": "jaccard_tied"}
    found = words.headline(document | {"baseline": {"regressions": [regression]}})
    assert found["status"] == "failed"
    assert found["sentence"].startswith(
        "Worse than the baseline in 1 numbers, first layer 2 reference theta checkpoint"
    )
    broken = document["cases"][0] | {"verdict": "failed", "jaccard_tied": None, "reason": "out of memory"}
    found = words.headline(document | {"cases": [broken, *document["cases"][1:]]})
    assert found["status"] == "failed"
    assert found["sentence"].startswith("1 of 4 cases failed: out of memory. Selects what the reference selects")


def test_differences_join_the_two_sides():
    reference = {"q_theta": 160000.0, "k_theta": 160000.0, "q_fp4": True, "k_fp4": True, "k_yarn": {"factor": 16.0}}
    replaced = {"q_theta": 10000.0, "k_theta": 10000.0, "k_fp4": False, "k_yarn": None}
    assert words.differences(replaced, reference) == [
        ("theta", "10000", "160000"), ("k_fp4", "off", "on"), ("k_yarn", "none", "factor 16"),
    ]  # fmt: skip
    assert words.differences({"q_theta": 1.0, "k_theta": 2.0}, reference) == [
        ("q_theta", "1", "160000"), ("k_theta", "2", "160000"),
    ]  # fmt: skip
    sides = {"q_format": "bf16", "k_format": "fp16"}  # the same value replaces different ones
    assert words.differences({"q_format": "e4m3", "k_format": "e4m3"}, sides) == [
        ("q_format", "e4m3", "bf16"), ("k_format", "e4m3", "fp16"),
    ]  # fmt: skip


def test_many_layers_are_counted():
    assert words.layers_of([{"layer": 4}, {"layer": 2}, {"layer": 4}]) == "layer 2, 4"
    assert words.layers_of([{"layer": n} for n in range(8)]) == "layer 0, 1, 2, 3, 4, 5, 6, 7"
    assert words.layers_of([{"layer": n} for n in range(9)]) == "9 layers"
