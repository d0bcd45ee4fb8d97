"""Seeded weights of one layer's indexer, made for the imaginary model of `basis`; not white noise.

They read the latent directions that the synthetic hidden states come from, so queries relate to contents:

    wkv     key map K of the layer over the latents, a shared row, a few loud input channels, a noise floor
    wq_b    per head a mixture of the same K (0.1 ... 0.7 of it) and a map of its own, undone for the query
            projection
    gates   rows of both signs with a positive offset; softmax gates neither flat nor one-hot

Rows are scaled on a short synthetic probe, so that the magnitudes of q, keys and gates are those of a trained
model. Every tensor has a random stream of its own, seeded by (seed, layer, name), and the arithmetic runs in
fp64 before the rounding to the stored type: the same seed gives the same bytes for one torch build, whatever
the number of threads, and a layer's tensors do not depend on which other layers are made.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..refimpl.config import IndexerConfig
from ..refimpl.formats import E4M3_AMAX_FLOOR, E4M3_MAX, ceil_power_of_two
from .basis import Basis, gaussian, model_basis, seeded
from .hidden import synthetic_hidden

PROBE_TOKENS = 128
PROBE_SEED = -1
KEY_DECAY = 0.35
"""Amplitude of latent direction i in a weight falls as (i + 1)^-KEY_DECAY, on top of the decay in x."""
FLOOR_SHARE = 0.5
"""Size of the noise floor against the latent part of a weight, and of the row that all rows share."""
SHARED_SHARE = 0.25
LOUD_GAIN = 6.0
"""How much larger than the rest the few loud input channels of a weight are."""


class WeightMaker:
    """Makes the tensors of a seeded checkpoint by layer number and name within the layer (`attn.wq_a.scale`).

    It keeps the last quantised pair, since a scale comes with its weight.
    """

    def __init__(self, config: IndexerConfig, seed: int) -> None:
        self.config, self.seed = config, seed
        self.basis = model_basis(config.hidden_size, config.q_lora_rank)
        x, qr = synthetic_hidden(config, length=PROBE_TOKENS, seed=PROBE_SEED)
        self.x, self.qr = x.double(), qr.double()
        self._pair: tuple[int, str, tuple[Tensor, Tensor]] | None = None

    def tensor(self, layer: int, kind: str) -> Tensor:
        """One tensor in its stored dtype: F8_E4M3, F8_E8M0, F32 (ape) or BF16."""
        stem, _, ending = kind.rpartition(".")
        if stem in ("attn.wq_a", "attn.indexer.wq_b"):
            if self._pair is None or self._pair[:2] != (layer, stem):
                made = self._wq_a(layer) if stem == "attn.wq_a" else self._wq_b(layer)
                self._pair = (layer, stem, quantise_weight(made, self.config.weight_block))
            return self._pair[2][0 if ending == "weight" else 1].clone()
        make = {
            "attn_norm.weight": lambda _: self.basis.norm_weight,
            "attn.q_norm.weight": lambda _: self.basis.q_norm_weight,
            "attn.indexer.weights_proj.weight": self._weights_proj,
            "attn.indexer.compressor.wkv.weight": self._wkv,
            "attn.indexer.compressor.wgate.weight": self._wgate,
            "attn.indexer.compressor.ape": self._ape,
            "attn.indexer.compressor.norm.weight": self._norm,
        }[kind]
        made = make(layer)
        return made.float().clone() if kind.endswith(".ape") else made.bfloat16()

    def _stream(self, layer: int, name: str) -> torch.Generator:
        return seeded("weights", self.seed, layer, name)

    def _wq_a(self, layer: int) -> Tensor:
        """The query projection of the basis, a tenth of it this layer's own."""
        dense = self.basis.query_projection
        noise = gaussian(*dense.shape, generator=self._stream(layer, "wq_a")).double()
        return dense + 0.1 * dense.square().mean().sqrt() * noise

    def _key_map(self, layer: int) -> Tensor:
        """K [D, r]: from latents to key dims."""
        rank = self.basis.spectrum.numel()
        return gaussian(self.config.index_head_dim, rank, generator=self._stream(layer, "key map")) * self._decay()

    def _decay(self) -> Tensor:
        return torch.arange(1, self.basis.spectrum.numel() + 1, dtype=torch.float32) ** -KEY_DECAY

    def _wq_b(self, layer: int) -> Tensor:
        config, basis, generator = self.config, self.basis, self._stream(layer, "wq_b")
        heads, dim = config.index_n_heads, config.index_head_dim
        shared = torch.linspace(0.1, 0.7, heads)[torch.randperm(heads, generator=generator)].view(-1, 1, 1)
        own = gaussian(heads, dim, basis.spectrum.numel(), generator=generator) * self._decay()
        loudness = (0.3 * gaussian(heads, 1, 1, generator=generator)).exp()
        mixture = loudness * (shared * self._key_map(layer) + (1 - shared.square()).sqrt() * own)
        # the rows of `spread` are orthogonal, so this undoes the query projection and its norm weight
        unspread = basis.spread[:-1] / basis.spread[:-1].square().sum(1, keepdim=True) / basis.q_norm_weight
        weight = self._matrix(mixture.flatten(0, 1), unspread, None, generator)
        return fit_rows(weight, self.qr, std=1.0, offset=0.6 * gaussian(heads * dim, generator=generator))

    def _wkv(self, layer: int) -> Tensor:
        generator, key_map = self._stream(layer, "wkv"), self._key_map(layer)
        own = gaussian(2, *key_map.shape, generator=generator) * self._decay()
        # columns of the previous window first: those share less with the key map than the window's own
        mixture = torch.cat((0.6 * key_map + 0.8 * own[0], 0.9 * key_map + 0.4 * own[1]))
        weight = self._matrix(mixture, self.basis.directions, self.basis, generator)
        return fit_rows(weight, self.x, std=1.0, offset=0.8 * gaussian(len(weight), generator=generator))

    def _wgate(self, layer: int) -> Tensor:
        generator = self._stream(layer, "wgate")
        mixture = gaussian(2 * self.config.index_head_dim, self.basis.spectrum.numel(), generator=generator)
        weight = self._matrix(mixture * self._decay(), self.basis.directions, self.basis, generator)
        return fit_rows(weight, self.x, std=1.2, offset=0.5 * gaussian(len(weight), generator=generator))

    def _weights_proj(self, layer: int) -> Tensor:
        generator = self._stream(layer, "weights_proj")
        mixture = gaussian(self.config.index_n_heads, self.basis.spectrum.numel(), generator=generator)
        weight = self._matrix(mixture * self._decay(), self.basis.directions, self.basis, generator)
        offset = 0.4 + 0.3 * gaussian(len(weight), generator=generator)
        return fit_rows(weight, self.x, std=0.7, offset=offset)

    def _ape(self, layer: int) -> Tensor:
        return 0.5 * gaussian(4, 2 * self.config.index_head_dim, generator=self._stream(layer, "ape"))

    def _norm(self, layer: int) -> Tensor:
        return 0.9 * (0.35 * gaussian(self.config.index_head_dim, generator=self._stream(layer, "norm"))).exp()

    def _matrix(self, mixture: Tensor, directions: Tensor, basis: Basis | None, generator: torch.Generator) -> Tensor:
        """mixture [out, r] of directions [r, in] with a shared row, a noise floor and loud inputs; fp64.

        With a basis the input is x, and its outlier channels get small weights, as training would give them.
        """
        out, width = mixture.shape[0], directions.shape[1]
        weight = mixture.double() @ directions.double()
        typical = float(weight.square().mean().sqrt())
        channel = (0.3 * gaussian(width, generator=generator)).exp()
        weight += FLOOR_SHARE * typical * gaussian(out, width, generator=generator) * channel
        weight += SHARED_SHARE * typical * gaussian(width, generator=generator)
        loud = torch.randperm(width, generator=generator)[: max(2, width // 512)]
        weight[:, loud] *= LOUD_GAIN
        if basis is not None:
            weight[:, basis.outliers] *= 4 / basis.outlier_gain
        return weight


def fit_rows(weight: Tensor, probe: Tensor, *, std: float, offset: Tensor) -> Tensor:
    """weight [out, in] scaled so that outputs on probe [n, in] have that std, and shifted to means `offset`.

    The shift goes along the probe's mean direction, as the bias of a layer without bias does. fp64.
    """
    mean = probe.mean(0)
    outputs = probe @ weight.T
    weight = weight * (std / (outputs - outputs.mean(0)).square().mean().sqrt())
    shift = offset.double() - weight @ mean
    return weight + torch.outer(shift, mean / mean.square().sum())


def quantise_weight(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """weight [out, in] as (float8_e4m3fn of the same shape, float8_e8m0fnu [ceil(out / b0), ceil(in / b1)]).

    Per block: s = 2^ceil(log2(max(amax, 1e-4) / 448)), code = RNE(w / s).
    """
    rows, cols = weight.shape
    grid = (-(-rows // block[0]), -(-cols // block[1]))
    padded = torch.zeros(grid[0] * block[0], grid[1] * block[1])
    padded[:rows, :cols] = weight
    blocks = padded.view(grid[0], block[0], grid[1], block[1])
    amax = blocks.abs().amax(dim=(1, 3), keepdim=True)
    scale = ceil_power_of_two(amax.clamp_min(E4M3_AMAX_FLOOR) / E4M3_MAX)
    codes = (blocks / scale).view_as(padded)[:rows, :cols].to(torch.float8_e4m3fn).contiguous()
    exponents = (scale.view(torch.int32) >> 23).to(torch.uint8).view(grid)
    return codes, exponents.view(torch.float8_e8m0fnu)
