"""A user's own machines as offers: what they cost an hour, whether rented, bought, or only plugged in.

[[machine]]
name = "lab"
device = "RTX 4090"
count = 4                       # devices of one machine
nodes = 2                       # machines of this kind
network_gb_per_s = 1.25         # between them, or network_gbit_per_s = 10; without it each stands alone
price = 1.20                    # dollars an hour of one machine, or price_usd_per_hour; or:
purchase_usd = 12000            # ... spread over its years, at full use
years = 4
electricity_usd_per_kwh = 0.30  # of what the GPUs draw
"""

import tomllib
from collections.abc import Sequence

import msgspec

from trainpace.errors import Contradiction, TrainpaceError, UnreadableInput
from trainpace.offers.offer import OWN, Offer
from trainpace.records import Record

HOURS_PER_YEAR = 8766.0


class Machine(Record):
    """One `[[machine]]`, as the module's docstring shows it."""

    name: str
    device: str
    count: int = 1
    nodes: int = 1
    network_gbit_per_s: float | None = None
    network_gb_per_s: float | None = None
    price: float | None = None
    price_usd_per_hour: float | None = None
    purchase_usd: float | None = None
    years: float | None = None
    electricity_usd_per_kwh: float = 0.0
    as_of: str | None = None

    def __post_init__(self) -> None:
        for one, other in (("price", "price_usd_per_hour"), ("network_gb_per_s", "network_gbit_per_s")):
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise Contradiction(f"machine {self.name} has both {one} and {other}.", "Give one of them.")
        if self.usd_per_hour is not None and self.purchase_usd is not None:
            raise Contradiction(
                f"machine {self.name} has a price per hour ({self.usd_per_hour}) and a purchase price"
                f" ({self.purchase_usd}).",
                "Give one of them.",
            )
        if (self.purchase_usd is None) != (self.years is None):
            raise TrainpaceError(f"machine {self.name}: purchase_usd and years go together.")
        if self.years is not None and not 0 < self.years <= 50:
            raise TrainpaceError(f"machine {self.name}: years is {self.years}; it must be from 0 to 50.")

    @property
    def usd_per_hour(self) -> float | None:
        """The price of one machine, under whichever key it was given."""
        return self.price if self.price_usd_per_hour is None else self.price_usd_per_hour

    @property
    def gb_per_s(self) -> float | None:
        """The bandwidth of one machine's network in one direction."""
        return self.network_gb_per_s if self.network_gbit_per_s is None else self.network_gbit_per_s / 8


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
        names = [machine.name for machine in machines]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise Contradiction(f"two machines have the name {twice[0]!r}.", "Name each differently.")
        return tuple(_offer(machine, source) for machine in machines)
    except msgspec.ValidationError as error:
        fields = ", ".join(Machine.__struct_fields__)
        raise UnreadableInput(
            f"{source}: {error}.", f"A [[machine]] has a name and a device, and may have: {fields}."
        ) from None
    except TrainpaceError as error:
        raise UnreadableInput(f"{source}: {error}") from None


def notes_on(machines: Sequence[Offer]) -> list[str]:
    """What the user should know about their own machines before they read the ranking."""
    notes = []
    for offer in machines:
        if not offer.can_join and (offer.most_nodes or 1) > 1:
            notes.append(
                f"machine {offer.instance_type}: its {offer.most_nodes} nodes cannot be joined without network_gb_per_s"
                " (1 Gbit/s Ethernet is 0.125); each counts alone."
            )
        if not offer.price_usd_per_hour:
            counted = "beside electricity its cost" if offer.electricity_usd_per_kwh else "its cost"
            notes.append(f"machine {offer.instance_type}: no price: {counted} counts as 0.")
    return notes


def _offer(m: Machine, source: str) -> Offer:
    price = m.usd_per_hour or 0.0
    if m.purchase_usd is not None and m.years is not None:
        price = m.purchase_usd / (m.years * HOURS_PER_YEAR)
    return Offer(
        provider=OWN, instance_type=m.name, device=m.device, count=m.count, most_nodes=m.nodes, price_usd_per_hour=price,
        network_gb_per_s=m.gb_per_s, network_source=source,
        electricity_usd_per_kwh=m.electricity_usd_per_kwh, source=source, as_of=m.as_of,
    )  # fmt: skip
