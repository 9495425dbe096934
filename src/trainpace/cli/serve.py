"""`trainpace serve`."""

from __future__ import annotations

from typing import Any

import click

from trainpace.cli.options import within
from trainpace.errors import TrainpaceError
from trainpace.verbs.places import JOURNAL, default_workloads_folder

PORT = 8765


@click.command()
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="The address to listen on; any but loopback needs a token."
)
@click.option(
    "--port", type=within("port", 0, 65535, int), default=str(PORT), show_default=True, help="0 takes a free one."
)
@click.option(
    "--name", "names", multiple=True, help="Another name that this server is called by (its DNS name); needs a token."
)
@click.option(
    "--with-token", is_flag=True, help="Ask for a token on loopback too, where other people use this machine."
)
@click.option("--journal", "place", metavar="PATH|URL", help=JOURNAL)
@click.option("--hardware", metavar="FILE.toml", help="Also read devices of your own from this file.")
def serve(
    host: str, port: int, names: tuple[str, ...], with_token: bool, place: str | None, hardware: str | None
) -> int:
    """Show the journal, and what-if, in the browser.

    Listens on loopback, so that only this machine reaches it. It only reads the journal; of models it knows the built-in ones
    and the workloads that `trainpace forecast --save-workload` left in the data folder's workloads/.

    \b
    trainpace serve
    trainpace serve --port 9000 --journal team.db
    """
    try:
        from trainpace.web.app import application
        from trainpace.web.server import EVERY_ADDRESS, address_of, listening, policy_of, run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("trainpace"):
            raise
        raise TrainpaceError(f"the dashboard needs {error.name}.", "pip install 'trainpace[serve]'") from None
    import secrets

    from trainpace.journal import Journal
    from trainpace.verbs.own_hardware import own_devices
    from trainpace.verbs.progress import Silent
    from trainpace.verbs.servers import known_offers
    from trainpace.web.models import Models

    own: Any = own_devices(hardware)
    if host in EVERY_ADDRESS and not names:
        raise TrainpaceError(f"{host} is every address of this machine.", "Say what it is called with --name HOST.")
    opened = listening(host, port)
    port = opened.getsockname()[1]
    policy = policy_of(host, port, names, secrets.token_urlsafe(32) if with_token else None)
    with opened, Journal.open(place, create=place is None, read_only=True) as journal:
        app = application(journal, Models(default_workloads_folder()), own, known_offers(None, Silent()))
        shown = names[0] if names else host
        click.echo(f"Journal: {journal.place}\nOpen {address_of(shown, port, policy.token)} (Ctrl+C ends)")
        run(app, policy, opened)
    return 0
