"""Markdown, JUnit XML and Prometheus metrics: valid, complete, and with the document's numbers."""

import copy
import json
import math
import re
from xml.etree import ElementTree as ET

import pytest
from prometheus_client.parser import text_string_to_metric_families

from diffcheck.reporting.junit import junit
from diffcheck.reporting.markdown import cell, markdown
from diffcheck.reporting.merge import merge
from diffcheck.reporting.prometheus import CASE_GAUGES, metrics

COMMENT_LIMIT = 65_536


def tables(text):
    found, rows = [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            rows.append([part.strip() for part in re.split(r"(?<!\\)\|", line)[1:-1]])
        elif rows:
            found.append(rows)
            rows = []
    return found


class TestMarkdown:
    def test_tables(self, run_document):
        gates, worst, what_if, layers = tables(markdown(run_document))
        for table in (gates, worst, what_if, layers):
            assert len({len(row) for row in table}) == 1
            assert set(table[1]) == {"--"}
        assert gates[2][:3] == ["jaccard\\_tied>=0.9", "FAILED", "8"]
        assert gates[3][:3] == ["jaccard\\_kernel>=0.999", "passed", "8"]
        by_name = {row[0]: dict(zip(worst[0], row, strict=True)) for row in worst[2:]}
        assert list(by_name) == ["reference", "fp8", "fp4", "q-only-hadamard"]
        for precision, row in by_name.items():
            mine = [c for c in run_document["cases"] if c["precision"] == precision and not c["what_if"]]
            assert row["Jaccard, tied (worst layer)"] == f"{min(c['jaccard_tied'] for c in mine):.3f}"
            needles = sum(c["needles_selected_reference"] for c in mine)
            assert row["needles lost"] == f"{sum(c['needles_lost'] for c in mine)} of {needles}"
        assert [row[0] for row in what_if[2:]] == [f"{name}, theta 10000" for name in by_name]
        assert "q-only-hadamard" in layers[2][0]

    def test_begins_with_the_verdict_and_folds(self, run_document):
        text = markdown(run_document)
        first, _, sentence, *_ = text.splitlines()
        assert first == "### diffcheck: fault"
        assert sentence.startswith("Gate jaccard\\_tied>=0.9 failed. Wrong setting: q-only-hadamard runs")
        assert text.count("<details>") == text.count("</details>") == 2

    def test_regressions_are_listed(self, run_document):
        worse = {"case": "layer 2 fp8 theta checkpoint", "field": "jaccard_tied", "before": 0.9, "after": 0.5,
                 "worse": 0.4, "tolerance": 0.005, "passing": "jaccard_tied=0.4"}  # fmt: skip
        text = markdown(run_document | {"baseline": {"before": "old.json", "cases": [], "regressions": [worse] * 12}})
        assert text.count("- layer 2 fp8 theta checkpoint: jaccard\\_tied 0.9 -> 0.5, worse by 0.4") == 10
        assert "- and 2 more" in text

    def test_fits_into_a_comment(self, run_document, synthetic):
        documents = synthetic.synthetic_documents(run_document, [4096, 8192])
        gate = copy.deepcopy(run_document["gates"][0])
        gate["failed"] = [f"layer {n} precision-1 theta checkpoint: jaccard_tied 0.123456" for n in range(3000)]
        documents[0]["gates"] = [gate]
        text = markdown(merge(documents))
        assert len(text) < COMMENT_LIMIT
        assert "and 2990 more" in text
        assert "Worst layers, 40 of " in text

    def test_names_are_no_markup(self):
        assert cell("a|b\n<b>*x*</b> [y](z) `c` _d_") == ("a\\|b &lt;b>\\*x\\*&lt;/b> \\[y](z) \\`c\\` \\_d\\_")


class TestJunit:
    def test_structure(self, run_document):
        root = ET.fromstring(junit([run_document]))
        assert root.tag == "testsuites"
        suites = list(root)
        assert [suite.get("name") for suite in suites] == ["jaccard_tied>=0.9", "jaccard_kernel>=0.999"]
        for suite in suites:
            properties, *cases = suite
            assert properties.tag == "properties"
            assert {case.tag for case in cases} == {"testcase"}
            assert len({(case.get("classname"), case.get("name")) for case in cases}) == len(cases) == 16
            assert int(suite.get("tests")) == len(cases)
            for attribute, child in (("failures", "failure"), ("skipped", "skipped"), ("errors", "error")):
                assert int(suite.get(attribute)) == sum(case.find(child) is not None for case in cases)
            assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", suite.get("timestamp"))
            float(suite.get("time"))
        for attribute in ("tests", "failures", "skipped", "errors"):
            assert int(root.get(attribute)) == sum(int(suite.get(attribute)) for suite in suites)

    def test_failures_are_the_gates(self, run_document):
        root = ET.fromstring(junit([run_document]))
        failed = {case.get("name"): case.find("failure").get("message") for case in root.iter("testcase")
                  if case.find("failure") is not None}  # fmt: skip
        expected = {}
        for gate in run_document["gates"]:
            for line in gate["failed"]:
                name, _, value = line.partition(": ")
                expected[name] = f"{value}, expected {gate['gate']}; {gate['passing']} would have passed"
        assert failed == expected
        assert len(failed) >= 2
        reasons = {case.find("skipped").get("message") for case in root.iter("testcase")
                   if case.find("skipped") is not None}  # fmt: skip
        assert reasons == {"a what-if theta does not count"}

    def test_fails_exactly_where_the_run_fails(self, cli, mini, tmp_path):
        out = tmp_path / "junit.xml"
        command = ["run", "--checkpoint", mini, "--layers", "4", "--queries", "16", "--precision", "fp8", "--theta",
                   "checkpoint", "--junit", out]  # fmt: skip
        for gate, length, code in (
            (["--gate", "jaccard>=0.5"], [], 0), (["--gate", "jaccard>=0.99"], [], 1), ([], [], 0),
            (["--gate", "jaccard>=0.5"], ["--length", "200"], 1),
        ):  # fmt: skip
            assert cli(*command, *gate, *length)[0] == code
            root = ET.fromstring(out.read_text())
            assert (int(root.get("failures")) > 0) == (code == 1)
            assert int(root.get("tests")) >= 1
        assert "nothing was measured" in out.read_text()
        assert "vacuous: no query sees more than k entries" in out.read_text()

    def test_without_gates_and_with_odd_names(self, run_document):
        document = copy.deepcopy(run_document) | {"gates": []}
        document["cases"][0]["precision"] = 'a<b>&"\x00\x1b'
        document["cases"][1] |= {"verdict": "refused", "reason": "no kernel"}
        root = ET.fromstring(junit([document]))
        (suite,) = root
        assert (suite.get("name"), suite.get("failures"), suite.get("skipped")) == ("cases", "0", "1")
        assert 'layer 2 a<b>&"?? theta checkpoint' in [case.get("name") for case in suite.iter("testcase")]
        assert suite.find(".//skipped").get("message") == "refused: no kernel"

    def test_a_case_that_broke_off_is_an_error(self, run_document):
        document = copy.deepcopy(run_document)
        case = document["cases"][0]
        document["cases"][0] = {
            name: case[name] for name in ("layer", "precision", "theta_setting", "what_if", "length", "backend")
        } | {"verdict": "failed", "reason": "out of memory"}  # fmt: skip
        document["gates"] = [g for g in document["gates"] if g["passed"]]
        root = ET.fromstring(junit([document]))
        assert (root.get("failures"), root.get("errors")) == ("0", "1")
        assert root.find(".//error").get("message") == "out of memory"
        assert ET.fromstring(junit([document | {"gates": []}])).get("errors") == "1"

    def test_a_regression_is_a_failure(self, cli, mini, tmp_path):
        report, out = tmp_path / "run.json", tmp_path / "junit.xml"
        what = ["--layers", "4", "--queries", "16", "--precision", "fp8", "--theta", "checkpoint"]
        assert cli("run", "--checkpoint", mini, *what, "--json", report)[0] == 0
        assert cli("run", "--checkpoint", mini, *what, "--baseline", report, "--junit", out)[0] == 0
        root = ET.fromstring(out.read_text())
        assert root.get("failures") == "0"
        assert root[-1].get("name") == "baseline"
        assert root[-1][-1].get("name") == "layer 4 fp8 theta checkpoint"
        before = json.loads(report.read_text())
        before["cases"][0]["jaccard_tied"] = 1.0
        report.write_text(json.dumps(before))
        assert cli("run", "--checkpoint", mini, *what, "--baseline", report, "--junit", out)[0] == 1
        (failure,) = ET.fromstring(out.read_text()).iter("failure")
        assert failure.get("message").startswith("layer 4 fp8 theta checkpoint: jaccard_tied 1 -> 0.8")
        assert failure.get("type") == "baseline"

    def test_probes_are_tests_too(self, run_document):
        document = copy.deepcopy(run_document)
        probe = {"case": "probe of mine, 262144 entries", "layer": None, "precision": None, "theta_setting": None}
        gate = {"gate": "topk_wrong_rows==0", "field": "topk_wrong_rows", "measured": 1, "passed": False,
                "failed": ["probe of mine, 262144 entries: topk_wrong_rows 4"],
                "passing": None, "source": "command line",
                "checked": [probe | {"value": 4, "passed": False}]}  # fmt: skip
        document["gates"] = [gate]
        root = ET.fromstring(junit([document]))
        (failure,) = root.iter("failure")
        assert failure.get("message") == "topk_wrong_rows 4, expected topk_wrong_rows==0"

    def test_several_runs(self, run_document, synthetic):
        root = ET.fromstring(junit(synthetic.synthetic_documents(run_document, [4096, 8192])))
        assert [suite.get("name") for suite in root] == ["run 1: cases", "run 2: cases"]


class TestMetrics:
    def test_parses_and_says_what_it_is(self, run_document):
        families = list(text_string_to_metric_families(metrics(run_document)))
        assert len({family.name for family in families}) == len(families) >= 25
        for family in families:
            assert family.type == "gauge"
            assert family.name.startswith("diffcheck_")
            assert family.documentation.endswith(".")
            labels = [tuple(sorted(sample.labels.items())) for sample in family.samples]
            assert len(set(labels)) == len(labels) >= 1

    def test_values_are_the_cases(self, run_document):
        families = {family.name: family for family in text_string_to_metric_families(metrics(run_document))}
        fields = {
            "diffcheck_jaccard_tied_ratio": "jaccard_tied", "diffcheck_kernel_error_ratio": "kernel_error",
            "diffcheck_needles_lost": "needles_lost", "diffcheck_key_size_bytes": "bytes_per_entry",
            "diffcheck_case_duration_seconds": "seconds", "diffcheck_recall_worst_ratio": "recall_worst",
        }  # fmt: skip
        for name, field in fields.items():
            found = {
                (s.labels["layer"], s.labels["precision"], s.labels["theta"]): s.value for s in families[name].samples
            }
            assert found == {
                (str(c["layer"]), c["precision"], c["theta_setting"]): c[field] for c in run_document["cases"]
            }
        sample = families["diffcheck_jaccard_ratio"].samples[0]
        assert set(sample.labels) == {"checkpoint", "layer", "precision", "theta", "length", "backend"}
        gates = {s.labels["gate"]: s.value for s in families["diffcheck_gate_passed"].samples}
        assert gates == {"jaccard_tied>=0.9": 0, "jaccard_kernel>=0.999": 1}
        (status,) = families["diffcheck_run_status"].samples
        assert status.labels["status"] == "fault"

    def test_what_does_not_exist_has_no_sample(self, run_document):
        document = copy.deepcopy(run_document)
        for each in document["cases"]:
            each.update(needles_lost=None)
        document["cases"][0].update(score_rel_error=None, nonfinite=["score_rel_error"])
        families = {family.name: family for family in text_string_to_metric_families(metrics(document))}
        assert "diffcheck_needles_lost" not in families
        assert "diffcheck_attention_mass_lost_ratio" not in families
        values = [sample.value for sample in families["diffcheck_score_error_ratio"].samples]
        assert sum(map(math.isnan, values)) == 1

    def test_labels_are_escaped(self, run_document):
        document = copy.deepcopy(run_document)
        document["checkpoint"]["path"] = 'C:\\new "y"\nz'
        (family, *_) = text_string_to_metric_families(metrics(document))
        assert family.samples[0].labels["checkpoint"] == 'C:\\new "y"\nz'

    def test_units_are_in_the_names(self):
        units = ("_ratio", "_bytes", "_seconds", "_rows", "_lost", "_reference", "_median")
        assert all(name.endswith(units) for name in CASE_GAUGES)


class TestRender:
    def test_the_same_from_a_kept_file(self, cli, run_file, run_document, tmp_path):
        """What `render` makes of the JSON file is what `run` makes at once."""
        names = ["page.html", "summary.md", "junit.xml", "diffcheck.prom"]
        options = ["--html", "--markdown", "--junit", "--metrics"]
        pairs = [item for pair in zip(options, (tmp_path / name for name in names), strict=True) for item in pair]
        status, out, _ = cli("render", run_file, *pairs)
        assert status == 0
        assert out.splitlines() == [f"wrote {tmp_path / name}" for name in names]
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)  # nothing half written stays
        status, out, _ = cli("render", run_file)
        assert status == 0
        mine = [c for c in run_document["cases"] if c["precision"] == "q-only-hadamard" and not c["what_if"]]
        lost, needles = (sum(c[name] for c in mine) for name in ("needles_lost", "needles_selected_reference"))
        assert f"q-only-hadamard: LOSES {lost} of {needles} needles (layer 2, 4)" in out

    def test_run_writes_all_forms(self, cli, mini, tmp_path):
        report = tmp_path / "run.json"
        files = {"--html": "a.html", "--markdown": "a.md", "--junit": "a.xml", "--metrics": "a.prom"}
        first = [item for option, name in files.items() for item in (option, tmp_path / name)]
        again = [item for option, name in files.items() for item in (option, tmp_path / f"again-{name}")]
        what = ["--layers", "4", "--queries", "16", "--precision", "fp8", "--theta", "checkpoint"]
        assert cli("run", "--checkpoint", mini, *what, "--json", report, *first)[0] == 0
        assert cli("render", report, *again)[0] == 0
        for name in files.values():
            assert (tmp_path / name).read_text() == (tmp_path / f"again-{name}").read_text()

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (None, ["No such file"]),
            ("{", ["not JSON"]),
            ("[]", ["has no cases"]),
            ('{"schema_version": 1, "findings": []}', ["has no cases"]),
            ('{"schema_version": 7, "cases": []}', ["schema_version is 7, expected 1"]),
            ('{"schema_version": 1, "cases": []}', ["lacks gates"]),
        ],
    )
    def test_other_files_are_refused(self, cli, tmp_path, content, words):
        path = tmp_path / "other.json"
        if content is not None:
            path.write_text(content)
        status, _, err = cli("render", path, "--html", tmp_path / "page.html")
        assert status == 2
        assert err.count("\n") == 1
        assert str(path) in err
        assert all(word in err for word in words)
        assert not (tmp_path / "page.html").exists()

    def test_an_older_report_says_what_it_lacks(self, cli, run_document, tmp_path):
        path = tmp_path / "old.json"
        old = copy.deepcopy(run_document)
        for each in old["cases"]:
            del each["stages"]
        path.write_text(json.dumps(old))
        status, _, err = cli("render", path)
        assert status == 2
        assert "lacks stages" in err

    def test_files_that_cannot_be_written(self, cli, mini, run_file, tmp_path):
        for option in ("--html", "--markdown", "--junit", "--metrics"):
            status, _, err = cli("run", "--checkpoint", mini, option, tmp_path / "none" / "file")
            assert status == 2
            assert err.startswith(f"diffcheck: {option}: cannot write ")
        one = tmp_path / "one"
        status, _, err = cli("render", run_file, "--html", one, "--markdown", one)
        assert status == 2
        assert "two name one file" in err


class TestMerge:
    def test_lengths_stand_beside_one_another(self, run_document, synthetic):
        documents = synthetic.synthetic_documents(run_document, [4096, 8192])
        found = merge(documents)
        assert len(found["cases"]) == 2 * len(documents[0]["cases"])
        assert found["inputs"]["length"] == run_document["inputs"]["length"]
        assert found["seconds"] == pytest.approx(2 * run_document["seconds"])

    def test_backends_become_precisions(self, run_document):
        other = copy.deepcopy(run_document)
        for each in other["cases"]:
            each["backend"] = "triton"
        found = merge([run_document, other])
        names = {case["precision"] for case in found["cases"]}
        assert {"fp8 on emulated", "fp8 on triton"} <= names
        (gate, _) = found["gates"]
        assert gate["measured"] == 16
        assert len(gate["failed"]) == 2 * len(run_document["gates"][0]["failed"])
        families = list(text_string_to_metric_families(metrics(found)))
        assert len({family.name for family in families}) == len(families)

    def test_a_gate_that_failed_once_has_failed(self, run_document):
        other = copy.deepcopy(run_document)
        for each in other["cases"]:
            each["backend"] = "triton"
        for gate in other["gates"]:
            gate |= {"passed": True, "failed": []}
        assert [gate["passed"] for gate in merge([run_document, other])["gates"]] == [False, True]
        assert [gate["passed"] for gate in merge([other, run_document])["gates"]] == [False, True]

    def test_what_does_not_go_together(self, run_document, cli, run_file):
        status, _, err = cli("render", run_file, run_file)
        assert status == 2
        assert "two reports hold layer 2, precision reference, theta_setting checkpoint, length 4096" in err
        other = copy.deepcopy(run_document)
        other["checkpoint"]["config"]["index_topk"] = 512
        with pytest.raises(ValueError, match="reports select 64 and 512 entries"):
            merge([run_document, other])

    def test_differences_are_noted(self, run_document, synthetic):
        first, second = synthetic.synthetic_documents(run_document, [4096, 8192])
        second["environment"] = second["environment"] | {"device": "another"}
        assert merge([first, second])["notes"][-1] == "the reports differ in environment: shown is that of the first"
