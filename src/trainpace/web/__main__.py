"""The dashboard as a program: serves the `ServeRequest` that its starter puts into `REQUEST`, until interrupted."""

import secrets

from trainpace.errors import TrainpaceError
from trainpace.journal import Journal
from trainpace.verbs.offers import known_offers
from trainpace.verbs.places import default_workloads_folder, own_devices
from trainpace.verbs.request import Silent
from trainpace.verbs.serve import ServeRequest
from trainpace.web.app import application
from trainpace.web.models import Models
from trainpace.web.server import EVERY_ADDRESS, address_of, listening, policy_of, run


def serve(request: ServeRequest) -> None:
    r = request
    if r.host in EVERY_ADDRESS and not r.name:
        raise TrainpaceError(f"{r.host} is every address of this machine.", "Say what it is called with `name` HOST.")
    own = own_devices(r.hardware)
    opened = listening(r.host, r.port)
    port = opened.getsockname()[1]
    policy = policy_of(r.host, port, r.name, secrets.token_urlsafe(32) if r.with_token else None)
    with opened, Journal.open(r.journal, create=r.journal is None, read_only=True) as journal:
        app = application(journal, Models(default_workloads_folder()), own, known_offers(None, Silent()))
        shown = r.name[0] if r.name else r.host
        print(f"Journal: {journal.place}\nOpen {address_of(shown, port, policy.token)} (Ctrl+C ends)", flush=True)
        run(app, policy, opened)


if __name__ == "__main__":
    serve(globals().get("REQUEST", ServeRequest()))
