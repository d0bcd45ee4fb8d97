"""Which gates apply to which case: precedence, precisions, layers, and the files that say so."""

import pytest

from diffcheck.errors import InputError
from diffcheck.gate_rules import GatePlan
from diffcheck.settings import Settings, find_settings


def case(layer=4, precision="fp8", what_if=False, **fields):
    return {
        "layer": layer, "precision": precision, "theta_setting": "10000" if what_if else "checkpoint",
        "what_if": what_if, "verdict": "format", "nonfinite": [],
    } | fields  # fmt: skip


def settings(tmp_path, text):
    path = tmp_path / "diffcheck.toml"
    path.write_text(text)
    return find_settings(path)


@pytest.fixture
def plan(tmp_path):
    """A file with general and special gates, and two on the command line."""
    found = settings(
        tmp_path,
        """
        gates = ["jaccard >= 0.9", "kernel_error <= 1e-5", "needles_lost == 0"]
        [[rule]]
        precision = "fp*"
        gates = ["jaccard >= 0.8"]
        [[rule]]
        precision = ["fp4", "int8"]
        layers = "2, 10-20, 3?"
        gates = ["jaccard >= 0.7", "jaccard <= 0.99"]
        """,
    )
    return GatePlan.of(["kernel_error <= 1", "kernel_error < 0.5"], found, what_if=False)


def texts(plan, what):
    return {applied.gate.text for applied in plan.applying(what)}


@pytest.mark.parametrize(
    ("what", "jaccards"),
    [
        (case(precision="bf16"), {"jaccard >= 0.9"}),
        (case(precision="fp8", layer=2), {"jaccard >= 0.8"}),
        (case(precision="fp4", layer=4), {"jaccard >= 0.8"}),
        (case(precision="fp4", layer=2), {"jaccard >= 0.7", "jaccard <= 0.99"}),
        (case(precision="fp4", layer=10), {"jaccard >= 0.7", "jaccard <= 0.99"}),
        (case(precision="fp4", layer=20), {"jaccard >= 0.7", "jaccard <= 0.99"}),
        (case(precision="fp4", layer=21), {"jaccard >= 0.8"}),
        (case(precision="fp4", layer=35), {"jaccard >= 0.7", "jaccard <= 0.99"}),
        (case(precision="int8", layer=35), {"jaccard >= 0.7", "jaccard <= 0.99"}),
        (case(precision="int8", layer=3), {"jaccard >= 0.9"}),
    ],
)
def test_the_last_rule_that_covers_a_case_counts(plan, what, jaccards):
    assert texts(plan, what) == jaccards | {"kernel_error <= 1", "kernel_error < 0.5", "needles_lost == 0"}


def test_an_equality_bounds_both_sides(tmp_path):
    found = settings(tmp_path, 'gates = ["needles_lost >= 0", "needles_lost <= 2"]')
    assert texts(GatePlan.of(["needles_lost == 1"], found, what_if=False), case()) == {"needles_lost == 1"}
    found = settings(tmp_path, 'gates = ["needles_lost == 0"]')
    assert texts(GatePlan.of(["needles_lost <= 1"], found, what_if=False), case()) == {"needles_lost <= 1"}


def test_recommended_stands_for_gates_that_others_replace(tmp_path):
    plan = GatePlan.of(["recommended"], Settings(), what_if=False)
    every = {"jaccard_kernel>=0.999", "recall_mean>=0.8", "attention_mass_lost<=0.05"}
    assert texts(plan, case()) == every
    found = settings(tmp_path, 'gates = ["recommended"]\n[[rule]]\nprecision = "fp8"\ngates = ["recall_mean>=0.7"]')
    plan = GatePlan.of([], found, what_if=False)
    assert texts(plan, case()) == every - {"recall_mean>=0.8"} | {"recall_mean>=0.7"}
    assert texts(plan, case(precision="bf16")) == every


def test_recommended_leaves_out_only_what_needs_a_text():
    plan = GatePlan.of(["recommended"], Settings(), what_if=False)
    good = case(jaccard_kernel=1.0, recall_mean=0.9)
    assert [(r.gate, r.passed) for r in plan.check([good])] == [
        ("jaccard_kernel>=0.999", True), ("recall_mean>=0.8", True),
    ]  # fmt: skip
    lossy = good | {"attention_mass_lost": 0.06}
    assert [r.passed for r in plan.check([lossy])] == [True, True, False]
    assert [r.passed for r in plan.check([lossy | {"attention_mass_lost": 0.05, "recall_mean": 0.79}])] == [
        True, False, True,
    ]  # fmt: skip
    assert [r.passed for r in plan.check([case()])] == [False, False], "nothing measured must not pass"
    assert [r.passed for r in plan.check([])] == [False, False]
    asked = GatePlan.of(["attention_mass_lost<=0.05"], Settings(), what_if=False)
    assert [r.passed for r in asked.check([good])] == [False], "asked for by name it must be measured"


def test_results_are_of_the_cases_that_a_gate_applies_to(plan):
    cases = [
        case(precision="bf16", jaccard=0.85, kernel_error=0.1, needles_lost=0),
        case(precision="fp8", jaccard=0.85, kernel_error=0.1, needles_lost=None),
        case(precision="fp4", jaccard=0.75, kernel_error=0.6, needles_lost=0),
    ]
    results = {r.gate: r for r in plan.check(cases)}
    assert set(results) == {
        "jaccard >= 0.9", "jaccard >= 0.8", "kernel_error <= 1", "kernel_error < 0.5", "needles_lost == 0",
    }  # fmt: skip
    assert results["jaccard >= 0.9"].failed == ["layer 4 bf16 theta checkpoint: jaccard 0.85"]
    assert results["jaccard >= 0.8"].failed == ["layer 4 fp4 theta checkpoint: jaccard 0.75"]
    assert results["jaccard >= 0.8"].measured == 2
    assert results["jaccard >= 0.8"].source == "diffcheck.toml, rule 1: precision fp*"
    assert results["kernel_error < 0.5"].failed == ["layer 4 fp4 theta checkpoint: kernel_error 0.6"]
    assert results["kernel_error < 0.5"].source == "command line"
    assert results["needles_lost == 0"].measured == 2


def test_a_gate_of_some_cases_is_left_alone_by_a_run_without_them(tmp_path):
    found = settings(tmp_path, '[[rule]]\nprecision = "fp8"\ngates = ["jaccard>=0.9"]')
    plan = GatePlan.of([], found, what_if=False)
    assert plan.check([case(precision="bf16", jaccard=0.1)]) == []
    (result,) = plan.check([case(jaccard=None)])
    assert not result.passed, "there is a case, but nothing was measured"
    (result,) = GatePlan.of(["jaccard>=0.9"], Settings(), what_if=False).check([])
    assert not result.passed


def test_what_if_counts_only_when_asked(tmp_path):
    cases = [case(jaccard=1.0), case(jaccard=0.1, what_if=True)]
    for asked, in_file, passed in ((False, "false", True), (True, "false", False), (False, "true", False)):
        found = settings(tmp_path, f"gate_what_if = {in_file}")
        (result,) = GatePlan.of(["jaccard>=0.9"], found, what_if=asked).check(cases)
        assert result.passed is passed
    (result,) = GatePlan.of(["jaccard>=0.9"], Settings(), what_if=False).check(cases[1:])
    assert result.measured == 0
    assert not result.passed


def test_probes_count_at_general_gates_only(tmp_path):
    probe = {"probe": "clustered scores", "backend": "mine", "entries": 9, "topk_wrong_rows": 4}
    found = settings(
        tmp_path, 'gates = ["topk_wrong_rows<=9"]\n[[rule]]\nprecision = "*"\ngates = ["topk_wrong_rows<=1"]'
    )
    results = GatePlan.of([], found, what_if=False).check([case(topk_wrong_rows=1)], [probe])
    assert [(r.gate, r.measured, r.passed) for r in results] == [
        ("topk_wrong_rows<=9", 1, True),
        ("topk_wrong_rows<=1", 1, True),
    ]


def test_explained(plan):
    lines = plan.explain([case(precision="fp4", layer=2), case(what_if=True)])
    assert lines == [
        "layer 2 fp4 theta checkpoint",
        "  needles_lost == 0  (diffcheck.toml)",
        "  jaccard >= 0.7  (diffcheck.toml, rule 2: precision fp4, int8; layers 2, 10-20, 3?; "
        "instead of jaccard >= 0.8, diffcheck.toml, rule 1: precision fp*)",
        "  jaccard <= 0.99  (diffcheck.toml, rule 2: precision fp4, int8; layers 2, 10-20, 3?)",
        "  kernel_error <= 1  (command line; instead of kernel_error <= 1e-5, diffcheck.toml)",
        "  kernel_error < 0.5  (command line; instead of kernel_error <= 1e-5, diffcheck.toml)",
        "layer 4 fp8 theta 10000: a what-if, gates do not count it (--gate-what-if)",
    ]
    assert GatePlan.of([], Settings(), what_if=False).explain([case()]) == ["layer 4 fp8 theta checkpoint: no gate"]


# -------------------------------------------------------------------------------------------------------------- files


def test_the_nearest_file_upwards_counts(tmp_path):
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    assert find_settings(None, inner).path is None or tmp_path not in find_settings(None, inner).path.parents
    (tmp_path / "pyproject.toml").write_text('[tool.diffcheck]\ngates = ["margin>=1"]')
    assert find_settings(None, inner).path == tmp_path / "pyproject.toml"
    assert find_settings(None, inner).rules[0].gates[0].text == "margin>=1"
    (tmp_path / "diffcheck.toml").write_text("")
    assert find_settings(None, inner).path == tmp_path / "diffcheck.toml", "before pyproject.toml beside it"
    (tmp_path / "a" / "pyproject.toml").write_text("[project]\nname = 'other'")
    assert find_settings(None, inner).path == tmp_path / "diffcheck.toml", "a pyproject.toml without the table is none"
    (tmp_path / "a" / "pyproject.toml").write_text("[tool.diffcheck]\ntolerance = { jaccard = 0.5 }")
    assert find_settings(None, inner).tolerance == {"jaccard": 0.5}


def test_a_broken_pyproject_of_somebody_else_does_not_matter(tmp_path):
    (tmp_path / "diffcheck.toml").write_text("")
    inner = tmp_path / "a"
    inner.mkdir()
    (inner / "pyproject.toml").write_text("[project\n")
    assert find_settings(None, inner).path == tmp_path / "diffcheck.toml"
    (inner / "pyproject.toml").write_text("[tool.diffcheck\n")
    with pytest.raises(InputError, match="not readable as TOML"):
        find_settings(None, inner)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gate = 1", "unknown key 'gate', expected one of gates, gate_what_if, tolerance, rule"),
        ("gates = 'x'", "gates is 'x', expected a list of conditions"),
        ("gates = [1]", "expected a list of conditions"),
        ("gates = ['jaccard']", "gates: 'jaccard', expected FIELD OP NUMBER"),
        ("gates = ['jacard>1']", "gates: unknown field 'jacard'"),
        ("gate_what_if = 1", "gate_what_if is 1, expected true or false"),
        ("tolerance = 1", "tolerance is 1, expected a table of numbers"),
        ("tolerance = {jaccard = true}", "expected a table of numbers"),
        ("rule = 1", r"rule is 1, expected tables \[\[rule\]\]"),
        ("[[rule]]\ngates = []", "rule 1: expected gates, and precision or layers"),
        ("[[rule]]\nlayers = 2", "rule 1: expected gates, and precision or layers"),
        ("[[rule]]\nlayers = 2\ngates=[]\n[[rule]]\nlayer = 2\ngates = []", "rule 2: unknown key 'layer'"),
        ("[[rule]]\nlayers = '4-2'\ngates = []", "rule 1: layers has '4-2', expected a number, a range 4-10"),
        ("[[rule]]\nlayers = 'two'\ngates = []", "rule 1: layers has 'two'"),
        ("[[rule]]\nlayers = 1.5\ngates = []", "rule 1: layers is 1.5, expected names or numbers"),
        ("[[rule]]\nprecision = ''\ngates = []", "rule 1: precision is '', expected names or numbers"),
        ("[[rule]]\nprecision = []\ngates = []", r"rule 1: precision is \[\], expected names or numbers"),
        ("[[rule]]\nlayers = 2\ngates = ['x']", "rule 1: gates: 'x', expected FIELD OP NUMBER"),
        ("a = [", "not readable as TOML"),
    ],
)
def test_bad_files(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        settings(tmp_path, text)


def test_bad_paths(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        find_settings(tmp_path / "none.toml")
    (tmp_path / "pyproject.toml").write_text("[tool.other]")
    with pytest.raises(InputError, match=r"has no table \[tool.diffcheck\]"):
        find_settings(tmp_path / "pyproject.toml")
    (tmp_path / "pyproject.toml").write_text("[tool]\ndiffcheck = 1")
    with pytest.raises(InputError, match="expected a table"):
        find_settings(tmp_path / "pyproject.toml")


# ------------------------------------------------------------------------------------------------------- command line

QUICK = ["--layers", "4", "--queries", "24", "--precision", "reference,fp8", "--theta", "checkpoint,10000"]


def test_run_takes_gates_from_a_file(cli, mini, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = ["run", "--checkpoint", mini, *QUICK]
    (tmp_path / "diffcheck.toml").write_text(
        'gates = ["jaccard_tied>=0.999"]\n[[rule]]\nprecision = "fp8"\ngates = ["jaccard_tied>=0.95"]'
    )
    status, out, _ = cli(*run)
    assert status == 1
    assert f"settings   {tmp_path / 'diffcheck.toml'}" in out
    assert "gate jaccard_tied>=0.999: passed (1 cases)" in out
    (line,) = [line for line in out.splitlines() if "gate jaccard_tied>=0.95: FAILED" in line]
    assert "(1 cases, diffcheck.toml, rule 1: precision fp8; jaccard_tied>=0.8" in line
    would = line.split("; ")[-1].removesuffix(" would have passed)")
    assert cli(*run, "--gate", would)[0] == 0, "the command line is stronger"
    (tmp_path / "other.toml").write_text('gates = ["jaccard_tied>=0.5"]')
    assert cli(*run, "--config", "other.toml")[0] == 0
    assert cli(*run, "--config", "none.toml")[0] == 2


def test_explain_gates_computes_nothing(cli, mini, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "diffcheck.toml").write_text('[[rule]]\nlayers = "4-9"\ngates = ["jaccard_tied>=0.95"]')
    status, out, err = cli(
        "run", "--checkpoint", mini, *QUICK, "--explain-gates", "--gate", "needles_lost==0", "--json", "x.json"
    )
    assert status == 0
    assert out.splitlines()[1:4] == [
        "layer 4 reference theta checkpoint",
        "  jaccard_tied>=0.95  (diffcheck.toml, rule 1: layers 4-9)",
        "  needles_lost==0  (command line)",
    ]
    assert "layer 4 fp8 theta 10000: a what-if" in out
    assert not (tmp_path / "x.json").exists()
    assert err == ""
