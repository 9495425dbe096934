"""Summary of one training process: mean time of each part of a step, and other properties."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import chain, dropwhile, groupby, pairwise
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from trainpace.core.records import Record
from trainpace.core.stats import consecutive_blocks, mean_and_half_width, median, median_interval
from trainpace.watch.event_logs import Line, Loader, Notes, lines_of, training_loader
from trainpace.watch.inside.event_log import (
    CHECKPOINT,
    EVALUATION,
    FEW_SAMPLES,
    LOADER_START,
    MUTED,
    NO_SYNC,
    OTHER,
    PARTS,
    PLAIN,
    REPLACING,
    SETTLING,
    TRIALS,
    Fetch,
    Step,
)
from trainpace.watch.inside.script import StatedLength
from trainpace.watch.stragglers import WARM_UP_STEPS, half_width_ms

ALIKE = 1.05
"""Largest ratio of FLOPs between steps that count as equally large."""
USUAL = 0.8
"""Least share of steps with the most frequent number of backward passes.

Above it, steps with another number only end an epoch.
"""


class Counted(NamedTuple):
    """Operator counts of some steps by step number, and all steps."""

    by_step: dict[int, dict[str, Any]]
    steps: Sequence[Step]

    def typical(self, name: str) -> Any:
        """Return the typical value of a count.

        It is the median, with two exceptions. For times of equally large steps it is the minimum,
        since other programs only make them longer. If some steps have more backward passes than
        others, as in actor-critic trainings, it is the mean, scaled to the backward passes of all
        steps.
        """
        if not self.by_step:
            return 0
        counts = sorted(c.get(name, 0) for c in self.by_step.values())
        passes = {s.number: s.micro_steps for s in self.steps}
        here = [passes.get(number, 0) for number in self.by_step]
        if any(here) and self._vary(passes, here):
            every = fmean(s.micro_steps for s in self.steps[1:] or self.steps)
            return type(counts[0])(fmean(counts) * every / fmean(here))
        return counts[0 if name.endswith("_ns") and self._are_alike() else len(counts) // 2]

    def _vary(self, passes: Mapping[int, int], here: Sequence[int]) -> bool:
        """Return True if not all steps have as many backward passes as the counted steps."""
        usual, often = Counter(passes.values()).most_common(1)[0]
        return set(here) != {usual} or often < USUAL * len(passes)

    def _are_alike(self) -> bool:
        flops = [c.get("flops", 0.0) for c in self.by_step.values()]
        return max(flops) <= ALIKE * min(flops)

    def outside(self, steady: Sequence[Step]) -> float:
        """Return the share of the script's own time in which operators ran outside of any module.

        Only operators with gradients count. They are measured in the counted steps, and the share
        is for `steady`, the steps without counting. Counting does not lengthen the rest of a step's
        own code. So the time outside of modules is what remains without that rest.
        """
        own = {s.number: s.parts_ns[OTHER] for s in self.steps}
        among = [(c.get("outside_ns", 0), own[n]) for n, c in self.by_step.items() if own.get(n)]
        every = [s.parts_ns[OTHER] for s in steady]
        if not among or not any(every):
            return 0.0
        outside, rest = median([ns for ns, _ in among]), median([whole - ns for ns, whole in among])
        # The median, because counted steps are usual steps. One step in sixteen may be a rollout.
        return min(outside, max(0.0, median(every) - max(0.0, rest))) / fmean(every)


WITH_LOADER = (PLAIN, NO_SYNC, MUTED)
"""Trials in which each batch comes from the script's own loader."""
OCCASIONAL = ("checkpoint", "evaluation", "loader_start", "trainpace")
"""Parts that occur only in some steps.

Their mean needs many steps, so short blocks are compared without them.
"""

RARE, MOST_RARE = 10, 0.1
"""Least work of a rare step in multiples of the median, and the largest share of such steps.

A rare step does what comes once in many updates, such as collecting experience for the next 100.
Chosen by hand.
"""
STAGE_STEPS = 20
"""Least number of steps per training or stage for excluding the preparation of each stage.

A judgement. Shorter stages are the normal rhythm of a training, for example if every sample has an
optimizer of its own.
"""


_WORK = [i for i, part in enumerate(PARTS) if part not in (*OCCASIONAL, "data")]


class FetchCost(Record):
    """Mean cost of the dataset's work, in milliseconds.

    Attributes:
        sample_wall_ms: Wall time per sample.
        sample_cpu_ms: CPU time per sample.
        collate_ms: Time per batch to collate.
        batches: Number of measured batches.
        in_workers: Worker processes did the work.
    """

    sample_wall_ms: float
    sample_cpu_ms: float
    collate_ms: float
    batches: int
    in_workers: bool


class Block(Record):
    """Consecutive steps under one trial.

    Attributes:
        step_ms: Mean step time without the occasional parts.
        parts_ms: Mean time of every part.
    """

    trial: str
    steps: int
    step_ms: float
    parts_ms: dict[str, float]


class Rank(Record):
    """Summary of one training process.

    `parts_ms` are means over `steps` steps after the warm-up, and add up to `step_ms`. If operators
    were counted, operators with gradients outside of modules count as forward.

    Attributes:
        few_operators: Operators of a step with two samples, or 0 if that was not tried.
        values_read: Values that a forward pass reads out of tensors, such as `.item()`.
        large_operators_ms: Time of forward and backward in operators that compute longer than a
            launch. None if not counted.
        device_busy_ms: Time per step in which an accelerator computed or copied. None without an
            accelerator, or if not measured.
        device_copies_ms: Part of `device_busy_ms` with only copies from the host.
        device_kernels_ms: Time per step by kernel name.
        other_gflops: Like `matmul_gflops`, for number formats that an accelerator could use instead
            of fp32.
        number_format: Precision of the forward pass in the second step, as in `Execution`. Empty
            for fp32, or if the model was not captured.
        stopped: The process was ended on purpose after some steps.
        optimizers: Optimizers that made an update in a step, or 0 without torch optimizers.
        accelerator: Name of the training device. Empty for a CPU.
        cpu: Name of the host's processor. Empty if unknown.
        delayed_share: Share of its runnable time that the training thread waited for a core.
        model_batch: First dimension of the model's input in the second step, or 0 if it was not
            captured.
        occasions: Share of steps with an evaluation, and with a checkpoint.
        stated: Length of the whole training, from the script's variables in the first step.
        warm_up: Plain steps before the steps that count.
        no_workload: Reason why the model cannot be traced. Empty if it was traced or if tracing was
            not tried.
        beside: Other processes that trained as the same rank at the same time, as in Hogwild. They
            are not counted.
        after_last_ms: Time by part from the end of the last step to the end of the process, such as
            a last evaluation.
        ended_in: Intervention during which the process ended. Empty without interventions.
        carried_out: The process was ended on purpose after all requested work was done.
        fewer_threads: Number of threads in the intervention of that name, or 0 without it.
        one_row_flops: Part of `product_flops` in matrix-vector products.
        product_flops: Part of `forward_flops` in matmuls.
        products_ms: Time per step in matmuls.
        slow_operators: (operator, line of the script, share of the time of all operators), slowest
            first. The line is empty in a backward pass.
        evaluates_with_gradients: An evaluation stored the activations that a backward pass would
            need.
        collects_experience: The policy was called for an environment between updates, as in
            reinforcement learning. This time is the script's own code ("other").
        epoch_steps: Mean steps of the epochs that ended before their loader did, or 0.
        epoch_batches: Batches of an epoch according to Lightning's Trainer, or 0.
        threads_by: Line of the script, or variable of the environment, by which the script set the
            number of threads. Empty if the script did not set it.
        random_samples: Making a sample draws from a global random generator, so parts of it differ
            in every epoch. None if not recorded.
        listed_numbers: Numbers that a sample holds in Python lists, or 0 for few.
        tokens: Three counts over the inputs of the first steps: tokens, tokens with each sample
            padded to the longest of its batch, and all positions. 0 without a mask.
        page_faults: Page faults per step that needed no disk. 0 if not counted, as without glibc.
        page_fault_ns: Time of one page fault in nanoseconds.
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
    model: str = ""
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
    cpu: str = ""
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
    collects_experience: bool = False
    epoch_steps: float = 0.0
    epoch_batches: int = 0
    threads_by: str = ""
    random_samples: bool | None = None
    listed_numbers: int = 0
    page_faults: float = 0.0
    page_fault_ns: float = 0.0
    tokens: tuple[int, int, int] = (0, 0, 0)
    after_last_ms: dict[str, float] = msgspec.field(default_factory=dict)

    @property
    def ended_in_the_last(self) -> bool:
        """True if the process ended in the last intervention, which some scripts do not support."""
        return self.ended_in == TRIALS[FEW_SAMPLES]


class InEpoch(NamedTuple):
    """Length of an epoch as seen, where it ends before its loader does. 0 for unknown.

    Attributes:
        steps: Mean number of steps of the epochs that the script left before the loader's end.
        batches: Number of batches according to Lightning's Trainer.
    """

    steps: float = 0.0
    batches: int = 0


class _Steps(NamedTuple):
    """Steps of a process, with the loader that fed them.

    Attributes:
        every: All steps.
        steady: Plain steps after the warm-up, without the rare ones.
        rare: Steps with work that comes once in many steps.
    """

    every: Sequence[Step]
    steady: Sequence[Step]
    rare: Sequence[Step]
    loader: Loader | None
    in_epoch: InEpoch

    @property
    def steps_per_epoch(self) -> float | None:
        return _steps_per_epoch(self.in_epoch, self.loader, self.micro_steps, self.samples)

    @property
    def after(self) -> list[Step]:
        """All steps after the warm-up."""
        return [s for s in self.every if s.number >= self.steady[0].number]

    @property
    def micro_steps(self) -> float:
        return fmean(s.micro_steps for s in self.steady)

    @property
    def samples(self) -> float:
        return fmean(s.samples for s in self.steady)


def rank_of(
    header: dict[str, Any], records: Sequence[Any], workers: Sequence[Sequence[Any]]
) -> Rank:
    """Summarize a training process with at least two steps.

    Args:
        header: Header of its event log.
        records: Records of its event log.
        workers: Records of the event log of each of its DataLoader workers.
    """
    every, by_worker = [r for r in records if isinstance(r, Step)], list(map(_fetches, workers))
    notes = Notes([*chain.from_iterable(workers), *records])
    logged = _logged(header, notes)
    counted = Counted(notes.by_step("counted"), every)
    unusual = _unusual(every, notes, counted)
    steady = _steady(every, unusual, logged.get("warm_up_steps", 0))
    rare = _rare(every, steady, {*unusual, *notes.by_step("counted_few")})
    seldom = {s.number for s in rare}
    steady = [s for s in steady if s.number not in seldom]
    loader = training_loader(notes, every[1:])
    in_epoch = InEpoch(logged.get("epoch_steps", 0.0), logged.get("epoch_batches", 0))
    steps = _Steps(every, steady, rare, loader, in_epoch)
    in_workers = [fetch for fetches in by_worker for fetch in fetches]
    usual = _usual(by_worker if in_workers else [_fetches(records)])
    outside = counted.outside(steady)
    return Rank(
        **{name: value for name, value in logged.items() if name in Rank.__struct_fields__},
        **_timing(steps, _all_parts(steps, notes, usual, in_workers, outside)),
        **_operators(counted, outside, steady, "accelerator" not in logged),
        few_operators=Counted(notes.by_step("counted_few"), every).typical("operators"),
        loader=steps.loader,
        fetch=_fetch_cost(usual, bool(in_workers)),
        lines=lines_of(notes),
        blocks=tuple(_blocks(every, seldom, outside)),
        carried_out=logged.get("trials") == "complete",
        complete="ended" in logged,
        after_last_ms={part: ns / 1e6 for part, ns in logged.get("after_last_ns", {}).items()},
    )


def _fetches(records: Sequence[Any]) -> list[Fetch]:
    return [r for r in records if isinstance(r, Fetch)]


def _logged(header: dict[str, Any], notes: Notes) -> dict[str, Any]:
    """Return the header and the last note of each name, as fields of `Rank`."""
    logged: dict[str, Any] = {"torch": "", "threads": 1, **header}
    logged |= {"rank": header["rank"] or 0, "world_size": header["world_size"] or 1}
    logged |= notes.last_of_each()
    models = [note.content for note in notes.with_name("model")]
    logged |= max(models, key=lambda model: model["parameters"], default={})
    logged.pop("loader", None)  # It describes one of several loaders, perhaps not the training's.
    if "stated" in logged:
        logged["stated"] = msgspec.convert(logged["stated"], StatedLength)
    logged["slow_operators"] = tuple(map(tuple, logged.get("slow_operators", ())))
    if lengths := notes.values("epoch_steps"):
        logged["epoch_steps"] = fmean(lengths)
    # The training's loader is one of several, and an evaluation seldom augments.
    for name in ("random_samples", "listed_numbers"):
        logged[name] = max(notes.values(name), default=None if name == "random_samples" else 0)
    logged["tokens"] = tuple(logged.get("tokens", (0, 0, 0)))
    return logged


def _unusual(steps: Sequence[Step], notes: Notes, counted: Counted) -> set[int]:
    """Return the numbers of the steps that counting has slowed down or that begin a stage.

    The first step of a later training or stage includes its preparation.
    """
    begins = notes.by_step("begins_anew")
    is_stage = STAGE_STEPS * len(begins) <= len(steps)
    return {*counted.by_step, *(number + 1 for number in begins if is_stage)}


def _steady(steps: Sequence[Step], unusual: Set[int], programme_starts: int) -> list[Step]:
    """Return the plain steps after the warm-up, without the unusual ones."""
    plain = [s for s in steps if s.trial == PLAIN]
    first = max(min(WARM_UP_STEPS, len(plain) // 3), programme_starts)
    steady = [s for s in plain if s.number >= first] or plain[1:]
    return [s for s in steady if s.number not in unusual] or steady


def _rare(steps: Sequence[Step], steady: Sequence[Step], unusual: Set[int]) -> list[Step]:
    """Return the steps after the first ones that do much more than the steady steps.

    Steps with a trial's batches are never rare, because the batches change what they do. Neither
    are the unusual steps.
    """
    most = RARE * median([_work_ns(s) for s in steady])
    own = [s for s in _on_own_batches(steps)[::-1] if s.number > WARM_UP_STEPS]
    rare = [s for s in own if _work_ns(s) > most and s.number not in unusual]
    return rare if len(rare) <= MOST_RARE * len(own) else []


def _work_ns(step: Step) -> int:
    """Return the time of a step without waiting for data and without the occasional parts."""
    return sum(step.parts_ns[i] for i in _WORK)


def per_step(numbers: Sequence[int], steps: Sequence[Step]) -> float:
    """Return how often something comes per step, counted over whole periods.

    Steps with repeated batches do not advance an epoch, so a period with such a step is skipped. A
    single occurrence ends the longest stretch without one.

    Args:
        numbers: Numbers of the steps in which it comes, in order.
        steps: All steps.
    """
    if not numbers:
        return 0.0
    own = {s.number for s in _on_own_batches(steps)}
    periods = [b - a for a, b in pairwise(numbers) if own.issuperset(range(a + 1, b + 1))]
    if periods:
        return len(periods) / sum(periods)
    if len(numbers) > 1:
        return len(own.intersection(numbers)) / max(1, len(own))
    return 1 / max(numbers[0], steps[-1].number - numbers[0], 1)


def _with_rare(steps: _Steps, parts: dict[str, float]) -> dict[str, float]:
    """Add the work of the rare steps, spread over all steps, to the means of the steady steps."""
    if not steps.rare:
        return parts
    often, more = per_step([s.number for s in steps.rare], steps.every), _parts(steps.rare)
    worked = [PARTS[i] for i in _WORK]
    return parts | {p: parts[p] + often * max(0.0, more[p] - parts[p]) for p in worked}


def _all_parts(
    steps: _Steps, notes: Notes, usual: Sequence[Fetch], in_workers: Sequence[Fetch], outside: float
) -> dict[str, float]:
    """Return the mean milliseconds per step of each part."""
    waits_ns = notes.by_step("first_wait_ns")
    started = {s.number for s in steps.every if s.parts_ns[LOADER_START]}
    # If a loader is one batch ahead, its workers end one step before they start again.
    starts = {number + 1 for number in waits_ns} & started or started
    # A stream may fill a buffer first. That does not belong to the start of a process.
    is_stream = steps.loader is None or steps.loader.samples_in_dataset is None
    usual_ns = math.inf
    if usual and not is_stream:
        usual_ns = median([f.end_ns - f.start_ns for f in usual])
    first_fetches = _first_fetches_ns(steps.every, in_workers, waits_ns, usual_ns)
    usual_parts = _with_outside(_parts(steps.steady), outside)
    parts = _with_rare(steps, usual_parts) | _occasional(steps, starts)
    # Making the first batch counts as waiting for data. The rest is the start of the workers.
    first_ms = min(parts["loader_start"], _once_an_epoch(steps, starts, first_fetches))
    parts["loader_start"] -= first_ms
    parts["data"] += first_ms
    return parts


def _timing(steps: _Steps, parts: dict[str, float]) -> dict[str, Any]:
    times = [ms(s) for s in steps.steady]
    after = steps.after
    step_ms = math.fsum(parts.values())
    half = math.hypot(half_width_ms(times), _rare_half_width_ms(steps))
    median_ms, median_ms_low, median_ms_high = steady_ms(steps.steady)
    return {
        "steps": len(times) + sum(s.number >= after[0].number for s in steps.rare),
        "warm_up": sum(s.trial == PLAIN and s.number < after[0].number for s in steps.every),
        "occasions": {
            PARTS[part]: per_step(_steps_with(part, steps.every), steps.every)
            for part in (CHECKPOINT, EVALUATION)
        },
        "first_step_ms": ms(steps.every[0]),
        "step_ms": step_ms,
        "step_ms_low": min(step_ms, max(min(times), step_ms - half)),
        "step_ms_high": step_ms + half,
        "median_ms": median_ms,
        "median_ms_low": median_ms_low,
        "median_ms_high": median_ms_high,
        "parts_ms": parts,
        "micro_steps": steps.micro_steps,
        "samples_per_step": steps.samples,
        "reserved_gib": max(s.reserved_gib for s in steps.every),
        "allocator_retries": steps.every[-1].allocator_retries,
    }


def _rare_half_width_ms(steps: _Steps) -> float:
    """Return the half width of the 90% interval of the rare work per step, in ms."""
    if len(steps.rare) < 2:
        return 0.0
    _, half = mean_and_half_width([_work_ns(s) / 1e6 for s in steps.rare])
    return half * per_step([s.number for s in steps.rare], steps.every)


AS_COUNTED = (
    "operators",
    "values_read",
    "flops",
    "forward_flops",
    "product_flops",
    "one_row_flops",
)


def _operators(
    counted: Counted, outside: float, steady: Sequence[Step], on_cpu: bool
) -> dict[str, Any]:
    large_ms = None
    if on_cpu and counted.by_step:
        # If own code counts as forward, its large operators move with it.
        moved_ms = outside * _parts(steady)["other"]
        moved_ms = min(moved_ms, counted.typical("large_outside_ns") / 1e6)
        large_ms = float(counted.typical("large_operators_ns") / 1e6 + moved_ms)
    return {
        **{name: counted.typical(name) for name in AS_COUNTED},
        "products_ms": counted.typical("products_ns") / 1e6,
        "large_operators_ms": large_ms,
    }


def steps_per_epoch(rank: Rank) -> float | None:
    """Return the steps of an epoch as seen, or by the Trainer or the loader. None if unknown."""
    in_epoch = InEpoch(rank.epoch_steps, rank.epoch_batches)
    return _steps_per_epoch(in_epoch, rank.loader, rank.micro_steps, rank.samples_per_step)


def _steps_per_epoch(
    in_epoch: InEpoch, loader: Loader | None, micro_steps: float, samples: float
) -> float | None:
    batches = in_epoch.batches or (loader.batches if loader is not None else None)
    if in_epoch.steps or not batches:
        return in_epoch.steps or None
    return batches / _batches_per_step(loader, micro_steps, samples)


def batches_per_step(rank: Rank) -> float:
    """Return the number of batches per step.

    It is the number of backward passes, or less if a batch has several (GANs).
    """
    return _batches_per_step(rank.loader, rank.micro_steps, rank.samples_per_step)


def _batches_per_step(loader: Loader | None, micro_steps: float, samples: float) -> float:
    size = loader.batch_size if loader is not None else None
    backward = max(1.0, micro_steps)
    batches = samples / size if size else 0.0
    return min(backward, max(1.0, float(round(batches)))) if batches >= 0.5 else backward


def ms(step: Step) -> float:
    """Return the duration of a step in milliseconds."""
    return (step.end_ns - step.start_ns) / 1e6


def _parts(steps: Sequence[Step]) -> dict[str, float]:
    return {part: fmean(s.parts_ns[i] / 1e6 for s in steps) for i, part in enumerate(PARTS)}


def _occasional(steps: _Steps, with_start: set[int]) -> dict[str, float]:
    """Return the means of the occasional parts per step.

    Evaluations and checkpoints count by their rhythm over whole periods. Under trials, not every
    step uses the loader. Thus starts of the loader count once per epoch. `with_start` holds the
    numbers of the steps in which a loader started.
    """
    means = _parts(steps.after)
    # Repeated batches do not advance the epoch, and an evaluation may receive them too.
    own = _on_own_batches(steps.after)
    for part, among in ((EVALUATION, own), (CHECKPOINT, steps.after)):
        numbers = _steps_with(part, steps.every)
        costs = [s.parts_ns[part] / 1e6 for s in among if s.parts_ns[part]] or [
            s.parts_ns[part] / 1e6 for s in steps.every if s.parts_ns[part]
        ]
        means[PARTS[part]] = fmean(costs or [0.0]) * per_step(numbers, steps.every)
    starts_ns = {s.number: s.parts_ns[LOADER_START] for s in steps.after}
    means["loader_start"] = _once_an_epoch(steps, with_start, starts_ns)
    return {part: means[part] for part in OCCASIONAL}


def _steps_with(part: int, steps: Sequence[Step]) -> list[int]:
    return [s.number for s in steps if s.parts_ns[part]]


def _on_own_batches(steps: Sequence[Step]) -> list[Step]:
    """Return the steps that read from the loader, with the settling steps before them."""
    found, replaced = [], False
    for step in reversed(steps):
        if step.trial != SETTLING:
            replaced = step.trial in REPLACING
        if not replaced:
            found.append(step)
    return found


def _once_an_epoch(steps: _Steps, with_start: set[int], spent_ns: Mapping[int, int]) -> float:
    """Return the mean milliseconds per step of the work at the start of a loader.

    Under trials, not every step uses the loader. The work then counts once per epoch, with the mean
    of the starts outside of batch-replacing trials.
    """
    undisturbed = [s.number for s in steps.after if s.trial in WITH_LOADER]
    starts = len(with_start.intersection(undisturbed))
    per_epoch = steps.steps_per_epoch
    if not (any(s.trial for s in steps.every) and starts and per_epoch):
        return fmean(spent_ns.get(s.number, 0) for s in steps.after) / 1e6
    mean_ms = sum(spent_ns.get(number, 0) for number in undisturbed) / starts / 1e6
    return mean_ms / per_epoch


def steady_ms(steps: Sequence[Step]) -> tuple[float, float, float]:
    """Return the median step time without occasional parts, and its 90% interval, in ms."""
    occasional = [PARTS.index(part) for part in OCCASIONAL]
    times = [ms(s) - sum(s.parts_ns[i] for i in occasional) / 1e6 for s in steps]
    low, high = median_interval([median(block) for block in consecutive_blocks(times, 20)])
    middle = median(times)
    return middle, min(low, middle), max(high, middle)


def _usual(by_process: Sequence[Sequence[Fetch]]) -> list[Fetch]:
    """Return the fetches without the first one of each process, which opens files and imports.

    If fewer than four others are left, all are returned.
    """
    later = [fetch for fetches in by_process for fetch in fetches[1:]]
    return later if len(later) >= 4 else [fetch for fetches in by_process for fetch in fetches]


def _first_fetches_ns(
    steps: Sequence[Step], fetches: Sequence[Fetch], waits_ns: Mapping[int, int], usual_ns: float
) -> dict[int, int]:
    """Return the time of the first fetch within each start of a loader, by step number, in ns.

    The time is at most the usual fetch time. The rest of the first wait belongs to the new process.

    Args:
        steps: All steps.
        fetches: Fetches of the loader's workers.
        waits_ns: Wait for the first batch, by the number of the step before it.
        usual_ns: Usual time of a fetch.
    """
    begun = sorted((f.start_ns, f.end_ns - f.start_ns) for f in fetches)
    found = {}
    for step in steps:
        if wait_ns := min(step.parts_ns[LOADER_START], waits_ns.get(step.number - 1, 0)):
            at, end = bisect_left(begun, (step.start_ns, 0)), bisect_left(begun, (step.end_ns, 0))
            # The longest, because fetches before it may belong to an evaluation.
            found[step.number] = round(
                min(wait_ns, usual_ns, max((took for _, took in begun[at:end]), default=0))
            )
    return found


def _with_outside(parts: dict[str, float], outside: float) -> dict[str, float]:
    """Move the share `outside` of the script's own time to the forward pass."""
    moved = parts["other"] * outside
    return parts | {"forward": parts["forward"] + moved, "other": parts["other"] - moved}


def _blocks(steps: Sequence[Step], rare: Set[int], outside: float) -> Iterable[Block]:
    under_trials = dropwhile(lambda step: step.trial != SETTLING, steps)
    for trial, group in groupby(under_trials, key=lambda step: step.trial):
        run = [step for step in group if step.number not in rare]
        if trial != SETTLING and run:
            parts = _with_outside(_parts(run), outside)
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
    """Return a sentence that the workload is missing, with reason and consequence."""
    why = f": {rank.no_workload}" if rank.no_workload else ""
    return (
        f"Trainpace cannot trace this training's model{why}. So there is no forecast of other GPUs"
        " from this recording; all measurements hold."
    )
