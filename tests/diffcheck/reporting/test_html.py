"""The page: well formed, alone, small, and every number in it is the document's."""

import copy
import json
import math
import re
import shutil
import subprocess

import pytest

from diffcheck.reporting.details import packed, unpacked
from diffcheck.reporting.html import page
from diffcheck.reporting.merge import merge

LENGTHS = [4096, 8192, 16384, 32768, 65536, 131072]
LIMIT = 3_000_000
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@pytest.fixture(scope="module")
def text(run_document):
    return page(run_document)


@pytest.fixture(scope="module")
def read(text, html_tables):
    return html_tables.Page(text)


@pytest.fixture(scope="module")
def large(run_document, synthetic):
    return merge(synthetic.synthetic_documents(run_document, LENGTHS))


@pytest.fixture(scope="module")
def large_text(large):
    return page(large)


def check_alone(found):
    """Ids are unique, labels point to ids, and nothing is fetched."""
    assert len(found.ids) == len(set(found.ids))
    for tag, name, value in found.attributes:
        if name == "aria-labelledby":
            assert set(value.split()) <= set(found.ids)
        if name == "href":
            assert value.startswith("#"), value
            assert value[1:] in found.ids
        assert name not in ("src", "srcset", "action", "xlink:href", "onclick", "onload"), (tag, name)
        assert tag not in ("link", "iframe", "img", "object", "embed", "base")


def test_well_formed_and_alone(text, read):
    check_alone(read)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text.split('id="data"')[0])
    assert 'lang="en"' in text
    assert sum(1 for tag, name, _ in read.attributes if (tag, name) == ("svg", "aria-labelledby")) == 8


def test_the_verdict_comes_first(text, run_document):
    sentence = run_document["headline"]["sentence"]
    assert sentence.startswith("Gate jaccard_tied>=0.9 failed. Wrong setting: q-only-hadamard runs k_hadamard off")
    shown = text.index(sentence.replace(">", "&gt;"))
    assert shown < text.index("<main>")
    assert '<span class="status fault">Fault</span>' in text


def case_of(document, **wanted):
    (found,) = [c for c in document["cases"] if all(c[name] == value for name, value in wanted.items())]
    return found


def index_of(document):
    return {(c["layer"], c["precision"], c["theta_setting"], c["length"]): c for c in document["cases"]}


def check_heat_maps(found, document, sections):
    seen, index = 0, index_of(document)
    for name, theta, length in sections:
        (grid,) = [table for table in found.tables if table["id"] == f"{name}-heat"]
        precisions = grid["rows"][0][1:]
        for layer, *cells in grid["rows"][1:]:
            for precision, cell in zip(precisions, cells, strict=True):
                case = index[int(layer), precision, theta, length]
                number, _, note = cell.partition(" ")
                assert number == f"{case['jaccard_tied']:.3f}"
                assert ("lost" in note) == bool(case["needles_lost"])
                assert not case["needles_lost"] or f"{case['needles_lost']} lost" in note
                assert ("kernel" in note) == (case["verdict"] == "kernel")
                seen += 1
    assert seen == len(document["cases"])


def test_heat_maps(read, run_document):
    check_heat_maps(read, run_document, [("s0", "checkpoint", 4096), ("s1", "10000", 4096)])


def test_table_of_cases(read, run_document):
    (rows,) = [table["rows"] for table in read.tables if table["id"] == "rows"]
    assert len(rows) == 1 + len(run_document["cases"])
    for row in rows[1:]:
        found = dict(zip(rows[0], row, strict=True))
        case = case_of(
            run_document, layer=int(found["layer"]), precision=found["precision"], theta_setting=found["theta"]
        )
        for name, field in (
            ("J", "jaccard"), ("J tied", "jaccard_tied"), ("J ideal", "jaccard_ideal"), ("recall", "recall_mean"),
            ("worst", "recall_worst"),
        ):  # fmt: skip
            assert found[name] == f"{case[field]:.3f}"
        for name, field in (("score", "score_rel_error"), ("format", "format_error"), ("kernel", "kernel_error")):
            assert float(found[name]) == pytest.approx(case[field], rel=0.05, abs=5e-5)
        assert found["lost"] == f"{case['needles_lost']} of {case['needles_selected_reference']}"
        assert found["tail"] == f"{case['survival'][5]['p']:.3f}"
        head = case["survival"][:4]
        kept = sum(b["p"] * b["n"] for b in head) / sum(b["n"] for b in head)
        assert found["head"] == f"{kept:.3f}"
        assert (found["verdict"], found["first stage"]) == (case["verdict"], case["first_stage"] or "-")
        assert found["B"] == f"{case['bytes_per_entry']:g}"


def test_what_is_wrong_is_marked(text, run_document):
    """A wrong setting that is run, not one that is only imagined."""
    wrong = [c for c in run_document["cases"] if c["verdict"] == "config" and not c["what_if"]]
    assert text.count('<tr class="config">') == len(wrong) == 2


def numbers(read, section, title):
    (table,) = [t["rows"] for t in read.tables if t["section"] == section and t["title"] == title and t["id"] is None]
    return table[0][1:], {row[0]: row[1:] for row in table[1:]}


def test_chart_numbers(read, run_document):
    """The tables beside the charts, recomputed from the document case by case."""
    cases = [c for c in run_document["cases"] if c["theta_setting"] == "checkpoint"]
    for precision in ("reference", "fp8", "fp4", "q-only-hadamard"):
        mine = [c for c in cases if c["precision"] == precision]
        columns, rows = numbers(read, "s0", "Survival by rank")
        for place in range(len(columns)):
            n = sum(c["survival"][place]["n"] for c in mine)
            kept = sum(c["survival"][place]["p"] * c["survival"][place]["n"] for c in mine)
            assert rows[precision][place] == f"{kept / n:.3f}"
        columns, rows = numbers(read, "s0", "Overlap against length")
        for place, column in enumerate(columns):
            bins = [b for c in mine for b in c["by_visible"] if f"to {4 * b['hi']}" == column]
            total = sum(b["queries"] for b in bins)
            assert rows[precision][place] == f"{sum(b['queries'] * b['jaccard_tied'] for b in bins) / total:.3f}"
        columns, rows = numbers(read, "s0", "Needle ranks")
        ranks = [rank for c in mine for rank in c["needle_rank"]]
        for place, part in enumerate((0.25, 0.5, 1, 2, 4)):
            assert columns[place] == f"below {part:g} k"
            assert rows[precision][place] == f"{sum(r is not None and r < part * 64 for r in ranks) / len(ranks):.3f}"
        columns, rows = numbers(read, "s0", "Margins at the k-th place")
        if precision != "reference":  # its scores have no noise
            assert rows[precision][:-1] == [str(sum(c["margins"]["counts"][i] for c in mine)) for i in range(12)]
        assert columns[0] == "0 to 0.001"


def test_stage_ladder(read, run_document):
    (grid,) = [table for table in read.tables if table["id"] == "s0-ladder"]
    stages = grid["rows"][0][1:]
    assert stages[0] == "q"
    assert stages[-1] == "topk"
    rows = {row[0]: row[1:] for row in grid["rows"][1:]}
    cases = [c for c in run_document["cases"] if c["theta_setting"] == "checkpoint" and c["precision"] == "fp8"]
    for place, stage in enumerate(stages[:-1]):
        worst = max(s["format"] for c in cases for s in c["stages"] if s["stage"] == stage)
        shown, _, note = rows["fp8: format"][place].partition(" ")
        assert float(shown) == pytest.approx(worst, rel=0.05, abs=5e-5)
        assert note == ("first in 2" if stage == "q_quant" else "")
    assert "fp8: kernel" not in rows  # the emulation has no kernel part


def test_recipes_and_gates(read, run_document):
    rows = [row for table in read.tables if table["section"] == "recipes" for row in table["rows"]]
    assert ["q-only-hadamard @ checkpoint", "k_hadamard", "off", "on"] in rows
    assert ["reference @ 10000", "theta", "10000", "160000"] in rows
    assert ["reference @ checkpoint", "nothing", "", ""] in rows
    gates = [row for table in read.tables if table["section"] == "gates" for row in table["rows"]][1:]
    assert [row[:3] for row in gates] == [
        ["jaccard_tied>=0.9", "FAILED", "8 cases"], ["jaccard_kernel>=0.999", "passed", "8 cases"],
    ]  # fmt: skip
    assert gates[0][3:5] == ["command line", run_document["gates"][0]["passing"]]
    for failure in run_document["gates"][0]["failed"]:
        assert failure in gates[0][5]


def details_of(text):
    return unpacked(re.search(r'id="data">([^<]*)<', text)[1])


def check_details(found, document):
    """Every number of every case, to the digits that it is shown with."""

    def same(shown, real, digits=3):
        if real is None or isinstance(real, bool | str):
            assert shown == real
        elif isinstance(real, list):
            assert len(shown) == len(real)
            for a, b in zip(shown, real, strict=True):
                same(a, b, digits)
        elif isinstance(real, dict):
            assert shown == real
        else:
            assert math.isclose(shown, real, rel_tol=0.5 * 10 ** (1 - digits), abs_tol=1e-300), (shown, real)

    for i, case in enumerate(document["cases"]):
        for name, column in found["columns"].items():
            same(column[i], case[name], 4 if name.startswith("jaccard") else 3)
        same([column[i] for column in found["survival"]], [b["p"] for b in case["survival"]])
        bins = {(b["lo"], b["hi"]): b["jaccard_tied"] for b in case["by_visible"]}
        same([column[i] for column in found["overlap"]], [bins.get(tuple(b)) for b in found["visible_bins"]])
        margins = case["margins"]
        assert [column[i] for column in found["margins"]] == [*margins["counts"], margins["noiseless"]]
        for part in ("format", "kernel"):
            same([column[i] for column in found[part]], [s[part] for s in case["stages"]])


def test_details(text, run_document):
    found = details_of(text)
    check_details(found, run_document)
    assert run_document["cases"][found["start"]]["precision"] == "q-only-hadamard"
    assert packed(found) == packed(copy.deepcopy(found))


def test_what_is_in_a_name_stays_text(run_document):
    document = copy.deepcopy(run_document)
    evil = '<script>alert("1")</script>&'
    document["cases"] = [case | {"precision": evil} for case in document["cases"][:2]]
    document["notes"] = [evil]
    document["checkpoint"]["path"] = evil
    text = page(document)
    assert evil not in text
    assert text.count("&lt;script&gt;alert(") >= 4


def test_a_large_run(large, large_text, html_tables):
    """21 layers x 12 precisions x 5 thetas x 6 lengths: small enough, well formed, nothing left out."""
    assert len(large["cases"]) == 21 * 12 * 5 * 6
    assert len(large_text.encode()) <= LIMIT, f"{len(large_text.encode())} bytes"
    found = html_tables.Page(large_text)
    check_alone(found)
    thetas = list(dict.fromkeys(case["theta_setting"] for case in large["cases"]))
    sections = [(t, n) for t in thetas for n in sorted(LENGTHS, reverse=True)]
    index = index_of(large)
    check_heat_maps(found, large, [(f"s{i}", theta, length) for i, (theta, length) in enumerate(sections)])
    (rows,) = [table["rows"] for table in found.tables if table["id"] == "rows"]
    assert len(rows) == 1 + 12 * 5 * 6
    for row in rows[1:]:
        shown = dict(zip(rows[0], row, strict=True))
        mine = [index[layer, shown["precision"], shown["theta"], int(shown["tokens"])] for layer in range(2, 44, 2)]
        assert shown["J tied"] == f"{min(c['jaccard_tied'] for c in mine):.3f}"
        assert shown["lost"] == f"{sum(c['needles_lost'] for c in mine)} of {8 * 21}"
        assert shown["J kernel"] == f"{min(c['jaccard_kernel'] for c in mine):.3f}"
    check_details(details_of(large_text), large)


def test_nothing_measured(cli, mini, tmp_path, html_tables):
    out, report = tmp_path / "page.html", tmp_path / "run.json"
    what = ["--precision", "fp8", "--theta", "checkpoint", "--length", "200", "--html", out, "--json", report]
    assert cli("run", "--checkpoint", mini, *what)[0] == 0
    text = out.read_text()
    html_tables.Page(text)
    assert "Nothing was tested: no query sees more than k entries" in text
    assert "<td class=none>vacuous" in text
    empty = json.loads(report.read_text()) | {"cases": []}
    html_tables.Page(page(empty))


def test_the_baseline(run_document, html_tables):
    change = {"jaccard_tied": {"before": 0.9, "after": 0.5}, "needle_rank_median": {"before": 3.0, "after": None}}
    case = run_document["cases"][0] | {"fields": change}
    worse = {"case": "layer 2 fp8 theta checkpoint", "field": "jaccard_tied", "before": 0.9, "after": 0.5,
             "worse": 0.4, "tolerance": 0.005, "passing": "jaccard_tied=0.4"}  # fmt: skip
    text = page(run_document | {"baseline": {"before": "old.json", "cases": [case], "regressions": [worse]}})
    found = html_tables.Page(text)
    check_alone(found)
    (rows,) = [table["rows"] for table in found.tables if table["section"] == "baseline"]
    name = "layer 2 reference theta checkpoint"
    assert rows[1:] == [[name, "jaccard_tied", "0.9", "0.5"], [name, "needle_rank_median", "3", "-"]]
    assert "old.json: 1 numbers are worse than tolerated" in text
    assert "jaccard_tied 0.9 -&gt; 0.5, worse by 0.4, tolerance 0.005" in text


def luminance(colour):
    """Relative luminance of #rrggbb as WCAG 2 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    lower, higher = sorted((luminance(one), luminance(other)))
    return (higher + 0.05) / (lower + 0.05)


def test_colours_can_be_read(text):
    """In light, dark and print: text at 4.5 to 1 at least, lines at 3 to 1 (WCAG 2, level AA)."""
    themes = [
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]+)", block)) for block in re.findall(r":root \{(.*?)\}", text, re.S)
    ]
    cells = re.findall(r"\.h(\d) \{ background: var\(--h\d\); color: var\(--([\w-]+)\); \}", text)
    assert (len(themes), len(cells)) == (3, 9)
    assert set(themes[0]) == set(themes[1]) == set(themes[2])  # a dark page is printed on white paper
    for changes in themes:
        theme = {n: v if len(v) > 4 else "#" + "".join(2 * c for c in v[1:]) for n, v in changes.items()}
        for number, ink in cells:
            assert contrast(theme[f"h{number}"], theme[ink]) >= 4.5, (number, theme)
        for name in ("ink", "soft", "accent", "bad", "good", "warn"):
            assert contrast(theme[name], theme["paper"]) >= 4.5, (name, theme)
        for number in range(7):
            assert contrast(theme[f"c{number}"], theme["paper"]) >= 3, (number, theme)
        steps = [luminance(theme[f"h{n}"]) for n in range(9)]
        middle = min(range(9), key=lambda n: contrast(theme[f"h{n}"], theme["paper"]))
        outward = [steps[: middle + 1][::-1], steps[middle:]]
        for side in outward:  # both ends stand out from the page more and more
            assert side == sorted(side) or side == sorted(side, reverse=True)


@pytest.fixture(scope="module")
def browser():
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser here, looked for {', '.join(BROWSERS)}")
    return found


def dom(browser, directory, text, script):
    """The page's elements after its own scripts and one more."""
    path = directory / "page.html"
    path.write_text(text.replace("</body>", f"<script>setTimeout(() => {{{script}}}, 600)</script></body>"))
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom"]
    done = subprocess.run([*command, f"--user-data-dir={directory}/profile", path.as_uri()],
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout


class TestInABrowser:
    def test_one_case_is_unfolded(self, browser, tmp_path, text, run_document, html_tables):
        """A click into the heat map shows that case's numbers."""
        click = 'document.querySelector("#s1-heat").tBodies[0].rows[1].cells[2].click()'
        made = html_tables.Page(dom(browser, tmp_path, text, click))
        fields, ladder, survival, overlap, margins = [t["rows"] for t in made.tables if t["section"] == "one"]
        shown = dict(fields[1:])
        case = case_of(run_document, layer=4, precision="fp8", theta_setting="10000")
        assert (shown["layer"], shown["precision"], shown["theta_setting"]) == ("4", "fp8", "10000")
        assert float(shown["jaccard_tied"]) == pytest.approx(case["jaccard_tied"], rel=1e-3)
        assert [row[0] for row in ladder[1:]] == [s["stage"] for s in case["stages"]]
        assert [float(row[1]) for row in ladder[1:]] == pytest.approx([s["format"] for s in case["stages"]], rel=0.01)
        assert [float(row[1]) for row in survival[1:]] == pytest.approx([b["p"] for b in case["survival"]], rel=0.01)
        assert len(overlap) - 1 == len(case["by_visible"])
        assert [int(row[1]) for row in margins[1:-1]] == case["margins"]["counts"]

    def test_sorting_and_filtering(self, browser, tmp_path, text, html_tables):
        script = (
            'const heads = [...document.querySelectorAll("#rows button")];'
            'const head = heads.find((b) => b.textContent === "J tied"); head.click();'
            'const box = document.querySelector("#filter"); box.value = "fp8 10000";'
            'box.dispatchEvent(new Event("input"));'
        )
        made = dom(browser, tmp_path, text, script)
        (rows,) = [t["rows"] for t in html_tables.Page(made).tables if t["id"] == "rows"]
        place = rows[0].index("J tied")
        values = [float(row[place]) for row in rows[1:]]
        assert values == sorted(values)
        assert values != sorted(values, reverse=True)
        assert '<span id="count">2 rows</span>' in made
        assert len(re.findall(r"<tr[^>]* hidden", made)) == len(values) - 2

    def test_a_large_page_works(self, browser, tmp_path, large, large_text, html_tables):
        click = 'document.querySelector("#s29-heat").tBodies[0].rows[20].cells[12].click()'
        made = dom(browser, tmp_path, large_text, click)
        fields = next(t["rows"] for t in html_tables.Page(made).tables if t["section"] == "one")
        case = case_of(large, layer=42, precision="precision-11", theta_setting="160000:noyarn", length=4096)
        assert float(dict(fields[1:])["jaccard"]) == pytest.approx(case["jaccard"], rel=1e-3)
