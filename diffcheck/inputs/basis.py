"""The imaginary model behind synthetic inputs: what its hidden states have in common, whatever the text.

Hidden states of a trained model are nothing like white noise, and white noise hides faults: it has no
outliers for a scale to clip, no shared direction for a bias to ride on, and so many equal directions that
every key looks alike. Measured on a small trained model of this architecture, the input of an indexer has 70
% of its energy in one mean direction, channels 13-16 times the typical one, and six effective dimensions
around the mean.

A basis is a function of the geometry alone (hidden size and q_lora rank), never of a seed: a seed chooses the
text, or the weights, and both must refer to the same model. So it is shared by the synthetic hidden states
and by the checkpoint fixtures, which makes queries relate to contents: both sides read the same latent
directions.

    x  = norm_weight * rms_normalise(mean + latent * (spectrum * directions) + floor + outlier channels)
    qr = q_norm_weight * rms_normalise((x @ read^T) @ spread + PICK * x[:, picked])

Letters: r latent rank, H hidden size, L q_lora rank.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

MAX_LATENT = 64
WORDS = 2048
TOPICS = 96
LATENT_DECAY = 0.5
"""Amplitude of latent direction i falls as (i + 1)^-LATENT_DECAY."""
MEAN_ENERGY, LATENT_ENERGY, FLOOR_ENERGY = 0.40, 0.45, 0.15
"""Energy per ordinary channel, before normalisation: the shared mean, the latent directions, and the noise
floor."""
OUTLIER_LOW, OUTLIER_HIGH = 12.0, 40.0
"""Outlier channels are this many times a typical channel."""
OUTLIER_WOBBLE = 0.2
"""How much of an outlier channel's magnitude changes from token to token; the rest is constant."""
PICK = 0.35
"""Share of single channels in the query projection; it keeps qr at full rank."""


def seeded(*parts: object) -> torch.Generator:
    """A CPU generator whose seed is a hash of the parts, so that every tensor has a stream of its own."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def gaussian(*shape: int, generator: torch.Generator) -> Tensor:
    """Standard normal fp32 of that shape from the generator."""
    return torch.randn(shape, generator=generator)


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """Fixed tensors of one geometry, all fp32 on the CPU; treat them as read-only.

    mean [H], unit mean square over ordinary channels, outliers included; outliers int64 [n]; outlier_gain [n]
    their multiples; directions [r, H] orthonormal rows; spectrum [r], squares summing to 1; floor [H] noise
    per channel; norm_weight [H]; words [WORDS, r] and topics [TOPICS, r] latents; read [r + 1, H] and spread
    [r + 1, L] the query projection, picked int64 [L] its single channels; q_norm_weight [L].
    """

    mean: Tensor
    outliers: Tensor
    outlier_gain: Tensor
    directions: Tensor
    spectrum: Tensor
    floor: Tensor
    norm_weight: Tensor
    words: Tensor
    topics: Tensor
    read: Tensor
    spread: Tensor
    picked: Tensor
    q_norm_weight: Tensor

    @property
    def query_projection(self) -> Tensor:
        """The query projection as one matrix fp64 [L, H]; dense, so only for small use and for writing
        weights."""
        dense = self.spread.double().T @ self.read.double()
        rows = torch.arange(self.picked.numel())
        dense[rows, self.picked] += PICK
        return dense


@lru_cache(maxsize=8)
def model_basis(hidden: int, q_lora: int) -> Basis:
    """The basis of a geometry, cached; about (2 * 65 + 6) * hidden * 4 bytes."""

    def stream(name: str) -> torch.Generator:
        return seeded("basis", hidden, q_lora, name)

    rank = max(1, min(MAX_LATENT, hidden // 2, q_lora // 2))
    order = torch.randperm(hidden, generator=stream("channels"))
    count = max(1, hidden // 800)
    outliers = order[:count].clone()
    gain = torch.logspace(0, 1, count) ** torch.log10(torch.tensor(OUTLIER_HIGH / OUTLIER_LOW)) * OUTLIER_LOW
    sign = torch.where(torch.rand(count, generator=stream("signs")) < 0.5, -1.0, 1.0)
    mean = gaussian(hidden, generator=stream("mean"))
    mean /= mean.square().mean().sqrt()
    mean *= MEAN_ENERGY**0.5
    mean[outliers] = gain * sign
    directions = orthonormal_rows(gaussian(rank, hidden, generator=stream("directions")))
    spectrum = torch.arange(1, rank + 1, dtype=torch.float32) ** -LATENT_DECAY
    floor = (0.5 * gaussian(hidden, generator=stream("floor"))).exp()
    floor *= (FLOOR_ENERGY / floor.square().mean()).sqrt()
    norm_weight = (0.25 * gaussian(hidden, generator=stream("norm"))).exp() * 0.9
    norm_weight[outliers] = 0.9
    # one row reads the mean, so that qr has a shared direction too
    read = torch.cat((directions, (mean / mean.norm()).unsqueeze(0)))
    spread = orthonormal_rows(gaussian(rank + 1, q_lora, generator=stream("spread")))
    # widen the weak directions a little: the query projection of a trained model evens its input out
    spread[:rank] *= (torch.arange(1, rank + 1, dtype=torch.float32) ** (LATENT_DECAY / 2)).unsqueeze(1)
    ordinary = order[count:]
    q_norm_weight = (0.2 * gaussian(q_lora, generator=stream("q_norm"))).exp()
    loud = torch.randperm(q_lora, generator=stream("loud"))[: max(1, q_lora // 256)]
    q_norm_weight[loud] *= 4
    return Basis(
        mean=mean,
        outliers=outliers,
        outlier_gain=gain,
        directions=directions,
        spectrum=spectrum / spectrum.norm(),
        floor=floor,
        norm_weight=norm_weight,
        words=gaussian(WORDS, rank, generator=stream("words")),
        topics=gaussian(TOPICS, rank, generator=stream("topics")),
        read=read,
        spread=spread,
        picked=ordinary[torch.arange(q_lora) % ordinary.numel()].clone()
        if ordinary.numel()
        else order[:1].expand(q_lora),
        q_norm_weight=q_norm_weight,
    )


def orthonormal_rows(rows: Tensor) -> Tensor:
    """Rows [n, m] made orthonormal (QR in fp64), signs fixed by the rows themselves; only of length 1 when n > m.

    fp32.
    """
    if rows.shape[0] > rows.shape[1]:
        return torch.nn.functional.normalize(rows, dim=1)
    q, r = torch.linalg.qr(rows.double().T)
    signed: Tensor = q * r.diagonal().sign()
    return signed.T.float().contiguous()
