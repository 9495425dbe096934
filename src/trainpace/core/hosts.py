"""CPUs as hosts of GPUs: one core launches the kernels, so its single-thread rating scales the host's part of a step.

`hosts.toml` beside this module holds the CPUs, with the sources of their ratings and how those without a measurement are derived.
"""

from __future__ import annotations

import functools
import math
import re
import statistics
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainpace.core.cluster import HOST_KINDS, Device, Figure, HostCPU
from trainpace.core.errors import UnknownName
from trainpace.core.records import Record, from_package

FILE = Path(__file__).parent / "hosts.toml"
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
}
"""The year when most cards of a generation began to be sold; the makers' announcements."""
NEWEST, OLDEST = 1, 2
"""A card's typical hosts were launched up to so many years after it, and before it."""
MACHINES = {
    "server": ("server",),
    "desktop": ("desktop",),
    "workstation": ("server", "desktop"),
    "laptop": ("laptop",),
}
ANY_GENERATION = "any"
ROUGH_LOG_SD = 0.15
"""Standard deviation of the logarithm of a rough rating: how far points per GHz differ from a core to its successor."""
_WORKSTATION = re.compile(r"RTX A\d|RTX \d+ Ada|Quadro|RTX PRO(?!.*Server)")
_DESKTOP = re.compile(r"[GR]TX \d|Titan|Arc\b")
_NOISE = re.compile(
    r"\((r|tm)\)|@.*|\b\d+-cores?\b|\b\d+th"
    r" gen\b|\b(processors?|cpus?|with|intel|amd|nvidia|xeon|epyc|core)\b"
)
_FAMILY = re.compile(r"\b(ryzen( threadripper)?( \d)?|threadripper|pro|platinum|gold|silver)\b")


class TypicalHost(Record):
    """What is assumed of a host that nobody named: the middle one of those that carry such cards, its rating, and the standard
    deviation of the logarithm of theirs."""

    name: str
    points: float
    log_sd: float


class TypicalHosts(Record):
    """The typical host by the kind of machine and a card's generation; ANY_GENERATION is of all."""

    machines: dict[str, dict[str, TypicalHost]]


@functools.cache
def host_catalogue() -> tuple[HostCPU, ...]:
    """Every packaged CPU, in the order of the file."""
    return tuple(_read(FILE.read_text("utf-8")))


def find_host(name: str) -> HostCPU:
    """A CPU by its name as people, clouds and /proc/cpuinfo write it. Raises `UnknownName` with the nearest names.

    Case, spaces, hyphens, clocks, counts of cores and the makers' words ("Intel(R) Xeon(R)") do not count; the number alone does
    where only one CPU has it ("8480+", "13900K").
    """
    full, number = _by_name()
    found = full.get(normalised_host(name)) or number.get(_number(name), [])
    if len(found) != 1:
        names = [cpu.name for cpu in found or host_catalogue()]
        raise UnknownName(
            "host CPU",
            name,
            names,
            "Name one that is about as fast on one core, or leave the host out.",
        )
    return found[0]


def normalised_host(name: str) -> str:
    """A CPU's name as it is compared: without makers' words and clocks, letters, digits and plus signs only."""
    return re.sub(r"[^a-z0-9+]", "", _NOISE.sub(" ", name.casefold()))


def typical_host(device: Device) -> TypicalHost:
    """The host that is assumed beside a card where none is named."""
    generations = _typical_hosts().machines[_machine(device)]
    return generations.get(device.architecture) or generations[ANY_GENERATION]


def typical_hosts() -> TypicalHosts:
    """What `typical_hosts.json` holds, made anew from the catalogue: CPUs of a kind of machine that were launched from OLDEST
    years before a generation of cards to NEWEST after it."""
    every = host_catalogue()
    grace = tuple(cpu for cpu in every if cpu.vendor == "NVIDIA")
    machines = {"superchip": {ANY_GENERATION: _middle(grace)}}
    for machine, kinds in MACHINES.items():
        able = [cpu for cpu in every if cpu.kind in kinds and cpu not in grace]
        then = {
            name: [c for c in able if year - OLDEST <= c.year <= year + NEWEST]
            for name, year in SOLD.items()
        }
        machines[machine] = {ANY_GENERATION: _middle(able)} | {
            name: _middle(cpus) for name, cpus in then.items() if cpus
        }
    return TypicalHosts(machines=machines)


def _middle(cpus: Sequence[HostCPU]) -> TypicalHost:
    middle = sorted(cpus, key=lambda cpu: cpu.single_thread.value)[len(cpus) // 2]
    log_sd = statistics.pstdev(math.log(cpu.single_thread.value) for cpu in cpus)
    log_sd = math.hypot(log_sd, ROUGH_LOG_SD if middle.rough else 0.0)
    return TypicalHost(
        name=middle.name, points=round(middle.single_thread.value), log_sd=round(log_sd, 3)
    )


@functools.cache
def _typical_hosts() -> TypicalHosts:
    return from_package("core/typical_hosts.json", TypicalHosts)


def _machine(device: Device) -> str:
    """The kind of machine that a card sits in: GeForce in desktops, workstation cards in desktops and servers."""
    if device.form_factor == "module" and device.vendor == "NVIDIA":
        return "superchip"
    if device.form_factor == "mobile":
        return "laptop"
    if _WORKSTATION.match(device.name):
        return "workstation"
    return "desktop" if _DESKTOP.match(device.name) else "server"


@functools.cache
def _by_name() -> tuple[dict[str, list[HostCPU]], dict[str, list[HostCPU]]]:
    """CPUs by their full names as compared, and by their numbers alone."""
    full: dict[str, list[HostCPU]] = {}
    number: dict[str, list[HostCPU]] = {}
    for cpu in host_catalogue():
        names = (cpu.name, *cpu.aliases)
        for named, keys in ((full, map(normalised_host, names)), (number, map(_number, names))):
            for key in set(keys):
                named.setdefault(key, []).append(cpu)
    return full, number


def _number(name: str) -> str:
    """A name without the words of its family: people say 13900K, 5950X and 8480+."""
    return re.sub(r"^i\d(?=\d{4})", "", normalised_host(_FAMILY.sub(" ", name.casefold())))


def _read(text: str) -> Iterator[HostCPU]:
    data: dict[str, Any] = tomllib.loads(text)
    sources, cores = data["sources"], data["core"]

    def figure(points: float, source: str) -> Figure:
        return Figure(value=points, source=sources[source]["title"], kind=sources[source]["kind"])

    for core, about in cores.items():
        like = cores[about.get("like", core)]
        per_ghz = statistics.median(
            cpu["points"] / cpu["turbo_ghz"] for cpu in like["measured"]
        ) * about.get("times", 1.0)
        for kind in HOST_KINDS:
            for cpu in about.get(kind, ()):
                points = (
                    figure(cpu["points"], cpu["source"])
                    if "points" in cpu
                    else figure(per_ghz * cpu["turbo_ghz"], "clock")
                )
                yield HostCPU(
                    name=cpu["name"],
                    vendor=about["vendor"],
                    core=core,
                    kind=kind,
                    year=cpu["year"],
                    single_thread=points,
                    turbo_ghz=cpu["turbo_ghz"],
                    rough="like" in about,
                    aliases=tuple(cpu.get("aliases", ())),
                )
