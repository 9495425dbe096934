"""Sentences about what a forecast took for granted: hosts and software that nobody named, and what a trace left out."""

from collections.abc import Mapping, Sequence

from trainpace.core.outcome import Forecast

HOST_MATTERS = 0.05
"""Share of a step in which the device waits for the host's launches, from which the host is mentioned."""


def assumed_hosts(rows: Sequence[Forecast]) -> list[str]:
    """A line about hosts that nobody named, where a step hangs on its host; the JSON answer names them all."""
    hanging = [
        f for f in rows if f.step and f.step.host_overhead_ms > HOST_MATTERS * f.step.total_ms
    ]
    hosts = dict.fromkeys(f"{f.host} beside {f.device}" for f in hanging if f.host_assumed)
    return (
        [f"The host is not named; taken as typical: {', '.join(hosts)} (--host names yours)."]
        if hosts
        else []
    )


def taken_for_granted(rows: Sequence[Forecast]) -> list[str]:
    """What the trace of the workload took for granted or left out, each once."""
    return list(dict.fromkeys(note for f in rows for note in f.notes))


def _named(devices: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    return [(part, " and ".join(names)) for part, names in devices.items()]


def software_lines(rows: Sequence[Forecast]) -> list[str]:
    """What software was taken, where somebody said something of it or attention depends on it; and what changes nothing."""
    of = {
        f.device: f for f in rows if f.software and (not f.software_assumed or ", " in f.software)
    }
    each = dict.fromkeys(f.software for f in of.values())
    taken = next(iter(each), "")
    if len(each) > 1:  # the framework is the same on all devices, what it takes there is not
        framework = taken.partition(", ")[0]
        parts = {
            software.partition(", ")[2]: [f.device for f in of.values() if f.software == software]
            for software in each
        }
        taken = f"{framework}, {'; '.join(f'{part} on {listed}' for part, listed in _named(parts))}"
    idle = dict.fromkeys(text for f in rows for text in f.software_idle)
    if not of:
        return [f"Without effect: {text}." for text in idle]
    assumed = any(f.software_assumed for f in of.values())
    said = "Software is not named; taken" if assumed else "Software"
    hint = " (--software, --attention)" if assumed else ""
    return [f"{said}: {taken}{hint}.", *(f"Without effect: {text}." for text in idle)]
