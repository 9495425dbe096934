"""``python -m trainpace.measure.worker``: time steps or gather gradients, in a process of its own."""

import sys
from typing import Any

import msgspec

from trainpace.errors import TrainpaceError
from trainpace.measure.probes import Conditions
from trainpace.process import serve
from trainpace.records import to_json


def _work(request: dict[str, Any]) -> str:
    conditions = msgspec.convert(request["conditions"], Conditions)
    if request["record"] == "MeasuredNoiseScale":
        from trainpace.measure.noise_scale import measure_noise_scale

        return to_json(measure_noise_scale(conditions, request["batch_size"]))
    from trainpace.measure.steps import measure_steps

    if conditions.memory_limit_gib is not None:
        _limit_memory(conditions.memory_limit_gib)
    return to_json(measure_steps(conditions, request["batch_size"]))


def _limit_memory(gib: float) -> None:
    """Let this process take only so much more than it has now, after torch was loaded. Data and anonymous memory count."""
    try:
        import resource

        import psutil

        limit = psutil.Process().memory_info().data + int(gib * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    except (ImportError, AttributeError, OSError, ValueError):
        raise TrainpaceError(f"a memory limit cannot be set on {sys.platform}.", "Leave it out.") from None


if __name__ == "__main__":
    serve(_work)
