"""The same global batch, divided in every way over micro-batches, accumulation and stages of ZeRO: what a heat map shows."""

from __future__ import annotations

import math

import numpy as np
from msgspec.structs import replace

from trainpace.core.execution import Execution, ZeroStage
from trainpace.core.records import Record
from trainpace.forecast import Grid, divisors
from trainpace.plan.evaluate import Setting, device_room_gib, evaluate
from trainpace.plan.search import is_legal

MOST_SIZES = 10
STAGES: tuple[ZeroStage, ...] = (0, 1, 2, 3)


class Layout(Record):
    """One way to divide it. step_ms: of an update whose data is there, None where it cannot be forecast; `needed_gib` of
    `room_gib` on each device, None where these are not known."""

    execution: Execution
    step_ms: float | None
    needed_gib: float | None
    room_gib: float | None

    @property
    def fits(self) -> bool:
        """Whether it can be trained so, as far as is known."""
        short = (
            self.needed_gib is not None
            and self.room_gib is not None
            and self.needed_gib > self.room_gib
        )
        return self.step_ms is not None and not short


def layouts_of(setting: Setting, chosen: Execution) -> tuple[Layout, ...]:
    """All of them at the mesh and the precision of `chosen`, which is among them: by stage, then by micro-batch, ascending."""
    share = chosen.micro_batch * chosen.accumulation
    sizes = divisors(share)
    if len(sizes) > MOST_SIZES:
        spread = {sizes[i] for i in np.linspace(0, len(sizes) - 1, MOST_SIZES).astype(int)}
        sizes = sorted(spread | {chosen.micro_batch})
    tried = [
        e
        for stage in STAGES
        for size in sizes
        if is_legal(
            e := replace(chosen, zero_stage=stage, micro_batch=size, accumulation=share // size),
            chosen,
        )
    ]
    found, room_gib = evaluate(setting, Grid.of(tried)), device_room_gib(setting.cluster)
    return tuple(
        Layout(
            execution=e, step_ms=_known(step_ms), needed_gib=_known(gib), room_gib=_known(room_gib)
        )
        for e, step_ms, gib in zip(
            tried, found.step_ms.tolist(), found.needed_gib.tolist(), strict=True
        )
    )


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
