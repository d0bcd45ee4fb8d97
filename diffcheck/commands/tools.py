"""Commands around a comparison: what a checkpoint is, what can run here and how fast, and checkpoints to try it on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError
from .options import Checkpoint, Layers, layer_numbers, split, split_precisions
from .output import check_writable, say, stdout, write_json


def inspect(
    checkpoint: Checkpoint,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything found to this file.")] = None,
) -> None:
    """Print a checkpoint's layer map, config values with their sources, traps, and header coverage.

    Exits with 2 when a layer could not be run on, or would give garbage.
    """
    from ..checkpoint.inspect import inspect_checkpoint, render

    if json_file is not None:
        check_writable(json_file)
    inspection = inspect_checkpoint(checkpoint)
    render(inspection, stdout())
    if json_file is not None:
        write_json(json_file, {"schema_version": 1} | inspection.to_json())
    if inspection.errors:
        raise typer.Exit(2)


def memory(
    checkpoint: Annotated[Path, typer.Option(help="Checkpoint directory, or a config.json; no tensor is read.")],
    precision: Annotated[
        str, typer.Option(help="Precisions whose index keys are counted; others are compared with the first.")
    ] = "e4m3/128/fp32,bf16,e2m1/32/ue8m0",
    context: Annotated[int, typer.Option(help="Tokens of the context that is added up.")] = 524_288,
    chunk: Annotated[int, typer.Option(help="Queries of a prefill chunk, for its logits.")] = 8192,
    kv_entry: Annotated[
        int | None, typer.Option(help="Bytes of a main cache entry; default: e4m3 with bf16 RoPE dims.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every term to this file.")] = None,
) -> None:
    """Print what index keys cost: bytes per entry, token and context, and the slots they take, from config.json."""
    from ..memory import document, measure, render

    if json_file is not None:
        check_writable(json_file)
    counted = measure(checkpoint, split_precisions(precision), context=context, chunk=chunk, kv_entry=kv_entry)
    render(stdout(), counted)
    if json_file is not None:
        write_json(json_file, document(counted))


def backends(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda: where they would run.")] = "auto",
) -> None:
    """List backends: available or why not, version, who runs which step, and the recipes they can run."""
    from ..backends.listing import render_backends

    render_backends(stdout(), device)


def bench(
    backend: Annotated[
        str | None, typer.Option(help="Kernels to time, comma separated; default all there are.")
    ] = None,
    shapes: Annotated[
        str | None,
        typer.Option(
            help="Such as prefill:4096x65536,select-decode:64x32768,queries:8192, or kinds alone: keys,decode."
        ),
    ] = None,
    formats: Annotated[str, typer.Option(help="Key formats: e4m3, bf16, e2m1.")] = "e4m3",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the records to this file.")] = None,
) -> None:
    """Time the kernels, accuracy first: no speed is printed for a wrong result. Needs a CUDA device.

    Exits with 1 when a kernel was wrong or failed. What was measured before an interrupt is in the JSON.
    """
    from ..bench import DEFAULT_SHAPES, passed, render
    from ..bench import bench as measure
    from ..reporting.document import about

    if json_file is not None:
        check_writable(json_file)
    names = None if backend is None else split(backend)
    console, records, partial = stdout(), [], True
    try:
        for record in measure(names, split(shapes) if shapes else list(DEFAULT_SHAPES), split(formats)):
            records.append(record)
            render(console, record)
        partial = False
    finally:
        if json_file is not None and records:
            write_json(json_file, about("cuda") | {"partial": partial, "records": records})
    if not all(map(passed, records)):
        raise typer.Exit(1)


def fixture(
    directory: Annotated[Path, typer.Argument(help="Directory to write; must not hold anything yet.")],
    like: Annotated[str, typer.Option(help="v4-flash, v4-pro or mini.")] = "mini",
    layers: Layers = "all",
    whole: Annotated[
        int | None, typer.Option(help="Write the whole model of the first WHOLE layers, random codes, not indexers.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
    shards: Annotated[int, typer.Option(help="Number of safetensors files.")] = 2,
    overwrite: Annotated[bool, typer.Option(help="Replace what the directory holds.")] = False,
    hidden_size: Annotated[int | None, typer.Option(help="Another hidden size.")] = None,
    q_lora_rank: Annotated[int | None, typer.Option(help="Another rank of the low-rank query.")] = None,
    index_n_heads: Annotated[int | None, typer.Option(help="Another number of index heads.")] = None,
    index_head_dim: Annotated[int | None, typer.Option(help="Another index head dim, a power of two.")] = None,
    index_topk: Annotated[int | None, typer.Option(help="Another number of selected entries.")] = None,
) -> None:
    """Write a checkpoint with seeded indexer weights (or a whole random model) in the released layout."""
    from ..fixture import write_checkpoint

    if whole is not None:
        from ..fixture_model import write_model

        indexer_only = (hidden_size, q_lora_rank, index_n_heads, index_head_dim, index_topk)
        if layers != "all" or shards != 2 or overwrite or any(value is not None for value in indexer_only):
            raise InputError("--whole goes with --like and --seed only: it writes one shard a layer at the real shapes")
        print(f"{write_model(directory, like=like, layers=whole, seed=seed, say=say)}: whole, {whole} layers")
        return
    written = write_checkpoint(
        directory, like=like, layers=layer_numbers(layers), seed=seed, shards=shards, overwrite=overwrite,
        hidden_size=hidden_size, q_lora_rank=q_lora_rank, index_n_heads=index_n_heads,
        index_head_dim=index_head_dim, index_topk=index_topk,
    )  # fmt: skip
    print(written)
