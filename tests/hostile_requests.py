"""Requests that no browser sends, as bytes. The seed makes them reproducible."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from urllib.parse import quote

PATHS = ("/runs", "/run", "/compare", "/sweeps", "/sweep", "/score", "/whatif")
FIELDS = {
    "/runs": (
        "model",
        "device",
        "precision",
        "kind",
        "outcome",
        "batch",
        "since",
        "sweep",
        "text",
        "order",
        "after",
    ),
    "/run": ("id",),
    "/compare": ("a", "b"),
    "/sweeps": ("page",),
    "/sweep": ("id",),
    "/score": ("model", "device"),
    "/whatif": (
        "model",
        "gpu",
        "gpus",
        "nodes",
        "network",
        "batch",
        "accumulate",
        "precision",
        "zero",
        "checkpointing",
        "epochs",
        "samples",
        "price",
    ),
}
VALUES = (
    "",
    "0",
    "-1",
    "1e999",
    "nan",
    "inf",
    "9" * 400,
    "1;DROP TABLE runs",
    "' OR 1=1 --",
    "%' ESCAPE '",
    "${7*7}",
    "{{7*7}}",
    "<script>",
    "../../../../etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "/etc/passwd",
    "file:///etc/passwd",
    "http://169.254.169.254/",
    "evil.py:task",
    "timm:resnet50",
    "transformers:/etc/passwd",
    "C:\\windows",
    "\u202e\U0001f4a9\u0130",
    "\x00",
    "\r\nSet-Cookie: x=1",
    "a" * 3000,
    "[]",
    "{}",
    "null",
    "true",
    "0x10",
    "١٢",
    "1_000",
    " 1 ",
    "2026-13-45",
    "9999-12-31T23:59:59+23:59",
    "0001-01-01",
    "W10",
    "WzEsMl0",
    "eyJhIjoxfQ",
    "IiI",
)
TRAVERSALS = (
    "/static/../../../../etc/passwd",
    "/static/%2e%2e/%2e%2e/etc/passwd",
    "/static/..%5c..%5cetc%5cpasswd",
    "//etc/passwd",
    "/.git/config",
    "/static/%252e%252e%252fetc/passwd",
    "/static/....//....//etc/passwd",
    "/%00",
    "/static/serve.js%00",
    "/..;/etc/passwd",
    "/runs/../etc",
    "http://evil.example/runs",
    "*",
    "/static/\u00ff",
    "/run.json/../../journal.db",
    "/workloads/damaged.json",
)
HOSTS = (
    "evil.example",
    "127.0.0.1@evil.example",
    "",
    "a" * 5000,
    "127.0.0.1\x00",
    "[::1",
    "localhost:99999",
    "xn--",
    "127.1",
    "0",
)
ORIGINS = (
    "http://evil.example",
    "null",
    "",
    "http://127.0.0.1",
    "http://localhost.evil.example",
    "\u00ff",
)
HEADERS = (
    "X: a\r\n b",
    "X\x00: 1",
    "X : 1",
    ": 1",
    "X: \x01\x7f",
    "Cookie: " + "a=b; " * 2000,
    'Cookie: \x00="; trainpace_1=',
    "Authorization: Bearer",
    "Range: bytes=0-99999999",
    "If-None-Match: *",
    "X-Forwarded-Host: evil.example",
    "X-HTTP-Method-Override: DELETE",
    "Expect: 100-continue",
    "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13",
    "HX-Request: true",
    "Accept: */*;q=\x00",
    "Transfer-Encoding: chunked\r\nContent-Length: 5",
    "Content-Length: 5\r\nContent-Length: 6",
    "Content-Length: -1",
    "Sec-Fetch-Site: cross-site",
)
BODIES = (
    b"{",
    b'{"a":' * 5000,
    b"\xff\xfe",
    b"[" * 100_000,
    b"a=1&" * 10_000,
    b"0\r\n\r\nGET /runs HTTP/1.1\r\nHost: evil\r\n\r\n",
)
METHODS = ("POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "GET\t", "get", "G" * 300)


def requests(count: int, port: int, seed: int = 1) -> Iterator[tuple[str, bytes]]:
    """Yield (kind of attack, request bytes)."""
    rng = random.Random(seed)
    kinds = {
        "traversal": _traversal,
        "host": _host,
        "origin": _origin,
        "body": _body,
        "header": _header,
        "query": _query,
        "method": _method,
        "noise": _noise,
        "cut short": _cut,
    }
    for i in range(count):
        kind = list(kinds)[i % len(kinds)]
        yield kind, kinds[kind](rng, port)


UNFINISHED = ("noise", "cut short")
"""Kinds after which the sender has to close its side, as the server may rightly wait for more."""


def send(port: int, data: bytes, kind: str = "", timeout_s: float = 60.0) -> int | None:
    """Return the status of the answer, or None if the server closed without one."""
    with socket.create_connection(("127.0.0.1", port), timeout_s) as opened:
        answer = b""
        try:
            opened.sendall(data)
            if kind in UNFINISHED:
                opened.shutdown(socket.SHUT_WR)
            while chunk := opened.recv(65536):
                answer += chunk
        except (ConnectionResetError, BrokenPipeError):
            pass
    return int(answer.split(None, 2)[1]) if answer.startswith(b"HTTP/1.1 ") else None


def _bytes(line: str, headers: list[str], body: bytes = b"") -> bytes:
    return (
        "\r\n".join([line, *headers, "Connection: close", "", ""]).encode(
            "utf-8", "surrogateescape"
        )
        + body
    )


def _address(rng: random.Random) -> str:
    path = rng.choice(PATHS)
    asked = "&".join(
        f"{f}={quote(rng.choice(VALUES))}"
        for f in rng.sample(FIELDS[path], rng.randint(1, min(3, len(FIELDS[path]))))
    )
    return f"{path}{rng.choice(('', '.json'))}?{asked}"


def _traversal(rng: random.Random, port: int) -> bytes:
    return _bytes(f"GET {rng.choice(TRAVERSALS)} HTTP/1.1", [f"Host: localhost:{port}"])


def _host(rng: random.Random, port: int) -> bytes:
    hosts = [f"Host: {rng.choice(HOSTS)}" for _ in range(rng.randint(0, 2))]
    return _bytes(f"GET {_address(rng)} HTTP/1.1", hosts)


def _origin(rng: random.Random, port: int) -> bytes:
    return _bytes(
        f"GET {_address(rng)} HTTP/1.1",
        [f"Host: localhost:{port}", f"Origin: {rng.choice(ORIGINS)}"],
    )


def _body(rng: random.Random, port: int) -> bytes:
    body = rng.choice(BODIES)
    length = rng.choice((len(body), 10**12, 0, 3))
    head = [
        f"Host: localhost:{port}",
        "Content-Type: application/json",
        f"Content-Length: {length}",
    ]
    return _bytes(
        f"{rng.choice(('GET', 'POST', 'PUT'))} {rng.choice(PATHS)}.json HTTP/1.1", head, body
    )


def _header(rng: random.Random, port: int) -> bytes:
    return _bytes(
        f"GET {_address(rng)} HTTP/1.1", [f"Host: localhost:{port}", *rng.sample(HEADERS, 2)]
    )


def _query(rng: random.Random, port: int) -> bytes:
    address = _address(rng)
    if rng.random() < 0.2:
        address += rng.choice(
            (
                "&%ff=%fe",
                "&" * 50,
                "&a=" * 200,
                "%0d%0aX-Injected:%201",
                "#x",
                " HTTP/1.1\r\nX-Injected: 1\r\n",
            )
        )
    return _bytes(f"GET {address} HTTP/1.1", [f"Host: localhost:{port}"])


def _method(rng: random.Random, port: int) -> bytes:
    return _bytes(f"{rng.choice(METHODS)} {_address(rng)} HTTP/1.1", [f"Host: localhost:{port}"])


def _noise(rng: random.Random, port: int) -> bytes:
    return rng.randbytes(rng.randint(1, 4000)) + rng.choice((b"", b"\r\n\r\n"))


def _cut(rng: random.Random, port: int) -> bytes:
    whole = _query(rng, port)
    return whole[: rng.randint(1, len(whole) - 1)]
