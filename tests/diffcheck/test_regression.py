"""Two reports: what counts as moved and as worse, which rows are paired, what is said, what is refused."""

import copy
import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from scipy import stats

from diffcheck.errors import InputError
from diffcheck.regression import (
    DEFAULT_TOLERANCE,
    HIGHER_IS_BETTER,
    LOWER_IS_BETTER,
    Report,
    check_comparable,
    compare_reports,
    read_report,
    tolerances,
)
from diffcheck.reporting.schema import load_schema

ROWS = 100


def case(precision="fp8", layer=4, **fields):
    rng = np.random.default_rng(7)
    return {
        "layer": layer, "precision": precision, "theta_setting": "checkpoint", "what_if": False, "backend": "emulated",
        "verdict": "format", "first_stage": "q_quant", "reason": None, "jaccard_tied": 0.9, "jaccard_kernel": 1.0,
        "needles_lost": 0, "topk_wrong_rows": 0, "attention_mass_lost": None, "kernel_error": 0.0, "margin": 3.0,
        "rows": {"jaccard_tied": rng.uniform(0.85, 0.95, ROWS).round(4).tolist()},
    } | fields  # fmt: skip


def report(*cases, name="report", **fields):
    layers = {str(c["layer"]): {"weights": "w", "inputs": "i", "rows": list(range(400, 400 + ROWS))} for c in cases}
    document = {
        "schema_version": 1, "partial": False, "layers": layers, "cases": list(cases),
        "environment": {"diffcheck": "1", "packages": {"torch": "2"}, "device": "cpu"},
        "inputs": {"source": "s", "length": 800}, "checkpoint": {"config": {"index_topk": 64}},
        "recipes": {"fp8 @ checkpoint": {"fields": {"k_theta": 1.0, "eps": 1e-6}}},
    }  # fmt: skip
    return Report(name=name, document=document | fields)


def compared(before, after, what_if=False, **tolerance):
    return compare_reports(before, after, tolerance=DEFAULT_TOLERANCE | tolerance, what_if=what_if)


def regressions(before, after, **options):
    return [(r["field"], r["worse"]) for r in compared(report(before), report(after), **options)["regressions"]]


# -------------------------------------------------------------------------------------------------------- regressions


@pytest.mark.parametrize(
    ("change", "worse"),
    [
        ({"jaccard_tied": 0.8951}, None),
        ({"jaccard_tied": 0.8949}, 0.0051),
        ({"jaccard_tied": 0.99}, None),
        ({"jaccard_kernel": 0.9985}, 0.0015),
        ({"needles_lost": 1}, 1),
        ({"topk_wrong_rows": 3}, 3),
        ({"kernel_error": 9.0, "margin": 0.0}, None),  # no tolerance is set on these
    ],
)
def test_worse_by_more_than_its_tolerance(change, worse):
    found = regressions(case(), case(**change))
    assert found == ([] if worse is None else [(next(iter(change)), pytest.approx(worse))])


def test_exactly_the_tolerance_passes():
    assert regressions(case(jaccard_tied=0.9), case(jaccard_tied=0.8), jaccard_tied=0.1) == []
    assert 0.8 - 0.7 > 0.1, "in floating point"
    assert regressions(case(jaccard_tied=0.8), case(jaccard_tied=0.7), jaccard_tied=0.1) == []
    assert regressions(case(needles_lost=1), case(needles_lost=3), needles_lost=2) == []


def test_better_is_no_regression_in_either_direction():
    assert regressions(case(needles_lost=5), case(needles_lost=0)) == []
    assert regressions(case(kernel_error=0.5), case(kernel_error=0.1), kernel_error=0) == []
    assert regressions(case(kernel_error=0.1), case(kernel_error=0.5), kernel_error=0) == [("kernel_error", 0.4)]


@pytest.mark.parametrize(
    ("change", "field", "after"),
    [
        ({"jaccard_tied": None, "verdict": "failed", "reason": "out of memory"}, "verdict", "failed (out of memory)"),
        ({"jaccard_tied": None, "verdict": "vacuous"}, "verdict", "vacuous"),
        ({"needles_lost": None}, "needles_lost", None),
    ],
)
def test_what_is_no_longer_measured_is_a_regression(change, field, after):
    (found,) = compared(report(case()), report(case(**change)))["regressions"]
    assert (found["field"], found["after"]) == (field, after)
    assert found["case"] == "layer 4 fp8 theta checkpoint"
    other = case("bf16")
    assert compared(report(case(**change), other), report(case(), other))["regressions"] == [], "measured again"


def test_what_if_counts_only_when_asked():
    before, after = (case(what_if=True, jaccard_tied=value) for value in (0.9, 0.1))
    assert regressions(before, after) == []
    assert len(regressions(before, after, what_if=True)) == 1
    assert compared(report(before), report(after))["cases"][0]["moved"], "shown all the same"


def test_moved_is_more_than_a_last_bit():
    def moved(**change):
        return compared(report(case()), report(case(**change)))["cases"][0]["moved"]

    assert not moved(jaccard_tied=math.nextafter(0.9, 1))
    assert not moved(seconds=5.0)
    assert moved(jaccard_tied=0.90001)
    assert moved(attention_mass_lost=0.0)
    assert moved(verdict="kernel")
    assert moved(first_stage=None)


# -------------------------------------------------------------------------------------------------------------- tests


def shifted(by, rows=ROWS, **fields):
    values = case()["rows"]["jaccard_tied"][:rows]
    noise = np.random.default_rng(1).normal(0, 0.01, rows)
    return case(rows={"jaccard_tied": (np.array(values) + by + noise).tolist()}, **fields)


def test_the_test_is_scipys_on_blocks_of_paired_rows():
    (found,) = compared(report(case()), report(shifted(0.002)))["cases"]
    (test,) = found["tests"]
    difference = np.array(shifted(0.002)["rows"]["jaccard_tied"]) - case()["rows"]["jaccard_tied"]
    blocks = difference.reshape(10, 10).sum(1)
    want = stats.permutation_test((blocks,), lambda x, axis: x.sum(axis=axis), permutation_type="samples").pvalue
    assert test["p"] == pytest.approx(want)
    assert test["p_holm"] == test["p"], "the only test"
    assert test["difference"] == pytest.approx(difference.mean())
    assert test["ci"][0] < difference.mean() < test["ci"][1]
    assert (test["rows"], test["blocks"], test["smallest_p"]) == (100, 10, 2**-9)


def test_many_tests_are_adjusted_together():
    names = ["a", "b", "c", "d"]
    before = report(*(case(name) for name in names))
    after = report(case("a"), case("b"), shifted(0.05, precision="c"), case("d"))
    tests = {c["precision"]: c["tests"][0] for c in compared(before, after)["cases"]}
    assert {name: test["p_holm"] for name, test in tests.items()} == {"a": 1.0, "b": 1.0, "c": 4 * 2**-9, "d": 1.0}


def test_only_common_rows_are_paired():
    before, after = report(case()), report(shifted(0.0, 60))
    after.document["layers"]["4"]["rows"] = [*range(350, 380), *range(440, 470)]
    found = compared(before, after)
    (test,) = found["cases"][0]["tests"]
    want = np.array(after.document["cases"][0]["rows"]["jaccard_tied"][30:]) - case()["rows"]["jaccard_tied"][40:70]
    assert test["rows"] == 30
    assert test["difference"] == pytest.approx(want.mean())
    assert "layer 4: 30 query rows in common of 100 and 60; only these are tested" in found["notes"]


def test_rows_without_a_value_are_left_out():
    before, after = case(), shifted(0.0)
    before["rows"]["attention_mass_lost"] = [None] * 40 + [0.1] * 60
    after["rows"]["attention_mass_lost"] = [0.2] * 50 + [0.1] * 49 + [None]
    found = compared(report(before), report(after))["cases"][0]["tests"]
    assert [(t["field"], t["rows"]) for t in found] == [("jaccard_tied", 100), ("attention_mass_lost", 59)]
    assert found[1]["difference"] == pytest.approx(0.1 * 10 / 59)


def test_other_inputs_are_not_paired():
    after = report(shifted(0.0))
    after.document["layers"]["4"]["inputs"] = "other"
    found = compared(report(case()), after)
    assert found["cases"][0]["tests"] == []
    assert "layer 4: other inputs, so rows are not paired and nothing is tested" in found["notes"]


def test_reports_without_rows_are_compared_by_their_numbers():
    old = report(case(), layers={})
    found = compared(old, report(case(jaccard_tied=0.5)))
    assert found["cases"][0]["tests"] == []
    assert "layer 4: no rows in one of the reports, so nothing is tested" in found["notes"]
    assert len(found["regressions"]) == 1


# -------------------------------------------------------------------------------------------------- what is different


@pytest.mark.parametrize(
    ("path", "value", "note"),
    [
        (["environment", "diffcheck"], "2", "diffcheck 1 -> 2"),
        (["environment", "packages", "torch"], "3", "torch 2 -> 3"),
        (["environment", "device"], "gpu", "device cpu -> gpu"),
        (["inputs", "length"], 900, "tokens 800 -> 900"),
        (["checkpoint", "config", "index_topk"], 32, "checkpoint: index_topk 64 -> 32"),
        (["layers", "4", "weights"], "v", "layer 4: other weights"),
        (["recipes", "fp8 @ checkpoint", "fields", "k_theta"], 2.0, "fp8 @ checkpoint: k_theta 1.0 -> 2.0"),
        (["partial"], True, "report is of an interrupted run"),
        (["cases", 0, "backend"], "triton", "backend emulated -> triton"),
    ],
)
def test_differences_are_said(path, value, note):
    after = report(case())
    assert compared(report(case()), after)["notes"] == []
    place = after.document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    assert compared(report(case()), after)["notes"] == [note]


def test_cases_of_one_report_only_are_named():
    found = compared(report(case(), case("bf16")), report(case(), case(layer=2)))
    assert found["only_before"] == ["layer 4 bf16 theta checkpoint"]
    assert found["only_after"] == ["layer 2 fp8 theta checkpoint"]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (case(layer=2), case(), r"a and b: no case in common.*\(layers 2, precisions fp8, thetas checkpoint against "),
        (case("bf16"), case(), "no case in common"),
        (case(theta_setting="10000"), case(), "no case in common"),
        (case(jaccard_tied=None), case(), "a: measured no case of b"),
    ],
)
def test_nothing_to_compare_is_refused(before, after, message):
    with pytest.raises(InputError, match=message):
        compared(report(before, name="a"), report(after, name="b"))
    with pytest.raises(InputError, match=message):
        check_comparable(report(before, name="a"), [after], "b")


# -------------------------------------------------------------------------------------------------------------- input


def test_tolerances_by_precedence():
    found = tolerances(file={"jaccard_tied": 0.1, "margin": 1.0}, command_line=["jaccard_tied=0.2", "seconds = 9"])
    assert found == DEFAULT_TOLERANCE | {"jaccard_tied": 0.2, "margin": 1.0, "seconds": 9.0}
    assert set(DEFAULT_TOLERANCE) <= set(HIGHER_IS_BETTER + LOWER_IS_BETTER)
    assert not set(HIGHER_IS_BETTER) & set(LOWER_IS_BETTER)


@pytest.mark.parametrize("text", ["jaccard", "jaccard=", "jaccard=x", "jaccard=-1", "jaccard=nan", "k=1", "=1", "x=1"])
def test_bad_tolerances(text):
    with pytest.raises(InputError, match="--tolerance"):
        tolerances(file={}, command_line=[text])


def test_a_file_with_a_bad_tolerance_is_named():
    with pytest.raises(InputError, match="tolerance: 'k' has no better and worse"):
        tolerances(file={"k": 1.0}, command_line=[])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 1, "cases": [{}]}', '{"schema_version": 2}'])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"x\.json"):
        read_report(path)
    with pytest.raises(InputError, match="no such file"):
        read_report(Path("nowhere.json"))


def test_a_report_of_several_runs_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(report(case(), case("bf16"), case()).document))
    with pytest.raises(InputError, match="holds layer 4 fp8 theta checkpoint twice, expected the report of one run"):
        read_report(path)
    path.write_text(json.dumps(report(case(), case("bf16")).document))
    assert len(read_report(path).document["cases"]) == 2


# ------------------------------------------------------------------------------------------------------- command line

QUICK = ["--layers", "4", "--queries", "64", "--precision", "fp8,fp4", "--theta", "checkpoint", "--backend", "emulated"]


@pytest.fixture(scope="module")
def made(mini, tmp_path_factory):
    """Reports of a good run, and of one whose "fp8" is another recipe."""
    from typer.testing import CliRunner

    from diffcheck.cli import app

    directory = tmp_path_factory.mktemp("reports")
    recipe = directory / "fp8.toml"
    recipe.write_text('name = "fp8"\nbase = "fp8"\n[replace]\nk_theta = 20000\n')
    other = [*QUICK[:5], "fp4", *QUICK[6:], "--recipe", str(recipe)]
    for name, options in (("good", QUICK), ("bad", other)):
        done = CliRunner().invoke(
            app, ["run", "--checkpoint", str(mini), *options, "--json", str(directory / f"{name}.json")]
        )
        assert done.exit_code == 0, done.output
    return directory


def test_compare_names_the_case_that_became_worse(cli, made, tmp_path):
    out = tmp_path / "moved.json"
    status, printed, _ = cli("compare", made / "good.json", made / "bad.json", "--json", out)
    assert status == 1
    assert "note   fp8 @ checkpoint: k_theta 160000.0 -> 20000.0" in printed
    assert "1 cases moved, 1 did not." in printed
    assert "p: the mean difference over 64 paired rows, signs flipped in 8 blocks" in printed
    assert "Holm over all 2 tests" in printed
    (line,) = [line for line in printed.splitlines() if "jaccard_tied" in line and line.startswith("REGRESSION")]
    assert line.startswith("REGRESSION: layer 4 fp8 theta checkpoint: jaccard_tied 0.8")
    found = json.loads(out.read_text())
    Draft202012Validator(load_schema("compare")).validate(found)
    assert [c["precision"] for c in found["cases"] if c["moved"]] == ["fp8"]
    (test,) = next(c["tests"] for c in found["cases"] if c["precision"] == "fp8")
    assert test["difference"] < 0
    assert test["p_holm"] == 2 * test["p"] < 0.1
    enough = [word.removesuffix(" would have passed") for word in printed.split("; ") if "would have passed" in word]
    enough = [word.split(" would")[0] for word in enough]
    allow = [option for text in enough for option in ("--tolerance", text)]
    status, printed, _ = cli("compare", made / "good.json", made / "bad.json", *allow)
    assert status == 0, printed
    assert "no regression within" in printed


def test_rows_average_to_the_case(made):
    for case in json.loads((made / "good.json").read_text())["cases"]:
        assert set(case["rows"]) == {"jaccard", "jaccard_tied"}
        for name, values in case["rows"].items():
            assert len(values) == case["queries"] == 64
            assert np.mean(values) == pytest.approx(case[name], abs=1e-4)


def test_nothing_moves_between_equal_runs(cli, made):
    status, printed, _ = cli("compare", made / "good.json", made / "good.json")
    assert status == 0
    assert "0 cases moved, 2 did not." in printed
    assert "REGRESSION" not in printed


def test_tolerances_from_a_file(cli, made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    both = ["compare", made / "good.json", made / "bad.json"]
    (tmp_path / "pyproject.toml").write_text(
        "[tool.diffcheck.tolerance]\njaccard_tied = 1\nneedles_lost = 99\nattention_mass_lost = 1"
    )
    assert cli(*both)[0] == 0
    assert cli(*both, "--tolerance", "jaccard_tied=0.01")[0] == 1, "the command line is stronger"


def test_a_baseline_does_it_in_one_step(cli, mini, made, tmp_path):
    out = tmp_path / "out.json"
    run = ["run", "--checkpoint", mini, *QUICK, "--json", out, "--baseline"]
    status, printed, _ = cli(*run, made / "good.json")
    assert status == 0
    assert "0 cases moved, 2 did not." in printed
    document = json.loads(out.read_text())
    Draft202012Validator(load_schema("run")).validate(document)
    Draft202012Validator(load_schema("compare")).validate(document["baseline"])
    assert document["baseline"]["regressions"] == []
    better = copy.deepcopy(json.loads((made / "good.json").read_text()))
    better["cases"][0]["jaccard_tied"] += 0.05
    (tmp_path / "better.json").write_text(json.dumps(better))
    status, printed, _ = cli(*run, tmp_path / "better.json")
    assert status == 1
    assert "REGRESSION: layer 4 fp8 theta checkpoint: jaccard_tied" in printed
    assert cli(*run, tmp_path / "better.json", "--tolerance", "jaccard_tied=0.06")[0] == 0


def test_a_baseline_is_read_before_any_work(cli, mini, made, tmp_path):
    run = ["run", "--checkpoint", mini, *QUICK]
    for options, message in (
        (["--baseline", tmp_path / "none.json"], "none.json: no such file"),
        (["--baseline", made / "good.json", "--layers", "2"], "this run: no case in common"),
        (["--baseline", made / "good.json", "--tolerance", "x=1"], "--tolerance: 'x' has no better"),
        (["--tolerance", "jaccard=1"], "expected --baseline FILE"),
    ):
        status, _, err = cli(*run, *options)
        assert status == 2
        assert message in err
        assert err.count("\n") == 1, "one line, and no progress"


def test_junit_and_headline_name_what_became_worse(cli, mini, made, tmp_path):
    better = json.loads((made / "good.json").read_text())
    better["cases"][1]["jaccard_tied"] += 0.05
    (tmp_path / "better.json").write_text(json.dumps(better))
    out, junit = tmp_path / "out.json", tmp_path / "junit.xml"
    options = ["--baseline", tmp_path / "better.json", "--json", out, "--junit", junit]
    assert cli("run", "--checkpoint", mini, *QUICK, *options)[0] == 1
    sentence = json.loads(out.read_text())["headline"]["sentence"]
    assert sentence.startswith(
        "Worse than the baseline in 1 numbers, first layer 4 fp4 theta checkpoint, jaccard_tied. No fault:"
    )
    suites = {suite.get("name"): suite for suite in ET.parse(junit).getroot()}
    assert set(suites) == {"cases", "baseline"}
    assert [test.find("failure") is not None for test in suites["baseline"].iter("testcase")] == [False, True]
    assert "worse by 0.05" in suites["baseline"].find(".//failure").get("message")
