"""From a step to the whole job on a number of nodes: what is not a step, what fails, what is paid while waiting; energy.

    job = transfer + start-up + E[(steps + data wait + stragglers + evaluation) cut by checkpoints and interrupted by failures]

Everything is 0 until it is asked for, but for failures and checkpoints, whose defaults carry their source.
"""

from __future__ import annotations

import math
from statistics import NormalDist

from trainpace.errors import TrainpaceError
from trainpace.hardware.device import Device
from trainpace.outcome import StepTime
from trainpace.records import Record
from trainpace.schedule.failures import Interruption, best_segments, expected_s

DEVICE_MTBF_H = 50_000.0
"""Hours of one GPU between unexpected interruptions of a job: 419 in 54 days on 16,384 H100 (Llama 3, arXiv:2407.21783,
table 5) is 50,676; Meta's A100 clusters had 6.5 in 1,000 node-days, so 29,500 (Kokolis et al., arXiv:2410.21680)."""
RESTART_S = 600.0
"""Until the job trains again: MegaScale finds and replaces a failed node within 10 minutes (Jiang et al., NSDI 2024)."""
PREEMPTION_MEAN_H = 24.0
"""Hours between preemptions of one spot instance: an assumption, as providers publish none. Google's preemptible machines
live at most 24 h; others last from hours to weeks (Wu et al., "Can't Be Late", NSDI 2024)."""
STORAGE_GB_PER_S = 1.0
"""Of the shared storage that checkpoints go to: an assumption, one client's share of a cloud's network file system."""
DOWNLOAD_GB_PER_S = 0.125
"""Of the way into the cloud: an assumption, 1 Gbit/s."""
IDLE_POWER_SHARE = 0.15
"""Of TDP that a GPU draws while it waits: 60 W of an A100's 400 W, 70 to 110 W of an H100's 700 W in nvidia-smi."""


class JobConditions(Record):
    """What a job does besides steps, and what it runs on. Times in seconds, bandwidths in GB/s.

    `sample_bytes`: what one sample reads from storage; `samples_per_cpu_s`: how many a processor prepares (`trainpace loader`
    measures it); 0: loading is hidden behind the steps. `step_variation`: standard deviation of a
    node's step over its mean (0: no stragglers). `checkpoint_every_s`: None is the interval that costs least.
    `device_mtbf_h` None: nothing fails. `data_gb` is copied to the servers before they train, at `download_gb_per_s`.
    """

    startup_s: float = 60.0
    sample_bytes: float = 0.0
    samples_per_cpu_s: float = 0.0
    storage_gb_per_s: float = STORAGE_GB_PER_S
    evaluation_samples: int = 0
    step_variation: float = 0.0
    checkpoint_every_s: float | None = None
    device_mtbf_h: float | None = DEVICE_MTBF_H
    restart_s: float = RESTART_S
    preemption_mean_h: float = PREEMPTION_MEAN_H
    data_gb: float = 0.0
    download_gb_per_s: float = DOWNLOAD_GB_PER_S

    def __post_init__(self) -> None:
        for name in (
            "startup_s",
            "sample_bytes",
            "samples_per_cpu_s",
            "evaluation_samples",
            "step_variation",
            "restart_s",
            "data_gb",
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise TrainpaceError(f"{name} is {value}; it must be 0 or more.")
        above = ("storage_gb_per_s", "checkpoint_every_s", "device_mtbf_h", "preemption_mean_h", "download_gb_per_s")
        for name in above:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise TrainpaceError(f"{name} is {value}; it must be above 0.")


class JobTime(Record):
    """Mean wall-clock seconds of a job, in parts that add up to `total_s`, and the checkpoints that it writes."""

    stepping_s: float
    data_wait_s: float
    stragglers_s: float
    evaluation_s: float
    checkpoint_s: float
    failures_s: float
    startup_s: float
    transfer_s: float
    checkpoints: int
    checkpoint_interval_s: float

    @property
    def total_s(self) -> float:
        """All parts together; infinite where the job is interrupted faster than it advances."""
        useful = self.stepping_s + self.data_wait_s + self.stragglers_s + self.evaluation_s
        return useful + self.checkpoint_s + self.failures_s + self.startup_s + self.transfer_s

    @property
    def goodput(self) -> float:
        """Share of the wall-clock time in which steps are done that count."""
        return self.stepping_s / self.total_s


def job_time(
    steps: int,
    epochs: float,
    step: StepTime,
    samples_per_step: int,
    nodes: int,
    devices: int,
    state_bytes: float,
    conditions: JobConditions,
    spot: bool = False,
    vcpus: int | None = None,
) -> JobTime:
    """The whole job on `nodes` nodes with `devices` devices in all.

    `state_bytes` is what a checkpoint holds; `vcpus` the processors of a node, None: not known, so that preparing samples
    counts nothing. Synchronous training waits for the slowest of its nodes: the largest of n normal
    variables (Blom 1958). An evaluation after every epoch is the forward part of steps. A spot instance that is taken away
    stops the job, as synchronous training does.
    """
    c = conditions
    stepping = steps * step.total_ms / 1e3
    loading_s = samples_per_step * c.sample_bytes / (c.storage_gb_per_s * 1e9)
    if c.samples_per_cpu_s and vcpus:
        loading_s = max(loading_s, samples_per_step / (c.samples_per_cpu_s * vcpus * nodes))
    data_wait = steps * max(0.0, loading_s - step.total_ms / 1e3)
    stragglers = stepping * slowest_of(nodes, c.step_variation)
    evaluation = epochs * c.evaluation_samples / samples_per_step * forward_ms(step) / 1e3
    work = stepping + data_wait + stragglers + evaluation
    write_s = state_bytes / (c.storage_gb_per_s * 1e9)
    interruptions = interruptions_of(nodes, devices, c, spot)
    if c.checkpoint_every_s is None:
        segments = best_segments(work, write_s, interruptions)
    else:
        segments = max(1, round(work / c.checkpoint_every_s))
    expected = expected_s(work, segments, write_s, interruptions)
    return JobTime(
        stepping_s=stepping, data_wait_s=data_wait, stragglers_s=stragglers, evaluation_s=evaluation,
        checkpoint_s=segments * write_s, failures_s=max(0.0, expected - work - segments * write_s), startup_s=c.startup_s,
        transfer_s=c.data_gb / c.download_gb_per_s, checkpoints=segments, checkpoint_interval_s=work / segments,
    )  # fmt: skip


def interruptions_of(nodes: int, devices: int, conditions: JobConditions, spot: bool) -> tuple[Interruption, ...]:
    """What stops the job: any of its devices failing, any of its spot instances being taken away."""
    found = []
    if conditions.device_mtbf_h is not None:
        found.append(
            Interruption(mean_time_between_s=conditions.device_mtbf_h * 3600 / devices, restart_s=conditions.restart_s)
        )
    if spot:
        every_s = conditions.preemption_mean_h * 3600 / nodes
        found.append(Interruption(mean_time_between_s=every_s, restart_s=conditions.restart_s))
    return tuple(found)


def slowest_of(nodes: int, variation: float) -> float:
    """How much longer than the mean the slowest of n nodes takes, as a share (Blom's approximation, within 5 % of the
    exact expectation at two nodes, 1 % from eight)."""
    if nodes == 1 or variation == 0.0:
        return 0.0
    return variation * NormalDist().inv_cdf((nodes - 0.375) / (nodes + 0.25))


def forward_ms(step: StepTime) -> float:
    """The forward passes of a step with their part of the host's work. Limit: exchanges that inference needs too (tensor and
    pipeline parallelism, gathered parameters) are left out, since a `StepTime` has those of both passes in one number."""
    computing = step.forward_ms + step.backward_ms + step.optimizer_ms
    return step.forward_ms * (1 + step.host_overhead_ms / computing) if computing else step.total_ms


def energy_kwh(device: Device, devices: int, step: StepTime, seconds: float) -> float | None:
    """An estimate of what the GPUs alone draw: between idle and TDP, by the share of a step in which they compute.

    Power grows about linearly with utilisation (Fan, Weber and Barroso, ISCA 2007). Kernels bound by memory draw less than
    TDP, so this is on the high side; processors, memory, fans and cooling come on top. None without a TDP.
    """
    if device.tdp_w is None:
        return None
    busy = (step.forward_ms + step.backward_ms + step.optimizer_ms) / step.total_ms
    watts = device.tdp_w.value * (IDLE_POWER_SHARE + (1 - IDLE_POWER_SHARE) * busy)
    return watts * devices * seconds / 3.6e6
