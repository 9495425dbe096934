"""A language model with experts, as grouped matmuls like transformers 5 or as a loop over experts."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from trainpace.workload.task import Task

TOKENS, WIDTH, INNER, EXPERTS, CHOSEN, LAYERS, WORDS = 16, 32, 48, 8, 2, 4, 97


class Experts(nn.Module):
    """Top-k routing and grouped matmuls like transformers 5."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.empty(EXPERTS, WIDTH, 2 * INNER))
        self.down = nn.Parameter(torch.empty(EXPERTS, INNER, WIDTH))

    def forward(self, x, chosen, weights):
        order = chosen.flatten().argsort()
        ends = torch.histc(chosen.flatten().int(), EXPERTS, 0, EXPERTS - 1).cumsum(
            0, dtype=torch.int32
        )
        gate, up = F.grouped_mm(x[order // CHOSEN], self.up, offs=ends).chunk(2, -1)
        out = F.grouped_mm(F.silu(gate) * up, self.down, offs=ends) * weights.flatten()[order, None]
        return out[order.argsort()].unflatten(0, (-1, CHOSEN)).sum(1)


class Loop(Experts):
    """One matmul for each expert that has tokens."""

    def forward(self, x, chosen, weights):
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            rows, place = torch.where(chosen == expert)
            gate, up = (x[rows] @ self.up[expert]).chunk(2, -1)
            out.index_add_(
                0, rows, (F.silu(gate) * up) @ self.down[expert] * weights[rows, place, None]
            )
        return out


class Layer(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.norm, self.router, self.experts = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, EXPERTS),
            experts(),
        )

    def forward(self, x):
        flat = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(CHOSEN)
        return x + self.experts(flat, chosen, weights).view_as(x)


class Language(nn.Module):
    def __init__(self, experts=Experts):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Layer(experts) for _ in range(LAYERS))

    def forward(self, tokens):
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def language_task(experts=Experts):
    def loss(model, batch):
        return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())

    with torch.device("meta"):
        model = Language(experts)
    return Task(
        "experts",
        model,
        lambda m, b: m(b),
        loss,
        lambda n: torch.randint(0, WORDS, (n, TOKENS)),
        None,
        "tokens",
    )
