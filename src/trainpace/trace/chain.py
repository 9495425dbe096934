"""Find a model's repeated blocks: the longest chain of alike modules."""

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from torch import nn

SHORTEST = 4
"""Alike blocks that make a chain. ResNet-50's longest stage has 5 of them, and fails for its share of the model."""

LEAST_SHARE = 0.5
"""The share of the model's parameters, or of its forward FLOPs, that blocks must hold to be worth cutting along."""


class Chain(NamedTuple):
    """Consecutive children of one class whose parameters have the same names and shapes, in order."""

    name: str
    modules: tuple[nn.Module, ...]

    @property
    def parameters(self) -> int:
        """The number of parameters in one block."""
        return sum(p.numel() for p in self.modules[0].parameters())


def longest_chain(model: nn.Module) -> Chain | None:
    """The chain that holds the most parameters, the longer of two that hold as many; None without one of SHORTEST.

    Modules that alternate between two classes or shapes (dense and expert layers in turn) are no chain.
    """
    chains = [chain for chain in _chains(model) if len(chain.modules) >= SHORTEST and chain.parameters]
    return max(chains, key=lambda c: (c.parameters * len(c.modules), len(c.modules)), default=None)


def _chains(model: nn.Module) -> Iterator[Chain]:
    for name, parent in model.named_modules():
        children = list(parent.named_children())
        if len(children) >= SHORTEST:
            for _, run in groupby(children, key=lambda child: _form(child[1])):
                members = list(run)
                yield Chain(f"{name}.{members[0][0]}".strip("."), tuple(module for _, module in members))


def _form(module: nn.Module) -> tuple[object, ...]:
    return type(module), *((name, p.shape) for name, p in module.named_parameters())
