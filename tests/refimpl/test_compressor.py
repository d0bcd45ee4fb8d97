"""The compressor's pieces: pooling state, softmax pool, norm.

| what | tolerance |
|--|--|
| windows and states of a stream, by hand | equal |
| pool against a loop in fp64 | 1e-6 of the largest value |
| bits of an entry, whatever entries are pooled with it | equal |
"""

import pytest
import torch

from diffcheck.refimpl.compressor import POOL_TILE, PoolState, pool_windows, rms_norm, window_slots


def numbered(first, count):
    """Projections [count, 2] whose two columns are the token's number and a hundred more."""
    tokens = torch.arange(first, first + count).float()
    return torch.stack((tokens, 100 + tokens), dim=1)


def test_slots_are_the_first_half_of_the_window_before_and_the_last_half_of_the_own():
    state = PoolState.start(2, "cpu")
    kv, gate, state = state.then(numbered(0, 9), numbered(0, 9))
    slots = window_slots(kv)
    assert slots.shape == (2, 8, 1)
    assert slots[0, :, 0].tolist() == [0, 0, 0, 0, 100, 101, 102, 103]
    assert slots[1, :, 0].tolist() == [0, 1, 2, 3, 104, 105, 106, 107]
    assert window_slots(gate)[0, :4].isneginf().all()
    assert state.kv[:, 0].tolist() == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("open_tokens", range(4))
def test_the_state_is_the_previous_window_and_the_open_one(open_tokens):
    state = PoolState.start(2, "cpu")
    assert state.gate.isneginf().all()
    assert not state.kv.any()
    for first in range(8 + open_tokens):
        kv, _, state = state.then(numbered(first, 1), numbered(first, 1))
        assert kv.shape[0] - 1 == ((first + 1) % 4 == 0), "an entry appears with its fourth token"
    assert state.kv[:, 0].tolist() == list(range(4, 8 + open_tokens))


def test_a_state_owns_its_memory():
    """And no more than its at most seven rows: a state outlives the call."""
    projections = numbered(0, 4002)
    _, _, state = PoolState.start(2, "cpu").then(projections, projections)
    before = state.kv.clone()
    projections.fill_(-1)
    assert torch.equal(state.kv, before)
    for tensor in (state.kv, state.gate):
        assert tensor.untyped_storage().nbytes() == 6 * 2 * 4


def test_pool_against_a_loop():
    rng = torch.Generator().manual_seed(0)
    kv, gate = torch.randn(2, 150, 4, 64, generator=rng)
    gate *= 5
    gate[0] = -torch.inf
    kv[0] = 0
    got = pool_windows(kv, gate)
    assert got.shape == (149, 32)
    for i in range(0, 149, 13):
        for d in range(0, 32, 5):
            values = [*kv[i, :, d].tolist(), *kv[i + 1, :, 32 + d].tolist()]
            logits = torch.tensor([*gate[i, :, d].tolist(), *gate[i + 1, :, 32 + d].tolist()]).double()
            want = (torch.tensor(values).double() * logits.softmax(0)).sum()
            assert abs(float(got[i, d]) - float(want)) < 1e-6 * max(map(abs, values))


def test_an_entrys_bits_do_not_depend_on_company(support):
    rng = torch.Generator().manual_seed(1)
    kv, gate = torch.randn(2, 2 * POOL_TILE + 4, 4, 256, generator=rng)
    whole = pool_windows(kv, gate)
    for first, last in ((0, 1), (5, 6), (POOL_TILE - 1, POOL_TILE + 2), (2, 2 * POOL_TILE + 3)):
        part = slice(first, last + 1)
        support.assert_same_bits(pool_windows(kv[part], gate[part]), whole[first:last], f"{first}..{last}")
    assert pool_windows(kv[:1], gate[:1]).shape == (0, 128)


def test_rms_norm_by_hand():
    x = torch.tensor([[3.0, -4.0, 0.0, 0.0]]).bfloat16()
    weight = torch.tensor([1.0, 2.0, 5.0, 7.0]).bfloat16()
    got = rms_norm(x, weight, eps=2.75)  # mean square 6.25, plus eps 9
    assert got.dtype == torch.float32
    assert torch.allclose(got, torch.tensor([[1.0, -8 / 3, 0.0, 0.0]]), rtol=1e-6)
    assert rms_norm(x.double(), weight, eps=1.0).dtype == torch.float64
