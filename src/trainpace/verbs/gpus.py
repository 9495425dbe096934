"""`gpus`: the hardware catalogue."""

from typing import Annotated

from trainpace.core.hardware import Device, catalogue, find_device
from trainpace.verbs.places import HardwareFile, own_devices
from trainpace.verbs.request import Argument, Progress, Request


class GpusRequest(Request):
    name: Annotated[str | None, Argument("One device, by its name.", metavar="[NAME]")] = None
    hardware: HardwareFile = None


def run(request: GpusRequest, progress: Progress) -> tuple[Device, ...]:
    """The device of that name, or all, the user's own first."""
    own = own_devices(request.hardware)
    return (*own, *catalogue()) if request.name is None else (find_device(request.name, own),)
