"""The nearest public measurements beside a forecast: the option, and whom it asks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Literal

from trainpace.verbs.request import Field

if TYPE_CHECKING:
    from trainpace.core.cluster import Device
    from trainpace.core.execution import Execution
    from trainpace.forecast import Nearness
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
