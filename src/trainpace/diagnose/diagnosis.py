"""Verdict, reasons and next steps for one recording."""

import math
import os
from collections.abc import Iterator, Sequence
from statistics import fmean

from trainpace.core.child import ending_of
from trainpace.core.errors import TrainpaceError
from trainpace.core.records import Record
from trainpace.core.units import format_duration, format_number
from trainpace.diagnose.advice import WORTH, advise
from trainpace.diagnose.loader_advice import core_wait_ms, crowding_cores
from trainpace.diagnose.shares import (
    FEW_SAMPLES,
    IN_WORDS,
    INTERVENTIONS,
    Advice,
    Proof,
    Split,
    kernels_ms,
    of_trial,
    own_pace_ms,
    proof,
    proof_in_words,
    removes_its_cause,
    sets_the_pace,
    split,
)
from trainpace.measure import KERNEL_KINDS
from trainpace.watch import (
    DELAYED,
    STEP_IN_WORDS,
    Rank,
    Recording,
    SlowLink,
    StatedLength,
    Straggler,
    Together,
    stated_length,
    steps_per_epoch,
)

LONGEST_EPOCH_S = 10 * 365 * 86_400
"""Longest plausible epoch, in seconds. A longer one means that the dataset is endless.

Endless datasets often report a very large number as their length.
"""
MOST_OPERATORS, LEAST_OPERATOR = 3, 0.1
"""Maximum number of named operators, and the minimum share of all operators' time for each."""
LEAST_LINE, MOST_LINES = 0.1, 2
LEAST_KIND = 0.02
"""Minimum share of the device's busy time for a kind of kernel to be named."""
MOST_NAMED = 3
DIFFERENT_TIME_MS = 1000.0
"""Smallest difference between clocks that is reported, in milliseconds.

Clocks that a network synchronizes differ by some milliseconds.
"""
FEWEST_STEPS = 20
OWN_CODE_OF_RL = "collecting experience, and the script's other code"
_WAITS = "torch.utils.data.dataloader"
"""Module of DataLoader. A line that calls it only waits for a batch, so it is not named."""


class Share(Record):
    """Milliseconds of the mean step due to one cause, and their share of the step.

    `proved` is True if an intervention or a measurement isolated the cause.
    """

    cause: str
    in_words: str
    ms: float
    share: float
    proved: bool


class Diagnosis(Record):
    """Causes of the step time, and suggested changes. The shares sum to `step_ms`.

    Attributes:
        verdict: The cause with the largest share, apart from Trainpace's own overhead.
        why: Sentences that explain the verdict.
        step_ms_low: Lower end of the interval of `step_ms`.
        step_ms_high: Upper end of the interval of `step_ms`.
        advice: Changes that save at least `WORTH` of the step, the largest saving first.
        not_worth: Changes that save less.
        share_of_roof: FLOP/s of the model relative to a large matmul, or None if unknown.
        job_steps: Steps of the whole training, or None if its length is unknown.
        job_by: Source of that length, or empty if the user gave it.
        together: Stragglers and slow links, if collectives of several ranks were recorded.
    """

    verdict: str
    why: tuple[str, ...]
    step_ms: float
    step_ms_low: float
    step_ms_high: float
    shares: tuple[Share, ...]
    proofs: tuple[Proof, ...]
    advice: tuple[Advice, ...]
    not_worth: tuple[Advice, ...]
    steps_per_epoch: float | None
    epochs: float | None
    share_of_roof: float | None
    job_steps: float | None = None
    job_by: str = ""
    warnings: tuple[str, ...] = ()
    together: Together | None = None

    def seconds_an_epoch(self, ms: float) -> float | None:
        """Convert milliseconds per step into seconds per epoch.

        Returns None if the length of an epoch is unknown, or if the job is shorter than an epoch.
        """
        if self.steps_per_epoch is None or self.steps_per_epoch > (self.job_steps or math.inf):
            return None
        return ms * self.steps_per_epoch / 1000

    def seconds_a_job(self, ms: float) -> float | None:
        """Convert milliseconds per step into seconds of the whole training.

        Returns None if the length of the training is unknown.
        """
        return None if self.job_steps is None else ms * self.job_steps / 1000


def diagnose(recording: Recording, epochs: float | None = None) -> Diagnosis:
    """Diagnose a recorded command.

    Args:
        recording: Recording made by `trainpace.watch`.
        epochs: Epochs of the whole training. By default, the length that the script gives.

    Raises:
        TrainpaceError: If the recording has no training steps. The message says what was seen.
    """
    ranks, crowded = recording.ranks, _is_crowded(recording)
    if not ranks:
        ended = f" It {ending_of(recording.exit_code)}." if recording.exit_code else ""
        raise TrainpaceError(
            f"no training step of the command was seen. {recording.seen}{ended}", STEP_IN_WORDS
        )
    parts = split(ranks, recording.together, crowded)
    if crowded:
        # Operators look slow while their threads wait for cores, so their times prove nothing.
        parts = parts._replace(proved=parts.proved - {"launch", "compute"})
    step = math.fsum(parts.by_cause.values())
    proofs = _proofs(ranks)
    shares = _shares(parts, step, ranks)
    top = next(s for s in shares if s.cause != "trainpace")
    changes = advise(ranks, parts)
    # Judge the changes by the step that remains once no thread waits for a core.
    worth = WORTH * (step - parts.by_cause["threads"])
    each, endless = _steps_per_epoch(ranks[0], step)
    stated = None if epochs is not None else _stated(recording, each)
    job_steps, job_epochs = _length(each, epochs, stated)
    low_ms, high_ms = _step_interval(recording, step)
    return Diagnosis(
        verdict=top.cause,
        why=(*_why(ranks, step, top, proofs), *faults_in_words(recording)),
        warnings=(*_warnings(recording), *endless),
        together=recording.together,
        step_ms=step,
        step_ms_low=low_ms,
        step_ms_high=high_ms,
        shares=tuple(shares),
        proofs=tuple(proofs),
        advice=tuple(a for a in changes if a.saves_ms >= worth),
        not_worth=tuple(a for a in changes if a.saves_ms < worth),
        steps_per_epoch=each,
        job_steps=job_steps,
        job_by="" if stated is None else stated.words,
        epochs=job_epochs,
        # On a crowded machine, other programs slow down the reference matmul as well.
        share_of_roof=None if crowded else _share_of_roof(ranks[0], parts.by_cause["compute"]),
    )


def _shares(parts: Split, step_ms: float, ranks: Sequence[Rank]) -> list[Share]:
    words = IN_WORDS
    if any(rank.collects_experience for rank in ranks):
        words = words | {"own_code": OWN_CODE_OF_RL}
    shares = [
        Share(
            cause=cause,
            in_words=words[cause],
            ms=ms,
            share=ms / step_ms,
            proved=cause in parts.proved,
        )
        for cause, ms in parts.by_cause.items()
    ]
    return sorted(shares, key=lambda s: -s.ms)


def _proofs(ranks: Sequence[Rank]) -> list[Proof]:
    tried = (proof(ranks, trial) for trial in INTERVENTIONS if trial != FEW_SAMPLES)
    return [found for found in tried if found is not None]


def _is_crowded(recording: Recording) -> bool:
    return (
        bool(recording.busy)
        or max((r.delayed_share for r in recording.ranks), default=0) >= DELAYED
    )


def _steps_per_epoch(rank: Rank, step_ms: float) -> tuple[float | None, list[str]]:
    """Return (steps per epoch or None if unknown, a warning if the dataset looks endless)."""
    steps = steps_per_epoch(rank)
    if steps is None:
        return None, []
    seconds = steps * step_ms / 1000
    if seconds <= LONGEST_EPOCH_S:
        return steps, []
    return None, [
        f"the loader reports {steps:,.0f} steps per epoch, which would take"
        f" {format_duration(seconds)}. Its dataset is treated as endless."
    ]


def _stated(recording: Recording, steps_per_epoch: float | None) -> StatedLength | None:
    """Return the training length in the command's arguments, or the one that the script gives.

    The script's length counts if the number of steps is unknown from the command.
    """
    by_command, by_script = stated_length(recording.command), recording.ranks[0].stated
    is_known = by_command is not None and (by_command.steps or steps_per_epoch)
    return by_command if is_known else by_script or by_command


def _length(
    steps_per_epoch: float | None, epochs: float | None, stated: StatedLength | None
) -> tuple[float | None, float | None]:
    """Return (steps, epochs) of the whole training, with None for unknown ones.

    The length that the script gives (`stated`) takes precedence over `epochs`.
    """
    steps: float | None = None
    if stated is not None:
        steps, epochs = stated.steps, stated.epochs
    if epochs is not None and steps_per_epoch is not None:
        steps = epochs * steps_per_epoch
    if steps is not None and steps_per_epoch:
        epochs = steps / steps_per_epoch
    return steps, epochs


def _step_interval(recording: Recording, step_ms: float) -> tuple[float, float]:
    """Return the interval of the step time in ms.

    On a busy machine, the lower end also accounts for the delay by other programs.
    """
    first = recording.ranks[0]
    delayed = max(min(r.delayed_share, 1.0) for r in recording.ranks) if recording.busy else 0.0
    low = step_ms * first.step_ms_low / first.step_ms * (1 - delayed)
    # The fastest block is the one that other programs delayed least.
    blocks = of_trial(first, "plain") if _is_crowded(recording) else []
    return (
        min(low, step_ms, *(block.step_ms for block in blocks)),
        step_ms * first.step_ms_high / first.step_ms,
    )


def _share_of_roof(rank: Rank, compute_ms: float) -> float | None:
    """Return the model's FLOP/s as a share of what a large matmul reached in the same process.

    Returns None if one of the two was not measured.
    """
    if not (rank.flops and rank.matmul_gflops and compute_ms > 0):
        return None
    return rank.flops / (compute_ms * 1e6) / rank.matmul_gflops


def _why(
    ranks: Sequence[Rank], step_ms: float, top: Share, proofs: Sequence[Proof]
) -> Iterator[str]:
    first = ranks[0]
    yield (
        f"{top.share:.0%} of a step ({format_number(top.ms)} of {format_number(step_ms)} ms) goes"
        f" into {top.in_words}."
    )
    for tried in proofs:
        how = INTERVENTIONS[tried.trial]
        if top.cause in how.causes and removes_its_cause(ranks, tried):
            with_ = how.steps_with.format(threads=_count(first.fewer_threads, "thread"))
            yield f"With {with_}, {proof_in_words(tried)}."
    if top.cause == "data" and first.fetch is not None:
        yield _sample_in_words(first)
    if top.cause in ("compute", "launch", "optimizer"):
        yield from _device_in_words(ranks, step_ms)
    # With a GPU, operator times on the host are launch times.
    if top.cause == "compute" and not first.accelerator:
        yield from _slow_operators(first)
    if top.cause in ("compute", "contention") and (beside := workers_beside(ranks)):
        yield beside
    if top.cause != "optimizer":  # its only line would be the call of optimizer.step()
        yield from _lines(first, {"own_code": "other"}.get(top.cause, top.cause))


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' if number > 1 else ''}"


def _sample_in_words(rank: Rank) -> str:
    assert rank.fetch is not None
    workers = rank.loader.workers if rank.loader else 0
    kind = "computing"
    if core_wait_ms(rank) > 0.5 * rank.fetch.sample_wall_ms:
        kind = "waiting for a core"
    elif rank.fetch.sample_cpu_ms < 0.5 * rank.fetch.sample_wall_ms:
        shared = workers > rank.cpus
        kind = f"waiting for storage or for one of {rank.cpus} cores" if shared else "waiting"
    where = f"in {_count(workers, 'worker')}" if workers else "in the training process"
    return (
        f"A sample takes {format_number(rank.fetch.sample_wall_ms)} ms {where}, mostly {kind};"
        f" collating a batch takes {format_number(rank.fetch.collate_ms)} ms."
    )


def _device_in_words(ranks: Sequence[Rank], step_ms: float) -> Iterator[str]:
    """Describe the share of the step that the device is busy, and the kinds of its kernels."""
    busy = [r.device_busy_ms for r in ranks if r.device_busy_ms is not None]
    if not busy:
        return
    by_kind = [
        (ms, KERNEL_KINDS[kind])
        for kind, ms in kernels_ms(ranks).items()
        if ms >= LEAST_KIND * fmean(busy)
    ]
    kinds = [f"{format_number(ms)} ms in {words}" for ms, words in sorted(by_kind, reverse=True)]
    share = min(1.0, fmean(busy) / step_ms)
    note = ""
    if ranks[0].world_size > 1:
        note = " Communication between ranks is not included."
    elif not sets_the_pace(ranks):
        note = " The host sets the pace: faster kernels alone do not shorten the step."
    listed = f": {', '.join(kinds)}" if kinds else ""
    yield f"The device is busy in {share:.0%} of the step{listed}.{note}"


def _slow_operators(rank: Rank) -> Iterator[str]:
    named = [
        f"{share:.0%} is {name.replace('.', '::')}"
        f" ({os.path.basename(line) if line else 'backward'})"
        for name, line, share in rank.slow_operators[:MOST_OPERATORS]
        if share >= LEAST_OPERATOR
    ]
    if named:
        yield f"Of all operators' time, {', '.join(named)}."


def workers_beside(ranks: Sequence[Rank]) -> str:
    """Describe the cores that loader workers take from the training.

    Returns an empty string if there are enough cores.
    """
    if not (busy := crowding_cores(ranks)):
        return ""
    return (
        f"Loader workers keep {busy:.1f} of {ranks[0].cpus} cores busy, where the model computes"
        " too: each slows the other down."
    )


def _lines(rank: Rank, part: str) -> Iterator[str]:
    seen = [
        line
        for line in rank.lines
        if line.part == part and line.share >= LEAST_LINE and _WAITS not in line.called
    ]
    for line in seen[:MOST_LINES]:
        called = f", in {line.called}" if line.called else ""
        yield f"{line.share:.0%} of this time was spent at {line.line}{called}."


def unseen_in_words(rank: Rank) -> str:
    """Name the occasional parts of a training that were not recorded, such as "no evaluation"."""
    unseen = [name for name, share in rank.occasions.items() if not share]
    return f"no {' or '.join(unseen)}" if unseen else ""


def _warnings(recording: Recording) -> Iterator[str]:
    ranks = recording.ranks
    yield from _ended(recording)
    yield from _incomplete(recording)
    if recording.seen:
        yield recording.seen
    yield from clocks_in_words(recording.together)
    fewest = min(r.steps for r in ranks)
    if fewest < FEWEST_STEPS:
        yield f"only {fewest} steps were counted."
    if any(r.blocks or r.stopped for r in ranks) and (unseen := unseen_in_words(ranks[0])):
        yield (
            f"the counted steps had {unseen}; trainpace watch shows what a whole training spends on"
            " that."
        )
    if max(r.allocator_retries for r in ranks):
        yield (
            "the memory allocator had to retry: memory is nearly full, and a smaller batch may be"
            " faster."
        )


def _incomplete(recording: Recording) -> Iterator[str]:
    ranks = recording.ranks
    if not all(r.complete for r in ranks):
        yield "a process was killed, so its last moments may be missing."
    if len(ranks) < ranks[0].world_size:
        yield f"{len(ranks)} of {ranks[0].world_size} ranks were recorded here."
    if _is_crowded(recording) and not recording.busy:
        delayed = min(1.0, max(r.delayed_share for r in ranks))
        yield (
            f"a training process waited for a core in {delayed:.0%} of its time: other programs, or"
            " more threads than cores, slow it down."
        )


def _ended(recording: Recording) -> Iterator[str]:
    """Warn if the command failed, and name the intervention that was running if it was the last."""
    if recording.exit_code in (0, None):
        return
    ended, first = f"the command {ending_of(recording.exit_code)}", recording.ranks[0]
    if all(r.carried_out for r in recording.ranks):
        yield (
            f"{ended} after Trainpace had ended the training; a launcher such as Ray reports that"
            " as a failure. The diagnosis is complete."
        )
    elif first.ended_in_the_last:
        yield (
            f"{ended} in steps with {INTERVENTIONS[first.ended_in].steps_with}, one of the last"
            f" interventions. All earlier steps are counted; --without {first.ended_in} skips it."
        )
    else:
        yield f"{ended}; earlier steps are counted."


def faults_in_words(recording: Recording) -> list[str]:
    """Describe stragglers and slow links between ranks, the most expensive first."""
    found = recording.together
    if found is None:
        return []
    faults = [
        (s.ms, _straggler(s, recording.ranks) + _proved(s, recording.ranks))
        for s in found.stragglers[:MOST_NAMED]
    ]
    faults += [(s.ms, _link(s)) for s in found.slow_links[:MOST_NAMED]]
    lines = [line for _, line in sorted(faults, key=lambda pair: -pair[0])]
    if found.uneven_ms is not None:
        lines.append(
            f"No rank is always behind, but ranks wait {format_number(found.uneven_ms)} ms per step"
            " for the rank with the largest inputs. Batches of similar lengths, or packed"
            " sequences, would save that."
        )
    return lines


def _straggler(s: Straggler, ranks: Sequence[Rank]) -> str:
    same = ", with inputs as large as the others'" if s.elements else ""
    place = "node is" if len({r.host for r in ranks}) > 1 else "device or cores are"
    reason = {
        "inputs": f"in computing: its inputs hold {s.elements:,.0f} elements per step and the"
        f" others' {s.usual_elements:,.0f}, as with longer sequences",
        "compute": f"in computing{same}. Its {place} probably slower, or busy",
        "data": "in waiting for its data, probably because of a slower disk or"
        f" loader{_samples_in_words(s, ranks)}",
    }.get(
        s.cause,
        "neither computing nor waiting for data, such as output, checkpoints or the script's own"
        " code",
    )
    return (
        f"Rank {s.rank} on {s.node} is a straggler, {format_number(s.ms)} ms per step behind"
        f" ({format_number(max(0.0, s.ms_low))} to {format_number(s.ms_high)}):"
        f" {format_number(s.cause_ms)} ms more {reason}."
    )


def _samples_in_words(s: Straggler, ranks: Sequence[Rank]) -> str:
    samples = {r.rank: r.fetch.sample_wall_ms for r in ranks if r.fetch is not None}
    mine = samples.pop(s.rank, 0.0)
    if not (mine and samples):
        return ""
    usual = format_number(fmean(samples.values()))
    return f"; a sample takes {format_number(mine)} ms there and {usual} ms elsewhere"


def _proved(s: Straggler, ranks: Sequence[Rank]) -> str:
    """Describe what interventions show about a straggler.

    Returns an empty string if no intervention ran.
    """
    own = {r.rank: fmean(steps) for r, steps in zip(ranks, own_pace_ms(ranks) or (), strict=False)}
    if s.rank not in own:
        return ""
    mine = own.pop(s.rank)
    shown = (
        f" Without communication between ranks, its step took {format_number(mine)} ms and the"
        f" others' {format_number(fmean(own.values()))} ms."
    )
    cached = proof(ranks, "cached_batch") if s.cause == "data" else None
    if cached is not None and cached.low_ms > 0:
        shown += f" With one cached batch on every rank, {proof_in_words(cached)}."
    return shown


def _link(s: SlowLink) -> str:
    return (
        f"The link from {s.sender} to {s.receiver} is slow: {format_number(s.mbit_per_s)} Mbit/s"
        f" instead of {format_number(s.usual_mbit_per_s)} on the fastest links. It costs"
        f" {'at least ' if s.at_least else ''}{format_number(s.ms)} ms per step."
    )


def clocks_in_words(found: Together | None) -> list[str]:
    """Describe each node whose clock differs from the clock of the first rank's node."""
    clocks = [
        c
        for c in (found.clocks if found else ())
        if abs(c.wall_ms) > max(DIFFERENT_TIME_MS, c.uncertainty_ms)
    ]
    return [
        f"the clock of {c.node} is {format_duration(abs(c.wall_ms) / 1000)}"
        f" {'ahead of' if c.wall_ms > 0 else 'behind'} the clock of the first rank's node."
        " Trainpace corrects for that; times in logs and of files are not corrected."
        for c in clocks[:MOST_NAMED]
    ]
