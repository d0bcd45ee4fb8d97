"""A run's document as large as they get, with random numbers in every field: 21 layers, 12 precisions, 5 thetas."""

import copy
import random
from itertools import pairwise

PRECISIONS = [f"precision-{i}" for i in range(12)]
THETAS = ["checkpoint", "10000", "40000", "1000000", "160000:noyarn"]
LAYERS = range(2, 44, 2)
STAGES = ["q", "q_rope", "q_hadamard", "q_quant", "pool", "k_norm", "k_rope", "k_hadamard", "k_quant", "gate", "scores"]
EDGES = [0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.5]
K = 512


def visible_bins(length):
    edges = [K]
    while edges[-1] < length // 4:
        edges.append(int(K * 2 ** (len(edges) / 2)))
    return list(pairwise(edges))


SHOWN = ("q_quant", "k_quant", "scores")
"""The stages that a chain of kernels shows, and only those have a kernel part."""


def synthetic_case(template, layer, precision, theta, length, rng):
    case = copy.copy(template)
    case |= {name: rng.random() for name, value in case.items() if isinstance(value, float)}
    same_for_a_layer = random.Random(layer * length)
    ranks = [[source.randrange(length // 4) for _ in range(8)] for source in (same_for_a_layer, rng)]
    return case | {
        "layer": layer, "precision": precision, "theta_setting": theta, "what_if": theta != "checkpoint",
        "length": length, "k": K, "visible": length // 4, "backend": "sglang",
        "verdict": rng.choice(["same", "format", "config", "kernel"]), "first_stage": rng.choice(STAGES),
        "jaccard_ci": [rng.random(), rng.random()], "needles": 8, "needle_rank_reference": ranks[0],
        "needle_rank": ranks[1], "needles_lost": rng.randrange(9), "needles_selected_reference": 8,
        "bytes_per_entry": 132.0,
        "misses": {name: rng.randrange(10_000) for name in ("ties", "near_ties", "real")},
        "survival": [
            {"lo": lo, "hi": hi, "p": rng.random(), "n": rng.randrange(20_000), "ci": None}
            for lo, hi in pairwise(EDGES)
        ],
        "by_visible": [
            {"lo": lo, "hi": hi, "queries": rng.randrange(1, 60), "jaccard": rng.random(),
             "jaccard_tied": rng.random(), "jaccard_worst": rng.random()}
            for lo, hi in visible_bins(length)
        ],
        "margins": template["margins"] | {"counts": [rng.randrange(60) for _ in range(12)], "noiseless": 0},
        "stages": [
            {"stage": name, "total": rng.random(), "format": rng.random(),
             "kernel": 1e-4 * rng.random() if name in SHOWN else None}
            for name in STAGES
        ],
    }  # fmt: skip


def synthetic_documents(base, lengths, seed=0):
    """One document a length; `base` is a real one, whose second case is the template."""
    rng, template = random.Random(seed), base["cases"][2]
    found = []
    for length in lengths:
        cases = [
            synthetic_case(template, layer, precision, theta, length, rng)
            for layer in LAYERS for precision in PRECISIONS for theta in THETAS
        ]  # fmt: skip
        recipe = next(iter(base["recipes"].values()))
        recipes = {f"{p} @ {t}": recipe for p in PRECISIONS for t in THETAS}
        checkpoint = base["checkpoint"] | {"config": base["checkpoint"]["config"] | {"index_topk": K}}
        found.append(base | {"cases": cases, "recipes": recipes, "gates": [], "checkpoint": checkpoint})
    return found
