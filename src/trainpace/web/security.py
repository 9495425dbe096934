"""Access control: every request passes here before any page sees it.

A server on loopback can still be reached by any page in the user's browser. So the name in Host must be one of this server's
(DNS rebinding), requests from other origins are refused, and only reading is possible. Any other address than loopback needs a
token besides.
"""

import hashlib
import hmac
import html
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
LONGEST_PATH = 512
LONGEST_QUERY = 4096
LONGEST_HEADERS = 16 * 1024
METHODS = ("GET", "HEAD")
TOKEN = "token"

HEADERS: Headers = [
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self';"
        b" base-uri 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
]


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
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Guarded:
    def __init__(self, app: App, policy: Policy) -> None:
        self._app = app
        self._policy = policy

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        if (refused := refusal(scope, self._policy)) is not None:
            headers = [*refused.headers, (b"connection", b"close")]
            await _answer(send, refused.status, page("Refused", refused.reason), headers)
            return
        welcome = _first_use(scope, self._policy)
        if welcome is not None:
            await _answer(send, 200, welcome[0], welcome[1])
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *HEADERS, *_caching(message["headers"])]}
            await send(message)

        await self._app(scope, receive, guarded)


def refusal(scope: Message, policy: Policy) -> Refusal | None:
    """Why this request is not answered; None: it is."""
    if scope["method"] not in METHODS:
        return Refusal(405, "This server only answers GET and HEAD.", ((b"allow", ", ".join(METHODS).encode()),))
    if (
        len(scope.get("raw_path") or scope["path"].encode()) > LONGEST_PATH
        or len(scope["query_string"]) > LONGEST_QUERY
    ):
        return Refusal(414, "This address is too long.")
    if sum(len(name) + len(value) for name, value in scope["headers"]) > LONGEST_HEADERS:
        return Refusal(431, "These headers are too long.")
    hosts = _values(scope, b"host")
    if len(hosts) != 1 or host_name(hosts[0]) not in policy.names:
        return Refusal(421, "This server is not called by that name; trainpace serve --name NAME adds one.")
    if any(value not in (b"", b"0") for value in _values(scope, b"content-length")) or _values(
        scope, b"transfer-encoding"
    ):
        return Refusal(413, "A request to read has no body.")
    host = hosts[0].decode("latin-1").lower()
    for origin in _values(scope, b"origin"):
        if origin.decode("latin-1").lower() not in (f"http://{host}", f"https://{host}"):
            return Refusal(403, "Requests from other origins are refused.")
    # another port of this host is the same site
    sites = _values(scope, b"sec-fetch-site")
    if (b"cross-site" in sites or b"same-site" in sites) and not _is_navigation(scope):
        return Refusal(403, "Requests from other sites are refused.")
    if policy.token is not None and not _shows_token(scope, policy):
        return Refusal(
            401, "Open the address that trainpace serve printed: it holds the token that this server asks for.",
            ((b"www-authenticate", b"Bearer"),),
        )  # fmt: skip
    return None


def host_name(host: bytes) -> str:
    """The name in a Host header, without the port; empty for what is no host."""
    text = host.decode("latin-1").strip().lower()
    if any(c in text for c in "/?#@\\ \t"):
        return ""
    try:
        parts = urlsplit(f"//{text}")
        _ = parts.port  # raises for what is no port
        return parts.hostname or ""
    except ValueError:
        return ""


def page(title: str, sentence: str, refresh: str = "") -> bytes:
    again = f'<meta http-equiv="refresh" content="0;url={html.escape(refresh)}">' if refresh else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="color-scheme" content="light dark">{again}'
        f"<title>{html.escape(title)} - Trainpace</title></head><body><main><h1>{html.escape(title)}</h1>"
        f"<p>{html.escape(sentence)}</p></main></body></html>\n"
    ).encode()


def _first_use(scope: Message, policy: Policy) -> tuple[bytes, Headers] | None:
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
    cookie = f"{policy.cookie_name}={policy.cookie_value}; HttpOnly; SameSite=Strict; Path=/{secure}"
    return page("Welcome", "One moment.", address), [(b"set-cookie", cookie.encode())]


def _query(scope: Message) -> list[tuple[str, str]]:
    try:
        return parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True, max_num_fields=100)
    except ValueError:
        return []


def _names_token(scope: Message, policy: Policy) -> bool:
    return any(_same(value, policy.token or "") for key, value in _query(scope) if key == TOKEN)


def _shows_token(scope: Message, policy: Policy) -> bool:
    """In its address, in a header, or by the cookie that stands for it."""
    bearers = [value.decode("latin-1") for value in _values(scope, b"authorization")]
    # not http.cookies: it drops every cookie at the first that it cannot parse, and other programs on this host set some
    parts = [part for value in _values(scope, b"cookie") for part in value.decode("latin-1").split(";")]
    cookies = [part.strip().partition("=") for part in parts]
    return (
        _names_token(scope, policy)
        or any(
            _same(text.removeprefix("Bearer "), policy.token or "") for text in bearers if text.startswith("Bearer ")
        )
        or any(name == policy.cookie_name and _same(given, policy.cookie_value) for name, _, given in cookies)
    )


def _same(given: str, wanted: str) -> bool:
    return bool(wanted) and hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode())  # in constant time


def _is_navigation(scope: Message) -> bool:
    """A link that a person followed: to a whole page, not to a part of another site's."""
    return _values(scope, b"sec-fetch-mode") == [b"navigate"] and _values(scope, b"sec-fetch-dest") == [b"document"]


def _values(scope: Message, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]


def _caching(headers: Headers) -> Headers:
    """Browsers and proxies store nothing but the responses that allow it themselves (the vendored files)."""
    return [] if any(key == b"cache-control" for key, _ in headers) else [(b"cache-control", b"no-store")]


async def _answer(send: Send, status: int, body: bytes, headers: Headers) -> None:
    plain = [(b"content-type", b"text/html; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    head = [*plain, *headers, *HEADERS, (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})
