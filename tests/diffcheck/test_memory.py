"""Memory of index keys, against sums done by hand on the published V4-Flash numbers."""

import json
import math

import pytest
from typer.testing import CliRunner

from diffcheck.cli import app
from diffcheck.errors import InputError
from diffcheck.fixture import GEOMETRIES
from diffcheck.memory import document, measure

FORMATS = ("e4m3/128/fp32", "bf16", "e2m1/32/ue8m0")
ENTRY = 448 + 7 + 2 * 64 + 1
"""Main entry of V4-Flash: e4m3 values, their scales, RoPE dims in bf16, and one byte to a multiple of 8."""
PER_TOKEN = 21 * ENTRY / 4 + 20 * ENTRY / 128
PER_REQUEST = 43 * 128 * ENTRY + 21 * 8 * 2048 * 4 + 21 * 8 * 512 * 4 + 20 * 128 * 1024 * 4


@pytest.fixture
def flash(tmp_path):
    """A directory with the config.json of V4-Flash and nothing else."""
    (tmp_path / "config.json").write_text(json.dumps(GEOMETRIES["v4-flash"].config_json()))
    return tmp_path


def test_flash_by_hand(flash):
    m = measure(flash, FORMATS)
    assert m.layers == {0: 2, 4: 21, 128: 20}
    assert m.entry_bytes == ENTRY == 584
    assert [t.bytes for t in m.token] == [3066.0, 91.25]
    assert math.fsum(t.bytes for t in m.request) == PER_REQUEST
    fp8, bf16, fp4 = m.costs
    assert (fp8.token, bf16.token, fp4.token) == (21 * 33, 21 * 64, 21 * 17)
    assert (fp8.kv_token, bf16.kv_token) == (3850.25, 4501.25)
    assert fp8.context == 21 * 33 * 524288
    assert fp8.kv_context == 3850.25 * 524288
    assert (fp8.more, fp8.slots) == (0, 0)
    assert bf16.more == pytest.approx(21 * 31 / 3850.25, rel=1e-12)
    assert bf16.slots == pytest.approx(-21 * 31 / 4501.25, rel=1e-12)
    assert fp4.slots == pytest.approx(21 * 16 / (3850.25 - 21 * 16), rel=1e-12)
    assert m.logits_bytes == 8192 * 131072 * 4
    assert m.topk_bytes == 8192 * 512 * 4


def test_a_publicly_estimated_deployment(flash):
    """bf16 index keys were estimated at +15 % KV bytes a token and -13 % slots: what requests of 32k tokens make it."""
    more, slots = measure(flash, FORMATS).costs[1].by_request[32768]
    fixed = PER_REQUEST / 32768
    assert more == pytest.approx((PER_TOKEN + 21 * 64 + fixed) / (PER_TOKEN + 21 * 33 + fixed) - 1, rel=1e-12)
    assert round(more, 2) == 0.15
    assert round(slots, 2) == -0.13


def test_formulas_say_what_is_counted(flash):
    """Each formula, read as arithmetic, gives its own bytes."""
    m = measure(flash, FORMATS)
    for term in (*m.token, *m.request):
        assert eval(term.formula.replace(" layers", "").replace("x", "*")) == term.bytes, term
    assert sum(t.bytes for t in m.entry) == 583


def test_other_context_chunk_and_entry(flash):
    m = measure(flash / "config.json", ["bf16", "fp4", "bf16"], context=8192, chunk=100, kv_entry=1024)
    assert [c.format for c in m.costs] == ["bf16", "fp4"]
    assert m.entry_bytes == 1024
    assert m.costs[0].kv_token == 21 * 1024 / 4 + 20 * 1024 / 128 + 21 * 64
    assert m.costs[1].context == 21 * 17 * 8192
    assert m.costs[1].more < 0 < m.costs[1].slots
    assert (m.logits_bytes, m.topk_bytes) == (100 * 2048 * 4, 100 * 512 * 4)
    assert measure(flash, ["bf16"], context=400).topk_bytes == 8192 * 100 * 4


def test_the_command(flash, tmp_path):
    out = tmp_path / "memory.json"
    result = CliRunner().invoke(app, ["memory", "--checkpoint", str(flash), "--json", str(out)])
    assert result.exit_code == 0
    assert "bf16                  256    1344.00       4501.25        29.9%      0.705 of      2.360    +16.9%" in (
        result.stdout
    )
    assert "21 layers x 584 / 4               =    3066.00 B" in result.stdout
    found = json.loads(out.read_text())
    assert found == json.loads(json.dumps(document(measure(flash, FORMATS))))
    assert found["formats"][1]["by_request_tokens"]["32768"]["slots_share"] == pytest.approx(-0.1309, abs=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 3}, "--context: 3"),
        ({"chunk": 0}, "--chunk: 0"),
        ({"kv_entry": 0}, "--kv-entry: 0"),
        ({"formats": []}, "names nothing"),
        ({"formats": ["e4m3/128/ue8m1"]}, "column 14"),
        ({"formats": ["e4m3/96/fp32"]}, "divides 128"),
    ],
)
def test_bad_options(flash, options, message):
    with pytest.raises(InputError, match=message):
        measure(flash, **({"formats": FORMATS} | options))


def test_bad_checkpoints(flash, tmp_path):
    with pytest.raises(InputError, match="no such directory"):
        measure(tmp_path / "absent", FORMATS)
    config = GEOMETRIES["v4-flash"].config_json()
    for change, message in (({"compress_ratios": [0, 4, 16]}, "compress"), ({"head_dim": None}, "head_dim")):
        (flash / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(InputError, match=message):
            measure(flash, FORMATS)
