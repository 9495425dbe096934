"""Access control: every request passes here before any page sees it.

A server on loopback can still be reached by any page in the user's browser. So the name in Host must be one of this server's
(DNS rebinding), requests from other origins are refused, and only reading is possible. Any other address than loopback needs a
token besides.
"""

import hashlib
import hmac
import html
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from starlette.datastructures import Headers
from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
"""Browsers and proxies store nothing but the responses that allow it themselves (the vendored files)."""


class Policy(NamedTuple):
    """`names`: the hosts that this server is called by. `token`: None where none is needed. `port` tells the cookies of two
    servers on one host apart, as browsers do not."""

    names: frozenset[str]
    token: str | None
    port: int

    @property
    def cookie_name(self) -> str:
        return f"trainpace_{self.port}"

    @property
    def cookie_value(self) -> str:
        """A digest of the token; the browser does not store the token itself."""
        return hashlib.sha256(f"trainpace cookie {self.token}".encode()).hexdigest()


class Refusal(NamedTuple):
    status: int
    reason: str
    headers: dict[str, str] = {}  # noqa: RUF012


class Guarded:
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

        await answer(scope, receive, guarded)


def refusal(scope: Scope, policy: Policy) -> Refusal | None:
    """Why this request is not answered; None: it is."""
    if scope["method"] not in METHODS:
        return Refusal(405, "This server only answers GET and HEAD.", {"allow": ", ".join(METHODS)})
    path = scope.get("raw_path") or scope["path"].encode()
    if len(path) > LONGEST_PATH or len(scope["query_string"]) > LONGEST_QUERY:
        return Refusal(414, "This address is too long.")
    if sum(len(name) + len(value) for name, value in scope["headers"]) > LONGEST_HEADERS:
        return Refusal(431, "These headers are too long.")
    headers = Headers(scope=scope)
    hosts = headers.getlist("host")
    if len(hosts) != 1 or host_name(hosts[0]) not in policy.names:
        return Refusal(
            421, "This server is not called by that name; trainpace serve --name NAME adds one."
        )
    if (
        any(value not in ("", "0") for value in headers.getlist("content-length"))
        or "transfer-encoding" in headers
    ):
        return Refusal(413, "A request to read has no body.")
    own = [f"{scheme}://{hosts[0].lower()}" for scheme in ("http", "https")]
    if any(origin.lower() not in own for origin in headers.getlist("origin")):
        return Refusal(403, "Requests from other origins are refused.")
    # another port of this host is the same site; a link that a person followed leads to a whole page, not to a part of another
    sites, mode, destination = (
        headers.getlist(f"sec-fetch-{name}") for name in ("site", "mode", "dest")
    )
    followed = mode == ["navigate"] and destination == ["document"]
    if ("cross-site" in sites or "same-site" in sites) and not followed:
        return Refusal(403, "Requests from other sites are refused.")
    if policy.token is not None and not _shows_token(scope, headers, policy):
        told = (
            "Open the address that trainpace serve printed: it holds the token that this server"
            " asks for."
        )
        return Refusal(401, told, {"www-authenticate": "Bearer"})
    return None


def host_name(host: str) -> str:
    """The name in a Host header, without the port; empty for what is no host."""
    text = host.strip().lower()
    if any(c in text for c in "/?#@\\ \t"):
        return ""
    try:
        parts = urlsplit(f"//{text}")
        _ = parts.port  # raises for what is no port
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
    """The token came in the address: leave a cookie, and go on to the address without it.

    By a page that refreshes itself: a strict cookie is not sent along when another site's link is redirected.
    """
    if policy.token is None or not _names_token(scope, policy):
        return None
    rest = urlencode([(k, v) for k, v in _query(scope) if k != TOKEN])
    address = quote(scope["path"], safe="/._-") + (f"?{rest}" if rest else "")
    # two slashes at the start would name another host
    address = "/" + address.lstrip("/")
    secure = "; Secure" if scope.get("scheme") == "https" else ""
    cookie = (
        f"{policy.cookie_name}={policy.cookie_value}; HttpOnly; SameSite=Strict; Path=/{secure}"
    )
    return HTMLResponse(page("Welcome", "One moment.", address), headers={"set-cookie": cookie})


def _query(scope: Scope) -> list[tuple[str, str]]:
    try:
        return parse_qsl(
            scope["query_string"].decode("latin-1"), keep_blank_values=True, max_num_fields=100
        )
    except ValueError:
        return []


def _names_token(scope: Scope, policy: Policy) -> bool:
    return any(_same(value, policy.token or "") for key, value in _query(scope) if key == TOKEN)


def _shows_token(scope: Scope, headers: Headers, policy: Policy) -> bool:
    """In its address, in a header, or by the cookie that stands for it."""
    bearers = (text.partition("Bearer ") for text in headers.getlist("authorization"))
    # not http.cookies: it drops every cookie at the first that it cannot parse, and other programs on this host set some
    cookies = (
        part.strip().partition("=")
        for value in headers.getlist("cookie")
        for part in value.split(";")
    )
    return (
        _names_token(scope, policy)
        or any(not before and _same(given, policy.token or "") for before, _, given in bearers)
        or any(
            name == policy.cookie_name and _same(given, policy.cookie_value)
            for name, _, given in cookies
        )
    )


def _same(given: str, wanted: str) -> bool:
    return bool(wanted) and hmac.compare_digest(
        given.encode("utf-8", "replace"), wanted.encode()
    )  # in constant time
