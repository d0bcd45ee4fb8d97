"""Every command printed in these pages runs as it stands there, one page after another in a directory of its own.

`$CHECKPOINT` is the miniature. What needs a GPU or an engine that is not here must say so with exit code 3.
"""

import base64
import json
import os
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch

from diffcheck import load_layer
from diffcheck.cli import main
from diffcheck.refimpl import Trace, run_indexer, save_traces

ROOT = Path(__file__).parents[1]
README_REPORTS = re.findall(r"\n## Reports\n(.*?)\n## ", (ROOT / "README.md").read_text(), flags=re.DOTALL)[0]
PAGES = ("README.md", "quickstart.md", "monitoring.md", "limits.md", "adding_a_fault.md")
TOKENS = 320


def lines(page):
    """Commands of a page's bash blocks, continued lines joined."""
    text = (ROOT / "docs" / page).read_text() if page != "README.md" else README_REPORTS
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    return [line for line in "".join(blocks).replace("\\\n", " ").splitlines() if line.strip()]


@pytest.fixture
def place(tmp_path, monkeypatch, mini):
    """A directory with what the pages assume: fixtures, token ids, a server's trace and answer, and their inputs."""
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CHECKPOINT", "fixtures/mini-v4")
    (tmp_path / "ids.json").write_text(json.dumps(json.loads((mini / "tokens.json").read_text())[:TOKENS]))
    traces, chosen = [], []
    for layer in (2, 4):
        whole = Trace.load(mini / "trace.safetensors", layer)
        x, qr = whole["x"][:TOKENS], whole["qr"][:TOKENS]
        traces.append(Trace({"x": x.clone(), "qr": qr.clone()}, layer=layer))
        config, weights = load_layer(ROOT / "fixtures" / "mini-v4", layer)
        reference = run_indexer(config, weights, x, qr)
        chosen.append(reference["topk"])
    save_traces(tmp_path / "inputs.safetensors", traces)
    save_traces(tmp_path / "server.safetensors", [Trace(dict(reference) | {"x": x.clone(), "qr": qr.clone()}, layer=4)])
    returned = torch.stack(chosen, 1).numpy().astype("<i4")
    counts = {"prompt_tokens": TOKENS - 20, "completion_tokens": 21}
    answer = {"text": "x", "meta_info": counts | {"indexer_topk": base64.b64encode(returned.tobytes()).decode()}}
    (tmp_path / "answer.json").write_text(json.dumps(answer))
    return tmp_path


def run(line, monkeypatch):
    """The exit code of a command line, run in this process."""
    program, *words = shlex.split(os.path.expandvars(line))
    if program == "python":
        monkeypatch.setattr(sys, "argv", words)
        runpy.run_path(words[0], run_name="__main__")
        return 0
    assert program == "diffcheck", line
    monkeypatch.setattr(sys, "argv", [program, *words])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code or 0


@pytest.mark.parametrize("page", PAGES)
def test_commands(page, place, monkeypatch, capsys):
    assert lines(page)
    for line in lines(page):
        code = run(line, monkeypatch)
        out, err = capsys.readouterr()
        absent = "--backend sglang" in line and (not torch.cuda.is_available() or shutil.which("sglang") is None)
        if absent and code == 3:
            assert err.startswith("diffcheck: backend sglang: "), err
            continue
        assert code == 0, f"{line}\n{err}"
        assert out, line
        for name in re.findall(r"--(?:html|json|markdown|junit|metrics|out) (\S+)", line):
            assert (place / name).stat().st_size > 100, name


def test_every_page_is_linked():
    """From the README, or from a page that is linked there."""
    seen, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        for target in re.findall(r"\]\(([^)#:]+\.md)\)", page.read_text()):
            path = (page.parent / target).resolve()
            assert path.is_file(), f"{page.name} links to {target}"
            if path not in seen:
                seen.add(path)
                todo.append(path)
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= {path.name for path in seen}


def test_the_example_of_a_fault(place, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "adding_a_fault.md").read_text(), flags=re.DOTALL)
    exec(compile(code, "adding_a_fault.md", "exec"), {"__name__": "example"})
    assert capsys.readouterr().out.startswith("layer 4: first wrong stage q_rope (")


def test_every_field_of_a_case_is_explained():
    """docs/report.md names each field of the schema's case."""
    schema = json.loads((ROOT / "diffcheck" / "schemas" / "run.json").read_text())
    names = re.findall(r"`([a-z_0-9*]+)`", (ROOT / "docs" / "report.md").read_text())
    patterns = [re.compile(name.replace("*", ".*")) for name in names]
    for field in [*schema["$defs"]["case"]["properties"], *schema["properties"]]:
        assert any(pattern.fullmatch(field) for pattern in patterns), field
