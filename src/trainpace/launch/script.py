"""A trial of an unchanged script, by its own launcher, under the recorder of `trainpace watch`.

The recorder ends the script after the steps that were wanted, and writes checkpoints aside while it runs (torch.save to a path;
they are removed at the end). What else the script writes (logs, metrics, its own step counters, checkpoints in other formats), it
writes: give it a folder of its own by its own arguments. Its losses are its own, so there are none in the result.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path

from trainpace.errors import TrainpaceError
from trainpace.launch.logs import first_error
from trainpace.launch.trial import FailedTrial, TrialResult
from trainpace.measure.statistics import median, median_interval
from trainpace.outcome import Interval
from trainpace.records import read_bytes
from trainpace.watch.command import COMMAND_FILE, watch
from trainpace.watch.inside.trail import DATA, LOADER_START, Step
from trainpace.watch.recording import ms, read_recording
from trainpace.watch.trails import header_of, read_processes, records_of

LOG = "script.log"
_INTERVENTIONS = ("cached_batch", "batch_on_device", "no_sync", "few_samples", "muted")
_FEWEST_WARM_UP, _FEWEST_STEPS = 4, 3
_GRACE_S = 10.0


def run_script(
    command: Sequence[str], folder: Path, steps: int, warmup_steps: int = 5, timeout_s: float = 600.0
) -> TrialResult | FailedTrial:
    """Run the command (python, torchrun, accelerate launch, deepspeed, ...) for so many steps after the warm-up; after
    `timeout_s` it is ended. The folder takes the recording and the output, and must not hold an earlier one.

    A script that ends earlier gives the steps that there were. Raises TrainpaceError when it cannot be started.
    """
    if (folder / COMMAND_FILE).exists():
        raise TrainpaceError(f"{folder} holds a recording already.", "Name a new folder.")
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / LOG
    warm_up = max(_FEWEST_WARM_UP, warmup_steps)
    trials = {
        "block_steps": steps, "rounds": 1, "warm_up_steps": warm_up, "limit_s": timeout_s, "without": _INTERVENTIONS,
    }  # fmt: skip
    with log.open("wb") as output:
        # the recorder ends the script in time, with the steps that there were; one that makes no steps is ended here
        code = watch(
            command, folder, trials, limit_s=timeout_s + _GRACE_S, output=output.fileno(), errors=output.fileno()
        )
    said = json.loads(read_bytes(folder / COMMAND_FILE))
    recording = read_recording(folder)
    late = said["seconds"] >= timeout_s
    if code == 128 + signal.SIGINT and not late:
        raise KeyboardInterrupt
    if code != 0 and late:
        reason = f"{command[0]} took longer than {timeout_s:g} s."
        return FailedTrial(kind="timed out", reason=reason, log=str(log))
    if code != 0:
        reason = first_error(log) or f"{command[0]} ended with exit code {code}."
        return FailedTrial(kind="failed", reason=reason, log=str(log))
    if not recording.ranks:
        return FailedTrial(kind="failed", reason=f"no training step was seen. {recording.seen}", log=str(log))
    process = max(read_processes(folder), key=lambda p: (-p.rank, p.steps))
    seen = [r for r in records_of(process.path) if isinstance(r, Step)]
    kept = [s for s in seen if s.trial == 0 and s.number >= warm_up]
    if len(kept) < _FEWEST_STEPS:
        reason = f"the script ended after {len(seen)} steps, too few to be timed after a warm-up of {warm_up}."
        return FailedTrial(kind="timed out" if late else "failed", reason=reason, log=str(log))
    first, header = recording.ranks[0], header_of(process.path) or {}
    step_ms = [ms(s) for s in kept]
    middle = median(step_ms)
    low, high = median_interval(step_ms)
    reserved = max(s.reserved_gib for s in seen)
    return TrialResult(
        step_ms=tuple(step_ms),
        data_wait_ms=tuple((s.parts_ns[DATA] + s.parts_ns[LOADER_START]) / 1e6 for s in kept),
        losses=(),
        median_ms=middle,
        interval_ms=Interval(
            low=low, high=high, coverage=0.9, basis="order statistics of the counted steps of one run"
        ),
        samples_per_second=1e3 * sum(r.samples_per_step for r in recording.ranks) / middle,
        peak_memory_gib=reserved or None,
        start_up_s=max(0.0, (seen[0].end_ns + header.get("clock_to_wall_ns", 0)) / 1e9 - said["started"]),
        world_size=first.world_size,
        environment={"torch": first.torch, "cores": str(first.cpus)},
        notes=("the script's losses are its own.",),
    )
