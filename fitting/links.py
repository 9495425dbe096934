"""Fit the constants of links on measured collectives, and show how cards, sources and payloads that
were left out are forecast.

    python -m fitting.links --data ../shared/data

Rows: NCCL's collectives of kernels16.parquet (aiconfigurator's in CUDA graphs; Vidur's, PipeWeave's
and Sailor's launched one by one) and nccl-tests of collectives.csv. Payloads are joined by powers
of two, and every group of a source, card, collective and number of ranks weighs the same. Takes two
to three minutes.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from msgspec.structs import replace
from scipy.optimize import least_squares

from trainpace.core.hardware import Cluster, find_device
from trainpace.forecast.collectives import (
    CONSTANTS,
    Collective,
    Generation,
    LinkConstants,
    collective_ms,
)

NODES = {  # card of the tables: (device, devices of its node)
    "A100-SXM-40GB": ("A100 SXM 40GB", 8),
    "A100-SXM-80GB": ("A100 SXM 80GB", 8),
    "H100-SXM-80GB": ("H100 SXM", 8),
    "H200-SXM": ("H200 SXM", 8),
    "H800-SXM": ("H800 SXM", 8),
    "GH200-96GB": ("GH200 96GB", 4),
    "B200": ("B200", 8),
    "B300": ("B300", 8),
    "GB200": ("GB200", 4),
    "V100-SXM-16GB": ("V100 SXM2 16GB", 4),
    "L40S": ("L40S", 8),
    "RTX-6000-Ada": ("RTX 6000 Ada", 2),
    "RTX-2080Ti": ("RTX 2080 Ti", 8),
    "TITAN-RTX": ("Titan RTX", 8),
}
NVLINK = {
    "A100-SXM-40GB",
    "A100-SXM-80GB",
    "H100-SXM-80GB",
    "H200-SXM",
    "H800-SXM",
    "B200",
    "B300",
    "GB200",
}
GRAPHS = "aiconfigurator"
SMALL = 2**14
LARGE = 2**20
BOUNDS = {
    "start_us": (1.0, 60.0),
    "hop_us": (0.1, 10.0),
    "efficiency": (0.5, 1.0),
    "switch_start_us": (3.0, 100.0),
    "switch_efficiency": (0.3, 1.0),
    "ramp_us": (0.1, 100.0),
    "send_ramp_us": (0.01, 50.0),
    "pair_efficiency": (0.5, 1.0),
    "pair_sum_efficiency": (0.5, 1.0),
    "eager_us": (0.0, 60.0),
    "peer_us": (0.1, 5.0),
    "far_peer_us": (1.0, 30.0),
}
SHARED = (
    "ramp_us",
    "send_ramp_us",
    "pair_efficiency",
    "pair_sum_efficiency",
    "eager_us",
    "peer_us",
    "far_peer_us",
)
OWN = ("start_us", "hop_us", "efficiency")
SWITCH = ("switch_start_us", "switch_efficiency")
POOLED = 0.3
"""Standard deviation of the log of a generation's figure from the mean of generations, and of a
row's group from its forecast.
"""
NOISE = 0.1
GUESS = Generation(
    start_us=6.0, hop_us=1.0, efficiency=0.8, switch_start_us=30.0, switch_efficiency=0.7
)
START = LinkConstants(
    generations=dict.fromkeys((3, 4, 5), GUESS),
    pcie=Generation(start_us=6.0, hop_us=1.0, efficiency=1.0),
    ramp_us=10.0,
    send_ramp_us=5.0,
    pair_efficiency=0.9,
    pair_sum_efficiency=0.9,
    eager_us=15.0,
    peer_us=1.0,
    far_peer_us=1.0,
)
FREE = [
    *SHARED,
    *(f"{g}.{name}" for g in (3, 4, 5) for name in (*OWN, *(SWITCH if g > 3 else ()))),
    "pcie.start_us",
    "pcie.hop_us",
]


class Row(NamedTuple):
    """One collective on one node or domain of NVLink:

    the median of payloads that round to one power of two.
    """

    source: str
    gpu: str
    collective: str
    ranks: int
    payload_bytes: float
    measured_us: float

    @property
    def is_eager(self) -> bool:
        """Launched by the host, not in a CUDA graph."""
        return self.source != GRAPHS


def read_rows(data: Path) -> list[Row]:
    """The rows of links between devices, joined by payload."""
    joined: dict[tuple[str, str, str, int, int], list[tuple[float, float]]] = defaultdict(list)
    for row in [*_tables(data / "kernels16.parquet"), *_nccl_tests(data / "collectives.csv")]:
        key = (row.source, row.gpu, row.collective, row.ranks, round(np.log2(row.payload_bytes)))
        joined[key].append((row.payload_bytes, row.measured_us))
    return [
        Row(source, gpu, collective, ranks, *np.median(points, axis=0).tolist())
        for (source, gpu, collective, ranks, _), points in sorted(joined.items())
    ]


def _tables(file: Path) -> Iterable[Row]:
    columns = ["source", "gpu", "op", "bytes", "ranks", "link", "library", "time_us", "extra"]
    collectives = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]
    table = pq.read_table(file, columns=columns, filters=pc.field("op").isin(collectives))
    for line in table.to_pylist():
        source, gpu, ranks, size = (
            line["source"].split()[0],
            line["gpu"],
            int(line["ranks"]),
            float(line["bytes"] or 0),
        )
        if gpu not in NODES or size < 1024 or not line["library"].lower().startswith("nccl"):
            continue
        per_node = json.loads(line["extra"] or "{}").get("devices_per_node", ranks)
        # bridged pairs stand apart; PipeWeave's two H100s share a third of their links, on a board
        # of four without a switch
        other = "pairwise" in line["link"] or (
            source == "PipeWeave" and gpu.startswith("H100") and ranks == 2
        )
        # Sailor's gathers and scatters copy lists of tensors, and its small ones time the host
        listed = source == "sailor" and (
            line["op"] in ("all_gather", "reduce_scatter") or size < 8 * 2**20
        )
        if per_node >= ranks and not other and not listed:
            name = "send" if line["op"] == "send_recv" else line["op"]
            yield Row(source, gpu, name, ranks, size, line["time_us"])


def _nccl_tests(file: Path) -> Iterable[Row]:
    """By NCCL's own choice of algorithm; times from the bus bandwidth, which is what the table always gives."""
    devices = {"A100 (NVLink 3 node)": "A100-SXM-80GB", "H200": "H200-SXM"}
    with file.open() as lines:
        for line in csv.DictReader(lines):
            own_choice = "=0" not in line["algo"] and "off" not in line["algo"]
            if (
                line["gpu"] in devices
                and own_choice
                and line["payload_bytes"]
                and float(line["num_nodes"]) == 1
            ):
                n, size = int(float(line["num_gpus"])), float(line["payload_bytes"])
                wire = (2 if line["collective"] == "all_reduce" else 1) * (n - 1) / n * size
                yield Row(
                    "nccl-tests",
                    devices[line["gpu"]],
                    line["collective"],
                    n,
                    size,
                    wire / float(line["busbw_GBps"]) / 1e3,
                )


class Batch:
    """Rows as arrays, one part a device, collective and way of launching."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        parts: dict[tuple[str, str, bool], list[int]] = defaultdict(list)
        groups: dict[tuple[str, str, str, int], int] = defaultdict(int)
        for i, row in enumerate(rows):
            parts[row.gpu, row.collective, row.is_eager].append(i)
            groups[row.source, row.gpu, row.collective, row.ranks] += 1
        self.weight = np.array(
            [groups[r.source, r.gpu, r.collective, r.ranks] ** -0.5 for r in rows]
        )
        self.measured_us = np.array([row.measured_us for row in rows])
        self.parts = []
        for (gpu, name, eager), at in parts.items():
            device, per_node = NODES[gpu]
            cluster = Cluster(device=find_device(device), devices_per_node=per_node, nodes=72)
            sizes, ranks = (
                np.array([rows[i].payload_bytes for i in at]),
                np.array([rows[i].ranks for i in at]),
            )
            self.parts.append((at, cluster, name, eager, sizes, ranks))

    def log_errors(self, constants: LinkConstants) -> np.ndarray:
        """Log of forecast over measured, by row."""
        us = np.empty(len(self.rows))
        for at, cluster, name, eager, sizes, ranks in self.parts:
            c = constants if eager else replace(constants, eager_us=0.0)
            ms = collective_ms(cast(Collective, name), sizes, ranks, ranks, cluster, c)
            assert not isinstance(ms, str), ms
            us[at] = 1e3 * ms
        return np.asarray(np.log(us / self.measured_us))


def is_fitted(row: Row) -> bool:
    """NVLink through switches; PCIe's latencies, but not its bandwidth, in which servers differ more than cards."""
    return row.gpu in NVLINK or (row.gpu == "L40S" and row.payload_bytes <= SMALL)


def fit(rows: Sequence[Row], start: LinkConstants = START) -> LinkConstants:
    """The constants, by least squares of log errors; a generation's are drawn to the mean of all (partial pooling)."""
    batch = Batch([row for row in rows if is_fitted(row)])
    numbers = {
        g for g, cards in _cards_by_generation().items() if any(r.gpu in cards for r in batch.rows)
    }
    free = [name for name in FREE if not name[0].isdigit() or int(name[0]) in numbers]
    start = replace(start, generations={g: start.generations[g] for g in numbers})
    low, high = np.array([BOUNDS[name.rpartition(".")[2]] for name in free]).T
    x0 = np.clip([_value(start, name) for name in free], low, high)

    def residuals(x: np.ndarray) -> np.ndarray:
        constants = _with(start, dict(zip(free, x.tolist(), strict=True)))
        own = np.log([[getattr(g, name) for name in OWN] for g in constants.generations.values()])
        apart = (own - own.mean(axis=0)) * NOISE / POOLED
        return np.concatenate([batch.weight * batch.log_errors(constants), apart.ravel()])

    scale = np.maximum(np.abs(x0), 0.1)
    solved = least_squares(
        residuals, x0, bounds=(low, high), x_scale=scale, loss="soft_l1", f_scale=0.05, max_nfev=25
    )
    return _with(start, dict(zip(free, solved.x.tolist(), strict=True)))


def _cards_by_generation() -> dict[int, set[str]]:
    found: dict[int, set[str]] = defaultdict(set)
    for gpu in NVLINK:
        generation = find_device(NODES[gpu][0]).nvlink_generation
        assert generation is not None
        found[int(generation.value)].add(gpu)
    return found


def _value(constants: LinkConstants, name: str) -> float:
    where, _, field = name.rpartition(".")
    record = (
        constants
        if not where
        else constants.pcie
        if where == "pcie"
        else constants.generations[int(where)]
    )
    return float(getattr(record, field))


def _with(constants: LinkConstants, values: dict[str, float]) -> LinkConstants:
    by_record: dict[str, dict[str, float]] = defaultdict(dict)
    for name, value in values.items():
        where, _, field = name.rpartition(".")
        by_record[where][field] = value
    generations = {g: replace(one, **by_record[str(g)]) for g, one in constants.generations.items()}
    pcie: Generation = replace(constants.pcie, **by_record["pcie"])
    return replace(constants, generations=generations, pcie=pcie, **by_record[""])


def summary(rows: Sequence[Row], constants: LinkConstants) -> str:
    """Errors of the rows in per cent, of all and of large payloads."""
    if not rows:
        return "no rows"
    every = 100 * np.expm1(Batch(rows).log_errors(constants))
    large = every[np.array([row.payload_bytes >= LARGE for row in rows])]
    return ", ".join(
        f"{name} {len(e)}: mean {np.abs(e).mean():.1f}, median {np.median(np.abs(e)):.1f}, bias {np.median(e):+.1f}"
        for name, e in (("all", every), ("from 1 MiB", large))
        if len(e)
    )


def left_out(rows: Sequence[Row], name: str, out: Sequence[Row]) -> None:
    """Print how some of the rows are forecast by a fit without them."""
    constants = fit([row for row in rows if row not in out])
    print(f"| {name} left out | {summary(out, constants)} |", flush=True)


def main() -> None:
    """Print the errors of rows that were left out, then the fit on all, which goes into
    `links.CONSTANTS`.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    rows = read_rows(parser.parse_args().data)
    nvlink = [row for row in rows if row.gpu in NVLINK]
    print(f"| shipped, NVLink | {summary(nvlink, CONSTANTS)} |")
    for gpu in sorted(NVLINK):
        left_out(nvlink, gpu, [row for row in nvlink if row.gpu == gpu])
    for source in ("PipeWeave", "Vidur", "nccl-tests", "sailor"):
        left_out(nvlink, source, [row for row in nvlink if row.source == source])
    left_out(
        nvlink,
        "every third payload",
        [row for row in nvlink if round(np.log2(row.payload_bytes)) % 3 == 0],
    )
    both = fit(rows)
    for name, chosen in (("NVLink", NVLINK), *((gpu, {gpu}) for gpu in sorted(NODES))):
        print(
            f"| fit on all, {name} | {summary([row for row in rows if row.gpu in chosen], both)} |"
        )
    print(both)


if __name__ == "__main__":
    main()
