"""The strategies: what they promise of every example, and that each kind and edge case turns up."""

import subprocess
import sys

import pytest
import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st

from diffcheck.kernels import allocate_pages, read_entries, write_entries
from diffcheck.refimpl import run_indexer
from diffcheck.testing import Layer, strategies

QUICK = settings(max_examples=500, database=None, derandomize=True, deadline=None)


@given(strategies.scores(max_rows=3, max_entries=130, max_k=40))
def test_scores_keep_their_bounds(made):
    rows, entries = made.scores.shape
    assert made.scores.dtype == torch.float32
    assert made.visible.dtype == torch.int32
    assert 1 <= rows <= 3
    assert 1 <= entries <= 130
    assert 1 <= made.k <= 40
    assert 0 <= int(made.visible.min()) <= int(made.visible.max()) <= entries
    hidden = made.scores[torch.arange(entries) >= made.visible[:, None]]
    assert hidden.isnan().all() or (hidden == torch.inf).all()
    if made.kind not in ("special values",):
        assert made.scores[torch.arange(entries) < made.visible[:, None]].isfinite().all()


@pytest.mark.parametrize("kind", strategies.SCORE_KINDS)
def test_each_kind_turns_up(kind):
    found = find(
        strategies.scores(), lambda made: made.kind == kind and int(made.visible.max()) > made.k, settings=QUICK
    )
    assert found.kind == kind


@pytest.mark.parametrize("difference", [-1, 0, 1])
def test_rows_that_see_about_k_turn_up(difference):
    find(strategies.scores(), lambda made: made.k + difference in made.visible.tolist() and made.k > 3, settings=QUICK)


def test_clusters_share_a_coarse_bin_and_single_bytes_differ_alone():
    rng = torch.Generator().manual_seed(0)
    clustered = strategies._scores("clustered", 2, 300, rng)
    assert float(clustered.std()) < 1 < 90 < float(clustered.min())
    bits = strategies._scores("one byte", 1, 300, rng).view(torch.int32)[0]
    changing = 0
    for value in bits.tolist():
        changing |= value ^ bits[0].item()
    assert changing in (0xFF, 0xFF00, 0xFF0000)
    with pytest.raises(ValueError, match="kind of scores 'none'"):
        strategies._scores("none", 1, 1, rng)


@settings(max_examples=25)
@given(st.data())
def test_layers_of_any_geometry_run(data):
    config = data.draw(strategies.configs())
    weights = data.draw(strategies.weights(config))
    weights.check(config)
    x, qr = data.draw(strategies.hidden_states(config, max_tokens=30))
    assert 4 <= len(x) <= 30
    trace = run_indexer(config, weights, x, qr)
    assert trace["scores"].shape == (len(x), len(x) // 4)
    queries = torch.arange(len(x))
    layer = Layer(number=1, config=config, weights=weights, x=x, qr=qr, queries=queries, source="")
    assert torch.equal(layer.reference()["topk"], trace["topk"])
    assert layer.visible.tolist() == [(t + 1) // 4 for t in range(len(x))]
    assert layer.k == config.index_topk


@given(strategies.ragged_batches(max_tokens=60, k=5))
def test_ragged_batches_by_hand(batch):
    token = entry = 0
    starts, ends = [], []
    for request, length in enumerate(batch.tokens):
        assert batch.cu_tokens[request] == token
        assert batch.cu_entries[request] == entry
        for position in range(length):
            starts.append(entry)
            ends.append(entry + (position + 1) // 4)
        token, entry = token + length, entry + length // 4
    assert (batch.cu_tokens[-1], batch.cu_entries[-1]) == (token, entry)
    assert batch.start.tolist() == starts
    assert batch.end.tolist() == ends
    assert {t.dtype for t in (batch.cu_tokens, batch.cu_entries, batch.start, batch.end)} == {torch.int32}


@pytest.mark.parametrize("tokens", [1, 4 * 8 - 1, 4 * 8, 4 * 65])
def test_edges_of_requests_turn_up(tokens):
    find(strategies.ragged_batches(), lambda batch: tokens in batch.tokens, settings=QUICK)


@given(strategies.block_tables(max_entries=150))
def test_pages_belong_to_one_request(tables):
    used = [tables.slots(request) for request in range(len(tables.lengths))]
    assert [len(slots) for slots in used] == tables.lengths.tolist()
    together = torch.cat(used)
    assert len(together.unique()) == len(together)
    pages = [set((slots // tables.page).tolist()) for slots in used]
    assert sum(map(len, pages)) == len(set().union(*pages)) == tables.pages - 3
    if len(together):
        assert 0 <= int(together.min()) <= int(together.max()) < tables.pages * tables.page
    assert tables.table.dtype == torch.int32


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 7, 8, 9])
def test_edges_of_pages_turn_up(length):
    find(strategies.block_tables(), lambda tables: length in tables.lengths.tolist(), settings=QUICK)


@settings(max_examples=10)
@given(strategies.block_tables(max_entries=130))
def test_what_is_written_through_a_table_is_read_back(tables):
    pages = allocate_pages("bf16", tables.pages, torch.device("cpu"))
    keys = [torch.randn(int(length), 128).bfloat16() for length in tables.lengths]
    for request, codes in enumerate(keys):
        write_entries(pages, "bf16", tables.slots(request), codes, None)
    for request, codes in enumerate(keys):
        assert torch.equal(read_entries(pages, "bf16", tables.slots(request))[0], codes)


def test_without_hypothesis_the_rest_works_and_the_error_says_what_to_do():
    code = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "from diffcheck.testing import assert_selection, made_up_config\n"
        "try:\n    from diffcheck.testing import strategies\n"
        "except ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == (
        "diffcheck.testing.strategies needs hypothesis: pip install 'diffcheck[testing]', or hypothesis itself\n"
    )
