"""The two hooks printed in docs/trace.md, run as they stand there on modules with the servers' names."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from diffcheck.inputs.source import load_inputs

DOC = (Path(__file__).parents[3] / "docs" / "trace.md").read_text()


class Norm(torch.nn.Module):
    def __init__(self, pair=False):
        super().__init__()
        self.pair = pair

    def forward(self, rows):
        return (rows * 2, rows) if self.pair else rows * 2


class Indexer(torch.nn.Module):
    def forward(self, hidden_states, qr, positions):
        return positions


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q_norm, self.indexer = Norm(), Indexer()


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm, self.self_attn = Norm(pair=True), Attention()

    def forward(self, rows, low):
        x, _ = self.input_layernorm(rows)
        qr = self.self_attn.q_norm(low)
        self.self_attn.indexer(x, qr=qr, positions=None)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList(Layer() for _ in range(5))


@pytest.mark.parametrize("engine", ["SGLang", "vLLM"])
def test_the_printed_hook_writes_a_trace(support, tmp_path, engine):
    section = DOC.split(f"## A hook for {engine}")[1]
    (code,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)[:1]
    assert len(code.strip().splitlines()) <= 26
    names = SimpleNamespace(space={})
    exec(compile(code, "docs/trace.md", "exec"), names.space)
    model, config = Model(), support.config(compress_ratios=(0, 0, 4, 128, 4))
    names.space["attach"](model)
    rows, low = torch.randn(9, 64).bfloat16(), torch.randn(9, 128).bfloat16()
    for part in (slice(0, 5), slice(5, 9)):
        for layer in model.model.layers:
            layer(rows[part], low[part])
    names.space["write"](tmp_path / "trace.safetensors")
    inputs = load_inputs(tmp_path / "trace.safetensors", config)
    assert sorted(inputs) == [2, 4]
    assert torch.equal(inputs[2].x, rows * 2)
    assert torch.equal(inputs[4].qr, low * 2)
    assert engine in inputs[2].source
