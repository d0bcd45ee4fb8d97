"""Seeded hidden states that are as unfriendly as real ones.

A sequence is a made-up text over the model of `basis`: every token has a word (Zipf-distributed, so frequent
words recur and match across the whole context), belongs to a topic (which lasts about sixty tokens and comes
back later, so neighbours are correlated), and adds something of its own. That latent is spread over the
hidden dimension with a decaying spectrum, on top of a shared mean direction, a noise floor of unequal
channels and a few outlier channels that are large in every token. Rows are RMS-normalised and weighted, as
after `attn_norm`.

qr is a fixed linear projection of x itself, then normalised and weighted, as after `q_norm`: it is a function
of x.

Text is made in independent blocks of BLOCK tokens, each seeded by (geometry, seed, block number). So a
shorter sequence is exactly the beginning of a longer one with the same seed, and the temporaries are those of
one block. Letters: T tokens, r latent rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..refimpl.config import IndexerConfig
from ..refimpl.errors import InputError
from .basis import LATENT_ENERGY, OUTLIER_WOBBLE, PICK, TOPICS, WORDS, Basis, gaussian, model_basis, seeded

BLOCK = 512
TOPIC_LENGTH = 64
"""Mean number of tokens before the topic changes."""
TOPIC_ENERGY, WORD_ENERGY, OWN_ENERGY = 0.45, 0.40, 0.15
"""How a token's latent is made up."""
ZIPF = 1.0
NORM_EPS = 1e-6


def synthetic_hidden(
    config: IndexerConfig, *, length: int, seed: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Hidden states of one made-up sequence: (x bf16 [length, hidden], qr bf16 [length, q_lora]), on `device`.

    Generated on the CPU whatever the device: on one machine the values depend only on (config's two widths, length,
    seed), and the first n rows of a longer sequence equal the sequence of length n with the same seed, bit for bit.
    Another torch build, kind of CPU or number of threads may sum its products in another order, which moves a few
    values by one bf16 unit. Raises InputError when length is not positive.
    """
    if length < 1:
        raise InputError(f"length is {length}, expected at least 1 token")
    basis = model_basis(config.hidden_size, config.q_lora_rank)
    x = torch.empty(length, config.hidden_size, dtype=torch.bfloat16)
    qr = torch.empty(length, config.q_lora_rank, dtype=torch.bfloat16)
    scratch = torch.empty(BLOCK, config.hidden_size)
    for first in range(0, length, BLOCK):
        rows = min(BLOCK, length - first)
        block = _text_block(basis, scratch, seed, first // BLOCK).bfloat16()
        x[first : first + rows] = block[:rows]
        # the whole block, although fewer rows may be wanted: a product's bits depend on its number of rows
        qr[first : first + rows] = low_rank_query(basis, block)[:rows]
    return x.to(device), qr.to(device)


def _text_block(basis: Basis, out: Tensor, seed: int, number: int) -> Tensor:
    """Block `number` of the text, written into `out` [BLOCK, H] fp32 and returned."""
    generator = seeded("text", out.shape[1], basis.q_norm_weight.numel(), seed, number)
    latent = _latents(basis, generator) * (basis.spectrum * (LATENT_ENERGY * out.shape[1]) ** 0.5)
    out.normal_(generator=generator).mul_(basis.floor).add_(basis.mean)
    out.addmm_(latent, basis.directions)
    wobble = 1 + OUTLIER_WOBBLE * gaussian(BLOCK, basis.outliers.numel(), generator=generator)
    out[:, basis.outliers] = basis.mean[basis.outliers] * wobble
    return out.mul_(_inverse_rms(out)).mul_(basis.norm_weight)


def _latents(basis: Basis, generator: torch.Generator) -> Tensor:
    """[BLOCK, r] unit-variance latents: topic, word and something of the token's own."""
    zipf = torch.arange(1, WORDS + 1, dtype=torch.float64) ** -ZIPF
    words = torch.multinomial(zipf, BLOCK, replacement=True, generator=generator)
    switch = torch.rand(BLOCK, generator=generator) < 1 / TOPIC_LENGTH
    drawn = torch.randint(TOPICS, (BLOCK + 1,), generator=generator)
    topics = drawn[switch.cumsum(0)]
    latent: Tensor = TOPIC_ENERGY**0.5 * basis.topics[topics] + WORD_ENERGY**0.5 * basis.words[words]
    latent += OWN_ENERGY**0.5 * gaussian(BLOCK, basis.words.shape[1], generator=generator)
    return latent


def low_rank_query(basis: Basis, x: Tensor) -> Tensor:
    """The fixed query projection of x [n, H], normalised and weighted: bf16 [n, q_lora]."""
    x32 = x.float()
    raw = torch.addmm(PICK * x32[:, basis.picked], x32 @ basis.read.T, basis.spread)
    return (raw * _inverse_rms(raw) * basis.q_norm_weight).bfloat16()


def _inverse_rms(rows: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    mean_square: Tensor = norm.square() / rows.shape[1]
    return torch.rsqrt(mean_square + NORM_EPS)
