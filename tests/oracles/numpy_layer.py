"""One layer of the stack once more, token by token in slow numpy, with ml_dtypes for every small float.

Written from the description of the numerics, sharing nothing with `refimpl/model`: loops over tokens, heads and slots,
rounding by casts. The indexer's selection is handed in (`numpy_indexer` has the indexer). Weights are the stored
tensors of the layer by their released names, as numpy arrays: e4m3 with e8m0 scales, packed e2m1, bf16, fp32.
"""

import ml_dtypes
import numpy as np

BF16, E4M3, E2M1 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn


def bf(x):
    return np.asarray(x, dtype=np.float32).astype(BF16).astype(np.float32)


def fp8_activation(x, block):
    """x [n] through e4m3, one power-of-two scale for `block` values."""
    out = np.empty_like(x, dtype=np.float32)
    for first in range(0, len(x), block):
        part = x[first : first + block].astype(np.float64)
        scale = 2.0 ** np.ceil(np.log2(max(np.abs(part).max(), 1e-4) / 448))
        out[first : first + block] = np.clip(part / scale, -448, 448).astype(E4M3).astype(np.float64) * scale
    return out


def dense(w, name):
    """A stored weight as fp64 [out, in], and whether its activation is quantised."""
    stored = w[f"{name}.weight"]
    if stored.dtype == np.int8:
        codes = stored.view(np.uint8)
        low, high = (codes & 15).view(E2M1), (codes >> 4).view(E2M1)
        values = np.stack((low.astype(np.float64), high.astype(np.float64)), -1).reshape(len(codes), -1)
        exponents = w[f"{name}.scale"].astype(np.int64) - 127
        return values * np.repeat(2.0**exponents, 32, axis=1), True
    values = stored.astype(np.float64)
    if stored.dtype != E4M3:
        return values, False
    exponents = w[f"{name}.scale"].astype(np.int64) - 127
    spread = np.repeat(np.repeat(2.0**exponents, 128, 0)[: len(values)], 128, 1)[:, : values.shape[1]]
    return values * spread, True


def linear(w, name, x):
    weight, quantised = dense(w, name)
    return bf(weight @ (fp8_activation(x, 128) if quantised else x).astype(np.float64))


def norm(x, weight, eps):
    x = x.astype(np.float64)
    return bf(x / np.sqrt((x * x).mean() + eps) * weight.astype(np.float64))


def rotate(x, position, frequencies, sign=1):
    """The last dims of x as interleaved pairs, turned by position * frequency."""
    out = x.astype(np.float64).copy()
    first = len(x) - 2 * len(frequencies)
    for i, frequency in enumerate(frequencies):
        angle = float(np.float32(position) * np.float32(frequency))
        a, b = out[first + 2 * i], out[first + 2 * i + 1]
        cos, sin = np.cos(angle), sign * np.sin(angle)
        out[first + 2 * i], out[first + 2 * i + 1] = a * cos - b * sin, a * sin + b * cos
    return bf(out)


def key_of(raw, weight, position, frequencies, eps):
    key = rotate(norm(raw, weight, eps), position, frequencies)
    plain = len(key) - 2 * len(frequencies)
    key[:plain] = bf(fp8_activation(key[:plain], 64))
    return key


def mix(w, name, streams, config):
    """(input, post, comb) of streams [4, C]."""
    flat = streams.reshape(-1).astype(np.float64)
    m = w[f"hc_{name}_fn"].astype(np.float64) @ flat / np.sqrt((flat * flat).mean() + config["eps"])
    base, scale, n = w[f"hc_{name}_base"].astype(np.float64), w[f"hc_{name}_scale"], len(streams)
    pre = 1 / (1 + np.exp(-(m[:n] * scale[0] + base[:n]))) + config["hc_eps"]
    post = 2 / (1 + np.exp(-(m[n : 2 * n] * scale[1] + base[n : 2 * n])))
    comb = np.exp((m[2 * n :] * scale[2] + base[2 * n :]).reshape(n, n))
    comb = comb / comb.sum(1, keepdims=True) + config["hc_eps"]
    comb = comb / (comb.sum(0, keepdims=True) + config["hc_eps"])
    for _ in range(config["iterations"] - 1):
        comb = comb / (comb.sum(1, keepdims=True) + config["hc_eps"])
        comb = comb / (comb.sum(0, keepdims=True) + config["hc_eps"])
    return bf(sum(pre[s] * streams[s] for s in range(n))), post, comb


def unmix(streams, out, post, comb):
    n = len(streams)
    return np.stack([bf(post[s] * out + sum(comb[r, s] * streams[r] for r in range(n))) for s in range(n)])


def compressed_keys(w, x, ratio, dim, frequencies, eps):
    wkv, wgate = (w[f"attn.compressor.{n}.weight"].astype(np.float64) for n in ("wkv", "wgate"))
    ape, keys = w["attn.compressor.ape"].astype(np.float64), []
    for entry in range(len(x) // ratio):
        kv, gate = [], []
        windows = [(entry, slice(0, dim))] if ratio == 128 else [(entry - 1, slice(0, dim)), (entry, slice(dim, None))]
        for window, columns in windows:
            for slot in range(ratio if window >= 0 else 0):
                row = x[ratio * window + slot].astype(np.float64)
                kv.append((wkv @ row)[columns])
                gate.append((wgate @ row + ape[slot])[columns])
        kv, gate = np.array(kv), np.exp(np.array(gate) - np.max(gate, axis=0))
        pooled = bf((kv * gate / gate.sum(0)).sum(0))
        keys.append(key_of(pooled, w["attn.compressor.norm.weight"], ratio * entry, frequencies, eps))
    return keys


def queries(w, qr, position, frequencies, config):
    """Queries [H, D] of one token's qr."""
    rows, eps = [], config["eps"]
    for q in linear(w, "attn.wq_b", qr).reshape(config["heads"], config["dim"]):
        mean = bf(bf(q * q).astype(np.float64).mean())
        q = bf(q * bf(1 / np.sqrt(bf(mean + np.float32(eps)).astype(np.float64))))
        rows.append(rotate(q, position, frequencies))
    return rows


def attend(q, held, sink):
    """One head's output [D] of q [D] over the keys [N, D]."""
    held = np.asarray(held, dtype=np.float64)
    logits = held @ q.astype(np.float64) * len(q) ** -0.5
    weight = np.exp(logits - logits.max())
    total = weight.sum() + np.exp(float(sink) - logits.max())
    return bf(bf(weight).astype(np.float64) @ held / total)


def attention(w, x, ratio, topk, frequencies, config):
    """Output [T, C] of the attention's input x [T, C]."""
    heads, dim, eps = config["heads"], config["dim"], config["eps"]
    keys = [
        key_of(linear(w, "attn.wkv", row), w["attn.kv_norm.weight"], t, frequencies, eps) for t, row in enumerate(x)
    ]
    entries = compressed_keys(w, x, ratio, dim, frequencies, eps) if ratio else []
    wo_a = dense(w, "attn.wo_a")[0].reshape(config["groups"], -1, heads // config["groups"] * dim)
    out = []
    for t, row in enumerate(x):
        qr = norm(linear(w, "attn.wq_a", row), w["attn.q_norm.weight"], eps)
        held = keys[max(0, t - config["window"] + 1) : t + 1]
        if ratio == 4:
            held = held + [entries[j] for j in topk[t] if j >= 0]
        elif ratio == 128:
            held = held + entries[: (t + 1) // 128]
        rows = [attend(q, held, w["attn.attn_sink"][h]) for h, q in enumerate(queries(w, qr, t, frequencies, config))]
        rows = [rotate(o, t, frequencies, sign=-1) for o in rows]
        grouped = np.array(rows, dtype=np.float64).reshape(config["groups"], -1)
        lowered = np.concatenate([bf(a @ o) for a, o in zip(wo_a, grouped, strict=True)])
        out.append(linear(w, "attn.wo_b", lowered))
    return np.array(out)


def expert(w, name, x, share, limit):
    a, u = (linear(w, f"{name}.{part}", x).astype(np.float64) for part in ("w1", "w3"))
    a, u = np.minimum(a, limit), np.clip(u, -limit, limit)
    return linear(w, f"{name}.w2", bf(share * a / (1 + np.exp(-a)) * u))


def feed_forward(w, x, token, config):
    """Output [C] of one token's x [C]."""
    s = np.sqrt(np.log1p(np.exp(w["ffn.gate.weight"].astype(np.float64) @ x)))
    if "ffn.gate.tid2eid" in w:
        chosen = sorted(w["ffn.gate.tid2eid"][token])
    else:
        chosen = sorted(np.argsort(-(s + w["ffn.gate.bias"]))[: config["chosen"]])
    total = np.zeros(len(x))
    for e in chosen:
        total += expert(w, f"ffn.experts.{e}", x, s[e] / s[chosen].sum() * config["factor"], config["limit"])
    return bf(total + expert(w, "ffn.shared_experts", x, 1.0, config["limit"]))


def layer(w, streams, tokens, ratio, topk, frequencies, config):
    """(x of the attention [T, C], streams after the layer [T, 4, C]) of streams [T, 4, C]."""
    mixed = [mix(w, "attn", row, config) for row in streams]
    x = np.array([norm(m[0], w["attn_norm.weight"], config["eps"]) for m in mixed])
    out = attention(w, x, ratio, topk, frequencies, config)
    streams = [unmix(s, o, m[1], m[2]) for s, o, m in zip(streams, out, mixed, strict=True)]
    for t, row in enumerate(streams):
        before, post, comb = mix(w, "ffn", row, config)
        out = feed_forward(w, norm(before, w["ffn_norm.weight"], config["eps"]), tokens[t], config)
        streams[t] = unmix(row, out, post, comb)
    return x, np.array(streams)
