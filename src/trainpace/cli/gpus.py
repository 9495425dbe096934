"""`trainpace gpus`."""

from __future__ import annotations

import click

from trainpace.cli.hardware import devices_of
from trainpace.cli.options import echo_json


@click.command()
@click.argument("name", required=False)
@click.option("--hardware", metavar="FILE.toml", help="Also read devices of your own from this file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def gpus(name: str | None, hardware: str | None, as_json: bool) -> int:
    """List the hardware catalogue, or one device with the source of every figure.

    \b
    trainpace gpus
    trainpace gpus "NVIDIA GeForce RTX 3090"
    """
    from trainpace.hardware import catalogue, find_device
    from trainpace.records import to_jsonable
    from trainpace.report.hardware import print_catalogue, print_device

    own = devices_of(hardware)
    if name is None:
        devices = [*own, *catalogue()]
        if as_json:
            echo_json([to_jsonable(device) for device in devices])
        else:
            print_catalogue(devices)
        return 0
    device = find_device(name, own)
    if as_json:
        echo_json(to_jsonable(device))
    else:
        print_device(device)
    return 0
