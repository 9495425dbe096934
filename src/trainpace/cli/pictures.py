"""`--html` and `--figure`, alike for every verb that has an answer to show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from trainpace.report.charts.chart import Picture


def picture_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The two options; their values are `page` and `figure`."""
    figure = click.option(
        "--figure",
        metavar="FILE",
        help="Save the charts as pictures (.png, .svg, .pdf): the first as FILE, others beside it with their title.",
    )
    page = click.option(
        "--html", "page", metavar="FILE.html", help="Save the answer as a page: one file, charts included."
    )
    return page(figure(command))


def check_pictures(o: dict[str, Any]) -> None:
    """Before any work: is there a folder to write into, and a kind of picture to write?"""
    for option in ("page", "figure"):
        if o[option] and not Path(o[option]).resolve().parent.is_dir():
            raise click.UsageError(f"the folder of {o[option]} does not exist.")
    if o["figure"]:
        from trainpace.report.figures import check_suffix

        check_suffix(o["figure"])


def save_pictures(o: dict[str, Any], page: Callable[[], str], pictures: Callable[[], Sequence[Picture]]) -> None:
    """What was asked for; both are made only then."""
    if o["page"]:
        from trainpace.records import write_whole

        write_whole(o["page"], page())
        click.echo(f"Page: {o['page']}", err=True)
    if o["figure"]:
        from trainpace.report.figures import save_figures

        for file in save_figures(pictures(), o["figure"]):
            click.echo(f"Picture: {file}", err=True)
