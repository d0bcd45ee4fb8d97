"""`--dry-run`: what a run would do, and about how long it takes.

Nearly all of the time goes into three things: projecting x to kv and gate once per layer, the score products once per
distinct pair of queries and keys, and the passes over these products. The first two are counted as operations and
divided by this machine's own matrix speed, measured on the spot; the passes cost about twice the products, as
observed on CPUs. It is an estimate, good to a factor of two.
"""

from __future__ import annotations

import time

import torch
from rich.console import Console

from .run import Plan

PASS_FACTOR = 3.0
"""Time of scores relative to their matrix products alone."""


def matmul_rate(device: str) -> float:
    """fp32 operations per second of this machine, on products like those of the indexer."""
    a, b = (torch.randn(2048, 2048, device=device) for _ in range(2))
    torch.matmul(a, b)
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(3):
        torch.matmul(a, b)
    if device == "cuda":
        torch.cuda.synchronize()
    return 3 * 2 * 2048**3 / (time.perf_counter() - began)


def estimate_seconds(todo: Plan) -> float:
    """Seconds that `execute` will take, roughly."""
    config = todo.checkpoint.config
    heads_dim = config.index_n_heads * config.index_head_dim
    entries, rows = todo.length // 4, todo.queries
    project = (
        2 * todo.length * config.hidden_size * 4 * config.index_head_dim + 2 * rows * config.q_lora_rank * heads_dim
    )
    scores = 2 * rows * heads_dim * entries * PASS_FACTOR * (len(todo.cases) + 2)
    return len(todo.layers) * (project + scores) / matmul_rate(todo.device)


def render_plan(console: Console, todo: Plan) -> None:
    """Print the cases, the bytes and the estimate."""
    console.print(f"checkpoint {todo.checkpoint.directory}", highlight=False, soft_wrap=True)
    console.print(f"inputs     {todo.source}, {todo.length} tokens", highlight=False, soft_wrap=True)
    for note in todo.notes:
        console.print(f"note       {note}", highlight=False, soft_wrap=True)
    for layer in todo.layers:
        for case in todo.cases:
            console.print(f"layer {layer}  {case.precision}  theta {case.theta.label}", highlight=False)
    count = len(todo.layers) * len(todo.cases)
    console.print(
        f"{count} cases; {todo.bytes_to_read:,} bytes of weights to read; "
        f"about {estimate_seconds(todo):.0f} s on {todo.device}",
        highlight=False,
    )
