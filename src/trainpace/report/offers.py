"""Offers for the terminal."""

import datetime
from collections.abc import Sequence

from trainpace.offers import SNAPSHOT_KNOWN_ON, Offer, is_stale
from trainpace.report.columns import Column, words
from trainpace.report.phrases import devices
from trainpace.report.terminal import print_lines, print_next, print_table, print_verdict
from trainpace.units import format_usd


def print_offers(offers: Sequence[Offer], today: datetime.date) -> None:
    rows = [
        (o.provider, o.instance_type, o.region, devices(o.count, o.device),
         format_usd(o.price_usd_per_hour), _spot(o), f"{8 * o.network_gb_per_s:g}" if o.network_gb_per_s else "-",
         o.as_of or "undated")
        for o in offers
    ]  # fmt: skip
    cheapest = min(offers, key=lambda o: o.price_usd_per_hour, default=None)
    least = "" if cheapest is None else (
        f", from {format_usd(cheapest.price_usd_per_hour)} an hour ({cheapest.provider} {cheapest.instance_type})"
    )  # fmt: skip
    print_verdict(f"{len(offers)} offers{least}.")
    columns = (
        words("provider"), words("server", least=16), words("region", 3), words("GPUs"), Column("$/h"), Column("spot $/h", 1),
        Column("Gbit/s", 4), words("as of", 2, 7),
    )  # fmt: skip
    print_table(columns, rows)
    stale = sum(is_stale(offer, today) for offer in offers)
    print_lines("Gbit/s: bandwidth between servers of one kind, where several can be joined.")
    if stale:
        print_lines(
            f"{stale} prices are old: undated ones are as known on {SNAPSHOT_KNOWN_ON} and may be older."
            " --json shows every source."
        )
        print_next("trainpace offers --refresh", "fetches today's prices")


def _spot(offer: Offer) -> str:
    return "-" if offer.spot_price_usd_per_hour is None else format_usd(offer.spot_price_usd_per_hour)
