"""What a reader must know of this machine to compare its figures: nothing that identifies a person, a host or a path."""

import platform
from collections.abc import Mapping

from trainpace.hardware import catalogue_name
from trainpace.machine.detection import cpu_name


def environment(device: str) -> dict[str, str]:
    """The hardware and the versions of the software. Imports torch."""
    import torch

    properties = {
        "cpu": cpu_name(), "architecture": platform.machine(), "threads": str(torch.get_num_threads()),
        "torch": str(torch.__version__), "python": platform.python_version(), "system": platform.system(),
    }  # fmt: skip
    if device == "cuda":
        properties |= {
            "gpu": torch.cuda.get_device_name(),
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
        }
    return properties


def device_in(environment: Mapping[str, str]) -> str:
    """The device of what was measured there, by the catalogue's name; "" where it does not say."""
    return catalogue_name(environment["gpu"]) if "gpu" in environment else environment.get("cpu", "")
