"""One training process summarised: the time of each part of its steps, and what else is known of it."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import dropwhile, groupby
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from trainpace.core.records import Record
from trainpace.core.stats import consecutive_blocks, mean_and_half_width, median, median_interval
from trainpace.watch.event_logs import Line, Loader, Notes, fetches_of, lines_of, training_loader
from trainpace.watch.inside.event_log import LAST, PARTS, REPLACING, TRIALS, Fetch, Step
from trainpace.watch.inside.script import StatedLength
from trainpace.watch.stragglers import WARM_UP_STEPS

ALIKE = 1.05
"""Times the FLOPs of the smallest of several steps that the largest has at most, where they count as equally large."""
USUAL = 0.8
"""Of all steps, those with the usual number of backward passes from which on the others count as an epoch's last ones."""
_OTHER = PARTS.index("other")


class Counted(NamedTuple):
    """What was counted in some steps, by their numbers, among all steps."""

    by_step: dict[int, dict[str, Any]]
    steps: Sequence[Step]

    def typical(self, name: str) -> Any:
        """The middle one; of the times of equally large steps the least, since other programs only make them longer.

        Where a step has more backward passes than another, as in actor-critic trainings, the mean, in proportion to the backward
        passes of all steps.
        """
        if not self.by_step:
            return 0
        counts = sorted(c.get(name, 0) for c in self.by_step.values())
        passes = {s.number: s.micro_steps for s in self.steps}
        here = [passes.get(number, 0) for number in self.by_step]
        usual, often = Counter(passes.values()).most_common(1)[0]
        is_regular = set(here) == {usual} and often >= USUAL * len(passes)
        if is_regular or not sum(here):
            return counts[0 if name.endswith("_ns") and self._are_alike() else len(counts) // 2]
        every = fmean(s.micro_steps for s in self.steps[1:] or self.steps)
        return type(counts[0])(fmean(counts) * every / fmean(here))

    def _are_alike(self) -> bool:
        flops = [c.get("flops", 0.0) for c in self.by_step.values()]
        return max(flops) <= ALIKE * min(flops)

    def outside(self, steady: Sequence[Step]) -> float:
        """The share of the script's own code, in steps that were not counted, in which operators ran that gradients flow through,
        outside of any module: what remains without the rest of a counted step's own code, which counting does not lengthen.
        """
        own = {s.number: s.parts_ns[_OTHER] for s in self.steps}
        among = [(c.get("outside_ns", 0), own[n]) for n, c in self.by_step.items() if own.get(n)]
        every = [s.parts_ns[_OTHER] for s in steady]
        if not among or not any(every):
            return 0.0
        outside, rest = median([ns for ns, _ in among]), median([whole - ns for ns, whole in among])
        # the middle step, as those that were counted are: one in sixteen may hold a whole rollout
        return min(outside, max(0.0, median(every) - max(0.0, rest))) / fmean(every)


_START = PARTS.index("loader_start")
WITH_LOADER = ("plain", "no_sync", "muted")
"""Trials in which each batch comes from the script's own loader."""
OCCASIONAL = ("checkpoint", "evaluation", "loader_start", "trainpace")
"""Parts that occur occasionally: their mean needs many steps, and blocks of few steps are compared without them."""

STAGE_STEPS = 20
"""Where trainings or stages have fewer steps each, they are the training's rhythm, as where every sample has an optimizer of its
own, and what prepares them is a part of it. A judgement."""


class FetchCost(Record):
    """Mean milliseconds of the dataset's work: per sample in wall-clock and processor time, and per batch to collate.
    `in_workers`: whether worker processes did it."""

    sample_wall_ms: float
    sample_cpu_ms: float
    collate_ms: float
    batches: int
    in_workers: bool


class Block(Record):
    """Consecutive steps under one trial: their mean without the occasional parts, and the mean of every part."""

    trial: str
    steps: int
    step_ms: float
    parts_ms: dict[str, float]


class Rank(Record):
    """One training process. `parts_ms` are means over `steps` steps after the warm-up and add up to `step_ms`.

    Where operators were counted, those that gradients flow through count as forward also outside of any module.

    `few_operators`: the operators of a step with two samples; 0 where that was not tried. `values_read`: numbers that a forward
    pass takes out of tensors (.item(), if on a tensor).
    `large_operators_ms`: the time of forward and backward in operators longer than a launch; None where not counted.
    `device_busy_ms`: a step's time in which a device that works beside the host computed or copied; None where there is none, or
    nobody looked. `device_copies_ms`: of that, when it only took copies from the host. `device_kernels_ms`: by kernel's name.
    `other_gflops`: of a large matrix product, like `matmul_gflops`, in number formats that an accelerator could use in place of
    fp32. `number_format`: the precision of the second step's forward pass, as `Execution` has it; empty for fp32, or
    where the model was not captured. `stopped`: it was ended on purpose after some steps. `optimizers`: how many made an
    update in a step; 0 where the parameters were changed without a torch optimizer. `accelerator`: the name of the device that
    trained; empty for a CPU. `delayed_share`: of the time in which its training thread could have run, what it waited for a
    core. `model_batch`: the first dimension of the model's input in the second step; 0 where it was not captured.
    `occasions`: the share of steps in which there was an evaluation, or a checkpoint; 0 for none. `stated`: the whole training's
    length, as the script's variables said in its first step; None where none did. `warm_up`: the steps before those that are
    counted. `no_workload`: what of the model Trainpace cannot trace; empty where it could, or nobody tried.
    `beside`: other processes that trained as the same rank at the same time, as under Hogwild, and are left out.
    `after_last_ms`: time by part from the last step's end to the process's, as of an evaluation after the last epoch.
    `ended_in`: the intervention under which it ended; empty where there were none. `carried_out`: it was ended on purpose, with
    all that was asked for done. `fewer_threads`: how many it computed with under the intervention of that name; 0 where there was
    none. `one_row_flops`: of a forward pass's `forward_flops`, of which `product_flops` are matrix products, those by a single
    vector. `products_ms`: a step's time in matrix products. `slow_operators`: of those in forward and backward, each with the
    line of the script that calls it ("" in a backward pass) and its share of all operators' time, the longest first.
    `evaluates_with_gradients`: an evaluation kept what a backward pass would need. `tokens`: of the first steps' inputs, those
    that their mask lets count, those with each sample padded to the longest of its batch, and all positions; 0 without a mask.
    `refuses_bf16`: its model did not bear the intervention. `page_faults`: of a step, those that needed no disk, and
    `page_fault_ns`: what one takes; 0 where they were not counted, as outside of glibc.
    """

    rank: int
    world_size: int
    host: str
    steps: int
    step_ms: float
    step_ms_low: float
    step_ms_high: float
    parts_ms: dict[str, float]
    micro_steps: float
    samples_per_step: float
    cpus: int
    torch: str
    threads: int
    loader: Loader | None = None
    fetch: FetchCost | None = None
    optimizer: str = ""
    optimizer_settings: dict[str, Any] = msgspec.field(default_factory=dict)
    optimizer_numbers: int = 0
    optimizer_tensors: int = 0
    model: str = ""
    wrapped: str = ""
    parameters: int = 0
    ddp: dict[str, Any] = msgspec.field(default_factory=dict)
    lines: tuple[Line, ...] = ()
    blocks: tuple[Block, ...] = ()
    first_step_ms: float = 0.0
    optimizer_variants_ms: dict[str, float] = msgspec.field(default_factory=dict)
    skips_sync: bool = False
    operators: int = 0
    few_operators: int = 0
    values_read: int = 0
    large_operators_ms: float | None = None
    device_busy_ms: float | None = None
    device_copies_ms: float = 0.0
    device_kernels_ms: dict[str, float] = msgspec.field(default_factory=dict)
    flops: float = 0.0
    forward_flops: float = 0.0
    product_flops: float = 0.0
    one_row_flops: float = 0.0
    products_ms: float = 0.0
    matmul_gflops: float = 0.0
    other_gflops: dict[str, float] = msgspec.field(default_factory=dict)
    reserved_gib: float = 0.0
    allocator_retries: float = 0.0
    complete: bool = True
    median_ms: float = 0.0
    median_ms_low: float = 0.0
    median_ms_high: float = 0.0
    number_format: str = ""
    stopped: bool = False
    optimizers: int = 1
    accelerator: str = ""
    delayed_share: float = 0.0
    model_batch: int = 0
    occasions: dict[str, float] = msgspec.field(default_factory=dict)
    stated: StatedLength | None = None
    warm_up: int = 0
    beside: int = 0
    no_workload: str = ""
    ended_in: str = ""
    carried_out: bool = False
    fewer_threads: int = 0
    slow_operators: tuple[tuple[str, str, float], ...] = ()
    evaluates_with_gradients: bool = False
    refuses_bf16: bool = False
    page_faults: float = 0.0
    page_fault_ns: float = 0.0
    tokens: tuple[int, int, int] = (0, 0, 0)
    after_last_ms: dict[str, float] = msgspec.field(default_factory=dict)

    @property
    def ended_among_the_last(self) -> bool:
        """Whether it ended in one of the last interventions, which not every script bears."""
        return self.ended_in in LAST


def rank_of(
    header: dict[str, Any], records: Sequence[Any], workers: Sequence[tuple[Path, int]]
) -> Rank:
    steps = [r for r in records if isinstance(r, Step)]
    by_worker = [list(fetches_of(path)) for path, _ in workers]
    in_workers = [fetch for fetches in by_worker for fetch in fetches]
    usual = _usual(by_worker if in_workers else [[r for r in records if isinstance(r, Fetch)]])
    notes = Notes(records)
    waits_ns = notes.by_step("first_wait_ns")
    started = {s.number for s in steps if s.parts_ns[_START]}
    # where a loader is a batch ahead, its workers end in the step before the one in which they start again
    starts = {number + 1 for number in waits_ns} & started or started
    noted: dict[str, Any] = {"torch": "", "threads": 1, **header}
    noted |= {
        "rank": header["rank"] or 0,
        "world_size": header["world_size"] or 1,
    } | notes.last_of_each()
    noted |= max(
        (n.content for n in notes.with_name("model")), key=lambda m: m["parameters"], default={}
    )
    noted.pop("loader", None)  # one of several, and maybe not of those that fed the training
    counted = Counted(notes.by_step("counted"), steps)
    few = Counted(notes.by_step("counted_few"), steps)
    plain = [s for s in steps if s.trial == 0]
    programme_starts = noted.get("warm_up_steps", 0)
    steady = [
        s for s in plain if s.number >= max(min(WARM_UP_STEPS, len(plain) // 3), programme_starts)
    ] or plain[1:]
    # steps that hold the end of one training, or of one stage, and what prepared the next one
    begins = {number + 1 for number in notes.by_step("begins_anew")}
    left_out = set(counted.by_step) | (begins if STAGE_STEPS * len(begins) <= len(steps) else set())
    steady = [s for s in steady if s.number not in left_out] or steady
    half = half_width_ms([ms(s) for s in steady])
    median_ms, median_ms_low, median_ms_high = steady_ms(steady)
    loader = training_loader(notes, {s.samples // max(1, s.micro_steps) for s in steps[1:]})
    # a stream may fill a buffer first, which is no new process's
    is_stream = loader is None or loader.samples_in_dataset is None
    usual_ns = (
        math.inf if is_stream or not usual else median([f.end_ns - f.start_ns for f in usual])
    )
    first_fetches = _first_fetches_ns(steps, in_workers, waits_ns, usual_ns)
    outside, on_cpu = counted.outside(steady), "accelerator" not in noted
    parts = _inside(_parts(steady), outside) | _occasional(steps, steady, loader, starts)
    # the time in which a worker makes the first batch is waiting for data; what is left is the workers' start
    first_ms = min(
        parts["loader_start"], _once_an_epoch(steps, steady, loader, starts, first_fetches)
    )
    parts |= {"loader_start": parts["loader_start"] - first_ms, "data": parts["data"] + first_ms}
    after = [s for s in steps if s.number >= steady[0].number]
    step_ms = math.fsum(parts.values())
    if "stated" in noted:
        noted["stated"] = msgspec.convert(noted["stated"], StatedLength)
    noted["slow_operators"] = tuple(map(tuple, noted.get("slow_operators", ())))
    noted["tokens"] = tuple(noted.get("tokens", (0, 0, 0)))
    as_noted = {name: value for name, value in noted.items() if name in Rank.__struct_fields__}
    return Rank(
        **as_noted,
        occasions={part: _share_with(after, part) for part in ("checkpoint", "evaluation")},
        steps=len(steady),
        warm_up=sum(s.number < steady[0].number for s in plain),
        step_ms=step_ms,
        step_ms_low=min(step_ms, max(min(map(ms, steady)), step_ms - half)),
        step_ms_high=step_ms + half,
        parts_ms=parts,
        micro_steps=fmean(s.micro_steps for s in steady),
        samples_per_step=fmean(s.samples for s in steady),
        loader=loader,
        fetch=_fetch_cost(usual, bool(in_workers)),
        lines=lines_of(notes),
        blocks=tuple(_blocks(steps, outside)),
        operators=counted.typical("operators"),
        few_operators=few.typical("operators"),
        values_read=counted.typical("values_read"),
        flops=counted.typical("flops"),
        forward_flops=counted.typical("forward_flops"),
        product_flops=counted.typical("product_flops"),
        one_row_flops=counted.typical("one_row_flops"),
        products_ms=counted.typical("products_ns") / 1e6,
        large_operators_ms=(
            _large_operators_ms(counted, outside, steady) if on_cpu and counted.by_step else None
        ),
        carried_out=noted.get("trials") == "complete",
        first_step_ms=ms(steps[0]),
        reserved_gib=max(s.reserved_gib for s in steps),
        allocator_retries=steps[-1].allocator_retries,
        complete="ended" in noted,
        median_ms=median_ms,
        median_ms_low=median_ms_low,
        median_ms_high=median_ms_high,
        after_last_ms={part: ns / 1e6 for part, ns in noted.get("after_last_ns", {}).items()},
    )


def batches_per_step(rank: Rank) -> float:
    """Batches per step: its backward passes, or fewer where a batch has several, as in a GAN."""
    return _batches_per_step(rank.loader, rank.micro_steps, rank.samples_per_step)


def _batches_per_step(loader: Loader | None, micro_steps: float, samples: float) -> float:
    size = loader.batch_size if loader is not None else None
    backward = max(1.0, micro_steps)
    batches = samples / size if size else 0.0
    return min(backward, max(1.0, float(round(batches)))) if batches >= 0.5 else backward


def ms(step: Step) -> float:
    return (step.end_ns - step.start_ns) / 1e6


def _parts(steps: Sequence[Step]) -> dict[str, float]:
    return {part: fmean(s.parts_ns[i] / 1e6 for s in steps) for i, part in enumerate(PARTS)}


def _share_with(steps: Sequence[Step], part: str) -> float:
    return fmean(s.parts_ns[PARTS.index(part)] > 0 for s in steps)


def _occasional(
    steps: Sequence[Step],
    steady: Sequence[Step],
    loader: Loader | None,
    with_start: Collection[int],
) -> dict[str, float]:
    """Means of the occasional parts over all steps after the warm-up, under trials or not. `with_start`: the numbers of the steps
    in which a loader started.

    Under trials not every step uses the loader, so its starts count once per epoch, and evaluations as in steps that do.
    """
    after = [s for s in steps if s.number >= steady[0].number]
    means = _parts(after)
    # repeated batches use none of an epoch up, and an evaluation may get them too
    if own := _on_own_batches(after):
        means["evaluation"] = _parts(own)["evaluation"]
    starts_ns = {s.number: s.parts_ns[_START] for s in after}
    means["loader_start"] = _once_an_epoch(steps, steady, loader, with_start, starts_ns)
    return {part: means[part] for part in OCCASIONAL}


def _on_own_batches(steps: Sequence[Step]) -> list[Step]:
    """The steps for which the loader read, with those that settle before such ones."""
    found, replaced = [], False
    for step in reversed(steps):
        if TRIALS[step.trial] != "settling":
            replaced = TRIALS[step.trial] in REPLACING
        if not replaced:
            found.append(step)
    return found


def _once_an_epoch(
    steps: Sequence[Step],
    steady: Sequence[Step],
    loader: Loader | None,
    with_start: Collection[int],
    spent: Mapping[int, int],
) -> float:
    """The mean over steps, in ms, of what a loader's start takes in some of them (ns by step). Under trials not
    every step uses the loader, so that it counts once per epoch, with the mean of the starts that nothing disturbed.
    """
    after = [s for s in steps if s.number >= steady[0].number]
    undisturbed = [s.number for s in after if TRIALS[s.trial] in WITH_LOADER]
    starts = sum(number in with_start for number in undisturbed)
    if not (any(s.trial for s in steps) and starts and loader is not None and loader.batches):
        return fmean(spent.get(s.number, 0) for s in after) / 1e6
    batches = _batches_per_step(
        loader, fmean(s.micro_steps for s in steady), fmean(s.samples for s in steady)
    )
    return (
        sum(spent.get(number, 0) for number in undisturbed)
        / starts
        / 1e6
        * batches
        / loader.batches
    )


def half_width_ms(times: Sequence[float], blocks: int = 10) -> float:
    """Half of the mean's 90 % interval, from the means of consecutive blocks, since neighbouring steps are correlated."""
    return mean_and_half_width([fmean(block) for block in consecutive_blocks(times, blocks)])[1]


def steady_ms(steps: Sequence[Step], blocks: int = 20) -> tuple[float, float, float]:
    """The median step without occasional parts, and its 90 % interval from the medians of consecutive blocks."""
    occasional = [PARTS.index(part) for part in OCCASIONAL]
    times = [ms(s) - sum(s.parts_ns[i] for i in occasional) / 1e6 for s in steps]
    low, high = median_interval([median(block) for block in consecutive_blocks(times, blocks)])
    middle = median(times)
    return middle, min(low, middle), max(high, middle)


def _usual(by_process: Sequence[Sequence[Fetch]]) -> list[Fetch]:
    """The fetches without the first one of each process, which opens files and imports; all where few others are left."""
    later = [fetch for fetches in by_process for fetch in fetches[1:]]
    return later if len(later) >= 4 else [fetch for fetches in by_process for fetch in fetches]


def _first_fetches_ns(
    steps: Sequence[Step], fetches: Sequence[Fetch], waits_ns: Mapping[int, int], usual_ns: float
) -> dict[int, int]:
    """Of a loader's start, the time that a worker usually takes for a batch, by the step's number: what the first batch takes
    longer is of a new process. `waits_ns`: how long the first batch was waited for, by the number of the step before.
    """
    begun = sorted((f.start_ns, f.end_ns - f.start_ns) for f in fetches)
    found = {}
    for step in steps:
        if wait_ns := min(step.parts_ns[_START], waits_ns.get(step.number - 1, 0)):
            at, end = bisect_left(begun, (step.start_ns, 0)), bisect_left(begun, (step.end_ns, 0))
            # the longest: those before it may be an evaluation's
            found[step.number] = round(
                min(wait_ns, usual_ns, max((took for _, took in begun[at:end]), default=0))
            )
    return found


def _large_operators_ms(counted: Counted, outside: float, steady: Sequence[Step]) -> float:
    """Of forward and backward, and of as much of the script's own code as counts as forward."""
    moved_ms = outside * _parts(steady)["other"]
    return float(
        counted.typical("large_operators_ns") / 1e6
        + min(moved_ms, counted.typical("large_outside_ns") / 1e6)
    )


def _inside(parts: dict[str, float], outside: float) -> dict[str, float]:
    """The parts with this share of the script's own code in the forward pass: operators that gradients flow through."""
    moved = parts["other"] * outside
    return parts | {"forward": parts["forward"] + moved, "other": parts["other"] - moved}


def _blocks(steps: Sequence[Step], outside: float) -> Iterable[Block]:
    settling = TRIALS.index("settling")
    under_trials = dropwhile(lambda step: step.trial != settling, steps)
    for trial, group in groupby(under_trials, key=lambda step: step.trial):
        if trial != settling:
            run = list(group)
            parts = _inside(_parts(run), outside)
            total = math.fsum(v for part, v in parts.items() if part not in OCCASIONAL)
            yield Block(trial=TRIALS[trial], steps=len(run), step_ms=total, parts_ms=parts)


def _fetch_cost(fetches: Sequence[Fetch], in_workers: bool) -> FetchCost | None:
    samples = sum(f.samples for f in fetches)
    if not samples:
        return None
    collate = math.fsum(f.collate_ns for f in fetches) / 1e6
    wall = math.fsum(f.end_ns - f.start_ns for f in fetches) / 1e6
    processor = math.fsum(f.cpu_ns for f in fetches) / 1e6
    return FetchCost(
        sample_wall_ms=max(0.0, wall - collate) / samples,
        sample_cpu_ms=min(max(0.0, processor - collate), max(0.0, wall - collate)) / samples,
        collate_ms=collate / len(fetches),
        batches=len(fetches),
        in_workers=in_workers,
    )


def untraced_in_words(rank: Rank) -> str:
    """That there is no workload, why, and what follows."""
    why = f": {rank.no_workload}" if rank.no_workload else ""
    return (
        f"Trainpace cannot trace this training's model{why}. So there is no forecast of other GPUs"
        " from this recording; all that was measured stands."
    )
