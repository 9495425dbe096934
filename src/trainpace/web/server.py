"""The server: socket, connections, and access control for every request.

Any page in the user's browser can reach a server on loopback. The server therefore accepts only its
own names in the Host header (against DNS rebinding), refuses requests from other origins, and
allows only reading. Addresses other than loopback also need a token. Connections that send no
request or do not read their answer are closed, so they cannot block others.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import html
import ipaddress
import secrets
import socket
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

import uvicorn
from h11 import LocalProtocolError
from starlette.datastructures import Headers, QueryParams
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from trainpace.core.errors import TrainpaceError
from trainpace.core.host import user_folder
from trainpace.journal import Journal
from trainpace.verbs.journal import ServeRequest
from trainpace.verbs.match import known_offers
from trainpace.verbs.places import own_devices
from trainpace.verbs.request import Silent
from trainpace.web.app import application
from trainpace.web.whatif import Models

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
LONGEST_PATH = 512
LONGEST_QUERY = 4096
LONGEST_HEADERS = 16 * 1024
METHODS = ("GET", "HEAD")
TOKEN = "token"

HEADERS = (
    (
        b"content-security-policy",
        (
            b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src"
            b" 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
        ),
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
)
NOT_STORED = (b"cache-control", b"no-store")
"""Default caching header. Only responses with their own (the vendored files) are stored.
"""


class Policy(NamedTuple):
    """Host names and token that a request needs. A token of None means no token.

    `port` separates the cookies of two servers on one host.
    """

    names: frozenset[str]
    token: str | None
    port: int

    @property
    def cookie_name(self) -> str:
        return f"trainpace_{self.port}"

    @property
    def cookie_value(self) -> str:
        """Digest of the token. The browser does not store the token itself."""
        return hashlib.sha256(f"trainpace cookie {self.token}".encode()).hexdigest()


class Refusal(NamedTuple):
    status: int
    reason: str
    headers: dict[str, str] = {}  # noqa: RUF012


class Guarded:
    """ASGI application that refuses requests outside a policy, and adds security headers."""

    def __init__(self, app: ASGIApp, policy: Policy) -> None:
        self._app = app
        self._policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        refused = refusal(scope, self._policy)
        if refused is not None:
            headers = {**refused.headers, "connection": "close"}
            answer: ASGIApp = HTMLResponse(page("Refused", refused.reason), refused.status, headers)
        else:
            answer = _first_use(scope, self._policy) or self._app

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = message["headers"]
                caching = () if any(name == NOT_STORED[0] for name, _ in given) else (NOT_STORED,)
                message = {**message, "headers": [*given, *HEADERS, *caching]}
            await send(message)

        # uvicorn has already answered a request whose body is malformed.
        with contextlib.suppress(LocalProtocolError):
            await answer(scope, receive, guarded)


def refusal(scope: Scope, policy: Policy) -> Refusal | None:
    """Return the reason to refuse a request, or None if it is allowed."""
    request = Request(scope)
    headers = request.headers
    checks = (_bad_shape(scope, headers), _bad_host(headers, policy), _bad_origin(headers))
    refused = next(filter(None, checks), None)
    if refused is None and policy.token is not None and not _shows_token(request, policy):
        reason = "Open the address that trainpace serve printed: it has the token for this server."
        return Refusal(401, reason, {"www-authenticate": "Bearer"})
    return refused


def _bad_shape(scope: Scope, headers: Headers) -> Refusal | None:
    if scope["method"] not in METHODS:
        return Refusal(405, "This server only answers GET and HEAD.", {"allow": ", ".join(METHODS)})
    path = scope.get("raw_path") or scope["path"].encode()
    if len(path) > LONGEST_PATH or len(scope["query_string"]) > LONGEST_QUERY:
        return Refusal(414, "This address is too long.")
    if sum(len(name) + len(value) for name, value in scope["headers"]) > LONGEST_HEADERS:
        return Refusal(431, "These headers are too long.")
    lengths = headers.getlist("content-length")
    if any(length not in ("", "0") for length in lengths) or "transfer-encoding" in headers:
        return Refusal(413, "A request to read has no body.")
    return None


def _bad_host(headers: Headers, policy: Policy) -> Refusal | None:
    hosts = headers.getlist("host")
    if len(hosts) == 1 and host_name(hosts[0]) in policy.names:
        return None
    return Refusal(421, "Unknown host name. Add it with trainpace serve --name NAME.")


def _bad_origin(headers: Headers) -> Refusal | None:
    host = headers.get("host", "").lower()
    own = [f"{scheme}://{host}" for scheme in ("http", "https")]
    if any(origin.lower() not in own for origin in headers.getlist("origin")):
        return Refusal(403, "Requests from other origins are refused.")
    # Another port of this host counts as the same site. A link that a person followed opens a whole
    # page, not a part of another page.
    site, mode, destination = (headers.getlist(f"sec-fetch-{n}") for n in ("site", "mode", "dest"))
    followed = mode == ["navigate"] and destination == ["document"]
    if {"cross-site", "same-site"} & set(site) and not followed:
        return Refusal(403, "Requests from other sites are refused.")
    return None


def host_name(host: str) -> str:
    """Return the name in a Host header without its port. "" if the header is invalid."""
    text = host.strip().lower()
    if any(c in text for c in "/?#@\\ \t"):
        return ""
    try:
        parts = urlsplit(f"//{text}")
        _ = parts.port  # Raises ValueError for an invalid port
        return parts.hostname or ""
    except ValueError:
        return ""


def page(title: str, sentence: str, refresh: str = "") -> str:
    again = f'<meta http-equiv="refresh" content="0;url={html.escape(refresh)}">' if refresh else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="color-scheme"'
        f' content="light dark">{again}'
        f"<title>{html.escape(title)} -"
        f" Trainpace</title></head><body><main><h1>{html.escape(title)}</h1>"
        f"<p>{html.escape(sentence)}</p></main></body></html>\n"
    )


def _first_use(scope: Scope, policy: Policy) -> HTMLResponse | None:
    """Move a token from the address into a cookie, and reload the page.

    The page reloads itself. With an HTTP redirect, the browser would not send a strict cookie after
    a link from another site.
    """
    query = Request(scope).query_params
    if policy.token is None or not _names_token(query, policy):
        return None
    rest = urlencode([(k, v) for k, v in query.multi_items() if k != TOKEN])
    address = quote(scope["path"], safe="/._-") + (f"?{rest}" if rest else "")
    # Two slashes at the start would name another host.
    address = "/" + address.lstrip("/")
    secure = "; Secure" if scope.get("scheme") == "https" else ""
    cookie = (
        f"{policy.cookie_name}={policy.cookie_value}; HttpOnly; SameSite=Strict; Path=/{secure}"
    )
    return HTMLResponse(page("Welcome", "One moment.", address), headers={"set-cookie": cookie})


def _names_token(query: QueryParams, policy: Policy) -> bool:
    return any(_same(value, policy.token or "") for value in query.getlist(TOKEN))


def _shows_token(request: Request, policy: Policy) -> bool:
    """Return True if the token is in the address, a header or the cookie."""
    bearers = request.headers.getlist("authorization")
    return (
        _names_token(request.query_params, policy)
        or any(_same(text, f"Bearer {policy.token}") for text in bearers)
        or _same(request.cookies.get(policy.cookie_name, ""), policy.cookie_value)
    )


def _same(given: str, wanted: str) -> bool:
    return bool(wanted) and hmac.compare_digest(
        given.encode("utf-8", "replace"), wanted.encode()
    )  # Compared in constant time


MOST_CONNECTIONS = 256
"""Maximum number of open connections. Further ones get status 503."""
CROWDED = 224
"""Number of connections above which a new one replaces an idle one."""
AT_ONCE = 32
"""Number of new connections to accept before open ones get their turn (asyncio's meaning of a
backlog). As many more wait in Linux's queue. Later ones connect a second later, when TCP tries
again.
"""
ASK_S = 15.0
"""Time limit for the head of a request in seconds, from when the connection is free."""
ANSWER_S = 60.0
"""Time limit for an answer in seconds, until the client has received it."""


class Connection(H11Protocol):
    """uvicorn connection with time limits.

    uvicorn itself would wait forever for the first request, and for a client that does not read its
    answer.
    """

    _limit: asyncio.TimerHandle | None = None
    free_since_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= CROWDED:
            make_room(self.connections)
        super().connection_made(transport)
        self._wait_for_request()

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before and not self.is_free:
            self._allow(ANSWER_S)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.is_free:  # A pipelined request may have begun.
            self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._limit is not None:
            self._limit.cancel()
        super().connection_lost(exc)

    @property
    def is_free(self) -> bool:
        """True if no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _wait_for_request(self) -> None:
        self.free_since_s = self.loop.time()
        self._allow(ANSWER_S if self.transport.get_write_buffer_size() else ASK_S)

    def _allow(self, seconds: float) -> None:
        if self._limit is not None:
            self._limit.cancel()
        self._limit = self.loop.call_later(seconds, self.transport.abort)


def make_room(connections: set[Any]) -> None:
    """Close one free connection: one without any request, or else the one that is free longest."""
    free = [c for c in connections if c.is_free]
    if free:
        first = min(free, key=lambda c: (c.cycle is not None, c.free_since_s))
        connections.discard(first)
        first.transport.abort()


EVERY_ADDRESS = ("0.0.0.0", "::")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def policy_of(host: str, port: int, names: tuple[str, ...], token: str | None) -> Policy:
    """Return the host names and token that a server requires.

    Loopback needs a token only if one is given, or if the server has other `names` (for example
    behind a proxy that others can reach). Every other address needs a token. Such a server accepts
    its own address and `names`.
    """
    if is_loopback(host):
        token = token or (secrets.token_urlsafe(32) if names else None)
        return Policy(LOOPBACK_NAMES | {host.lower()} | {n.lower() for n in names}, token, port)
    own = set() if host in EVERY_ADDRESS else {host.lower()}
    return Policy(
        frozenset(own | {n.lower() for n in names}), token or secrets.token_urlsafe(32), port
    )


def listening(host: str, port: int) -> socket.socket:
    """Open a listening socket. Port 0 selects a free port. Raises TrainpaceError on failure."""
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
            f"Cannot listen on {host} port {port}: {reason}.", "Choose another with `port`."
        ) from None
    return opened


def serve(request: ServeRequest) -> None:
    """Serve the dashboard until interrupted."""
    r = request
    own = own_devices(r.hardware)
    opened = listening(r.host, r.port)
    address, port = opened.getsockname()[:2]
    if address in EVERY_ADDRESS and not r.name:
        opened.close()
        raise TrainpaceError(
            f"The host {r.host!r} is every address of this machine.",
            "Give its name with `name` HOST.",
        )
    host = address if address in EVERY_ADDRESS else r.host
    policy = policy_of(host, port, r.name, secrets.token_urlsafe(32) if r.with_token else None)
    with opened, Journal.open(r.journal, create=r.journal is None, read_only=True) as journal:
        app = application(
            journal, Models(user_folder("data") / "workloads"), own, known_offers(None, Silent())
        )
        config = uvicorn.Config(
            Guarded(app, policy),
            # An access log would contain the token. Errors of pages go to stderr.
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
