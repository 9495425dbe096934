"""Peak memory under torch.compile."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, find_device
from trainpace.forecast import Forecaster, Target
from trainpace.workload import Variant
from trainpace.workload.task import Task
from trainpace.workload.trace import trace_task

LENGTH, WIDTH, HEADS, DEPTH, WORDS = 2048, 1280, 10, 20, 65536
MEASURED_GIB = 75422.02 / 1024
"""Peak of nanochat's d20 at its default batch of 32 (published report.md of six runs)."""


def norm(x):
    return F.rms_norm(x, (x.size(-1),))


def rotated(x, cos, sin):
    one, other = x.chunk(2, dim=-1)
    return torch.cat([one * cos + other * sin, other * cos - one * sin], dim=-1)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = HEADS
        for name in ("query", "key", "value", "out"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=False))
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x, cos, sin):
        y = norm(x)
        q, k, v = (
            linear(y).unflatten(-1, (HEADS, -1)) for linear in (self.query, self.key, self.value)
        )
        q, k = (norm(rotated(t, cos, sin)) for t in (q, k))
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(norm(x))).square())


class Nanochat(nn.Module):
    """The model of nanochat d20: QK norm, squared ReLU, capped logits in fp32."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.zeros(LENGTH, 1, WIDTH // HEADS // 2))

    def forward(self, tokens):
        x = norm(self.words(tokens))
        for layer in self.layers:
            x = layer(x, self.cos.to(x.dtype), self.sin.to(x.dtype))
        return 15 * torch.tanh(self.head(norm(x)).float() / 15)


def test_compiled_memory_of_nanochat():
    with torch.device("meta"):
        model = Nanochat()
    task = Task(
        "nanochat",
        model,
        lambda m, tokens: m(tokens),
        lambda m, tokens: F.cross_entropy(m(tokens).flatten(0, 1), tokens.flatten()),
        lambda n: torch.zeros(n, LENGTH, dtype=torch.int64),
        None,
        "tokens",
        LENGTH,
    )
    workload = trace_task(task, ("amp",), Variant("adamw"))
    forecaster = Forecaster(workload, Target(Cluster(device=find_device("H100"))))
    eager, compiled = (
        forecaster.memory(Execution(micro_batch=32, precision="amp_bf16", compile=compile))
        for compile in (False, True)
    )
    assert eager.allocated_gib > 1.5 * compiled.allocated_gib
    assert compiled.allocated_gib == pytest.approx(MEASURED_GIB, rel=0.15)
