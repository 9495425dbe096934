"""Fresh offers from gpuhunt's public catalogues (https://github.com/dstackai/gpuhunt), an optional library."""

import datetime
import importlib
from collections import Counter
from collections.abc import Iterable
from typing import Any

from trainpace.errors import TrainpaceError, UnknownName
from trainpace.hardware import find_device
from trainpace.offers.offer import Offer
from trainpace.offers.snapshot import SNAPSHOT_KNOWN_ON

PROVIDERS = {"lambdalabs": "lambda", "vastai": "vast", "datacrunch": "verda"}
"""gpuhunt's names for providers that the snapshot calls otherwise."""


def refreshed(today: datetime.date) -> tuple[tuple[Offer, ...], Counter[str]]:
    """Offers as of today, and how many GPUs of which name are not in the hardware catalogue.

    Raises TrainpaceError where gpuhunt is missing, or its catalogues cannot be reached.
    """
    stays = f"The packaged snapshot, known on {SNAPSHOT_KNOWN_ON}, stays in use."
    try:
        gpuhunt = importlib.import_module("gpuhunt")
    except ImportError:
        raise TrainpaceError(
            "refreshing offers needs gpuhunt, which is not installed.", f"pip install 'trainpace[offers]'. {stays}"
        ) from None
    try:
        items = gpuhunt.query()
    except Exception as error:  # whatever its many providers and HTTP clients raise
        raise TrainpaceError(f"the catalogues could not be read ({type(error).__name__}: {error}).", stays) from None
    if not items:
        raise TrainpaceError("the catalogues are empty: is this machine offline?", stays)
    return offers_of(items, today)


def offers_of(items: Iterable[Any], today: datetime.date) -> tuple[tuple[Offer, ...], Counter[str]]:
    """gpuhunt's CatalogItems as offers. The spot and the usual price of a server, which it lists apart, become one offer."""
    unknown: Counter[str] = Counter()
    usual: dict[tuple[str, str, str], Any] = {}
    spot: dict[tuple[str, str, str], float] = {}
    for item in items:
        if not item.gpu_name or not item.gpu_count or not item.price or item.price <= 0:
            continue
        provider = PROVIDERS.get(item.provider, item.provider)
        key = (provider, item.instance_name, item.location or "")
        if item.spot:
            spot[key] = min(item.price, spot.get(key, item.price))
        elif key not in usual or item.price < usual[key].price:
            usual[key] = item
    offers = []
    for key, item in usual.items():
        device = _device_name(item.gpu_name, item.gpu_memory)
        if device is None:
            unknown[item.gpu_name] += 1
            continue
        lower = spot.get(key)
        offers.append(
            Offer(
                provider=key[0], instance_type=key[1], region=key[2], device=device, count=item.gpu_count,
                gpu_memory_gib=item.gpu_memory, vcpus=item.cpu, ram_gib=item.memory, price_usd_per_hour=item.price,
                spot_price_usd_per_hour=lower if lower is not None and lower < item.price else None,
                source="gpuhunt", as_of=today.isoformat(),
            )
        )  # fmt: skip
    return tuple(offers), unknown


def _device_name(name: str, memory_gib: float | None) -> str | None:
    """The catalogue's name for a GPU and its memory; None where there is none of about that size."""
    for candidate in ([f"{name}-{memory_gib:g}GB"] if memory_gib else []) + [name]:
        try:
            device = find_device(candidate)
        except UnknownName:
            continue
        known = device.memory_gib.value if device.memory_gib else None
        if memory_gib is None or known is None or 0.85 < memory_gib / known < 1.15:
            return device.name
    return None
