"""The whole indexer once more: numpy, ml_dtypes and loops, written from the formulas alone.

Shares no code with the package, which may not be imported here. Arrays of type ml_dtypes.bfloat16 are bf16
tensors. Sums are in float64, where their order does not matter; what the reference sums in fp32 may then land
one bf16 value away, rarely. Everything elementwise is in float32, operation by operation.

Cosine, sine and power come from torch: libraries differ in their last bit, which the indexer leaves open.
"""

import math
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import torch

BF16 = ml_dtypes.bfloat16
E4M3 = ml_dtypes.float8_e4m3fn
E2M1 = ml_dtypes.float4_e2m1fn
RATIO = 4


def ceil_log2(value: float) -> int:
    """Ceiling of log2 of a positive number, without logarithms: value = m * 2^e with 0.5 <= m < 1."""
    mantissa, exponent = math.frexp(value)
    return exponent - 1 if mantissa == 0.5 else exponent


def _blocks(row: np.ndarray, size: int) -> Iterator[tuple[slice, np.ndarray]]:
    for first in range(0, len(row), size):
        yield slice(first, first + size), row[first : first + size].astype(np.float32)


def quantise_row_e4m3(row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(codes as float64, scale of each value as float64) of one row, per 128 values."""
    codes, scales = np.zeros(len(row)), np.zeros(len(row))
    for part, block in _blocks(row, 128):
        amax = np.maximum(np.abs(block).max(), np.float32(1e-4))
        scale = np.float32(2.0 ** ceil_log2(float(amax / np.float32(448))))
        codes[part] = np.clip(block / scale, np.float32(-448), np.float32(448)).astype(E4M3).astype(np.float64)
        scales[part] = scale
    return codes, scales


def fp4_row(row: np.ndarray) -> np.ndarray:
    """One bf16 row after the FP4 fake quantisation, bf16."""
    out = np.zeros(len(row), dtype=np.float32)
    for part, block in _blocks(row, 32):
        amax = np.maximum(np.abs(block).max(), np.float32(6 * 2.0**-126))
        scale = np.float32(2.0 ** ceil_log2(float(amax * (np.float32(1) / np.float32(6)))))
        codes = np.clip(block / scale, np.float32(-6), np.float32(6)).astype(E2M1).astype(np.float32)
        out[part] = codes * scale
    return out.astype(BF16)


def fp4_step(x: np.ndarray) -> np.ndarray:
    """FP4 fake quantisation of the last dim."""
    return np.stack([fp4_row(row) for row in x.reshape(-1, x.shape[-1])]).reshape(x.shape)


def e8m0(byte: int) -> float:
    """Scale that a byte stands for."""
    return math.nan if byte == 255 else 2.0 ** (int(byte) - 127)


def dequantise(weight: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    """Stored weight as float64: e4m3 with a scale byte per 128x128 block, or bytes of two e2m1 codes."""
    if scale is None:
        return weight.astype(np.float64)
    rows, columns = weight.shape
    if weight.dtype == E4M3:
        out = weight.astype(np.float64)
        for r in range(rows):
            for c in range(0, columns, 128):
                out[r, c : c + 128] *= e8m0(scale[r // 128, c // 128])
        return out
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    out = np.zeros((rows, 2 * columns))
    for r in range(rows):
        for c in range(2 * columns):
            byte = int(weight[r, c // 2]) & 255
            out[r, c] = values[byte % 16 if c % 2 == 0 else byte // 16] * e8m0(scale[r, c // 32])
    return out


def q(qr: np.ndarray, weight: np.ndarray, scale: np.ndarray | None, heads: int) -> np.ndarray:
    """Query projection, bf16 [T, H, D]; the activation is quantised exactly when the weight is."""
    activation = qr.astype(np.float64)
    if scale is not None:
        activation = np.stack([np.multiply(*quantise_row_e4m3(row)) for row in qr])
    product = activation @ dequantise(weight, scale).T
    return product.astype(np.float32).astype(BF16).reshape(len(qr), heads, -1)


def inverse_frequencies(theta: float, dims: int, factor: float, fast: float, slow: float, length: int) -> np.ndarray:
    """YaRN's angular frequencies, fp32."""
    result = []
    turns = {r: dims * math.log(length / (2 * math.pi * r)) / (2 * math.log(theta)) for r in (fast, slow)}
    low, high = max(math.floor(turns[fast]), 0), min(math.ceil(turns[slow]), dims - 1)
    span = np.float32(high - low if high != low else 0.001)
    exponents = torch.tensor([2 * i for i in range(dims // 2)], dtype=torch.float32) / dims
    for i, power in enumerate(torch.pow(theta, exponents).numpy()):
        frequency = np.float32(1) / power
        ramp = np.clip(np.float32(i - low) / span, np.float32(0), np.float32(1))
        result.append(frequency / np.float32(factor) * ramp + frequency * (np.float32(1) - ramp))
    return np.array(result, dtype=np.float32)


def rope(x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """Rotate the last dims of bf16 x [n, ..., D] as interleaved pairs, bf16."""
    out = x.astype(np.float32)
    dims = 2 * len(frequencies)
    first = x.shape[-1] - dims
    for n, position in enumerate(positions):
        angles = torch.from_numpy(np.float32(position) * frequencies)
        cosines, sines = torch.cos(angles).numpy(), torch.sin(angles).numpy()
        for i in range(dims // 2):
            a, b = out[n, ..., first + 2 * i].copy(), out[n, ..., first + 2 * i + 1].copy()
            out[n, ..., first + 2 * i] = a * cosines[i] - b * sines[i]
            out[n, ..., first + 2 * i + 1] = a * sines[i] + b * cosines[i]
    return out.astype(BF16)


def hadamard(x: np.ndarray) -> np.ndarray:
    """Walsh-Hadamard, natural order, by butterflies of growing stride in fp32; bf16 in and out."""
    values = x.astype(np.float32)
    dim, stride = values.shape[-1], 1
    while stride < dim:
        for first in range(0, dim, 2 * stride):
            for i in range(first, first + stride):
                a, b = values[..., i].copy(), values[..., i + stride].copy()
                values[..., i], values[..., i + stride] = a + b, a - b
        stride *= 2
    return (values * np.float32(dim**-0.5)).astype(BF16)


def pool(x: np.ndarray, wkv: np.ndarray, wgate: np.ndarray, ape: np.ndarray) -> np.ndarray:
    """Pooled entries of a whole sequence, bf16 [T//4, D]."""
    kv = x.astype(np.float64) @ wkv.astype(np.float64).T
    gate = x.astype(np.float64) @ wgate.astype(np.float64).T
    dim = kv.shape[1] // 2
    entries = np.zeros((len(x) // RATIO, dim))
    for i in range(len(entries)):
        slots = [(t, slice(0, dim)) for t in range(RATIO * (i - 1), RATIO * i) if t >= 0]
        slots += [(t, slice(dim, 2 * dim)) for t in range(RATIO * i, RATIO * (i + 1))]
        logits = np.stack([gate[t, half] + ape[t % RATIO, half] for t, half in slots])
        exponentials = np.exp(logits - logits.max(axis=0))
        values = np.stack([kv[t, half] for t, half in slots])
        entries[i] = (values * exponentials).sum(axis=0) / exponentials.sum(axis=0)
    return entries.astype(np.float32).astype(BF16)


def k_norm(pooled: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """RMSNorm, bf16."""
    rows = pooled.astype(np.float64)
    normal = rows / np.sqrt((rows * rows).mean(axis=-1, keepdims=True) + eps)
    return (normal * weight.astype(np.float64)).astype(np.float32).astype(BF16)


def gate(x: np.ndarray, weights_proj: np.ndarray, dim: int) -> np.ndarray:
    """Head gates: a bf16 linear, then the constant in fp32 and one rounding; bf16 [T, H]."""
    linear = (x.astype(np.float64) @ weights_proj.astype(np.float64).T).astype(np.float32).astype(BF16)
    return gate_from_linear(linear, dim)


def gate_from_linear(linear: np.ndarray, dim: int) -> np.ndarray:
    """The part of `gate` after the linear layer."""
    constant = np.float32(dim**-0.5 * linear.shape[1] ** -0.5)
    return (linear.astype(np.float32) * constant).astype(BF16)


def scores(queries: np.ndarray, keys: np.ndarray, gates: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """bf16 [T, E]; bf16 after the dot, after the gate and after the sum; -inf where invisible."""
    out = np.full((len(queries), len(keys)), -np.inf, dtype=np.float32)
    for t, position in enumerate(positions):
        for j in range(len(keys)):
            if j >= (position + 1) // RATIO:
                continue
            dots = (queries[t].astype(np.float64) @ keys[j].astype(np.float64)).astype(np.float32).astype(BF16)
            terms = np.maximum(dots.astype(np.float32), 0) * gates[t].astype(np.float32)
            out[t, j] = terms.astype(BF16).astype(np.float64).sum()
    return out.astype(BF16)


def topk(score: np.ndarray, positions: np.ndarray, k: int) -> np.ndarray:
    """Best visible entries, best first, the lower index first among equals; -1 where there are none left."""
    entries = score.shape[1]
    out = np.full((len(score), min(k, entries)), -1)
    for t, position in enumerate(positions):
        visible = range(min((int(position) + 1) // RATIO, entries))
        best = sorted(visible, key=lambda j: (-float(score[t, j]), j))[: out.shape[1]]
        out[t, : len(best)] = best
    return out
