"""The built wheel holds the three packages under one name, and nothing else at top level."""

import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _has_setuptools():
    try:
        return int(metadata.version("setuptools").split(".")[0]) >= 77
    except metadata.PackageNotFoundError:
        return False


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory):
    source = tmp_path_factory.mktemp("source")
    kept = ("pyproject.toml", "README.md", "LICENSE", "diffcheck", "refimpl", "kernels", "fixtures")
    for name in kept:  # a build in the tree would leave a build/ folder there
        subprocess.run(["cp", "-r", str(ROOT / name), str(source)], check=True)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(out), str(source)]
    if _has_setuptools():  # then no package index is needed
        command.append("--no-build-isolation")
    subprocess.run(command, check=True)
    (wheel,) = out.glob("*.whl")
    return zipfile.ZipFile(wheel).namelist()


def test_top_level(wheel_names):
    tops = {name.split("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"diffcheck"}


@pytest.mark.parametrize(
    "name",
    [
        "diffcheck/py.typed",
        "diffcheck/cli.py",
        "diffcheck/refimpl/indexer.py",
        "diffcheck/kernels/layout.py",
        "diffcheck/schemas/run.json",
        "diffcheck/reporting/page/page.html.j2",
        "diffcheck/reporting/page/page.js",
    ],
)
def test_holds(wheel_names, name):
    assert name in wheel_names


def test_every_module_is_in_the_wheel(wheel_names):
    prefixes = {"diffcheck": "diffcheck/", "refimpl": "diffcheck/refimpl/", "kernels": "diffcheck/kernels/"}
    for folder, prefix in prefixes.items():
        for path in (ROOT / folder).rglob("*.py"):
            assert prefix + path.relative_to(ROOT / folder).as_posix() in wheel_names, path
