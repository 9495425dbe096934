"""``python -m trainpace.machine.worker``: micro-benchmarks of this machine, in a process of its own."""

from typing import Any

import msgspec

from trainpace.machine.detection import Machine
from trainpace.machine.micro_benchmarks import calibrate
from trainpace.process import serve
from trainpace.records import to_json


def _work(request: dict[str, Any]) -> str:
    if request.get("threads"):
        import torch

        torch.set_num_threads(request["threads"])
    return to_json(calibrate(request["seconds"], msgspec.convert(request["machine"], Machine)))


if __name__ == "__main__":
    serve(_work)
