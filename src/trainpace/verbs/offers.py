"""`offers`: servers and their prices."""

import datetime
from typing import Annotated, Any

from trainpace.offers import Offer
from trainpace.records import Record, Table, to_jsonable, write_whole
from trainpace.verbs.own_hardware import HardwareFile, own_devices
from trainpace.verbs.places import default_offers_file
from trainpace.verbs.progress import Progress
from trainpace.verbs.request import Field, Request
from trainpace.verbs.servers import Gpus, MachinesFile, Providers, Regions, chosen_offers, known_offers


class OffersRequest(Request):
    """Which servers on offer."""

    provider: Providers = ()
    region: Regions = ()
    gpu: Gpus = ()
    machines: MachinesFile = None
    hardware: HardwareFile = None
    refresh: Annotated[bool, Field("Fetch today's offers through gpuhunt and keep them for later.")] = False


class Offers(Record, Table):
    """Servers on offer, the user's own machines first."""

    offers: tuple[Offer, ...]

    def to_dicts(self) -> list[dict[str, Any]]:
        """A row an offer."""
        return [to_jsonable(offer) for offer in self.offers]


def run(request: OffersRequest, progress: Progress) -> Offers:
    if request.refresh:
        _refresh(datetime.date.today(), progress)
    known = known_offers(request.machines, progress)
    offers, _ = chosen_offers(known, request.provider, request.region, request.gpu, own_devices(request.hardware))
    return Offers(offers=tuple(offers))


def _refresh(today: datetime.date, progress: Progress) -> None:
    from trainpace.offers import refreshed, write_offers

    fresh, unknown = refreshed(today)
    target = default_offers_file()
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, write_offers(fresh))
    left_out = f"; left out, not in the hardware catalogue: {', '.join(sorted(unknown))}" if unknown else ""
    progress.note(f"{len(fresh)} offers of today in {target}{left_out}.")
