"""Held-out forecasts against each other: which of two executions is faster."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from accuracy_tables import Judged

CLEARLY = 0.05
"""Executions whose measured times differ by less are not ranked: one that is measured twice differs by as much."""


class Order(NamedTuple):
    """How many pairs of executions there were, and how many of them the forecast put in the order that was measured."""

    pairs: int
    right: int

    @property
    def words(self) -> str:
        return (
            f"{100 * self.right / self.pairs:.1f} % of {self.pairs:,}" if self.pairs else "no pair"
        )


def order_of_executions(rows: Sequence[Judged], a_sample: bool) -> Order:
    """Pairs of executions of one model, with inputs of one size, on as many of the same cards, of one software and collection:
    does the forecast say which step is shorter, or, with `a_sample`, which trains more samples a second?"""
    outcomes = list(_pairs(rows, a_sample))
    return Order(len(outcomes), sum(outcomes))


def _pairs(rows: Sequence[Judged], a_sample: bool) -> Iterator[bool]:
    alike: dict[tuple[object, ...], list[Judged]] = {}
    for row in rows:
        case = row.case
        e, v = case.execution, case.variant
        cluster = case.cluster.device.name, e.nnodes, e.world_size
        model = case.spec, v.mode, v.sequence_length, v.image_size
        alike.setdefault((case.run.file, case.software, *cluster, *model), []).append(row)
    for same in alike.values():
        for one, other in itertools.combinations(same, 2):
            if one.case.execution == other.case.execution:
                continue  # measured twice
            parts = [row.case.execution.global_batch if a_sample else 1 for row in (one, other)]
            measured = [
                row.measured_ms / part for row, part in zip((one, other), parts, strict=True)
            ]
            forecast = [
                row.forecast_ms / part for row, part in zip((one, other), parts, strict=True)
            ]
            if max(measured) > (1 + CLEARLY) * min(measured):
                yield (measured[0] - measured[1]) * (forecast[0] - forecast[1]) > 0
