"""A user's own machines as offers: what they cost an hour, whether rented, bought, or only plugged in.

[[machine]]
name = "lab"
device = "RTX 4090"
count = 4                       # devices of one machine
nodes = 2                       # machines of this kind
network_gbit_per_s = 10         # between them; without it each stands alone
price_usd_per_hour = 1.20       # of one machine, or:
purchase_usd = 12000            # ... spread over its years, at full use
years = 4
electricity_usd_per_kwh = 0.30  # of what the GPUs draw
"""

from __future__ import annotations

import tomllib

import msgspec

from trainpace.errors import Contradiction, TrainpaceError, UnreadableInput
from trainpace.offers.offer import Offer
from trainpace.records import Record

HOURS_PER_YEAR = 8766.0
OWN = "own"
"""The provider of a user's own machines."""


class Machine(Record):
    """One `[[machine]]`, as the module's docstring shows it."""

    name: str
    device: str
    count: int = 1
    nodes: int = 1
    network_gbit_per_s: float | None = None
    price_usd_per_hour: float | None = None
    purchase_usd: float | None = None
    years: float | None = None
    electricity_usd_per_kwh: float = 0.0
    as_of: str | None = None

    def __post_init__(self) -> None:
        if self.price_usd_per_hour is not None and self.purchase_usd is not None:
            raise Contradiction(
                f"machine {self.name} has a price per hour ({self.price_usd_per_hour}) and a purchase price"
                f" ({self.purchase_usd}).",
                "Give one of them.",
            )
        if (self.purchase_usd is None) != (self.years is None):
            raise TrainpaceError(f"machine {self.name}: purchase_usd and years go together.")
        if self.years is not None and not 0 < self.years <= 50:
            raise TrainpaceError(f"machine {self.name}: years is {self.years}; it must be from 0 to 50.")


def parse_machines(text: str, source: str) -> tuple[Offer, ...]:
    """Offers of a user's TOML text. `source` names it in errors, which are always one sentence."""
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UnreadableInput(f"{source} is not valid TOML: {error}.") from None
    entries = data.get("machine")
    if data.keys() != {"machine"} or not isinstance(entries, list) or not entries:
        raise UnreadableInput(f"{source} should hold [[machine]] entries and nothing else.")
    try:
        machines = [msgspec.convert(entry, Machine) for entry in entries]
        return tuple(_offer(machine, source) for machine in machines)
    except (msgspec.ValidationError, TrainpaceError) as error:
        raise UnreadableInput(f"{source}: {error}") from None


def _offer(m: Machine, source: str) -> Offer:
    price = m.price_usd_per_hour or 0.0
    if m.purchase_usd is not None and m.years is not None:
        price = m.purchase_usd / (m.years * HOURS_PER_YEAR)
    return Offer(
        provider=OWN, instance_type=m.name, device=m.device, count=m.count, most_nodes=m.nodes, price_usd_per_hour=price,
        network_gb_per_s=None if m.network_gbit_per_s is None else m.network_gbit_per_s / 8, network_source=source,
        electricity_usd_per_kwh=m.electricity_usd_per_kwh, source=source, as_of=m.as_of,
    )  # fmt: skip
