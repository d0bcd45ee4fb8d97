"""Needle tests on text: how the text is built, what is counted, and a model that really retrieves."""

import json
import re

import pytest
import torch
from rich.console import Console

from diffcheck.cases import build_cases
from diffcheck.checkpoint.model import open_model
from diffcheck.errors import InputError
from diffcheck.fixture_model import write_model
from diffcheck.needle import NeedleTest, NeedleText, build_text, make_test, read_test, run_grid, summarise
from diffcheck.needle.build import Placed, parse_depth, parse_length
from diffcheck.needle.grid import Cell
from diffcheck.needle.haystack import filler
from diffcheck.needle.report import layer_ranks, render, words
from diffcheck.refimpl import run_indexer
from diffcheck.refimpl.model import run_model

ONE = NeedleText(needle=(91, 92, 93), question=(81, 82), answer=(71,))


def case(**changes):
    fields = {"needles": (ONE,), "filler": tuple(range(10)), "lengths": (40,), "depths": (0.5,)}
    return NeedleTest(**(fields | changes))


@pytest.mark.parametrize(("depth", "first"), [(0.0, 1), (1.0, 35), (0.5, 18)])
def test_one_needle(depth, first):
    """40 tokens: one special, 34 of filler around the needle's three, the question's two at the end."""
    ids, (placed,) = build_text(case(prefix=(99,)), 40, depth)
    assert len(ids) == 40
    assert placed.needle == (first, first + 2)
    assert ids[first : first + 3] == [91, 92, 93]
    assert placed.question == (38, 39)
    assert ids[-2:] == [81, 82]
    assert ids[0] == 99
    hay = [t for t in ids if t < 10]
    assert hay == [i % 10 for i in range(34)], "the filler goes on behind the needle where it stopped"


def test_several_needles_are_turns():
    """Depth 0.5 of 30 filler tokens: needles before filler 15, 25 and (wrapping) 5; answers only between turns."""
    needles = tuple(NeedleText(needle=(50 + i,), question=(60 + i, 60 + i), answer=(70 + i,)) for i in range(3))
    ids, placed = build_text(case(needles=needles, filler=tuple(range(30))), 41, 0.5)
    assert len(ids) == 41
    assert ids[-8:] == [60, 60, 70, 61, 61, 71, 62, 62]
    assert [ids[p.needle[0]] for p in placed] == [50, 51, 52]
    assert [ids[p.needle[0] + 1] for p in placed] == [15, 25, 5]
    assert [ids[p.question[0] : p.question[1] + 1] for p in placed] == [[60, 60], [61, 61], [62, 62]]


def test_text_that_does_not_fit():
    with pytest.raises(InputError, match="5 tokens leave 0 for filler"):
        build_text(case(), 5, 0.5)


@pytest.mark.parametrize(("text", "tokens"), [("2048", 2048), ("2k", 2000), ("4.5K", 4500), (" 22.597k", 22597)])
def test_lengths(text, tokens):
    assert parse_length(text) == tokens


@pytest.mark.parametrize("text", ["", "k", "2kk", "-5", "2.5", "3", "1e99", "nan"])
def test_bad_lengths(text):
    with pytest.raises(InputError, match="expected tokens such as"):
        parse_length(text)


@pytest.mark.parametrize("text", ["", "1.1", "-0.1", "nan", "half"])
def test_bad_depths(text):
    with pytest.raises(InputError, match="expected 0 to 1"):
        parse_depth(text)


def encode(text):
    return list(text.encode())


def test_from_options():
    made = make_test(
        needles=["A", "B"], questions=["Where?"], haystack=None, lengths=["100"], depths=["0", "1"], encode=encode
    )
    assert [n.needle for n in made.needles] == [tuple(b" A "), tuple(b" B ")]
    assert made.needles[0].question == made.needles[1].question == tuple(b" Where?")
    assert bytes(made.filler).decode().startswith("The ")
    for needles, questions in (([], ["a"]), (["a"], []), (["a", "b", "c"], ["a", "b"]), (["  "], ["a"])):
        with pytest.raises(InputError, match="expected"):
            make_test(needles=needles, questions=questions, haystack=None, lengths=["9"], depths=["0"], encode=encode)


def test_filler_is_seeded_and_dull():
    assert filler(50) == filler(50) != filler(50, seed=1)
    assert filler(50).count(". ") == 49
    assert not any(character.isdigit() for character in filler(500))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"no \[\[needle\]\] tables"),
        ("depth = 1", "unknown key 'depth'"),
        ("[[needle]]\ntext = 'a'", "has no question"),
        ("[[needle]]\ntext = 'a'\nquestion = 'b'\ncolour = 1", "unknown key 'colour'"),
        ("[[needle]]\ntext_tokens = ['a']\nquestion = 'b'", "expected a list of token ids"),
        ("lengths = 5\n[[needle]]\ntext = 'a'\nquestion = 'b'", "must be lists"),
        ("haystack = 'none.txt'\n[[needle]]\ntext = 'a'\nquestion = 'b'", r"none\.txt: no such file"),
        ("[[needle]", "not readable as TOML"),
    ],
)
def test_bad_files(tmp_path, text, message):
    (tmp_path / "test.toml").write_text(text)
    with pytest.raises(InputError, match=message):
        read_test(tmp_path / "test.toml", encode)


def record(layer, precision, selected, counted=(True, True)):
    found = [{"rank": [0, 9], "selected": list(selected), "counted": list(counted), "chance": [0.2, 0.4]}]
    return {"layer": layer, "precision": precision, "theta_setting": "checkpoint", "needles": found}


def test_summary_by_hand():
    """Layer 2: both tokens find it, one stays. Layer 4: one finds it, none stays: lost. Layer 6: found by none."""
    cell = Cell(length=9, depth=0.5, placed=())
    for layer, ours, theirs in ((2, (1, 1), (1, 0)), (4, (0, 1), (0, 0)), (6, (0, 0), (1, 1))):
        cell.records.append(record(layer, "reference", map(bool, ours)))
        cell.records.append(record(layer, "fp8", map(bool, theirs)))
    reference, fp8 = summarise(cell)
    assert (reference["kept"], reference["found"], reference["lost"]) == (1.0, 2, 0)
    assert fp8["kept"] == pytest.approx(1 / 3)
    assert (fp8["tokens"], fp8["found"], fp8["lost"], fp8["lost_layers"]) == (3, 2, 1, [4])
    assert fp8["chance"] == pytest.approx(0.3)
    assert words("fp8", [fp8]) == (
        "fp8: keeps 33.3% of the tokens that find it (blind choice: up to 30.0%), loses it in 1 of 2 pairs (layer 4)."
    )


def test_rows_that_see_too_little_count_nowhere():
    cell = Cell(length=9, depth=0.5, placed=())
    cell.records.append(record(2, "reference", (True, True), (False, False)))
    cell.records.append(record(2, "fp8", (False, False), (False, False)))
    for row in summarise(cell):
        assert row["vacuous"]
        assert row["kept"] is None
        assert "vacuous" in words(row["precision"], [row])


@pytest.fixture(scope="module")
def retrieved(mini, tmp_path_factory):
    """The trained miniature with one of its own records as needle: <R> key key value value, asked by <Q> key key."""
    folder = tmp_path_factory.mktemp("needle")
    text = [t for t in json.loads((mini / "tokens.json").read_text()) if t < 256]
    (folder / "hay.json").write_text(json.dumps(text))
    (folder / "test.toml").write_text(
        'lengths = ["1.2k"]\ndepths = [0.1, 0.9]\nhaystack = "hay.json"\n'
        "[[needle]]\ntext_tokens = [384, 262, 300, 340, 350]\nquestion_tokens = [385, 262, 300]\n"
    )
    (folder / "q-only.toml").write_text("[replace]\nk_hadamard = false\n")
    model = open_model(mini)
    cases = build_cases(model.config.indexer, ["fp8", "fp4"], ["checkpoint"], [folder / "q-only.toml"])
    test = read_test(folder / "test.toml", encode)
    return list(run_grid(model, (2, 4), test, cases))


def test_the_trained_model_finds_its_record(retrieved):
    """In layer 2 the last token of the question finds the record at every depth, and fp8 and fp4 keep it."""
    assert [cell.depth for cell in retrieved] == [0.1, 0.9]
    for cell in retrieved:
        for row in cell.records:
            (needle,) = row["needles"]
            assert needle["counted"] == [True] * 3
            if row["layer"] == 2 and row["precision"] != "q-only":
                assert needle["rank"][-1] < 4
                assert needle["selected"][-1]
        by_name = {row["precision"]: row for row in summarise(cell)}
        assert by_name["fp8"]["lost"] == by_name["fp4"]["lost"] == 0


def test_a_fault_loses_it(retrieved):
    broken = [row for cell in retrieved for row in cell.records if row["precision"] == "q-only" and row["layer"] == 4]
    assert all(row["needles"][0]["rank"][-1] > 0 for row in broken)
    rows = [row for cell in retrieved for row in summarise(cell) if row["precision"] == "q-only"]
    assert min(row["kept"] for row in rows) < 0.7


def test_each_needle_is_asked_by_its_own_question(mini):
    """Ranks of two turns once more from the indexer's own scores: counted by hand, rows and entries by the text."""
    model = open_model(mini)
    needles = (NeedleText(needle=(91, 92, 93, 94, 95), question=(81, 82, 83)), NeedleText(needle=(96,), question=(84,)))
    test = case(needles=needles, filler=tuple(range(100, 230)), lengths=(330,), depths=(0.3,))
    (cell,) = run_grid(model, (2,), test, ())
    ids, placed = build_text(test, 330, 0.3)
    *_, last = run_model(model.config, model.load, torch.tensor(ids), layers=range(3))
    rows = [list(range(p.question[0], p.question[1] + 1)) for p in placed]
    trace = run_indexer(model.config.indexer, model.checkpoint.load(2), last.record.x, last.record.qr)
    for got, place, own in zip(cell.records[0]["needles"], placed, rows, strict=True):
        entries = range(place.needle[0] // 4, place.needle[1] // 4 + 1)
        for rank, selected, t in zip(got["rank"], got["selected"], own, strict=True):
            scores = trace["scores"][t, : (t + 1) // 4].float()
            assert rank == min(int((scores > scores[j]).sum()) for j in entries)
            assert selected == bool(set(entries) & set(trace["topk"][t].tolist()))
    assert [len(n["rank"]) for n in cell.records[0]["needles"]] == [3, 1]


def test_an_interrupted_grid_goes_on(mini, tmp_path):
    model = open_model(mini)
    test = case(filler=tuple(range(100, 200)), lengths=(300,), depths=(0.2, 0.8))
    lines = []

    def stop(line):
        lines.append(line)
        if line.startswith("text 2"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(run_grid(model, (2,), test, (), run_dir=tmp_path, say=stop))
    lines.clear()
    cells = list(run_grid(model, (2,), test, (), run_dir=tmp_path, say=lines.append))
    assert len(cells) == 2
    assert "layers 0 to 2 are done" in lines[1]
    assert [r["needles"] for r in cells[0].records] == [
        r["needles"] for r in next(run_grid(model, (2,), test, ())).records
    ]


def test_command_on_a_random_model(tmp_path, capsys):
    """The whole command with a tokeniser: two needles, two turns; what is written has a rank for every token."""
    pytest.importorskip("tokenizers")
    from diffcheck.cli import app

    model = write_model(tmp_path / "model", like="mini", layers=3)
    arguments = ["needle", "--checkpoint", model, "--needle", "The code is 4711.", "--needle", "The dog is green."]
    arguments += ["--question", "Which code?", "--question", "Which colour?", "--lengths", "90,500", "--depths", "0.3"]
    arguments += ["--precision", "fp8", "--json", tmp_path / "out.json"]
    app([str(a) for a in arguments], standalone_mode=False)
    out = capsys.readouterr().out
    assert "vacuous" in out
    assert "fp8: keeps " in out
    cells = json.loads((tmp_path / "out.json").read_text())["cells"]
    assert [c["length"] for c in cells] == [90, 500]
    first, last = cells[1]["needles"][0]["question"]
    record = cells[1]["records"][1]
    assert record["precision"] == "fp8"
    assert len(record["needles"]) == 2
    assert len(record["needles"][0]["rank"]) == last - first + 1 == len(" Which code?")
    assert cells[1]["needles"][1]["question"][1] == 499, "the last question ends the text"


def test_options_win_over_the_file(mini, tmp_path, capsys):
    """A file of token ids needs no tokeniser; lengths given on the command line replace the file's."""
    from diffcheck.cli import app

    (tmp_path / "hay.json").write_text(json.dumps(list(range(100, 200))))
    (tmp_path / "test.toml").write_text(
        'lengths = ["22k"]\ndepths = [0.4, 0.6]\nhaystack = "hay.json"\n'
        "[[needle]]\ntext_tokens = [7, 8]\nquestion_tokens = [9]\n"
    )
    arguments = ["needle", "--checkpoint", mini, "--config", tmp_path / "test.toml", "--lengths", "60", "--layers", "2"]
    arguments += ["--precision", "fp8", "--json", tmp_path / "out.json"]
    app([str(a) for a in arguments], standalone_mode=False)
    cells = json.loads((tmp_path / "out.json").read_text())["cells"]
    assert [(c["length"], c["depth"]) for c in cells] == [(60, 0.4), (60, 0.6)]
    assert "vacuous" in capsys.readouterr().out
    with pytest.raises(InputError, match="--config excludes"):
        app([str(a) for a in [*arguments, "--needle", "x"]], standalone_mode=False)
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in mini.iterdir():
        if path.name != "tokenizer.json":
            (bare / path.name).symlink_to(path)
    with pytest.raises(InputError, match=r"tokenizer\.json: no such file"):
        app(["needle", "--checkpoint", str(bare), "--needle", "x", "--question", "y"], standalone_mode=False)


def test_ranks_by_layer(capsys):
    """By hand: two texts, one row that sees everything, one text whose needle no counted token selects."""
    placed = (Placed(needle=(8, 12), question=(40, 41)), Placed(needle=(20, 22), question=(42, 43)))

    def record(case, *needles):
        made = [
            {"rank": ranks, "selected": selected, "counted": counted, "chance": [0.1] * len(ranks)}
            for ranks, selected, counted in needles
        ]
        return {"layer": 2, "precision": case, "theta_setting": "checkpoint", "needles": made}

    full, none = [True, True], [False, False]
    cells = [
        Cell(length=44, depth=0.1, placed=placed, records=[
            record("reference", ([5, 3], full, full), ([0, 0], full, none)),
            record("fp8", ([9, 70], [True, False], full), ([0, 0], full, none)),
        ]),
        Cell(length=44, depth=0.9, placed=placed, records=[
            record("reference", ([8, 1], full, [True, False]), ([2, 6], full, full)),
            record("fp8", ([80, 1], [False, True], [True, False]), ([4, 90], [True, False], full)),
        ]),
    ]  # fmt: skip
    reference, fp8 = ("reference", "checkpoint"), ("fp8", "checkpoint")
    assert layer_ranks(cells) == {
        (2, 1): {reference: (5.5, 0), fp8: (44.5, 1)},
        (2, 2): {reference: (2, 0), fp8: (4, 0)},
    }
    render(Console(width=200), cells)
    out = capsys.readouterr().out
    assert "2 needles: the first lies at the depth named" in out
    assert re.search(r"^ +2 +1 +5\.5 / 0 +44\.5 / 1 *$", out, flags=re.MULTILINE), out
    assert "loses it in 1 of 3 pairs (layer 2)" in out
