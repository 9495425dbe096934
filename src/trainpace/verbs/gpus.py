"""`gpus`: the hardware catalogue."""

from typing import Annotated

from trainpace.hardware import Device, catalogue, find_device
from trainpace.records import Record
from trainpace.verbs.places import HardwareFile, own_devices
from trainpace.verbs.request import Argument, Progress, Request


class GpusRequest(Request):
    name: Annotated[str | None, Argument("One device, by its name.", metavar="[NAME]")] = None
    hardware: HardwareFile = None


class Devices(Record):
    devices: tuple[Device, ...]


def run(request: GpusRequest, progress: Progress) -> Devices:
    own = own_devices(request.hardware)
    if request.name is not None:
        return Devices(devices=(find_device(request.name, own),))
    return Devices(devices=(*own, *catalogue()))
