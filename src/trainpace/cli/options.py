"""Option types: numbers as people write them."""

from __future__ import annotations

import json
from typing import Any

import click

from trainpace.errors import TrainpaceError
from trainpace.records import read_text as read_text
from trainpace.verbs import units
from trainpace.verbs.request import Unit
from trainpace.verbs.units import ABOVE_0 as ABOVE_0
from trainpace.verbs.units import MOST_DEVICES


class UnitType(click.ParamType):
    """A value of the command line in a unit of the verbs."""

    def __init__(self, unit: Unit) -> None:
        self.name = unit.name
        self._unit = unit

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._unit.read(value)
        except TrainpaceError as error:
            self.fail(str(error), param, ctx)


def within(name: str, least: float, most: float, parse: Any = None, hint: str = "") -> UnitType:
    return UnitType(units.within(name, least, most, *([parse] if parse else []), hint=hint))  # type: ignore[misc]


DURATION, COUNT, USD, RATIO = map(UnitType, (units.DURATION, units.COUNT, units.USD, units.RATIO))
ABOVE_0_S, DEVICES, AT_LEAST_1 = map(UnitType, (units.ABOVE_0_S, units.DEVICES, units.AT_LEAST_1))
EPOCHS, GB_PER_S, SAMPLE_BYTES = map(UnitType, (units.EPOCHS, units.GB_PER_S, units.SAMPLE_BYTES))
BATCHES, WORKERS = map(UnitType, (units.BATCHES, units.WORKERS))
NETWORK_HELP = "A node's network bandwidth in one direction, in gigabytes: 400 Gbit/s is 50; 1 GbE is 0.125."


def check_fleet(num_gpus: int, nodes: int, network_gb_per_s: float | None, measured: bool = False) -> None:
    """Refuse a fleet that nobody has, and several nodes without a network between them (`measured`: by a profile)."""
    if num_gpus * nodes > MOST_DEVICES:
        raise click.UsageError(
            f"--num-gpus {num_gpus:,} x --nodes {nodes:,} cannot be right: up to {MOST_DEVICES:,} GPUs in all."
        )
    if nodes > 1 and network_gb_per_s is None and not measured:
        raise click.UsageError(
            f"{nodes} nodes need the network between them: add --network GB/S (1 Gbit/s Ethernet is 0.125)."
        )


def echo_json(value: Any) -> None:
    """Print JSON for a program to read."""
    click.echo(json.dumps(value, indent=1, allow_nan=False))
