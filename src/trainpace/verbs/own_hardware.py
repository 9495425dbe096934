"""The user's own devices."""

from typing import Annotated

from trainpace.hardware import Device, parse_catalogue
from trainpace.records import read_text
from trainpace.verbs.places import default_hardware_file
from trainpace.verbs.request import Field

HardwareFile = Annotated[str | None, Field("Also read devices of your own from this file.", metavar="FILE.toml")]


def own_devices(path: str | None) -> tuple[Device, ...]:
    """Devices of the file at `path`, or of the one in the user's configuration folder where there is one."""
    if path is not None:
        return parse_catalogue(read_text(path), path)
    default = default_hardware_file()
    return parse_catalogue(read_text(default), str(default)) if default.is_file() else ()
