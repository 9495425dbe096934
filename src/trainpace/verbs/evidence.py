"""The nearest public measurements beside a forecast: the option, and whom it asks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from trainpace.verbs.request import Field

if TYPE_CHECKING:
    from trainpace.core.execution import Execution
    from trainpace.core.hardware import Device
    from trainpace.forecast import Near, Nearness
    from trainpace.workload import Workload

Evidence = Annotated[
    Literal["nearest", "none"],
    Field(
        "Measurements of others, packaged with their sources, beside the forecast: the nearest"
        " ones, or none."
    ),
]
MOST_DEVICES = 3
"""With more devices the measurements would be longer than the answer."""
ALONE = 3
"""Measurements beside the forecast of one device; of several each has the nearest one."""

Asked = tuple["Workload", "Execution", "Device"]


def evidence_for(
    wanted: Literal["nearest", "none"], asked: Iterable[Asked]
) -> tuple[Nearness, ...]:
    """The nearest measurements of each GPU that is asked for; nothing for a machine's own CPU, of which nobody measured any."""
    if wanted == "none":
        return ()
    of_gpus = [
        (workload, execution, device)
        for workload, execution, device in asked
        if device.kind == "gpu"
    ]
    if not of_gpus:
        return ()
    from trainpace.forecast import nearest

    most = ALONE if len(of_gpus) == 1 else 1
    return tuple(nearest(*one, most=most) for one in of_gpus[:MOST_DEVICES])


def evidence_json(evidence: Sequence[Nearness]) -> list[dict[str, Any]]:
    """Return the key `evidence` of JSON answers: runs with sources, distances and differences."""
    return [
        {
            "model": nearness.model,
            "gpu": nearness.device,
            "batch": nearness.batch,
            "nearest": [_near_json(near) for near in nearness.runs],
            "none_near": not nearness.runs,
            "closest": (
                None if nearness.closest is None or nearness.runs else _near_json(nearness.closest)
            ),
        }
        for nearness in evidence
    ]


def _near_json(near: Near) -> dict[str, Any]:
    run = msgspec.to_builtins(near.run)
    error = near.run.error_pct
    return {
        **run,
        "error_pct": None if error is None else round(error, 2),
        "samples_per_second": near.run.samples_per_second,
        "distance": near.distance,
        "alike": list(near.alike),
        "unlike": list(near.unlike),
    }
