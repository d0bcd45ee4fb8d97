"""The reference on a GPU: the same function of the same inputs, and just as independent of chunks and rows."""

import pytest
import torch

from diffcheck import Recipe, evaluate
from diffcheck.checkpoint import Checkpoint
from diffcheck.refimpl import STAGES, Trace, run_indexer
from diffcheck.refimpl.trace import KEY_STAGES

pytestmark = pytest.mark.gpu

# Share of elements that may differ from the CPU's: another order of fp32 sums moves a few results of each rounding,
# and every later stage carries them on. Scores see all heads of all of them.
CPU_DIFFERENT = {"scores": 0.03} | dict.fromkeys(STAGES, 0.01)


@pytest.fixture(scope="module", params=[2, 4])
def layer(request, mini):
    checkpoint, trace = Checkpoint(mini), Trace.load(mini / "trace.safetensors", request.param)
    weights = checkpoint.load(request.param)
    return checkpoint.config, weights, trace["x"], trace["qr"]


def on_gpu(layer):
    config, weights, x, qr = layer
    return config, weights.to("cuda"), x.cuda(), qr.cuda()


def test_agrees_with_the_cpu(layer):
    cpu, gpu = run_indexer(*layer), run_indexer(*on_gpu(layer))
    for name in STAGES:
        if name == "topk":
            continue
        a, b = cpu[name], gpu[name].cpu()
        different = float((a != b).float().mean())
        print(f"{name}: {different:.2e} of the elements differ")
        assert different <= CPU_DIFFERENT[name], name
    full = slice(4 * layer[0].index_topk, None)  # the rows without empty slots
    rows = zip(cpu["topk"][full].tolist(), gpu["topk"][full].tolist(), strict=True)
    shared = sum(len(set(a) & set(b)) for a, b in rows) / cpu["topk"][full].numel()
    print(f"topk: {shared:.5f} of the entries are the same")
    assert shared >= 0.995


@pytest.mark.parametrize("sizes", [(1000, 1, 2, 3, 90), (7,) * 20])
def test_chunks_equal_one_shot(layer, sizes):
    config, weights, x, qr = on_gpu(layer)
    whole = run_indexer(config, weights, x[: sum(sizes)], qr[: sum(sizes)])
    state, start = None, 0
    for size in sizes:
        part = slice(start, start + size)
        trace = run_indexer(config, weights, x[part], qr[part], start=start, state=state)
        for name in STAGES:
            width = trace["scores"].shape[1]
            if name in KEY_STAGES:
                expected = whole[name][start // 4 : (start + size) // 4]
            elif name == "topk":
                expected = whole[name][part, : trace[name].shape[1]]
            else:
                expected = whole[name][part, :width] if name == "scores" else whole[name][part]
            assert torch.equal(trace[name], expected), (name, start)
        state, start = trace.state, start + size


def test_evaluate_equals_run_indexer(layer):
    arguments = on_gpu(layer)
    reference, trace = run_indexer(*arguments), evaluate(Recipe.reference(arguments[0]), *arguments)
    assert all(torch.equal(reference[name], trace[name]) for name in STAGES)
