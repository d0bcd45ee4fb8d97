"""Distances by hand."""

import torch

from diffcheck.diagnose.distance import distance, selection_distance


def misses(selected, scores, dtype=torch.bfloat16):
    scores = torch.tensor([scores]).to(dtype)
    known = torch.ones(scores.shape[1], dtype=torch.bool)
    return selection_distance(torch.tensor([selected]), scores, known, torch.tensor([len(selected)])).total


def test_misses_forgive_one_unit_of_the_score():
    """At 2 a bf16 unit is 2^-6: 1.984 may stand for 2, 1.9 may not."""
    scores = [4.0, 3.0, 2.0, 1.984375, 1.9]
    assert misses([0, 1, 2], scores) == 0
    assert misses([0, 1, 3], scores) == 0
    assert misses([0, 1, 4], scores) == 1
    assert misses([1, 2, 3], scores) == 1
    assert misses([0, 1, 3], scores, torch.float32) == 1


def test_too_many_or_too_few_are_misses():
    scores = torch.tensor([[3.0, 2.0, 1.0]])
    found = selection_distance(torch.tensor([[0, -1]]), scores, torch.ones(3, dtype=torch.bool), torch.tensor([2]))
    assert found.total == 1


def test_a_bf16_dump_is_compared_in_bf16():
    fine = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    assert distance(fine.bfloat16(), fine).equal
    assert not distance(fine, fine.bfloat16()).equal  # fp32 values that nobody rounded say so
    assert distance(fine, fine.bfloat16()).fits
    assert distance(fine.bfloat16().float(), fine.bfloat16()).equal
    assert not distance(fine * 1.02, fine).fits
