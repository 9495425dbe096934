"""Idle and slow clients do not block other clients."""

import contextlib
import socket
import threading
import time
import urllib.request

import pytest
import uvicorn

from trainpace.web import server as web_server
from trainpace.web.server import Connection, make_room


async def answer(scope, receive, send):
    body = b"x" * (50_000_000 if scope["path"] == "/large" else 10)
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [(b"content-length", b"%d" % len(body))],
        }
    )
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
def port(monkeypatch):
    monkeypatch.setattr(web_server, "ASK_S", 0.4)
    monkeypatch.setattr(web_server, "ANSWER_S", 0.8)
    config = uvicorn.Config(
        answer,
        http=Connection,
        ws="none",
        lifespan="off",
        log_level="critical",
        limit_concurrency=256,
    )
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield listening.getsockname()[1]
        server.should_exit = True
        thread.join()


def ends_within(client, seconds):
    """Return the seconds until the server closed the connection."""
    begun = time.monotonic()
    client.settimeout(seconds)
    with contextlib.suppress(ConnectionResetError):
        while client.recv(1 << 16):
            pass
    return time.monotonic() - begun


@pytest.mark.parametrize(
    "asked",
    [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"],
)
def test_idle_connection_is_closed(port, asked):
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(asked)
        assert 0.3 < ends_within(client, 10) < 5


def test_slow_request_is_closed(port):
    with socket.create_connection(("127.0.0.1", port)) as client:
        begun = time.monotonic()
        with contextlib.suppress(ConnectionError):
            for byte in b"GET / HTTP/1.1\r\nHost: x\r\nX: " + 1000 * b"y":
                client.sendall(bytes([byte]))
                time.sleep(0.05)
        assert time.monotonic() - begun < 5


def test_unread_response_is_dropped(port):
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        time.sleep(2)
        client.settimeout(5)
        taken = 0
        with contextlib.suppress(ConnectionResetError):
            while part := client.recv(1 << 20):
                taken += len(part)
        assert 0 < taken < 50_000_000


def test_idle_connections_do_not_block_a_request(port, monkeypatch):
    monkeypatch.setattr(web_server, "ASK_S", 60.0)
    with contextlib.ExitStack() as idle:
        for _ in range(400):
            idle.enter_context(socket.create_connection(("127.0.0.1", port)))
        for _ in range(5):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as answered:
                assert answered.read() == 10 * b"x"


class Held:
    """The attributes of a connection that `make_room` reads."""

    def __init__(self, address, asked, since, free=True):
        self.address, self.cycle, self.free_since_s, self.is_free = (
            address,
            asked or None,
            since,
            free,
        )
        self.transport, self.closed = self, False

    def abort(self):
        self.closed = True


def test_make_room_closes_connections_without_a_request_first():
    answering = [Held("a", True, 0, free=False) for _ in range(9)]
    asked = [Held("b", True, 1)]
    never = [Held("c", False, 5), Held("d", False, 4), Held("d", False, 3)]
    connections = {*answering, *asked, *never}
    order = []
    for _ in range(5):
        make_room(connections)
        order += [c for c in (*asked, *never) if c.closed and c not in order]
        assert not connections & set(order)
    assert order == [never[2], never[1], never[0], asked[0]]
    assert connections == set(answering)
    assert not any(c.closed for c in answering)
