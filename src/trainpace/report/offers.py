"""Servers on offer, for the terminal."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from trainpace.offers import SNAPSHOT_KNOWN_ON, Offer, is_stale
from trainpace.report.phrases import devices, plural, usd
from trainpace.report.terminal import (
    Column,
    print_lines,
    print_next,
    print_table,
    print_verdict,
    words,
)
from trainpace.verbs.carried import carried
from trainpace.verbs.offers import OffersRequest


def print_offers(
    offers: Sequence[Offer], today: datetime.date, asked: OffersRequest | None = None
) -> None:
    offers = sorted(offers, key=lambda o: o.price_usd_per_hour)
    rows = [
        (
            o.provider,
            o.instance_type,
            o.region,
            devices(o.count, o.device),
            usd(o.price_usd_per_hour),
            usd(o.spot_price_usd_per_hour),
            f"{8 * o.network_gb_per_s:g}" if o.network_gb_per_s else "-",
            o.as_of or "undated",
        )
        for o in offers
    ]
    least = ""
    if offers:
        cheapest = offers[0]
        least = (
            f", from {usd(cheapest.price_usd_per_hour)} an hour ({cheapest.provider}"
            f" {cheapest.instance_type})"
        )
    print_verdict(f"{plural(len(offers), 'offer')}{least}.")
    columns = (
        words("provider"),
        words("server", least=16),
        words("region", 3),
        words("GPUs"),
        Column("$/h"),
        Column("spot $/h", 1),
        Column("Gbit/s", 4),
        words("as of", 2, 7),
    )
    print_table(columns, rows)
    stale = sum(is_stale(offer, today) for offer in offers)
    print_lines("Gbit/s: bandwidth between servers of one kind, where several can be joined.")
    if stale:
        undated = f"undated ones are as known on {SNAPSHOT_KNOWN_ON} and may be older"
        are = "price is" if stale == 1 else "prices are"
        print_lines(f"{stale} {are} old: {undated}. --json shows every source.")
        filters = [] if asked is None else carried(asked, type(asked), ["refresh"])
        print_next(["trainpace", "offers", *filters, "--refresh"], "fetches today's prices")
