"""Hostile requests do not crash the server, leave its folder or increase its memory."""

import collections
import re
import sys
import sysconfig
from pathlib import Path

import pytest

import trainpace
from hostile_requests import requests, send
from served import served
from web_pages import get

COUNT = 2000
WARM = 300
GROWTH_KIB = 24 * 1024
PAGES = (
    "/runs",
    "/runs?model=no",
    "/sweeps",
    "/score",
    "/compare",
    "/run?id=x",
    "/whatif",
    "/whatif?model=little+transformer&precision=bf16",
    "/static/serve.js",
    "/nope",
)


def anonymous_kib(pid):
    return int(re.search(r"RssAnon:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


@pytest.mark.slow
def test_hostile_requests_neither_crash_nor_escape_nor_leak_memory(data, tmp_path):
    log = tmp_path / "audit.log"
    with served(data, log=log) as server:
        for path in PAGES:  # templates and modules are loaded on first use
            get(server.base + path)
        for kind, request in requests(WARM, server.port, seed=2):
            send(server.port, request, kind)
        before, told = anonymous_kib(server.process.pid), log.stat().st_size
        statuses = collections.Counter(
            (kind, send(server.port, request, kind))
            for kind, request in requests(COUNT, server.port)
        )
        after = anonymous_kib(server.process.pid)
        assert get(server.base + "/runs") == 200
        assert {key: n for key, n in statuses.items() if key[1] is not None and key[1] >= 500} == {}
        assert after - before < GROWTH_KIB
        text = log.read_text(errors="replace")
    # the warm-up opens the journal and the packaged traces, so later requests open no files
    assert {"open", "sqlite3.connect"} <= {line.split("\t")[0] for line in text[:told].splitlines()}
    events = [line.split("\t") for line in text[told:].splitlines()]
    assert not [e for e in events if e[0] not in ("open", "sqlite3.connect", "compile", "exec")]
    code = [
        Path(trainpace.__file__).parent,
        Path(sys.prefix),
        Path(sys.base_prefix),
        Path(sysconfig.get_path("stdlib")),
    ]
    for event in events:
        kind, path = event[:2]
        if kind == "sqlite3.connect":
            assert path == str(data / "trainpace" / "journal.db")
        elif kind == "open":
            inside = Path(path).is_relative_to(data / "trainpace") and not Path(
                path
            ).name.startswith(("link", "secret"))
            assert inside or any(Path(path).is_relative_to(root) for root in code), path
            assert event[2] in ("r", "rb", "None"), event
