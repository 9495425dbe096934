"""`trainpace offers`."""

from __future__ import annotations

import datetime
from typing import Any

import click

from trainpace.cli.options import echo_json


@click.command()
@click.option("--provider", "providers", multiple=True, help="Only this provider; several times if you like.")
@click.option("--region", "regions", multiple=True, help="Only regions with this in their name.")
@click.option("--gpu", "gpus", multiple=True, help="Only this GPU.")
@click.option("--machines", metavar="FILE.toml", help="Also machines of your own.")
@click.option("--hardware", metavar="FILE.toml", help="Also read devices of your own from this file.")
@click.option("--refresh", is_flag=True, help="Fetch today's offers through gpuhunt and keep them for later.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def offers(refresh: bool, as_json: bool, **o: Any) -> int:
    """List servers on offer: GPUs, price, spot price, network, and where the price comes from.

    \b
    trainpace offers --gpu H100 --provider aws
    trainpace offers --refresh
    """
    from trainpace.cli.hardware import devices_of
    from trainpace.cli.servers import chosen, offers_known
    from trainpace.records import to_jsonable
    from trainpace.report.offers import print_offers

    today = datetime.date.today()
    if refresh:
        _refresh(today)
    found, _ = chosen(offers_known(o["machines"]), o["providers"], o["regions"], o["gpus"], devices_of(o["hardware"]))
    if as_json:
        echo_json({"record": "Offers", "schema_version": 1, "rows": [to_jsonable(offer) for offer in found]})
    else:
        print_offers(found, today)
    return 0


def _refresh(today: datetime.date) -> None:
    from trainpace.cli.places import default_offers_file
    from trainpace.offers.refresh import refreshed
    from trainpace.offers.snapshot import write_offers
    from trainpace.records import write_whole

    fresh, unknown = refreshed(today)
    target = default_offers_file()
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, write_offers(fresh))
    left_out = f"; left out, not in the hardware catalogue: {', '.join(sorted(unknown))}" if unknown else ""
    click.echo(f"{len(fresh)} offers of today in {target}{left_out}.", err=True)
