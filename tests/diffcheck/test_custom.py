"""Formats written in Python: the documented example, what a package offers, and what is refused."""

import pickle
import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

from diffcheck import Pipeline, Recipe, custom
from diffcheck.backends import find_backend
from diffcheck.cases import load_recipe
from diffcheck.custom import CustomFormat, load_custom
from diffcheck.errors import InputError
from diffcheck.formats import Format, fake_quantise
from diffcheck.grammar import parse_precision, parse_storage
from diffcheck.presets import build

DOCS = Path(__file__).parents[2] / "docs" / "choosing.md"
ECHO = """
class Echo:
    def encode(self, x): return x
    def decode(self, stored): return stored
    def bytes(self, dim): return 4 * dim
echo = Echo()
"""


@pytest.fixture
def smooth(tmp_path):
    """The example of the docs, written to a file as a reader would."""
    (code,) = re.findall(r"```python\n(# smooth\.py.*?)```", DOCS.read_text(), flags=re.DOTALL)
    assert 20 <= code.count("\n") <= 35
    path = tmp_path / "smooth.py"
    path.write_text(code)
    return f"{path}:smooth"


def test_the_documented_example_keeps_loud_channels_from_drowning_the_others(smooth):
    fmt = load_custom(smooth)
    assert fmt.bytes_per_entry(128) == 132
    keys = torch.randn(2000, 128, generator=torch.Generator().manual_seed(0))
    keys[:, 7] *= 1e5  # what shares a scale with this channel falls among the subnormals
    quiet = torch.arange(128) != 7
    plain = fake_quantise(keys, Format(element="e4m3"))

    def loss(got):
        return float((got - keys)[:, quiet].norm() / keys[:, quiet].norm())

    assert loss(plain) > 0.05
    assert loss(fmt.fake_quantise(keys)) < 0.03


def test_the_documented_example_in_a_run(smooth, support):
    cfg = support.config()
    x, qr = support.inputs(cfg, 400)
    layer = Pipeline(cfg, support.weights(cfg), x, qr)
    recipe = build(f"k=nohad+{smooth},q=nohad+bf16", cfg)
    assert str(recipe.k_format) == smooth
    assert re.fullmatch(re.escape(smooth) + r" \[[0-9a-f]{12}\]", recipe.to_json()["k_format"])
    unquantised = layer.stage(recipe.replace(k_format=None), "k_quant")
    keys = layer.stage(recipe, "k_quant")
    assert keys.dtype == torch.float32
    assert torch.equal(keys, recipe.k_format.fake_quantise(unquantised))
    assert 0 < float((keys - unquantised.float()).norm() / unquantised.float().norm()) < 0.05
    assert layer.stage(recipe, "topk").shape == (400, 4)


def test_kernels_refuse_it(smooth, support):
    recipe = build(f"k={smooth}", support.config(index_n_heads=64))
    for name in ("triton", "deep_gemm", "sglang"):
        assert "smooth" in find_backend(name).refusal(recipe, support.config(index_n_heads=64))
    assert find_backend("emulated").refusal(recipe, support.config()) is None


def test_wherever_a_format_can_be(smooth, tmp_path, support):
    cfg = support.config()
    file = tmp_path / "recipe.toml"
    file.write_text(f'name = "mine"\nbase = "k=qat+e3m2"\n[replace]\nq_format = "{smooth}"\n')
    recipe = load_recipe(file, cfg)
    assert recipe.q_format == load_custom(smooth)
    assert str(recipe.k_format) == "e3m2/32/ue8m0"
    assert recipe.k_fp4
    with pytest.raises(InputError, match="column"):  # the FP4 step has a built-in format
        load_recipe(_write(tmp_path, f'[replace]\nk_fp4_format = "{smooth}"\n'), cfg)
    # a trace file must not make the reader run a program
    with pytest.raises(InputError, match="k_format"):
        Recipe.from_json({"k_format": smooth}, cfg)


def _write(directory, text):
    path = directory / "other.toml"
    path.write_text(text)
    return path


def test_another_process_loads_it_by_name_and_a_changed_file_is_another_format(tmp_path, monkeypatch):
    path = tmp_path / "echo.py"
    path.write_text(ECHO)
    name = f"{path}:echo"
    first = parse_storage(name)
    again = pickle.loads(pickle.dumps(first))
    assert again == first
    assert hash(again) == hash(first)
    assert again.codec is not first.codec
    monkeypatch.chdir(tmp_path)
    relative = pickle.dumps(parse_storage("echo.py:echo"))
    monkeypatch.chdir("/")
    assert pickle.loads(relative).name == "echo.py:echo"
    path.write_text(ECHO + "# changed\n")
    assert load_custom(name) != first


def test_a_package_offers_one(monkeypatch, tmp_path):
    path = tmp_path / "offering_formats_for_a_test.py"
    path.write_text(ECHO)
    monkeypatch.syspath_prepend(str(tmp_path))
    point = EntryPoint("my-echo", "offering_formats_for_a_test:Echo", custom.GROUP)
    monkeypatch.setattr(custom, "entry_points", lambda group: [point] if group == custom.GROUP else [])
    side = parse_precision("k=qat+my-echo,q=bf16").k
    assert side.qat
    assert isinstance(side.format, CustomFormat)
    assert side.format.name == "my-echo"
    assert side.format.bytes_per_entry(2) == 8
    with pytest.raises(InputError, match=r"column 8 .*expected one of my-echo"):
        parse_precision("k=my-ecco")
    broken = EntryPoint("my-echo", "offering_formats_for_a_test:Missing", custom.GROUP)
    monkeypatch.setattr(custom, "entry_points", lambda group: [broken])
    with pytest.raises(InputError, match=r"my-echo .* cannot be loaded"):
        parse_precision("my-echo")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo = 3", "has no encode, decode, bytes"),
        ("class echo:\n    def __init__(self, x): pass", "cannot be made: TypeError"),
        ("raise RuntimeError('no such luck')", "cannot be loaded: RuntimeError: no such luck"),
        ("other = 1", "has no 'echo'"),
    ],
)
def test_what_is_no_format_is_refused_when_it_is_named(tmp_path, body, message):
    path = tmp_path / "bad.py"
    path.write_text(body)
    with pytest.raises(InputError, match=message):
        parse_precision(f"qat+{path}:echo")
    with pytest.raises(InputError, match="no such file"):
        parse_precision(f"{tmp_path}/absent.py:echo")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("return stored", "return stored[0]"), r"decode gives torch.float32 \[128\], expected float \[2, 128\]"),
        (("return stored", "return stored.long()"), r"decode gives torch.int64 \[2, 128\]"),
        (("return stored", "return 1"), "decode gives int"),
        (("return stored", "return stored + stored.new_zeros(3)"), "decode fails: RuntimeError"),
        (("return 4 * dim", "return None"), r"bytes\(128\) is None"),
        (("return 4 * dim", "return -1"), r"bytes\(128\) is -1"),
    ],
)
def test_what_a_format_may_not_do(tmp_path, change, message):
    path = tmp_path / "echo.py"
    path.write_text(ECHO.replace(*change))
    fmt = load_custom(f"{path}:echo")
    with pytest.raises(InputError, match=message):
        fmt.fake_quantise(torch.zeros(2, 128)), fmt.bytes_per_entry(128)
