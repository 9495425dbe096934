"""Measurements from outside: each probe in a fresh process, so that a crash or a hang costs that probe alone."""

from __future__ import annotations

from trainpace import records
from trainpace.isolation import run_isolated
from trainpace.measure.profile import MachineProfile
from trainpace.outcome import Measurement

PROBE_TIMEOUT_S = 600.0


def measure(
    spec: str,
    batch_size: int,
    optimizer: str | None = None,
    device: str = "cpu",
    seconds: float = 4.0,
    sequence_length: int | None = None,
    timeout_s: float = PROBE_TIMEOUT_S,
) -> Measurement:
    """Real training steps of `spec` at one batch size on this machine."""
    request = {
        "profile": False, "spec": spec, "batch_size": batch_size, "optimizer": optimizer, "device": device,
        "seconds": seconds, "sequence_length": sequence_length,
    }  # fmt: skip
    answer = run_isolated("trainpace.measure.worker", request, timeout_s, f"measuring {spec} at batch {batch_size}")
    return records.from_json(answer, Measurement, "the measurement")


def profile_this_cpu(timeout_s: float = PROBE_TIMEOUT_S) -> MachineProfile:
    """Micro-benchmarks of this machine's CPU."""
    answer = run_isolated("trainpace.measure.worker", {"profile": True}, timeout_s, "profiling this machine")
    return records.from_json(answer, MachineProfile, "the profile")
