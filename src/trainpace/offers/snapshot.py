"""Read offers from CSV: the snapshot in the package (`fitting/offers.py` makes it), or a refreshed one."""

import csv
import functools
import io
import tomllib
from importlib import resources

import msgspec

from trainpace.errors import TrainpaceError, UnreadableInput
from trainpace.offers.offer import Offer

COLUMNS = (
    "provider", "instance_type", "region", "device", "count", "gpu_memory_gib", "vcpus", "ram_gib",
    "price_usd_per_hour", "spot_price_usd_per_hour", "source", "as_of",
)  # fmt: skip
SNAPSHOT_KNOWN_ON = "2026-11-20"
"""When the snapshot was put together; undated prices in it may be older."""
_PACKAGE = "trainpace.offers"


@functools.cache
def snapshot() -> tuple[Offer, ...]:
    """The packaged offers."""
    return read_offers((resources.files(_PACKAGE) / "snapshot.csv").read_text("utf-8"), "trainpace's own snapshot.csv")


def read_offers(text: str, source: str) -> tuple[Offer, ...]:
    """Offers of a CSV text with the columns COLUMNS. `source` names it in errors."""
    rows = csv.DictReader(io.StringIO(text))
    missing = set(COLUMNS) - set(rows.fieldnames or ())
    if missing:
        raise UnreadableInput(f"{source} lacks the column {min(missing)}.", f"Columns: {', '.join(COLUMNS)}.")
    offers = []
    for line, row in enumerate(rows, start=2):
        given = {column: row[column] for column in COLUMNS if row[column] not in ("", None)}
        network = node_networks().get((given.get("provider", ""), given.get("instance_type", "")))
        if network is not None:
            given |= {"network_gb_per_s": network[0], "network_source": network[1]}
        try:
            offers.append(msgspec.convert(given, Offer, strict=False))
        except (msgspec.ValidationError, TrainpaceError) as error:
            raise UnreadableInput(f"{source}, line {line}: {error}.") from None
    return tuple(offers)


def write_offers(offers: tuple[Offer, ...]) -> str:
    """The CSV text of offers; what `read_offers` reads."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for offer in offers:
        values = (getattr(offer, column) for column in COLUMNS)
        writer.writerow(
            "" if value is None else f"{value:g}" if isinstance(value, float) else value for value in values
        )
    return text.getvalue()


@functools.cache
def node_networks() -> dict[tuple[str, str], tuple[float, str]]:
    """(provider, instance type) -> (GB/s of a node in one direction, source), for servers that can be joined."""
    families = tomllib.loads((resources.files(_PACKAGE) / "networks.toml").read_text("utf-8"))["family"]
    return {
        (family["provider"], name): (family["gbit_per_s"] / 8, family["source"])
        for family in families
        for name in family["instance_types"]
    }
