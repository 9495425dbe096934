"""What this machine's accelerator is, asked in a process of its own: the asking one may need no torch."""

import msgspec

from trainpace.core.records import Record, from_json, to_json
from trainpace.core.worker import run_isolated, serve

TIMEOUT_S = 120.0


class DeviceHere(Record):
    """An accelerator of this machine, by what torch says of it. `name` is "" where its kind has none."""

    kind: str
    count: int
    name: str = ""
    versions: dict[str, str] = msgspec.field(default_factory=dict)


def device_here(kind: str | None = None) -> DeviceHere:
    """The device of that kind; None: the accelerator that this torch sees, or the CPU. Raises TrainpaceError where there
    is none of that kind, with what to do about it."""
    answer = run_isolated(
        "trainpace.measure.device_description", {"kind": kind}, TIMEOUT_S, "looking for a device"
    )
    return from_json(answer, DeviceHere, "the description of the device")


def _work(request: dict[str, str | None]) -> str:
    from trainpace.measure.devices import (
        accelerator_here,
        check_device,
        count_devices,
        device_name,
        versions,
    )

    kind = request["kind"] or accelerator_here() or "cpu"
    check_device(kind)
    return to_json(
        DeviceHere(
            kind=kind, count=count_devices(kind), name=device_name(kind), versions=versions(kind)
        )
    )


if __name__ == "__main__":
    serve(_work)
