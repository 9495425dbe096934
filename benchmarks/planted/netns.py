"""Hosts on one machine: network namespaces joined by a switch, their links of a given speed. Needs root, `ip` and `tc`.

Every namespace calls its end of the link eth0. The token bucket limits what each host sends; this kernel adds no latency.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence

from trainpace.core.records import Record

INTERFACE = "eth0"
BURST = "16kb"
"""What the bucket lets through at once; the kernel cannot keep 1 Gbit/s with much less."""
LARGEST_PACKET = 15_000
"""Bytes of a packet before the card would cut it up: below the burst, or the bucket cuts it at three times the host's work."""


class Host(Record, kw_only=True):
    """A namespace: what to put before a command to run it there, and its address on the link."""

    prefix: tuple[str, ...]
    address: str


def missing() -> str:
    """Why there can be no hosts here; "" where there can."""
    if os.geteuid() != 0:
        return "network namespaces are made as root"
    absent = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (apt-get install iproute2)"
    tried = subprocess.run(
        ("unshare", "--net", "--mount", "true"), capture_output=True, text=True, check=False
    )
    return (
        f"this machine makes no network namespaces ({tried.stderr.strip()})"
        if tried.returncode
        else ""
    )


def _ip(*words: str) -> None:
    subprocess.run(("ip", *words), check=True, capture_output=True, text=True)


@contextlib.contextmanager
def hosts(number: int, mbit_per_s: float, subnet: str = "10.77.0") -> Iterator[tuple[Host, ...]]:
    """So many hosts that each send at most `mbit_per_s`; they are gone afterwards, whatever happened in between."""
    switch = f"planted{os.getpid()}"
    names = [f"{switch}-{i}" for i in range(number)]
    made: list[str] = []
    try:
        for name in (switch, *names):
            _ip("netns", "add", name)
            made.append(name)
        _ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge0", "up")
        found = tuple(_join(switch, name, i, subnet) for i, name in enumerate(names))
        for name in names:
            shape(name, mbit_per_s)
        yield found
    finally:
        for name in made:
            subprocess.run(("ip", "netns", "delete", name), check=False, capture_output=True)


@contextlib.contextmanager
def reached(joined: Sequence[Host]) -> Iterator[str]:
    """This machine's own address on the switch of these hosts, over a link of full speed; gone afterwards."""
    switch = joined[0].prefix[-1].rpartition("-")[0]
    address = f"{joined[0].address.rpartition('.')[0]}.254"
    _ip("link", "add", switch, "type", "veth", "peer", "name", "outside", "netns", switch)
    try:
        _ip("-n", switch, "link", "set", "outside", "master", "bridge0")
        _ip("-n", switch, "link", "set", "outside", "up")
        _ip("address", "add", f"{address}/24", "dev", switch)
        _ip("link", "set", switch, "up")
        yield address
    finally:
        subprocess.run(("ip", "link", "delete", switch), check=False, capture_output=True)


def shape(name: str, mbit_per_s: float) -> None:
    """Set, or change, what the host of this namespace may send."""
    words = (
        f"qdisc replace dev {INTERFACE} root tbf rate {mbit_per_s}mbit burst {BURST} latency 400ms"
    )
    subprocess.run(("tc", "-n", name, *words.split()), check=True, capture_output=True, text=True)


def _join(switch: str, name: str, number: int, subnet: str) -> Host:
    port = f"port{number}"
    _ip(
        "link",
        "add",
        INTERFACE,
        "netns",
        name,
        "type",
        "veth",
        "peer",
        "name",
        port,
        "netns",
        switch,
    )
    _ip("-n", switch, "link", "set", port, "master", "bridge0")
    _ip("-n", switch, "link", "set", port, "up")
    host = Host(prefix=("ip", "netns", "exec", name), address=f"{subnet}.{number + 1}")
    _ip("-n", name, "address", "add", f"{host.address}/24", "dev", INTERFACE)
    _ip("-n", name, "link", "set", INTERFACE, "gso_max_size", str(LARGEST_PACKET))
    for interface in ("lo", INTERFACE):
        _ip("-n", name, "link", "set", interface, "up")
    return host
