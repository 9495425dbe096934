"""Servers that can be rented or are there already, with their prices: a dated snapshot in the package (`fitting/offers.py` makes
it), a user's own machines, and a refresh from gpuhunt's public catalogues (https://github.com/dstackai/gpuhunt).
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
OWN = "own"
"""The provider of a user's own machines."""
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
"""When the snapshot was put together; undated prices in it may be older."""
GPUHUNT_PROVIDERS = {"lambdalabs": "lambda", "vastai": "vast", "datacrunch": "verda"}
"""gpuhunt's names for providers that the snapshot calls otherwise."""
EGRESS_USD_PER_GB = {"aws": 0.09, "gcp": 0.12, "azure": 0.087, "oci": 0.0085}
"""List prices of the first paid tier to the internet from North America and Europe, on the providers' pricing pages in 2025.
Others charge nothing for it, or do not say."""


BOOT_S = 120.0
"""Assumed where nobody says how long a machine takes to start: two minutes."""


class Offer(Record):
    """A server with its price. `device` is a name in the catalogue, `count` its devices.

    Prices are for the whole server and an hour. `network_gb_per_s` is the node's bandwidth in one direction to nodes of its
    kind; None: it stands alone. `host` is its CPU, empty where nobody says. `source` says where the price comes from, `as_of`
    (YYYY-MM-DD) when it held; None: nobody said. `electricity_usd_per_kwh` is paid on top, for machines of one's own;
    `idle_watts` is what one of those draws while it waits for work, `boot_s` how long it takes to start.
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
        if not 1 <= self.count <= 1024:
            raise TrainpaceError(f"{name}: a server of {self.count} devices cannot be right.")
        for field in ("price_usd_per_hour", "spot_price_usd_per_hour", "electricity_usd_per_kwh"):
            value = getattr(self, field)
            if value is not None and not (math.isfinite(value) and 0 <= value <= 1e6):
                raise TrainpaceError(
                    f"{name}: {field} is {value}; it must be from 0 to 1e6 dollars."
                )
        if self.network_gb_per_s is not None and not 0 < self.network_gb_per_s <= 1e6:
            raise TrainpaceError(
                f"{name}: network_gb_per_s is {self.network_gb_per_s}; it must be above 0."
            )
        if self.idle_watts is not None and not 0 < self.idle_watts <= 1e5:
            raise TrainpaceError(f"{name}: idle_watts is {self.idle_watts}; it must be above 0.")
        if self.boot_s is not None and not 0 < self.boot_s <= 86400:
            raise TrainpaceError(
                f"{name}: boot_s is {self.boot_s}; it must be above 0, and at most a day."
            )
        if self.most_nodes is not None and self.most_nodes < 1:
            raise TrainpaceError(
                f"{name}: nodes is {self.most_nodes}; it must be a whole number from 1."
            )
        if self.as_of is not None:
            try:
                datetime.date.fromisoformat(self.as_of)
            except ValueError:
                raise TrainpaceError(
                    f"{name}: as_of is {self.as_of!r}; write it as 2026-11-20."
                ) from None


def is_stale(offer: Offer, today: datetime.date) -> bool:
    """Whether the price is older than STALE_AFTER_DAYS, or undated. What a user says of their own machines holds."""
    if offer.provider == OWN:
        return False
    return (
        offer.as_of is None
        or (today - datetime.date.fromisoformat(offer.as_of)).days > STALE_AFTER_DAYS
    )


def transfer_of(provider: str, data_from: str, conditions: JobConditions) -> JobConditions:
    """The conditions with the speed and the dollars of bringing the data to a provider.

    Data inside the provider's own storage come at its speed and cost nothing to move; others come over the internet.
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
    return read_offers(_packaged("snapshot.csv"), "trainpace's own snapshot.csv")


def read_offers(text: str, source: str) -> tuple[Offer, ...]:
    """Offers of a CSV text with the columns COLUMNS. `source` names it in errors."""
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
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for offer in offers:
        values = [getattr(offer, column) for column in COLUMNS]  # csv writes nothing for None
        writer.writerow([f"{value:g}" if isinstance(value, float) else value for value in values])
    return text.getvalue()


def _packaged(name: str) -> str:
    return (resources.files("trainpace.offers") / name).read_text("utf-8")


@functools.cache
def node_networks() -> dict[tuple[str, str], tuple[float, str]]:
    """(provider, instance type) -> (GB/s of a node in one direction, source), for servers that can be joined."""
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
    """The published CPU of a server and its source, as fields of an offer."""
    for family in _server_hosts():
        if family["provider"] == provider and instance_type.startswith(tuple(family["starts"])):
            return {"host": family["cpu"], "host_source": family["source"]}
    return {}


# ---- a user's own machines


class Machine(Record):
    """A user's own machines: what they cost an hour, whether rented, bought, or only plugged in.

    [[machine]]
    name = "lab"
    device = "RTX 4090"
    count = 4                       # devices of one machine
    nodes = 2                       # machines of this kind
    network_gb_per_s = 1.25         # between them, or network_gbit_per_s = 10; without it each stands alone
    host = "EPYC 7742"              # the CPU; without it one typical of such cards is assumed
    price = 1.20                    # dollars an hour of one machine, or price_usd_per_hour; or:
    purchase_usd = 12000            # ... spread over its years, at full use
    years = 4
    electricity_usd_per_kwh = 0.30  # of what the GPUs draw
    idle_watts = 60                 # of one machine that is on and waits; without it nothing is said of idle ones
    boot_s = 120                    # until it works again, once it was switched off
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
            raise TrainpaceError(f"machine {self.name}: purchase_usd and years go together.")
        if self.years is not None and not 0 < self.years <= 50:
            raise TrainpaceError(
                f"machine {self.name}: years is {self.years}; it must be from 0 to 50."
            )

    def offer(self, source: str) -> Offer:
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
    """Offers of a user's TOML text. `source` names it in errors, which are always one sentence."""
    data = toml_of(text, source)
    entries = data.get("machine")
    if data.keys() != {"machine"} or not isinstance(entries, list) or not entries:
        raise UnreadableInput(f"{source} should hold [[machine]] entries and nothing else.")
    try:
        machines = [msgspec.convert(entry, Machine) for entry in entries]
        name, times = Counter(machine.name for machine in machines).most_common(1)[0]
        if times > 1:
            raise Contradiction(f"two machines have the name {name!r}.", "Name each differently.")
        return tuple(machine.offer(source) for machine in machines)
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
        if offer.network_gb_per_s is None and (offer.most_nodes or 1) > 1:
            notes.append(
                f"machine {offer.instance_type}: its {offer.most_nodes} nodes cannot be joined"
                " without network_gb_per_s (1 Gbit/s Ethernet is 0.125); each counts alone."
            )
        if not offer.price_usd_per_hour:
            counted = "beside electricity its cost" if offer.electricity_usd_per_kwh else "its cost"
            notes.append(f"machine {offer.instance_type}: no price: {counted} counts as 0.")
        if offer.idle_watts is not None:
            notes.append(_idle(offer, offer.idle_watts))
    return notes


def _idle(offer: Offer, watts: float) -> str:
    """What a machine costs that is on and waits, and from how much idleness on switching it off saves, since it draws at least as
    much while it starts. Slurm waits SuspendTime before it does so (slurm.conf(5))."""
    kwh = watts * 24 / 1000
    boot = (
        f"{BOOT_S:g} s (assumed; boot_s says it)" if offer.boot_s is None else f"{offer.boot_s:g} s"
    )
    cost = (
        f" and {kwh * offer.electricity_usd_per_kwh:.2f} dollars"
        if offer.electricity_usd_per_kwh
        else ""
    )
    return (
        f"machine {offer.instance_type}: each one that waits for work draws {watts:g} W: {kwh:.3g}"
        f" kWh{cost} a day. Slurm switches idle nodes off (SuspendProgram and SuspendTime in"
        f" slurm.conf), which saves energy from {boot} of idleness on, the time to start again."
    )


# ---- a refresh


def refreshed(today: datetime.date) -> tuple[tuple[Offer, ...], Counter[str]]:
    """Offers as of today, and how many GPUs of which name are not in the hardware catalogue.

    Raises TrainpaceError where gpuhunt is missing, or its catalogues cannot be reached.
    """
    stays = f"The packaged snapshot, known on {SNAPSHOT_KNOWN_ON}, stays in use."
    try:
        gpuhunt = importlib.import_module("gpuhunt")
    except ImportError:
        raise TrainpaceError(
            "refreshing offers needs gpuhunt, which is not installed.",
            f"pip install 'trainpace[offers]'. {stays}",
        ) from None
    try:
        items = gpuhunt.query()
    except Exception as error:  # whatever its many providers and HTTP clients raise
        raise TrainpaceError(
            f"the catalogues could not be read ({type(error).__name__}: {error}).", stays
        ) from None
    if not items:
        raise TrainpaceError("the catalogues are empty: is this machine offline?", stays)
    return offers_of(items, today)


def offers_of(items: Iterable[Any], today: datetime.date) -> tuple[tuple[Offer, ...], Counter[str]]:
    """gpuhunt's CatalogItems as offers. The spot and the usual price of a server, which it lists apart, become one offer."""
    unknown: Counter[str] = Counter()
    usual: dict[tuple[str, str, str], Any] = {}
    spot: dict[tuple[str, str, str], Any] = {}
    for item in items:
        if not item.gpu_name or not item.gpu_count or not item.price or item.price <= 0:
            continue
        provider = GPUHUNT_PROVIDERS.get(item.provider, item.provider)
        key = (provider, item.instance_name, item.location or "")
        items_of_kind = spot if item.spot else usual
        if key not in items_of_kind or item.price < items_of_kind[key].price:
            items_of_kind[key] = item
    offers = []
    for key, item in usual.items():
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


def _device_name(name: str, memory_gib: float | None) -> str | None:
    """The catalogue's name for a GPU and its memory; None where there is none of about that size."""
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
