"""Gloo's collectives between hosts whose links have a known speed: forecast against measured.

Run as root on a machine that does nothing else: python benchmarks/cluster_links.py [--quick]. The hosts are network
namespaces (2 or 4), shaped to 100 to 1000 Mbit/s. The links are calibrated at 2 hosts and one speed only, on payloads that
the check leaves out; every other speed, the 4 hosts and all checked payloads are forecast. Kept in
benchmarks/results/cluster_links.md.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
RESULT = HERE / "results" / "cluster_links.md"
sys.path.insert(0, str(HERE / "planted"))

from msgspec.structs import replace  # noqa: E402
from netns import Host, hosts  # noqa: E402
from on_hosts import together  # noqa: E402

from trainpace.core.hardware import Cluster, Device, HostLinks  # noqa: E402
from trainpace.forecast.collectives import collective_ms  # noqa: E402
from trainpace.measure.calibration import TimedCollective, fit_host_links  # noqa: E402
from trainpace.measure.collectives import COLLECTIVES  # noqa: E402

CALIBRATED_MBIT, CALIBRATED_HOSTS = 300.0, 2
CALIBRATED_BYTES = (
    2**11,
    2**13,
    3 * 2**12,
    3 * 2**13,
    2**15,
    3 * 2**14,
    2**17,
    2**19,
    2**21,
    2**23,
)
CHECKED_BYTES = (2**10, 2**12, 2**14, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26)
CHECKED = [(2, mbit) for mbit in (100.0, 300.0, 1000.0)] + [
    (4, mbit) for mbit in (100.0, 300.0, 1000.0)
]
SECONDS_OF_A_TIMING = 15.0
RANK = (str(HERE / "planted" / "collective_rank.py"),)


class Row(NamedTuple):
    """One collective on one set of hosts."""

    hosts: int
    mbit_per_s: float
    timed: TimedCollective
    forecast_ms: float

    @property
    def error_pct(self) -> float:
        """How far the forecast is above what was measured."""
        return 100 * (self.forecast_ms / self.timed.time_ms - 1)


def measure(
    joined: tuple[Host, ...],
    mbit: float,
    collectives: tuple[str, ...],
    sizes: tuple[int, ...],
    repeats: int,
) -> list[TimedCollective]:
    """Times of every payload; the largest ones fewer times, so that a slow link does not take minutes."""
    limit = SECONDS_OF_A_TIMING / 8 * mbit * 1e6 / (2 * len(collectives))
    small = [s for s in sizes if s * repeats <= limit]
    large = [s for s in sizes if s not in small]
    found: list[TimedCollective] = []
    for some, times in ((small, repeats), (large, 3)):
        if some:
            request = {"collectives": collectives, "sizes_bytes": some, "repeats": times}
            found += [
                TimedCollective(
                    **{k: r[k] for k in ("collective", "payload_bytes", "ranks", "time_ms")}
                )
                for r in together(joined, RANK, request)
            ]
    return found


CPU = Device(name="cpu", vendor="", architecture="", kind="cpu")


def cluster_of(links: HostLinks, number: int, mbit: float, device: Device = CPU) -> Cluster:
    """So many CPU hosts on links of a known speed. More hosts than cores take turns at what wakes them; while a link carries
    bytes the cores have time for all."""
    crowd = max(1.0, number / (os.cpu_count() or 1))
    links = replace(links, start_us=crowd * links.start_us, message_us=crowd * links.message_us)
    return Cluster(
        device=device, nodes=number, network_gb_per_s_per_device=mbit / 8e3, host_links=links
    )


def forecast(links: HostLinks, number: int, mbit: float, timed: list[TimedCollective]) -> list[Row]:
    """Every timed collective as the links would have it."""
    rows = []
    for t in timed:
        ms = collective_ms(
            t.collective,  # type: ignore[arg-type]
            t.payload_bytes,
            number,
            1,
            cluster_of(links, number, mbit),
        )
        assert not isinstance(ms, str), ms
        rows.append(Row(number, mbit, t, float(ms)))
    return rows


def run(repeats: int, quick: bool) -> tuple[HostLinks, list[Row]]:
    """Calibrate, then check."""
    with hosts(CALIBRATED_HOSTS, CALIBRATED_MBIT) as joined:
        timed = measure(joined, CALIBRATED_MBIT, COLLECTIVES, CALIBRATED_BYTES, repeats)
    links = fit_host_links(timed, CALIBRATED_MBIT / 8e3)
    rows: list[Row] = []
    for number, mbit in CHECKED:
        sizes = CHECKED_BYTES[:-2] if quick else CHECKED_BYTES
        with hosts(number, mbit) as joined:
            reduced = measure(joined, mbit, ("all_reduce",), sizes, repeats)
            others = measure(joined, mbit, COLLECTIVES[1:], sizes[2:-1], repeats)
        rows += forecast(links, number, mbit, reduced + others)
        print("\n".join(lines_of(rows[-len(reduced + others) :])), flush=True)
    return links, rows


def lines_of(rows: list[Row]) -> list[str]:
    """A table row each."""
    return [
        f"| {r.hosts} | {r.mbit_per_s:.0f} | {r.timed.collective} | {r.timed.payload_bytes / 2**10:.0f}"
        f" | {r.timed.time_ms:.3f} | {r.forecast_ms:.3f} | {r.error_pct:+.1f} |"
        for r in rows
    ]


def summary(rows: list[Row]) -> list[str]:
    """Mean absolute error by what was forecast; the same figures from `calibrate`'s payloads are not among them."""
    groups: dict[str, list[float]] = defaultdict(list)
    for r in rows:
        error = abs(r.error_pct)
        groups[r.timed.collective].append(error)
        if r.timed.collective == "all_reduce":
            groups[f"all_reduce, {r.hosts} hosts"].append(error)
            size = r.timed.payload_bytes
            part = (
                "below 64 KiB"
                if size < 2**16
                else "64 KiB to 1 MiB"
                if size <= 2**20
                else "above 1 MiB"
            )
            groups[f"all_reduce, {r.hosts} hosts, {part}"].append(error)
    return [
        f"| {name} | {len(e)} | {statistics.mean(e):.1f} | {statistics.median(e):.1f} | {max(e):.1f} |"
        for name, e in sorted(groups.items())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="fewer repeats, nothing above 4 MiB, result not kept"
    )
    quick = parser.parse_args().quick
    links, rows = run(9 if quick else 21, quick)
    import torch

    head = [
        "# Collectives between shaped hosts (`python -m benchmarks cluster`)",
        "",
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, gloo; "
        f"calibrated at {CALIBRATED_HOSTS} hosts and {CALIBRATED_MBIT:.0f} Mbit/s on payloads that are not checked.",
        "",
        f"Links: {links}",
        "",
        "| what | rows | mean error, % | median, % | largest, % |",
        "|---|---|---|---|---|",
        *summary(rows),
        "",
    ]
    table = [
        "| hosts | Mbit/s | collective | KiB | measured, ms | forecast, ms | error, % |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(head))
    if not quick:
        RESULT.write_text("\n".join([*head, *table, *lines_of(rows), ""]))


if __name__ == "__main__":
    main()
