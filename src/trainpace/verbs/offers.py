"""`offers`: servers and their prices, refreshed or packaged, and the user's own machines."""

import datetime
from collections.abc import Sequence
from typing import Annotated, Any

from trainpace.core.errors import TrainpaceError, UnknownName
from trainpace.core.hardware import Device, catalogue, find_device, normalised
from trainpace.core.host import user_folder
from trainpace.core.intake import read_text
from trainpace.core.records import Record, Table, to_jsonable, write_whole
from trainpace.offers import (
    EGRESS_USD_PER_GB,
    Offer,
    notes_on,
    parse_machines,
    read_offers,
    snapshot,
)
from trainpace.verbs.places import HardwareFile, own_devices
from trainpace.verbs.request import Field, Group, Progress, Request

Providers = Annotated[
    tuple[str, ...], Field("Only this provider; repeat for several.", group=Group.GPUS)
]
Regions = Annotated[
    tuple[str, ...], Field("Only regions whose name contains this: us-east, eu.", group=Group.GPUS)
]
Gpus = Annotated[
    tuple[str, ...], Field("Only this GPU; H100 alone is every H100.", group=Group.GPUS)
]
MachinesFile = Annotated[
    str | None, Field("Your own machines, from this file.", metavar="FILE.toml", group=Group.GPUS)
]


class OffersRequest(Request):
    provider: Providers = ()
    region: Regions = ()
    gpu: Gpus = ()
    machines: MachinesFile = None
    hardware: HardwareFile = None
    refresh: Annotated[
        bool, Field("Fetch today's offers through gpuhunt and keep them for later.")
    ] = False


class Offers(Record, Table):
    """Servers on offer, the user's own machines first."""

    offers: tuple[Offer, ...]

    def to_dicts(self) -> list[dict[str, Any]]:
        return [to_jsonable(offer) for offer in self.offers]


def run(request: OffersRequest, progress: Progress) -> Offers:
    if request.refresh:
        from trainpace.offers import refreshed, write_offers

        fresh, unknown = refreshed(datetime.date.today())
        target = user_folder("data") / "offers.csv"
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, write_offers(fresh))
        left_out = (
            f"; left out, not in the hardware catalogue: {', '.join(sorted(unknown))}"
            if unknown
            else ""
        )
        progress.note(f"{len(fresh)} offers of today in {target}{left_out}.")
    every_offer = known_offers(request.machines, progress)
    offers, _ = chosen_offers(
        every_offer, request.provider, request.region, request.gpu, own_devices(request.hardware)
    )
    return Offers(offers=tuple(offers))


def known_offers(
    machines: str | None, progress: Progress, only_machines: bool = False
) -> tuple[Offer, ...]:
    """The machines of a file, then the refreshed offers where there are some, else the packaged snapshot."""
    own: tuple[Offer, ...] = ()
    if machines is not None:
        own = parse_machines(read_text(machines), machines)
        for note in notes_on(own):
            progress.note(f"trainpace: {note}")
    if only_machines:
        return own
    refreshed = user_folder("data") / "offers.csv"
    public = (
        read_offers(read_text(refreshed), str(refreshed)) if refreshed.is_file() else snapshot()
    )
    return (*own, *public)


def check_provider(name: str, offers: Sequence[Offer]) -> None:
    """Raises UnknownName for a provider that neither has offers nor a known price for data that leave it."""
    providers = sorted({*EGRESS_USD_PER_GB, *(offer.provider for offer in offers)})
    if name.casefold() not in providers:
        raise UnknownName("provider", name, (), f"`data_from` knows {', '.join(providers)}.")


def _is_one_of(device: Device, family: str) -> bool:
    """Whether the card is of a family that people rent by one word, whatever its form factor: every A100, every P100."""
    word, *rest = device.name.split()
    form = rest[:1] and rest[0].upper().startswith(("PCIE", "SXM", "NVL"))
    return bool(form) and normalised(family) == normalised(word)


def chosen_offers(
    offers: Sequence[Offer],
    providers: Sequence[str],
    regions: Sequence[str],
    gpus: Sequence[str],
    own: Sequence[Device],
) -> tuple[list[Offer], dict[str, Device]]:
    """The offers of these providers, regions (a part of the name) and GPUs, and their devices by name.

    Raises UnknownName for a provider, region or GPU that no offer has.
    """

    def has_provider(offer: Offer, name: str) -> bool:
        return offer.provider.casefold() == name.casefold()

    def has_region(offer: Offer, name: str) -> bool:
        return name.casefold() in offer.region.casefold()

    for what, wanted, has in (
        ("provider", providers, has_provider),
        ("region", regions, has_region),
    ):
        for name in wanted:
            if not any(has(offer, name) for offer in offers):
                names = {getattr(offer, what) for offer in offers} - {""}
                raise UnknownName(what, name, sorted(names), "See trainpace offers.")
    by_name = {device.name: device for device in (*catalogue(), *own)}
    devices = {
        name: by_name.get(name) or find_device(name, own)
        for name in {offer.device for offer in offers}
    }
    chosen = {find_device(name, own).name for name in gpus} | {
        device.name for device in devices.values() for name in gpus if _is_one_of(device, name)
    }
    left = [
        o
        for o in offers
        if (not providers or any(has_provider(o, name) for name in providers))
        and (not regions or any(has_region(o, name) for name in regions))
        and (not chosen or devices[o.device].name in chosen)
    ]
    if not left and (providers or regions):
        filters = " and ".join(
            w for w, given in (("provider", providers), ("region", regions), ("GPU", gpus)) if given
        )
        raise TrainpaceError(f"no offer has this {filters}.", "See trainpace offers.")
    if not left:
        raise TrainpaceError(
            f"nobody among the offers rents out {' or '.join(gpus)}.",
            "A machine of your own: `machines` FILE.toml. Its time alone: trainpace forecast.",
        )
    return left, devices
