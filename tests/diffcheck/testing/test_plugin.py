"""The pytest plugin as a user meets it: the documented test passes, and explains planted faults."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOC = (ROOT / "docs" / "pytest.md").read_text()
KERNELS, TEST = re.findall(r"```python\n(.*?)```", DOC, flags=re.DOTALL)
(COMMAND,) = re.findall(r"```bash\npytest (.*?)\n```", DOC)
DERANDOMISED = """
import hypothesis
hypothesis.settings.register_profile("here", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("here")
"""


@pytest.fixture
def user(pytester, mini):
    """Runs the documented test with the documented options, after a change of the kernels."""
    (pytester.path / "fixtures").symlink_to(mini.parent)
    pytester.makeconftest(DERANDOMISED)
    (pytester.path / "test_my_kernels.py").write_text(TEST)
    pytester.syspathinsert()

    def run(old="", new="", options=COMMAND):
        assert old in KERNELS
        (pytester.path / "my_kernels.py").write_text(KERNELS.replace(old, new) if old else KERNELS)
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", *options.split())

    yield run
    sys.modules.pop("my_kernels", None)


def test_the_documented_test_is_short():
    assert len(TEST.strip().splitlines()) <= 25


def test_it_passes(user):
    result = user()
    result.assert_outcomes(passed=5)
    result.stdout.fnmatch_lines(["diffcheck: checkpoint fixtures/mini-v4"])


FAULTS = {
    "scores rounded to bf16": (
        ("scores.masked_fill(", "scores.bfloat16().float().masked_fill("),
        {"failed": 1, "passed": 4},
        [
            "*AssertionError: selection is wrong in 1 of * rows (top *), first in row *, which sees * entries:",
            "*drops entry *: score *, rank 0*",
        ],
    ),
    "the worst instead of the best": (
        ("descending=True", "descending=False"),
        {"failed": 3, "passed": 2},
        ["*selection is wrong in 64 of 64 rows (top 64), first in row 0 (position *, which sees *"],
    ),
    "a row sees one entry too many": (
        (">= visible[:, None]\n    ranked", "> visible[:, None]\n    ranked"),
        {"failed": 1, "passed": 4},
        ["*fills * places, expected *"],
    ),
    "an entry too many is kept": (
        ("chosen >= visible[:, None], -1", "chosen > visible[:, None], -1"),
        {"failed": 1, "passed": 4},
        ["*, which it must not see*"],
    ),
    "NaN is the best score": (
        ("hidden | scores.isnan()", "hidden"),
        {"failed": 1, "passed": 4},
        ["*keeps entry *: score nan, rank *"],
    ),
    "one rotation step is lost": (
        ("y, half = x.float(), 1", "y, half = x.float(), 2"),
        {"failed": 2, "passed": 3},
        ["*AssertionError: q_hadamard: 9*% of * elements unequal*", "*first at [[]0, *: got *, expected * ulp)*"],
    ),
    "the rotation is not normalised": (
        ("(y * x.shape[-1] ** -0.5)", "(y * 0.1)"),
        {"failed": 2, "passed": 3},
        ["*q_hadamard: *relative error 0.1*"],
    ),
}


def shape(text):
    return [" ".join(re.sub(r"[-+]?[0-9]+[0-9.]*", "#", line).split()) for line in text.splitlines()]


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught_and_explained(user, fault):
    change, outcomes, lines = FAULTS[fault]
    result = user(*change)
    result.assert_outcomes(**outcomes)
    result.stdout.fnmatch_lines(lines)
    if fault == "scores rounded to bf16":
        (shown,) = re.findall(r"```text\n(selection is wrong.*?)```", DOC, flags=re.DOTALL)
        printed = "\n".join(shape(result.stdout.str()))
        assert all(line in printed for line in shape(shown)), "the documented message"


SMALL = """
def test_layer(diffcheck_layer, diffcheck_reference):
    print("number", diffcheck_layer.number, len(diffcheck_layer.queries), len(diffcheck_layer.x))
    assert len(diffcheck_reference["topk"]) == len(diffcheck_layer.queries)
"""


def small(pytester, *options):
    pytester.makepyfile(SMALL)
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", "-s", *options)


def test_skipped_without_a_checkpoint(pytester):
    result = small(pytester, "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*needs --diffcheck-checkpoint PATH*"])
    result.stdout.no_fnmatch_line("*diffcheck: checkpoint*")
    small(pytester, "--diffcheck-layer", "all").assert_outcomes(skipped=1)


def test_options(pytester, mini):
    where = [f"--diffcheck-checkpoint={mini}"]
    small(pytester, *where).stdout.fnmatch_lines(["*number 2 64 4096*"])
    small(pytester, *where, "--diffcheck-layer", "4").stdout.fnmatch_lines(["*number 4 64 4096*"])
    both = small(pytester, *where, "--diffcheck-layer", "4", "--diffcheck-layer", "2", "-v")
    both.assert_outcomes(passed=2)
    both.stdout.fnmatch_lines(["*test_layer[[]layer4]*", "*test_layer[[]layer2]*"])
    made = small(pytester, *where, "--diffcheck-length", "500", "--diffcheck-queries", "20")
    made.stdout.fnmatch_lines(["*number 2 2? 500*"])
    trace = small(pytester, *where, f"--diffcheck-trace={mini / 'trace.safetensors'}", "--diffcheck-device", "cpu")
    trace.assert_outcomes(passed=1)


def test_the_ini_file_is_enough(pytester, mini):
    (pytester.path / "there").symlink_to(mini)
    pytester.makeini("[pytest]\ndiffcheck_checkpoint = there")
    (pytester.path / "inner").mkdir()
    (pytester.path / "inner" / "test_small.py").write_text(SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(pytester.path / "inner")
        pytester.runpytest_inprocess("-p", "no:cacheprovider", "--rootdir", pytester.path).assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--diffcheck-checkpoint=nowhere"], "*diffcheck: nowhere: no such directory*"),
        (["--diffcheck-checkpoint={mini}", "--diffcheck-layer", "3"], "*diffcheck: *layer 3*128*"),
        (["--diffcheck-checkpoint={mini}", "--diffcheck-trace=x"], "*diffcheck: x: no such file*"),
        (["--diffcheck-checkpoint={mini}", "--diffcheck-device", "tpu"], "*diffcheck: --device: 'tpu'*"),
    ],
)
def test_bad_options_fail_in_one_line(pytester, mini, options, line):
    result = small(pytester, *(option.format(mini=mini) for option in options))
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([line])
    result.stdout.no_fnmatch_line("*Traceback*")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--diffcheck-layer", "two"], "*--diffcheck-layer: two, expected numbers or all*"),
        (["--diffcheck-checkpoint=nowhere", "--diffcheck-layer", "all"], "*nowhere: no such directory*"),
    ],
)
def test_bad_layers_are_usage_errors(pytester, options, line):
    result = small(pytester, *options)
    assert result.ret != 0
    assert line.strip("*") in result.stdout.str() + result.stderr.str()


OTHERS = """
import sys
def test_nothing_heavy_is_loaded():
    loaded = [name for name in ("torch", "triton", "numpy", "hypothesis", "diffcheck.testing") if name in sys.modules]
    assert loaded == []
    assert "diffcheck.pytest_plugin" in sys.modules
"""


def test_other_suites_do_not_notice(pytester):
    """Nothing is imported for them, no warning appears even where each is an error, and it can be turned off."""
    pytester.makepyfile(OTHERS)
    plain = ["-p", "no:hypothesispytest", "-p", "no:xdist", "-W", "error"]
    result = pytester.runpytest_subprocess(*plain)
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*diffcheck: *")
    off = pytester.runpytest_subprocess(*plain, "-p", "no:diffcheck")
    off.assert_outcomes(failed=1)
    assert "--diffcheck-checkpoint" in pytester.runpytest_subprocess(*plain, "--help").stdout.str()


def test_installed_it_is_as_in_place(tmp_path):
    """A regular install, in which pytest rewrites the package's assertions, beside a suite of another project."""
    source, site, project = (tmp_path / name for name in ("source", "site", "project"))
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "diffcheck", "refimpl", "kernels"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(source)], check=True)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(site)]
    done = subprocess.run([*pip, str(source)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip("needs setuptools 77 or newer to build without a package index")
    project.mkdir()
    (project / "test_small.py").write_text(SMALL + OTHERS)
    (project / "pytest.ini").write_text(f"[pytest]\ndiffcheck_checkpoint = {ROOT / 'fixtures' / 'mini-v4'}\n")
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "error::pytest.PytestWarning", "-k", "layer"]
    script = f"import sys; sys.path.insert(0, {str(site)!r}); import pytest; sys.exit(pytest.main({options}))"
    done = subprocess.run([sys.executable, "-c", script], cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
