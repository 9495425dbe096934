"""Fit the constants of collectives on nccl-tests of one A100 and one H200 node; each node is also forecast from the other."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from trainpace.forecast.collectives import LinkConstants, collective_ms
from trainpace.hardware.catalogue_reader import find_device
from trainpace.hardware.cluster import Cluster
from trainpace.records import Record

DEVICES = {"A100 (NVLink 3 node)": "A100 SXM 80GB", "H200": "H200 SXM"}
BOUNDS = {
    "link_efficiency": (0.5, 1.0),
    "ll_start_us": (5.0, 100.0),
    "ll_share": (0.01, 0.3),
    "ll128_start_us": (10.0, 150.0),
    "ll128_share": (0.1, 0.95),
    "simple_start_us": (20.0, 500.0),
    "nvls_start_us": (20.0, 300.0),
    "nvls_efficiency": (0.5, 1.0),
}


class Row(Record):
    """One all-reduce by NCCL's own choice on one node."""

    device: str
    ranks: int
    payload_bytes: float
    measured_ms: float


def read_rows(data: Path) -> list[Row]:
    """The rows of one node by default settings; times from the bus bandwidth where only that is given."""
    rows = []
    with (data / "collectives.csv").open() as file:
        for line in csv.DictReader(file):
            if line["gpu"] not in DEVICES or line["collective"] != "all_reduce" or "=0" in line["algo"]:
                continue
            if "off" in line["algo"] or not line["payload_bytes"]:
                continue
            n, size = int(float(line["num_gpus"])), float(line["payload_bytes"])
            ms = 2 * (n - 1) / n * size / float(line["busbw_GBps"]) / 1e6
            rows.append(Row(device=DEVICES[line["gpu"]], ranks=n, payload_bytes=size, measured_ms=ms))
    return rows


def log_errors(rows: Sequence[Row], constants: LinkConstants) -> np.ndarray:
    """Log of forecast over measured, by row."""
    errors = np.empty(len(rows))
    for name in {row.device for row in rows}:
        at = [i for i, row in enumerate(rows) if row.device == name]
        cluster = Cluster(device=find_device(name), devices_per_node=8)
        ranks = np.array([rows[i].ranks for i in at])
        ms = collective_ms("all_reduce", [rows[i].payload_bytes for i in at], ranks, ranks, cluster, constants)
        assert not isinstance(ms, str), ms
        errors[at] = np.log(ms / [rows[i].measured_ms for i in at])
    return errors


def fit(rows: Sequence[Row], free: Sequence[str]) -> LinkConstants:
    """The constants named in `free`, by least squares of log errors from several starts; the others stay as they are."""
    base = LinkConstants()
    low, high = np.array([BOUNDS[name] for name in free]).T

    def constants(x: np.ndarray) -> LinkConstants:
        return LinkConstants(**{**{f: getattr(base, f) for f in BOUNDS}, **dict(zip(free, x.tolist(), strict=True))})

    rng = np.random.default_rng(0)
    starts = [np.clip([getattr(base, n) for n in free], low, high), *rng.uniform(low, high, (20, len(free)))]
    solved = [
        least_squares(
            lambda x: log_errors(rows, constants(x)),
            s,
            bounds=(low, high),
            x_scale=high - low,
            loss="soft_l1",
            f_scale=0.1,
        )
        for s in starts
    ]
    return constants(min(solved, key=lambda s: s.cost).x)


def summary(rows: Sequence[Row], constants: LinkConstants) -> str:
    """Mean and largest error of the rows, in per cent."""
    errors = 100 * np.abs(np.expm1(log_errors(rows, constants)))
    return f"{len(rows)} rows, mean {errors.mean():.1f} %, largest {errors.max():.1f} %"


def main() -> None:
    """Print each node forecast from the other, then the fit on both, which goes into `LinkConstants`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    rows = read_rows(parser.parse_args().data)
    ramp = [name for name in BOUNDS if not name.startswith("nvls")]
    a100 = [row for row in rows if row.device.startswith("A100")]
    h200 = [row for row in rows if row not in a100]
    # an A100 node has no reduction in the switch: how well that works is read off 4 to 7 H200s at 8 GiB, not from its ramp
    few = [row for row in h200 if row.ranks < 8]
    from_a100 = fit([*a100, *few], [*ramp, "nvls_efficiency"])
    ramp_h200 = [row for row in h200 if row.ranks == 8]
    print("fit on A100 (and the share in the switch on 4 to 7 H200):", summary(a100, from_a100))
    print("  forecast of the H200 node:", summary(ramp_h200, from_a100))
    from_h200 = fit(h200, list(BOUNDS))
    print("fit on H200:", summary(h200, from_h200))
    print("  forecast of the A100 node:", summary(a100, from_h200))
    both = fit(rows, list(BOUNDS))
    print("fit on both:", summary(rows, both))
    print(both)


if __name__ == "__main__":
    main()
