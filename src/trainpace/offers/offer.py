"""Servers with their prices.

They come from one of three sources: a dated snapshot in the package (made by `fitting/offers.py`),
a list of the user's own machines, or a refresh from gpuhunt's public catalogues
(https://github.com/dstackai/gpuhunt).
"""

import csv
import datetime
import functools
import importlib
import io
import math
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

import msgspec

from trainpace.core.errors import Contradiction, TrainpaceError, UnknownName, UnreadableInput
from trainpace.core.hardware import find_device, find_host
from trainpace.core.intake import toml_of
from trainpace.core.records import Record
from trainpace.job import JobConditions

STALE_AFTER_DAYS = 90
"""Age in days above which a price counts as old."""
OWN = "own"
"""Provider name of a user's own machines."""
HOURS_PER_YEAR = 8766.0
COLUMNS = (
    "provider",
    "instance_type",
    "region",
    "device",
    "count",
    "gpu_memory_gib",
    "vcpus",
    "ram_gib",
    "price_usd_per_hour",
    "spot_price_usd_per_hour",
    "source",
    "as_of",
)
SNAPSHOT_KNOWN_ON = "2026-11-20"
"""Date of the snapshot. Its undated prices may be older."""
GPUHUNT_PROVIDERS = {"lambdalabs": "lambda", "vastai": "vast", "datacrunch": "verda"}
"""Map from gpuhunt's provider names to those of the snapshot."""
EGRESS_USD_PER_GB = {"aws": 0.09, "gcp": 0.12, "azure": 0.087, "oci": 0.0085}
"""Price of moving data out of a provider, in dollars per GB.

List prices of the first paid tier to the internet from North America and Europe, from the
providers' pricing pages in 2025. Other providers charge nothing, or publish no price.
"""


BOOT_S = 120.0
"""Assumed start time of a machine in seconds."""


_RANGES = {
    "count": (1, 1024),
    "price_usd_per_hour": (0, 1e6),
    "spot_price_usd_per_hour": (0, 1e6),
    "electricity_usd_per_kwh": (0, 1e6),
    "network_gb_per_s": (1e-6, 1e6),
    "idle_watts": (1e-3, 1e5),
    "boot_s": (1e-3, 86400),
    "most_nodes": (1, 1e6),
}
"""Smallest and largest valid value of each numeric field of an offer."""


class Offer(Record):
    """A server with its price per hour.

    Attributes:
        device: Name of the GPU in the hardware catalogue.
        count: Number of GPUs in the server.
        network_gb_per_s: Bandwidth to other nodes of this type in one direction. None if nodes
            cannot be joined.
        host: Name of the CPU. Empty if unknown.
        most_nodes: Maximum number of nodes, or None without a limit.
        electricity_usd_per_kwh: Price of electricity, paid in addition. Only for own machines.
        idle_watts: Power of an own machine that is on but idle.
        boot_s: Start time of an own machine.
        source: Origin of the price.
        as_of: Date of the price (YYYY-MM-DD). None if unknown.
    """

    provider: str
    instance_type: str
    device: str
    count: int
    price_usd_per_hour: float
    region: str = ""
    gpu_memory_gib: float | None = None
    vcpus: int | None = None
    ram_gib: float | None = None
    spot_price_usd_per_hour: float | None = None
    network_gb_per_s: float | None = None
    network_source: str = ""
    host: str = ""
    host_source: str = ""
    most_nodes: int | None = None
    electricity_usd_per_kwh: float = 0.0
    idle_watts: float | None = None
    boot_s: float | None = None
    source: str = ""
    as_of: str | None = None

    def __post_init__(self) -> None:
        name = f"{self.provider} {self.instance_type}".strip()
        for field, (low, high) in _RANGES.items():
            value = getattr(self, field)
            if value is not None and not low <= value <= high:
                raise TrainpaceError(
                    f"{name}: {field} is {value}; it must be from {low:g} to {high:g}."
                )
        if self.as_of is not None:
            try:
                datetime.date.fromisoformat(self.as_of)
            except ValueError:
                raise TrainpaceError(
                    f"{name}: as_of is {self.as_of!r}; write it as 2026-11-20."
                ) from None

    def price(self, spot: bool) -> float | None:
        """Return the dollars per hour of one server."""
        return self.spot_price_usd_per_hour if spot else self.price_usd_per_hour


def is_stale(offer: Offer, today: datetime.date) -> bool:
    """Return True if the price is undated or older than STALE_AFTER_DAYS.

    Prices of own machines are never stale.
    """
    if offer.provider == OWN:
        return False
    return (
        offer.as_of is None
        or (today - datetime.date.fromisoformat(offer.as_of)).days > STALE_AFTER_DAYS
    )


def transfer_of(provider: str, data_from: str, conditions: JobConditions) -> JobConditions:
    """Return the job conditions with the download speed and egress cost for a provider.

    Data in the provider's own storage is read at the storage's speed, without egress cost. Other
    data comes over the internet.

    Args:
        provider: The provider of the server.
        data_from: The provider that stores the data.
        conditions: The conditions of the job.
    """
    if not conditions.data_gb:
        return conditions
    if data_from.casefold() == provider.casefold():
        return msgspec.structs.replace(
            conditions, download_gb_per_s=conditions.storage_gb_per_s, egress_usd=0.0
        )
    usd_per_gb = EGRESS_USD_PER_GB.get(data_from.casefold(), 0.0)
    return msgspec.structs.replace(conditions, egress_usd=conditions.data_gb * usd_per_gb)


# ---- the snapshot


@functools.cache
def snapshot() -> tuple[Offer, ...]:
    """Return the offers of the packaged snapshot."""
    return read_offers(_packaged("snapshot.csv"), "trainpace's own snapshot.csv")


def read_offers(text: str, source: str) -> tuple[Offer, ...]:
    """Parse offers from CSV text.

    Args:
        text: CSV with the columns COLUMNS.
        source: Name of the text in errors.

    Raises:
        UnreadableInput: A column is missing, or a row is invalid.
    """
    rows = csv.DictReader(io.StringIO(text))
    missing = set(COLUMNS) - set(rows.fieldnames or ())
    if missing:
        raise UnreadableInput(
            f"{source} lacks the column {min(missing)}.", f"Columns: {', '.join(COLUMNS)}."
        )
    offers = []
    for line, row in enumerate(rows, start=2):
        given = {column: row[column] for column in COLUMNS if row[column] not in ("", None)}
        network = node_networks().get((given.get("provider", ""), given.get("instance_type", "")))
        if network is not None:
            given |= {"network_gb_per_s": network[0], "network_source": network[1]}
        given |= _host_of(given.get("provider", ""), given.get("instance_type", ""))
        try:
            offers.append(msgspec.convert(given, Offer, strict=False))
        except (msgspec.ValidationError, TrainpaceError) as error:
            raise UnreadableInput(f"{source}, line {line}: {error}.") from None
    return tuple(offers)


def write_offers(offers: tuple[Offer, ...]) -> str:
    """Return offers as CSV text with the columns COLUMNS."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for offer in offers:
        # The csv module writes None as an empty field.
        values = [getattr(offer, column) for column in COLUMNS]
        writer.writerow([f"{value:g}" if isinstance(value, float) else value for value in values])
    return text.getvalue()


def _packaged(name: str) -> str:
    return (resources.files("trainpace.offers") / name).read_text("utf-8")


@functools.cache
def node_networks() -> dict[tuple[str, str], tuple[float, str]]:
    """Return a map from (provider, instance type) to (GB/s of a node in one direction, source)."""
    families = tomllib.loads(_packaged("networks.toml"))["family"]
    return {
        (family["provider"], name): (family["gbit_per_s"] / 8, family["source"])
        for family in families
        for name in family["instance_types"]
    }


@functools.cache
def _server_hosts() -> tuple[dict[str, Any], ...]:
    return tuple(tomllib.loads(_packaged("hosts.toml"))["family"])


def _host_of(provider: str, instance_type: str) -> dict[str, str]:
    """Return the published CPU of a server and the source, as fields of an offer."""
    for family in _server_hosts():
        if family["provider"] == provider and instance_type.startswith(tuple(family["starts"])):
            return {"host": family["cpu"], "host_source": family["source"]}
    return {}


# ---- a user's own machines


class Machine(Record):
    """Own machines of one kind, as a [[machine]] entry of a TOML file.

    The price may be per hour, or a purchase price spread over years of full use. Without a price,
    only the electricity of the machine costs money.

        [[machine]]
        name = "lab"
        device = "RTX 4090"
        count = 4                       # GPUs per machine
        nodes = 2                       # machines of this kind
        network_gb_per_s = 1.25         # between them, or network_gbit_per_s = 10;
                                        # without it, machines cannot be joined
        host = "EPYC 7742"              # the CPU; by default one typical of such GPUs
        price = 1.20                    # dollars per hour of one machine, or price_usd_per_hour
        purchase_usd = 12000            # purchase price, instead of a price per hour
        years = 4                       # years over which the purchase price is spread
        electricity_usd_per_kwh = 0.30  # for the power of the GPUs
        idle_watts = 60                 # of one machine that is on but idle
        boot_s = 120                    # time to start after it was switched off
    """

    name: str
    device: str
    count: int = 1
    nodes: int = 1
    network_gbit_per_s: float | None = None
    network_gb_per_s: float | None = None
    host: str = ""
    price: float | None = None
    price_usd_per_hour: float | None = None
    purchase_usd: float | None = None
    years: float | None = None
    electricity_usd_per_kwh: float = 0.0
    idle_watts: float | None = None
    boot_s: float | None = None
    as_of: str | None = None

    def __post_init__(self) -> None:
        for one, other in (
            ("price", "price_usd_per_hour"),
            ("network_gb_per_s", "network_gbit_per_s"),
            ("price", "purchase_usd"),
            ("price_usd_per_hour", "purchase_usd"),
        ):
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise Contradiction(
                    f"machine {self.name} has both {one} and {other}.", "Give one of them."
                )
        if (self.purchase_usd is None) != (self.years is None):
            raise TrainpaceError(f"machine {self.name}: purchase_usd and years need each other.")
        if self.years is not None and not 0 < self.years <= 50:
            raise TrainpaceError(
                f"machine {self.name}: years is {self.years}; it must be above 0 and at most 50."
            )

    def offer(self, source: str) -> Offer:
        """Return this machine as an offer. `source` names the file that describes it."""
        price = self.price if self.price_usd_per_hour is None else self.price_usd_per_hour
        if self.purchase_usd is not None and self.years is not None:
            price = self.purchase_usd / (self.years * HOURS_PER_YEAR)
        return Offer(
            provider=OWN,
            instance_type=self.name,
            device=self.device,
            count=self.count,
            most_nodes=self.nodes,
            price_usd_per_hour=price or 0.0,
            network_source=source,
            network_gb_per_s=(
                self.network_gb_per_s
                if self.network_gbit_per_s is None
                else self.network_gbit_per_s / 8
            ),
            electricity_usd_per_kwh=self.electricity_usd_per_kwh,
            idle_watts=self.idle_watts,
            boot_s=self.boot_s,
            source=source,
            as_of=self.as_of,
            host=find_host(self.host).name if self.host else "",
            host_source=source if self.host else "",
        )


def parse_machines(text: str, source: str) -> tuple[Offer, ...]:
    """Parse own machines from TOML text.

    Args:
        text: TOML with [[machine]] entries.
        source: Name of the text in errors.

    Raises:
        UnreadableInput: The text has other entries, or an invalid machine.
    """
    data = toml_of(text, source)
    entries = data.get("machine")
    if data.keys() != {"machine"} or not isinstance(entries, list) or not entries:
        raise UnreadableInput(f"{source} must have [[machine]] entries and nothing else.")
    try:
        machines = [msgspec.convert(entry, Machine) for entry in entries]
        name, times = Counter(machine.name for machine in machines).most_common(1)[0]
        if times > 1:
            raise Contradiction(f"two machines are named {name!r}.", "Give each its own name.")
        return tuple(machine.offer(source) for machine in machines)
    except msgspec.ValidationError as error:
        fields = ", ".join(Machine.__struct_fields__)
        raise UnreadableInput(
            f"{source}: {error}.", f"A [[machine]] has a name and a device, and may have: {fields}."
        ) from None
    except TrainpaceError as error:
        raise UnreadableInput(f"{source}: {error}") from None


def notes_on(machines: Sequence[Offer]) -> list[str]:
    """Return warnings about own machines: networks, prices and idle power."""
    notes = []
    for offer in machines:
        if offer.network_gb_per_s is None and (offer.most_nodes or 1) > 1:
            notes.append(
                f"machine {offer.instance_type}: its {offer.most_nodes} nodes cannot be joined"
                " without network_gb_per_s (1 Gbit/s Ethernet is 0.125); each is ranked alone."
            )
        if not offer.price_usd_per_hour:
            counted = (
                "only its electricity is counted"
                if offer.electricity_usd_per_kwh
                else "it is counted as free"
            )
            notes.append(f"machine {offer.instance_type}: no price given, so {counted}.")
        if offer.idle_watts is not None:
            notes.append(_idle(offer, offer.idle_watts))
    return notes


def _idle(offer: Offer, watts: float) -> str:
    """Return a note with the cost of an idle machine.

    The note also says how long a machine must be idle before switching it off saves energy. That is
    at least its start time, because a starting machine draws at least as much power as an idle one.
    Slurm waits SuspendTime before it suspends a node (slurm.conf(5)).
    """
    kwh = watts * 24 / 1000
    boot = f"{BOOT_S:g} s (assumed; set boot_s)" if offer.boot_s is None else f"{offer.boot_s:g} s"
    cost = (
        f" and {kwh * offer.electricity_usd_per_kwh:.2f} dollars"
        if offer.electricity_usd_per_kwh
        else ""
    )
    return (
        f"machine {offer.instance_type}: an idle one draws {watts:g} W: {kwh:.3g} kWh{cost} per"
        f" day. Switching it off saves energy if it stays idle for longer than {boot}, its start"
        " time. Slurm can do this (SuspendProgram and SuspendTime in slurm.conf)."
    )


# ---- a refresh


def refreshed(today: datetime.date) -> tuple[tuple[Offer, ...], Counter[str]]:
    """Query gpuhunt for current offers.

    Returns:
        The offers, and the number of servers per GPU that is missing from the hardware catalogue.

    Raises:
        TrainpaceError: gpuhunt is missing, or its catalogues are empty or cannot be read.
    """
    stays = f"The packaged snapshot of {SNAPSHOT_KNOWN_ON} stays in use."
    try:
        gpuhunt = importlib.import_module("gpuhunt")
    except ImportError:
        raise TrainpaceError(
            "refreshing offers needs gpuhunt, which is not installed.",
            f"pip install 'trainpace[offers]'. {stays}",
        ) from None
    try:
        items = gpuhunt.query()
    except Exception as error:  # Its many providers and HTTP clients can raise any exception.
        raise TrainpaceError(
            f"the catalogues could not be read ({type(error).__name__}: {error}).", stays
        ) from None
    if not items:
        raise TrainpaceError("the catalogues are empty: is this machine offline?", stays)
    return offers_of(items, today)


def offers_of(items: Iterable[Any], today: datetime.date) -> tuple[tuple[Offer, ...], Counter[str]]:
    """Convert gpuhunt's CatalogItems to offers.

    gpuhunt lists the on-demand and the spot price of a server as separate items.

    Returns:
        The offers, and the number of servers per GPU that is missing from the hardware catalogue.
    """
    on_demand, spot = _cheapest_items(items)
    unknown: Counter[str] = Counter()
    offers = []
    for key, item in on_demand.items():
        device = _device_name(item.gpu_name, item.gpu_memory)
        if device is None:
            unknown[item.gpu_name] += 1
            continue
        provider, instance_type, region = key
        spot_price = spot[key].price if key in spot else math.inf
        offers.append(
            Offer(
                provider=provider,
                instance_type=instance_type,
                region=region,
                device=device,
                count=item.gpu_count,
                gpu_memory_gib=item.gpu_memory,
                vcpus=item.cpu,
                ram_gib=item.memory,
                price_usd_per_hour=item.price,
                spot_price_usd_per_hour=spot_price if spot_price < item.price else None,
                source="gpuhunt",
                as_of=today.isoformat(),
            )
        )
    return tuple(offers), unknown


_Items = dict[tuple[str, str, str], Any]


def _cheapest_items(items: Iterable[Any]) -> tuple[_Items, _Items]:
    """Return the cheapest on-demand item and the cheapest spot item of each server."""
    on_demand: _Items = {}
    spot: _Items = {}
    for item in items:
        if not (item.gpu_name and item.gpu_count and item.price and item.price > 0):
            continue
        provider = GPUHUNT_PROVIDERS.get(item.provider, item.provider)
        key = (provider, item.instance_name, item.location or "")
        kind = spot if item.spot else on_demand
        if key not in kind or item.price < kind[key].price:
            kind[key] = item
    return on_demand, spot


def _device_name(name: str, memory_gib: float | None) -> str | None:
    """Return the catalogue name of a GPU with about this memory, or None if there is none."""
    for candidate in ([f"{name}-{memory_gib:g}GB"] if memory_gib else []) + [name]:
        try:
            device = find_device(candidate)
        except UnknownName:
            continue
        if (
            memory_gib is None
            or device.memory_gib is None
            or 0.85 < memory_gib / device.memory_gib.value < 1.15
        ):
            return device.name
    return None
