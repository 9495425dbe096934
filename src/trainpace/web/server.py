"""The socket that the server listens on, its policy, and uvicorn."""

import ipaddress
import secrets
import socket

import uvicorn

from trainpace.core.errors import TrainpaceError
from trainpace.core.host import user_folder
from trainpace.journal import Journal
from trainpace.verbs.offers import known_offers
from trainpace.verbs.places import own_devices
from trainpace.verbs.request import Silent
from trainpace.verbs.serve import ServeRequest
from trainpace.web.app import application
from trainpace.web.connections import AT_ONCE, MOST_CONNECTIONS, Connection
from trainpace.web.security import LONGEST_HEADERS, LOOPBACK_NAMES, Guarded, Policy
from trainpace.web.whatif import Models

EVERY_ADDRESS = ("0.0.0.0", "::")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def policy_of(host: str, port: int, names: tuple[str, ...], token: str | None) -> Policy:
    """Loopback answers to its names without a token unless one is given or it has other `names`, as behind a proxy, which others
    can reach; every other address needs one, and is called by itself and by `names`."""
    if is_loopback(host):
        token = token or (secrets.token_urlsafe(32) if names else None)
        return Policy(LOOPBACK_NAMES | {host.lower()} | {n.lower() for n in names}, token, port)
    own = set() if host in EVERY_ADDRESS else {host.lower()}
    return Policy(
        frozenset(own | {n.lower() for n in names}), token or secrets.token_urlsafe(32), port
    )


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes a free one. Raises TrainpaceError where that is refused."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((host, port))
        opened.listen(MOST_CONNECTIONS)
    except (OSError, OverflowError) as error:
        opened.close()
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise TrainpaceError(
            f"cannot listen on {host} port {port}: {reason}.", "Choose another with `port`."
        ) from None
    return opened


def serve(request: ServeRequest) -> None:
    r = request
    own = own_devices(r.hardware)
    opened = listening(r.host, r.port)
    address, port = opened.getsockname()[:2]
    if address in EVERY_ADDRESS and not r.name:
        opened.close()
        raise TrainpaceError(
            f"the host {r.host!r} is every address of this machine.",
            "Say what it is called with `name` HOST.",
        )
    host = address if address in EVERY_ADDRESS else r.host
    policy = policy_of(host, port, r.name, secrets.token_urlsafe(32) if r.with_token else None)
    with opened, Journal.open(r.journal, create=r.journal is None, read_only=True) as journal:
        app = application(
            journal, Models(user_folder("data") / "workloads"), own, known_offers(None, Silent())
        )
        config = uvicorn.Config(
            Guarded(app, policy),
            # an access log would hold the token; what a page could not do is on stderr
            access_log=False,
            log_level="warning",
            server_header=False,
            ws="none",
            http=Connection,
            proxy_headers=False,
            h11_max_incomplete_event_size=LONGEST_HEADERS,
            timeout_keep_alive=10,
            timeout_graceful_shutdown=3,
            limit_concurrency=MOST_CONNECTIONS,
            backlog=AT_ONCE,
        )
        host = r.name[0] if r.name else f"[{r.host}]" if ":" in r.host else r.host
        token = f"?token={policy.token}" if policy.token else ""
        print(
            f"Journal: {journal.place}\nOpen http://{host}:{port}/{token} (Ctrl+C ends)", flush=True
        )
        uvicorn.Server(config).run(sockets=[opened])
