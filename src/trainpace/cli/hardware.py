"""The user's own devices."""

from __future__ import annotations

from trainpace.cli.options import read_text
from trainpace.cli.places import default_hardware_file
from trainpace.hardware import Device, parse_catalogue


def devices_of(path: str | None) -> tuple[Device, ...]:
    """Devices of --hardware FILE, or of the file in the user's configuration folder where there is one."""
    if path is not None:
        return parse_catalogue(read_text(path), path)
    default = default_hardware_file()
    return parse_catalogue(read_text(str(default)), str(default)) if default.is_file() else ()
