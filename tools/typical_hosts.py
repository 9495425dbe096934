"""Write src/trainpace/core/typical_hosts.json from the catalogue of host CPUs; a test compares the
two.

python tools/typical_hosts.py
"""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from trainpace.core.hardware import (
    ANY_GENERATION,
    HostCPU,
    TypicalHost,
    TypicalHosts,
    host_catalogue,
)
from trainpace.core.records import to_json, write_whole

FILE = Path(__file__).parents[1] / "src/trainpace/core/typical_hosts.json"
SOLD = {
    "Kepler": 2014,
    "Maxwell": 2015,
    "Pascal": 2016,
    "Volta": 2017,
    "Turing": 2018,
    "Ampere": 2020,
    "CDNA": 2022,
    "Ada": 2022,
    "Hopper": 2022,
    "Gaudi": 2022,
    "Blackwell": 2024,
    "Battlemage": 2024,
    "RDNA 3": 2022,
    "Apple M1": 2020,
    "Apple M2": 2022,
    "Apple M3": 2023,
    "Apple M4": 2024,
}
"""Year in which most cards of a generation went on sale, from the makers' announcements."""
NEWEST, OLDEST = 1, 2
"""Typical hosts of a card were launched at most 1 year after and 2 years before the card."""
MACHINES = {
    "server": ("server",),
    "desktop": ("desktop",),
    "workstation": ("server", "desktop"),
    "laptop": ("laptop",),
}
ROUGH_LOG_SD = 0.15
"""Standard deviation of the logarithm of a rough rating.

It is estimated from the points per GHz of cores and their successors.
"""


def typical_hosts() -> TypicalHosts:
    """Compute the content of `typical_hosts.json` from the catalogue of host CPUs.

    The candidates for a generation of cards are CPUs of the same kind of machine. They were
    launched from OLDEST years before the cards to NEWEST years after.
    """
    every = host_catalogue()
    grace = tuple(cpu for cpu in every if cpu.vendor == "NVIDIA")
    machines = {"superchip": {ANY_GENERATION: _middle(grace)}}
    for machine, kinds in MACHINES.items():
        able = [cpu for cpu in every if cpu.kind in kinds and cpu not in grace]
        machines[machine] = {ANY_GENERATION: _middle(able)} | _by_generation(able)
    return TypicalHosts(machines=machines)


def _by_generation(cpus: Sequence[HostCPU]) -> dict[str, TypicalHost]:
    sold_with = {
        name: [cpu for cpu in cpus if year - OLDEST <= cpu.year <= year + NEWEST]
        for name, year in SOLD.items()
    }
    return {name: _middle(some) for name, some in sold_with.items() if some}


def _middle(cpus: Sequence[HostCPU]) -> TypicalHost:
    middle = sorted(cpus, key=lambda cpu: cpu.single_thread.value)[len(cpus) // 2]
    log_sd = statistics.pstdev(math.log(cpu.single_thread.value) for cpu in cpus)
    log_sd = math.hypot(log_sd, ROUGH_LOG_SD if middle.rough else 0.0)
    return TypicalHost(
        name=middle.name, points=round(middle.single_thread.value), log_sd=round(log_sd, 3)
    )


if __name__ == "__main__":
    write_whole(FILE, to_json(typical_hosts(), indent=1) + "\n")
