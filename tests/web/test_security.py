"""Tests of access control over raw sockets."""

import contextlib
import json
import re
import signal
import socket
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from served import served
from trainpace.core.errors import TrainpaceError
from trainpace.web.server import (
    MOST_CONNECTIONS,
    Policy,
    host_name,
    is_loopback,
    listening,
    policy_of,
    refusal,
)


def raw(port, data, read=True):
    with socket.create_connection(("127.0.0.1", port), 10) as opened:
        opened.sendall(data)
        answer = b""
        while read and (chunk := opened.recv(65536)):
            answer += chunk
    return answer


def get(server, path, *headers, method="GET", host=None):
    lines = [
        f"{method} {path} HTTP/1.1",
        f"Host: {host or f'127.0.0.1:{server.port}'}",
        "Connection: close",
        *headers,
    ]
    answer = raw(server.port, "\r\n".join([*lines, "", ""]).encode("latin-1"))
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), head.decode("latin-1").lower(), body


@pytest.mark.parametrize(
    "host", ["127.0.0.1:{}", "localhost:{}", "LOCALHOST", "[::1]:{}", "127.0.0.1:9"]
)
def test_loopback_host_is_accepted(server, host):
    assert get(server, "/runs", host=host.format(server.port))[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:{}",
        "127.0.0.1.evil.example",
        "127.0.0.1@evil.example",
        "evil.example#127.0.0.1",
        "localhost.",
        "0.0.0.0",
        "[::1",
        "",
        "127.0.0.1:port",
        "localhost/",
        "127.0.0.1 evil",
    ],
)
def test_foreign_host_is_rejected(server, host):
    """DNS rebinding points the name of a foreign page to 127.0.0.1."""
    assert get(server, "/runs", host=host.format(server.port) or " ")[0] in (400, 421)


def test_missing_or_duplicate_host_is_rejected(server):
    assert get(server, "/runs", "Host: localhost")[0] in (400, 421)
    assert raw(server.port, b"GET /runs HTTP/1.0\r\n\r\n").split()[1] in (b"400", b"421")


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "null",
        "http://127.0.0.1:1",
        "https://127.0.0.1.evil.example",
        "file://",
    ],
)
def test_foreign_origin_is_rejected(server, origin):
    assert get(server, "/runs.json", f"Origin: {origin}")[0] == 403


def test_own_origin_is_accepted(server):
    assert get(server, "/runs.json", f"Origin: http://127.0.0.1:{server.port}")[0] == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_cross_site_embedding_is_rejected_and_navigation_is_accepted(server, site):
    """Browsers count another port of the same host as same-site."""
    for mode, destination, status in (
        ("no-cors", "script", 403),
        ("navigate", "iframe", 403),
        ("navigate", "document", 200),
    ):
        headers = (
            f"Sec-Fetch-Site: {site}",
            f"Sec-Fetch-Mode: {mode}",
            f"Sec-Fetch-Dest: {destination}",
        )
        assert get(server, "/runs", *headers)[0] == status, headers


@pytest.mark.parametrize(
    "method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "FOO"]
)
def test_only_get_and_head_are_allowed(server, method):
    status, head, _ = get(server, "/runs", method=method)
    assert status == 405
    assert "allow: get, head" in head


@pytest.mark.parametrize(
    "headers",
    [["Content-Length: 1000000000"], ["Transfer-Encoding: chunked"], ["Content-Length: 5"]],
)
def test_request_bodies_are_rejected(server, headers):
    assert get(server, "/runs", *headers)[0] == 413


def test_malformed_chunk_is_answered_without_a_traceback(data):
    with served(data) as server:
        head = f"POST / HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
        sent = f"{head}Transfer-Encoding: chunked\r\n\r\nZZ\r\n".encode()
        assert raw(server.port, sent).startswith(b"HTTP/1.1 4")
        assert get(server, "/runs")[0] == 200
        server.process.send_signal(signal.SIGINT)
        assert "Traceback" not in server.process.stdout.read()


def test_long_urls_and_headers_are_rejected(server):
    assert get(server, "/runs?text=" + "a" * 5000)[0] == 414
    assert get(server, "/" + "a" * 1000)[0] == 414
    assert get(server, "/runs", "X-Long: " + "a" * 100_000)[0] in (400, 431)


def test_every_response_has_the_security_headers(server):
    for path in ("/runs", "/runs.json", "/nope", "/static/serve.js", "/whatif?batch=x", "/"):
        head = get(server, path)[1]
        assert (
            "content-security-policy: default-src 'none'; script-src 'self'; style-src 'self'"
            in head
        ), path
        assert "frame-ancestors 'none'" in head
        assert "unsafe" not in head
        assert "x-content-type-options: nosniff" in head
        assert "cross-origin-resource-policy: same-origin" in head
        assert "referrer-policy: no-referrer" in head
        assert (
            "cache-control: " + ("no-cache" if path.startswith("/static") else "no-store") in head
        )
        assert "server:" not in head


@pytest.mark.parametrize(
    "path",
    [
        "/static/../secret.json",
        "/static/%2e%2e%2fsecret.json",
        "/static/..%2f..%2fetc%2fpasswd",
        "/../../etc/passwd",
        "//etc/passwd",
        "/static//etc/passwd",
        "/static/serve.js%00.css",
        "/static/",
        "/static",
        "/templates/base.html",
        "/static/htmx.LICENSE/..",
    ],
)
def test_static_paths_do_not_escape_their_folder(server, path):
    status, _, body = get(server, path)
    assert status == 404
    assert b"root:" not in body
    assert b"Workload" not in body


@pytest.mark.parametrize(
    "model",
    [
        "../../secret",
        "link",
        "../workloads/damaged",
        "/etc/passwd",
        "built-in/resnet18",
        "secret",
        ".",
    ],
)
def test_model_names_do_not_escape_the_workloads_folder(server, model):
    status, _, body = get(server, f"/whatif.json?model={model}")
    assert status == 404
    assert json.loads(body)["record"] == "Error"


@pytest.mark.parametrize(
    "model", ["evil.py:task", "timm:resnet50", "transformers:config.json", "torchvision:vgg16"]
)
def test_model_specs_that_run_code_are_rejected(server, model):
    assert get(server, f"/whatif.json?model={model}")[0] == 404


def test_damaged_workload_error_does_not_reveal_its_path(server):
    status, _, body = get(server, "/whatif.json?model=damaged")
    assert status == 422
    assert str(server.folder) not in body.decode()


def test_requests_without_the_token_return_401(guarded):
    assert guarded.token
    for path in (
        "/runs",
        "/runs.json",
        "/static/serve.js",
        "/nope",
        "/?token=",
        "/?token=wrong",
        f"/?token={guarded.token}x",
    ):
        status, head, body = get(guarded, path)
        assert status == 401, path
        assert guarded.token.encode() not in body
        assert "set-cookie" not in head


def test_token_moves_from_the_url_to_a_cookie(guarded):
    status, head, body = get(guarded, f"/runs?model=resnet&token={guarded.token}")
    assert status == 200
    assert b'url=/runs?model=resnet"' in body
    assert guarded.token.encode() not in body
    assert "no-store" in head
    cookie = re.search(r"set-cookie: ([^;\r]+)(.*)", head)
    assert "httponly" in cookie[2]
    assert "samesite=strict" in cookie[2]
    assert guarded.token.lower() not in cookie[1]
    assert get(guarded, "/runs", f"Cookie: {cookie[1]}")[0] == 200
    assert get(guarded, "/runs", f"Cookie: x{cookie[1]}")[0] == 401
    assert get(guarded, "/runs", f"Cookie: {cookie[1][:-1]}0")[0] in (
        401,
        200 if cookie[1].endswith("0") else 401,
    )
    assert get(guarded, "/runs.json", f"Authorization: Bearer {guarded.token}")[0] == 200
    assert get(guarded, "/runs.json", "Authorization: Bearer x")[0] == 401


@pytest.mark.parametrize(
    "odd", ['theme={"a":1}', "a=1 2", "a", "name=ä", "", "=", 'a="b', "trainpace_0"]
)
def test_other_cookies_are_ignored(odd):
    policy = Policy(frozenset({"localhost"}), "secret", 1)
    own = f"{policy.cookie_name}={policy.cookie_value}"
    for cookies, refused in ((f"{odd}; {own}", False), (f"{own};{odd}", False), (odd, True)):
        headers = [(b"host", b"localhost"), (b"cookie", cookies.encode())]
        scope = {
            "type": "http",
            "method": "GET",
            "path": "/",
            "query_string": b"",
            "headers": headers,
        }
        assert (refusal(scope, policy) is not None) == refused, cookies


@pytest.mark.parametrize("path", ["//evil.example/", "/%2f%2fevil.example", "/\\evil.example"])
def test_token_redirect_stays_on_this_server(guarded, path):
    body = get(guarded, f"{path}?token={guarded.token}")[2].decode("latin-1")
    found = re.search(r'content="0;url=([^"]*)"', body)
    assert found is None or re.match(r"/(?![/\\])", found[1])


def test_non_loopback_address_requires_a_token():
    assert policy_of("127.0.0.1", 1, (), None).token is None
    assert policy_of("::1", 1, (), None).token is None
    assert (
        len(policy_of("127.0.0.1", 1, ("pc.example",), None).token) >= 40
    )  # others may reach the server through a proxy
    assert policy_of("127.0.0.1", 1, ("pc.example",), "given").token == "given"
    for host in ("0.0.0.0", "::", "192.0.2.1", "server.example"):
        policy = policy_of(host, 1, ("pc.example",), None)
        assert len(policy.token) >= 40
        assert "pc.example" in policy.names
        assert not policy.names & {"0.0.0.0", "::", "localhost"}
    assert [is_loopback(h) for h in ("localhost", "127.9.9.9", "10.0.0.1", "evil")] == [
        True,
        True,
        False,
        False,
    ]


def test_idle_connections_do_not_block_requests(server):
    with contextlib.ExitStack() as idle:
        for _ in range(MOST_CONNECTIONS + 50):
            idle.enter_context(socket.create_connection(("127.0.0.1", server.port), 10))
        assert [get(server, "/runs")[0] for _ in range(3)] == [200, 200, 200]


@pytest.mark.parametrize(
    "query",
    ["model=%ED%A0%80", "model=%FF", "model=a%00b", "batch=%EF%BF%BE", "gpu=%ED%B0%80%ED%A0%80"],
)
def test_invalid_utf8_in_the_query_is_not_a_server_error(server, query):
    assert get(server, f"/whatif?{query}")[0] in (200, 400, 404)


def test_port_in_use_raises_a_clear_error(server):
    with pytest.raises(TrainpaceError, match="already in use"):
        listening("127.0.0.1", server.port)


def test_serving_on_all_interfaces_requires_a_name(capsys):
    from trainpace.cli import main

    with pytest.raises(SystemExit) as stopped:
        main(["serve", "--host", "0.0.0.0", "--port", "0"])
    assert stopped.value.code == 2
    assert "--name" in capsys.readouterr().err


@given(st.binary(max_size=40))
def test_only_configured_host_names_are_accepted(host):
    policy = Policy(frozenset({"localhost"}), None, 1)
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/",
        "query_string": b"",
        "headers": [(b"host", host)],
    }
    assert (refusal(scope, policy) is None) == (host_name(host.decode("latin-1")) == "localhost")
    if refusal(scope, policy) is None:
        assert re.fullmatch(rb"(?i)\s*localhost(:\d*)?\s*", host)


def test_serving_does_not_modify_the_journal(server):
    file = server.folder / "trainpace" / "journal.db"
    before = file.read_bytes(), stat.S_IMODE(file.stat().st_mode)
    for path in ("/runs", "/score", "/sweeps", "/runs.json?text=x"):
        assert get(server, path)[0] == 200
    assert (file.read_bytes(), stat.S_IMODE(file.stat().st_mode)) == before
