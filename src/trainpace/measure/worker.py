"""``python -m trainpace.measure.worker``: time steps, or profile the machine, in a process of its own."""

from __future__ import annotations

from typing import Any

from trainpace.isolation import serve
from trainpace.measure.machine import profile_cpu
from trainpace.measure.steps import measure_steps
from trainpace.records import to_json


def _work(request: dict[str, Any]) -> str:
    return to_json(profile_cpu() if request.pop("profile") else measure_steps(**request))


if __name__ == "__main__":
    serve(_work)
