"""Two hosts on one machine: network namespaces joined by a link of a given speed. Needs root, `ip` and `tc`.

Both namespaces call their end of the link eth0. The token bucket limits what each end sends; this kernel adds no latency.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

from trainpace.records import Record

INTERFACE = "eth0"


class Host(Record, kw_only=True):
    """A namespace: what to put before a command to run it there, and its address on the link."""

    prefix: tuple[str, ...]
    address: str


def _ip(*words: str) -> None:
    subprocess.run(("ip", *words), check=True, capture_output=True, text=True)


@contextlib.contextmanager
def two_hosts(mbit_per_s: float) -> Iterator[tuple[Host, Host]]:
    """Two hosts whose link carries `mbit_per_s` each way; they are gone afterwards, whatever happened in between."""
    names = [f"planted{os.getpid()}-{i}" for i in range(2)]
    hosts = [Host(prefix=("ip", "netns", "exec", n), address=f"10.77.0.{i}") for i, n in enumerate(names, 1)]
    made: list[str] = []
    try:
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
        _ip("link", "add", INTERFACE, "netns", names[0], "type", "veth", "peer", "name", INTERFACE, "netns", names[1])
        for name, host in zip(names, hosts, strict=True):
            _ip("-n", name, "address", "add", f"{host.address}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                _ip("-n", name, "link", "set", interface, "up")
            shape = f"qdisc add dev {INTERFACE} root tbf rate {mbit_per_s}mbit burst 32kb latency 400ms"
            subprocess.run(("tc", "-n", name, *shape.split()), check=True, capture_output=True, text=True)
        yield hosts[0], hosts[1]
    finally:
        for name in made:
            subprocess.run(("ip", "netns", "delete", name), check=False, capture_output=True)
