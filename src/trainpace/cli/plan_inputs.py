"""What `trainpace plan` starts from: the fleet, the present execution, the job and the loader, from options and files."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from trainpace.cli.options import ABOVE_0, check_fleet, read_text, within
from trainpace.cli.settings import SettingsSource
from trainpace.errors import Contradiction, TrainpaceError, UnreadableInput
from trainpace.units import parse_count

if TYPE_CHECKING:
    from trainpace.diagnose import Advice
    from trainpace.execution import Execution, Precision, ZeroStage
    from trainpace.hardware import Cluster
    from trainpace.plan import DataPath
    from trainpace.schedule import Schedule
    from trainpace.watch import Rank, Recording
    from trainpace.workload import Workload

MOST_WORKERS = 16
PLANNED_CAUSES = ("data", "launch", "communication", "straggler")
"""Of a diagnosis: what the search itself weighs, or what no setting changes."""
DEFAULT_BATCH = 32
FLEET_KEYS = {"gpu": str, "num_gpus": int, "nodes": int, "network_gb_per_s": float, "price": float}


class Present(NamedTuple):
    """How the training runs now, as files and a recording say; options are laid beside them."""

    files: SettingsSource
    recording: Recording | None

    @classmethod
    def read(cls, o: dict[str, Any]) -> Present:
        """Read the settings files, the launch command and the recording that were named."""
        recording = None
        if o["watched"]:
            from trainpace.watch import read_recording

            recording = read_recording(Path(o["watched"]))
            if not recording.ranks:
                raise UnreadableInput(f"{o['watched']} holds no training steps: {recording.seen}")
        return cls(SettingsSource.read(o["configs"], o["launch"]), recording)

    @property
    def rank(self) -> Rank | None:
        """The recording's first process."""
        return None if self.recording is None else self.recording.ranks[0]

    def pick(self, name: str, option: Any, recorded: Any = None) -> Any:
        """An option's value, else the files', else the recording's."""
        value = self.files.pick(name, option)
        return recorded if value is None else value

    def precision(self, o: dict[str, Any]) -> Precision:
        """The present number format."""
        precision: Precision = self.pick("precision", o["precision"]) or "fp32"
        return precision

    def world(self, o: dict[str, Any], cluster: Cluster) -> tuple[int, int]:
        """(nodes, processes per node) of now."""
        nodes, processes = self.files.world(o["nodes_now"], o["gpus_now"])
        if nodes is None and processes is None and self.rank is not None:
            nodes, processes = _split(self.rank.world_size, cluster.devices_per_node)
        return nodes or cluster.nodes, processes or cluster.devices_per_node

    def execution(self, o: dict[str, Any], cluster: Cluster, workload: Workload) -> Execution:
        """The present execution. Raises Contradiction where its numbers clash, or need more devices than there are."""
        from trainpace.execution import Execution
        from trainpace.schedule import accumulation_for_global_batch

        nodes, processes = self.world(o, cluster)
        if nodes > cluster.nodes or processes > cluster.devices_per_node:
            raise Contradiction(
                f"it trains on {nodes} x {processes} GPUs (nodes x GPUs a node) now, and the fleet has {cluster.nodes} x"
                f" {cluster.devices_per_node}.",
                "Name the whole fleet with --nodes and --num-gpus.",
            )
        recompute = self.pick("activation_checkpointing", None)
        if o["checkpointing"] is not None:
            recompute = o["checkpointing"]
        offload = o["offload"] or self._offload_in_files()
        zero: ZeroStage = 3 if self.files.value("sharding") == "fsdp" and self.files.value("zero_stage") is None else 0
        stage: ZeroStage | None = self.pick("zero_stage", o["zero"])
        start = Execution(
            micro_batch=self.pick("micro_batch", o["batch"], self._recorded_batch()) or DEFAULT_BATCH,
            nnodes=nodes, nproc_per_node=processes, tp=self.pick("tp", o["tp"]) or 1, pp=self.pick("pp", o["pp"]) or 1,
            cp=self.pick("cp", o["cp"]) or 1, precision=self.precision(o), optimizer=workload.optimizer,
            zero_stage=zero if stage is None else stage, offload_optimizer=offload in ("optimizer", "both"),
            offload_parameters=offload in ("parameters", "both"),
            activation_checkpointing="full" if workload.checkpointed else recompute or "none",
            compile=bool(self.pick("compile", o["compiled"] or None)), channels_last=o["channels_last"],
        )  # fmt: skip
        accumulation = self.pick("accumulation", o["accumulate"], self._recorded_accumulation())
        total = self.pick("global_batch", o["global_batch"])
        if total is not None:
            needed = accumulation_for_global_batch(total, start.micro_batch, start.data_parallel_size)
            if accumulation not in (None, needed):
                raise Contradiction(
                    f"global batch {total} is not micro-batch {start.micro_batch} x accumulation {accumulation} x"
                    f" data-parallel size {start.data_parallel_size}.",
                    "Leave one of them out.",
                )
            accumulation = needed
        from msgspec.structs import replace

        return replace(start, accumulation=accumulation or 1)

    def _offload_in_files(self) -> str:
        optimizer, parameters = (bool(self.files.value(f"offload_{what}")) for what in ("optimizer", "parameters"))
        return (
            "both" if optimizer and parameters else "optimizer" if optimizer else "parameters" if parameters else "none"
        )

    def _recorded_batch(self) -> int | None:
        from trainpace.watch import batches_per_step

        if self.rank is None or not self.rank.samples_per_step:
            return None
        return max(1, round(self.rank.samples_per_step / batches_per_step(self.rank)))

    def _recorded_accumulation(self) -> int | None:
        from trainpace.watch import batches_per_step

        return None if self.rank is None else max(1, round(batches_per_step(self.rank)))


def cluster_of(o: dict[str, Any], present: Present) -> Cluster:
    """The fleet, of --cluster or of options; without sizes, what it trains on now."""
    from trainpace.hardware import Cluster, find_device
    from trainpace.verbs.own_hardware import own_devices

    said = _fleet_file(o["fleet"]) if o["fleet"] else {}
    for key, option in (("gpu", "gpu"), ("num_gpus", "num_gpus"), ("nodes", "nodes"), ("network_gb_per_s", "network"),
                        ("price", "price")):  # fmt: skip
        if o[option] is not None:
            if said.get(key, o[option]) != o[option]:
                raise Contradiction(f"{key} is {said[key]} in {o['fleet']} and {o[option]} on the command line.")
            said[key] = o[option]
    if not said.get("gpu"):
        raise click.UsageError("Name the fleet's GPU with --gpu, or a fleet with --cluster.")
    nodes, processes = present.files.world(o["nodes_now"], o["gpus_now"])
    per_node, count = said.get("num_gpus", processes or 1), said.get("nodes", nodes or 1)
    network = said.get("network_gb_per_s")
    if network is not None and not 1e-6 <= network <= 1e6:
        raise TrainpaceError(f"a network of {network} GB/s cannot be right: give 1e-6 to 1e6.")
    check_fleet(per_node, count, network)
    return Cluster(
        device=find_device(said["gpu"], own_devices(o["hardware"])), devices_per_node=per_node, nodes=count,
        price_usd_per_device_hour=said.get("price"),
        network_gb_per_s_per_device=None if network is None else network / per_node,
    )  # fmt: skip


def noise_scale_of(o: dict[str, Any]) -> float | None:
    """Samples, from a number, from what `trainpace measure --noise-scale --output` or `trainpace run` (ladder.json) wrote."""
    said = o["noise_scale"]
    if said is None:
        return None
    if not o["allow_global_batch"]:
        raise click.UsageError("--noise-scale weighs global batches: add --allow-global-batch.")
    if not said.endswith(".json"):
        number: float = within("number of samples", ABOVE_0, 1e12, parse_count).convert(said, None, None)
        return number
    from trainpace.records import read_bytes

    try:
        read = json.loads(read_bytes(said))
        if isinstance(read, dict):
            tried = [t["measured"] for r in (read["baseline"], *read["rungs"]) for t in r["tried"] if t["measured"]]
            samples = next((told for m in tried if (told := m.get("noise_scale", {}).get("samples"))), None)
        else:
            scales = [found["noise_scale"] for found in read if found.get("noise_scale")]
            samples = scales[-1]["scale"]["samples"] if scales else None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UnreadableInput(
            f"{said} is no file of measurements.",
            "trainpace measure --output writes one, and trainpace run a ladder.json.",
        ) from None
    if not samples:
        raise TrainpaceError(f"{said} holds no gradient noise scale.", "Measure it: trainpace measure --noise-scale.")
    return float(samples)


def _fleet_file(path: str) -> dict[str, Any]:
    try:
        said = tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise UnreadableInput(f"{path} is not valid TOML ({error}).") from None
    for key, value in said.items():
        kind = FLEET_KEYS.get(key)
        if kind is None:
            raise UnreadableInput(f"{path} has a key {key!r} that is not known.", f"Known: {', '.join(FLEET_KEYS)}.")
        if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
            raise UnreadableInput(
                f"{key} in {path} is {value!r}; it should be {'text' if kind is str else 'a number'}."
            )
    return said


def schedule_of(o: dict[str, Any], present: Present) -> Schedule:
    """The job. Without one there are no seconds to save."""
    from trainpace.schedule import Schedule

    samples = o["samples"]
    if samples is None and o["tokens"] is None and present.rank is not None and present.rank.loader is not None:
        samples = present.rank.loader.samples_in_dataset
    pick = present.pick
    schedule = Schedule(
        samples=samples, tokens=o["tokens"], sequence_length=pick("sequence_length", o["sequence_length"]),
        epochs=pick("epochs", o["epochs"]), max_steps=pick("max_steps", o["max_steps"]),
        drop_last=bool(pick("drop_last", None)),
    )  # fmt: skip
    if schedule.epochs is None and schedule.max_steps is None:
        raise TrainpaceError(
            "how long the job is is not known.",
            "Add --samples and --epochs, or --max-steps (1000, to see what a thousand steps save).",
        )
    if schedule.epochs is not None and schedule.samples_per_epoch is None:
        raise TrainpaceError("how many samples an epoch has is not known.", "Add --samples or --tokens.")
    return schedule


def data_paths(o: dict[str, Any], present: Present, start: Execution, cluster: Cluster) -> tuple[DataPath, ...]:
    """The present data path, then more workers and samples prepared offline, by the pipeline model of `loader`."""
    from trainpace.diagnose import HANDOVER_MS, SEND_MS, loader_cost
    from trainpace.loader.model import LoaderCost, batch_ms, fewest_workers
    from trainpace.plan import NO_WAIT, DataPath

    rank = present.rank
    now = present.pick("dataloader_workers", o["workers"], rank.loader.workers if rank and rank.loader else None)
    cost = None if rank is None else loader_cost(rank)
    if o["sample_ms"] is not None:
        cost = LoaderCost(sample_wall_ms=o["sample_ms"], sample_cpu_ms=o["sample_ms"], collate_ms=0.0,
                          batch_size=start.micro_batch)  # fmt: skip
    if cost is None or now is None:
        if o["workers"] is not None or o["cores"] is not None:
            raise click.UsageError("--workers and --cores need --sample-ms, or a recording that has it.")
        if cost is not None:
            raise click.UsageError("Say with --workers how many loader workers there are now.")
        return (NO_WAIT,)
    cores = o["cores"] or (rank.cpus if rank is not None else None)
    if cores is None:
        raise click.UsageError("--sample-ms needs --cores, the cores of a node that its loaders may use.")
    a_rank = max(1.0, cores / cluster.devices_per_node)

    def path(workers: int) -> DataPath:
        sent = cost if workers == 0 else _sent(cost, SEND_MS, HANDOVER_MS)
        ms = batch_ms(sent, workers, a_rank)
        return DataPath(workers=workers, ms_per_sample=ms / cost.batch_size, beside=workers > 0)

    paths = {workers: path(workers) for workers in range(1, MOST_WORKERS + 1)}
    enough = fewest_workers({workers: p.ms_per_sample for workers, p in paths.items()})
    counts = dict.fromkeys(w for w in (1, 2, 4, 8, enough) if w <= enough and w != now)
    offline = DataPath(
        workers=max(1, now), ms_per_sample=cost.collate_ms / cost.batch_size / max(1, now), precomputed=True
    )
    return (path(now), *(paths[w] for w in counts if w > now), offline)


def script_changes(present: Present, start: Execution, schedule: Schedule) -> list[tuple[Advice, float]]:
    """What the recording's diagnosis would change in the script itself, beside loader and execution, with the seconds of the
    job that it saves at the recorded pace."""
    if present.recording is None:
        return []
    from trainpace.diagnose import diagnose
    from trainpace.schedule import total_steps

    steps = total_steps(schedule, start)
    advice = diagnose(present.recording).advice
    return [(a, steps * a.saves_ms / 1e3) for a in advice if a.cause not in PLANNED_CAUSES]


def _sent(cost: Any, send_ms: float, handover_ms: float) -> Any:
    from msgspec.structs import replace

    return replace(cost, send_ms=cost.send_ms or send_ms, handover_ms=cost.handover_ms or handover_ms)


def _split(world: int, devices_per_node: int) -> tuple[int, int]:
    """A world of processes over nodes that hold so many."""
    return (1, world) if world <= devices_per_node else (-(-world // devices_per_node), devices_per_node)
