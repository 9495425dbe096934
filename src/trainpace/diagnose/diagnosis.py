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
from trainpace.diagnose.loader_advice import crowding_cores
from trainpace.diagnose.shares import (
    FEW_SAMPLES,
    IN_WORDS,
    Advice,
    Proof,
    device_in_words,
    leaves_exchange_out,
    of_trial,
    own_pace_ms,
    proof,
    split,
)
from trainpace.watch import (
    DELAYED,
    FEW,
    STEP_IN_WORDS,
    TRIALS,
    Rank,
    Recording,
    SlowLink,
    StatedLength,
    Straggler,
    Together,
    batches_per_step,
    stated_length,
)

LONGEST_EPOCH_S = 10 * 365 * 86_400
"""A longer epoch is none: datasets without an end often give a large number for their length."""
MOST_OPERATORS, LEAST_OPERATOR = 3, 0.1
"""How many operators are named, and the share of all operators' time that each has at least."""


class Share(Record):
    """Milliseconds of the mean step due to one cause. `proved`: an intervention removed or isolated it."""

    cause: str
    in_words: str
    ms: float
    share: float
    proved: bool


class Diagnosis(Record):
    """The causes of a step's time, and what to change. Shares add up to `step_ms`. `together`: what ranks do to each other, where
    several were recorded and their collectives say it."""

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
    """Steps of the whole training, as far as its length is known."""
    job_by: str = ""
    """How the length of the training is known, where nobody said it."""
    warnings: tuple[str, ...] = ()
    together: Together | None = None

    def seconds_an_epoch(self, ms: float) -> float | None:
        """Milliseconds per step as seconds per epoch; None where the epoch's length is unknown, or the job is shorter."""
        if self.steps_per_epoch is None or self.steps_per_epoch > (self.job_steps or math.inf):
            return None
        return ms * self.steps_per_epoch / 1000

    def seconds_a_job(self, ms: float) -> float | None:
        """Milliseconds per step as seconds of the whole training; None where its length is unknown."""
        return None if self.job_steps is None else ms * self.job_steps / 1000


def diagnose(recording: Recording, epochs: float | None = None) -> Diagnosis:
    """The diagnosis of a recorded command. Raises TrainpaceError, with what was seen, for a command without training steps."""
    if not recording.ranks:
        ended = f" It {ending_of(recording.exit_code)}." if recording.exit_code else ""
        raise TrainpaceError(
            f"the command made no training step that could be seen. {recording.seen}{ended}",
            STEP_IN_WORDS,
        )
    ranks = recording.ranks
    parts = split(ranks, recording.together, _is_crowded(recording))
    if _is_crowded(
        recording
    ):  # threads that wait for each other's cores look like operators that compute
        parts = parts._replace(proved=parts.proved - {"launch", "compute"})
    step = math.fsum(parts.by_cause.values())
    proofs = {
        p.trial: p
        for trial in TRIALS[2:]
        if trial != FEW_SAMPLES and (p := proof(ranks, trial)) is not None
    }
    shares = sorted(
        (
            Share(
                cause=c,
                in_words=IN_WORDS[c],
                ms=parts.by_cause[c],
                share=parts.by_cause[c] / step,
                proved=c in parts.proved,
            )
            for c in IN_WORDS
        ),
        key=lambda s: -s.ms,
    )
    verdict = next(s.cause for s in shares if s.cause != "trainpace")
    changes = advise(ranks, parts)
    # once a core is free for every thread, what remains of the step is what other changes are worth something of
    worth = WORTH * (step - parts.by_cause["threads"])
    first = ranks[0]
    batches = first.loader.batches if first.loader is not None else None
    each = batches / batches_per_step(first) if batches is not None else None
    warnings = _warnings(recording)
    if each is not None and each * step / 1000 > LONGEST_EPOCH_S:
        took = format_duration(each * step / 1000)
        warnings.append(
            f"the loader says that an epoch has {each:,.0f} steps, which would take {took}: its"
            " dataset is taken to be endless."
        )
        each = None
    stated = None if epochs is not None else stated_length(recording.command) or first.stated
    job_steps = _job_steps(each, epochs, stated)
    why = (*_why(verdict, ranks, step, shares, proofs), *faults_in_words(recording))
    return Diagnosis(
        verdict=verdict,
        why=why,
        warnings=tuple(warnings),
        together=recording.together,
        step_ms=step,
        step_ms_low=min(
            step * first.step_ms_low / first.step_ms * (1 - _delayed(recording)),
            _undisturbed_step_ms(recording, step),
        ),
        step_ms_high=step * first.step_ms_high / first.step_ms,
        shares=tuple(shares),
        proofs=tuple(proofs.values()),
        advice=tuple(a for a in changes if a.saves_ms >= worth),
        not_worth=tuple(a for a in changes if a.saves_ms < worth),
        steps_per_epoch=each,
        job_steps=job_steps,
        job_by="" if stated is None else stated.words,
        epochs=(
            job_steps / each
            if job_steps is not None and each
            else epochs
            if stated is None
            else stated.epochs
        ),
        # a product that other programs disturbed is no roof
        share_of_roof=(
            None if _is_crowded(recording) else _share_of_roof(first, parts.by_cause["compute"])
        ),
    )


def _job_steps(
    steps_per_epoch: float | None, epochs: float | None, stated: StatedLength | None
) -> float | None:
    """By the epochs that were asked for, else by the steps or the epochs that the command or its script states."""
    if stated is not None:
        if stated.steps is not None:
            return stated.steps
        epochs = stated.epochs
    return None if epochs is None or steps_per_epoch is None else epochs * steps_per_epoch


def _undisturbed_step_ms(recording: Recording, step_ms: float) -> float:
    """On a crowded machine the quickest block of plain steps, which others held up least; elsewhere the step itself."""
    blocks = (
        [b.step_ms for b in of_trial(recording.ranks[0], "plain")] if _is_crowded(recording) else []
    )
    return min([*blocks, step_ms])


def _delayed(recording: Recording) -> float:
    """The share of a step that would be gone at most without the programs that kept the machine busy."""
    return max(min(r.delayed_share, 1.0) for r in recording.ranks) if recording.busy else 0.0


def _share_of_roof(rank: Rank, compute_ms: float) -> float | None:
    """FLOP/s of the model's operators relative to a large matrix product in the same process."""
    if not (rank.flops and rank.matmul_gflops and compute_ms > 0):
        return None
    return rank.flops / (compute_ms * 1e6) / rank.matmul_gflops


def _why(
    verdict: str,
    ranks: tuple[Rank, ...],
    step: float,
    shares: list[Share],
    proofs: dict[str, Proof],
) -> list[str]:
    first = ranks[0]
    top = next(s for s in shares if s.cause == verdict)
    lines = [
        f"{top.share:.0%} of a step ({format_number(top.ms)} of {format_number(step)} ms) goes into"
        f" {top.in_words}."
    ]
    alone = ("no_sync", "no exchange between ranks")
    trials = {
        "data": ("cached_batch", "the same batch again and again"),
        "communication": alone,
        "straggler": alone,
        "logging": ("muted", "output left out"),
        "threads": (
            "fewer_threads",
            f"{first.fewer_threads} thread{'s' if first.fewer_threads > 1 else ''} per process",
        ),
        "host_to_device": ("batch_on_device", "the batch on the device already"),
    }
    trial, what = trials.get(verdict, ("", ""))
    evidence = proofs.get(trial)
    if evidence is not None and (trial != "no_sync" or leaves_exchange_out(ranks, evidence)):
        lines.append(
            f"With {what} a step took {format_number(evidence.without_ms)} ms in place of"
            f" {format_number(evidence.plain_ms)}: {format_number(evidence.saved_ms)} less"
            f" ({format_number(evidence.low_ms)} to {format_number(evidence.high_ms)})."
        )
    if verdict == "data" and first.fetch is not None:
        shared = bool(first.loader and first.loader.workers > first.cpus)
        waits = f"waiting, for storage or for one of {first.cpus} cores" if shared else "waiting"
        kind = (
            waits if first.fetch.sample_cpu_ms < 0.5 * first.fetch.sample_wall_ms else "computing"
        )
        workers = first.loader.workers if first.loader else 0
        where = (
            f"in {workers} worker{'s' if workers > 1 else ''}"
            if workers
            else "in the training process"
        )
        lines.append(
            f"A sample takes {format_number(first.fetch.sample_wall_ms)} ms {where}, mostly {kind};"
            " collating a batch, joining its samples, takes"
            f" {format_number(first.fetch.collate_ms)} ms."
        )
    if verdict in ("compute", "launch", "optimizer"):
        lines += device_in_words(ranks, step)
    # beside a device, the host's times of operators say nothing of what they take
    if (
        verdict == "compute"
        and not first.accelerator
        and (operators := slow_operators_in_words(first))
    ):
        lines.append(operators)
    if verdict in ("compute", "contention") and (beside := workers_beside(ranks)):
        lines.append(beside)
    if verdict == "optimizer":  # the line of its step, which says nothing new
        return lines
    part = {"own_code": "other"}.get(verdict, verdict)
    seen = [
        line
        for line in first.lines
        if line.part == part and line.share >= 0.1 and _WAITS not in line.called
    ][:2]
    places = [f"{line.line}, in {line.called}" if line.called else line.line for line in seen]
    named = [f"{line.share:.0%} of this time was spent at" for line in seen]
    return lines + [f"{name} {place}." for name, place in zip(named, places, strict=True)]


_WAITS = "torch.utils.data.dataloader"
"""What a line calls that waits for a batch, which says nothing new of waiting for data."""


def slow_operators_in_words(rank: Rank) -> str:
    """Which operators take most of forward and backward, and at which lines, as a sentence; empty where none does."""
    named = [
        f"{share:.0%} is {name.replace('.', '::')}"
        f" ({os.path.basename(line) if line else 'backward'})"
        for name, line, share in rank.slow_operators[:MOST_OPERATORS]
        if share >= LEAST_OPERATOR
    ]
    return f"Of all operators' time, {', '.join(named)}." if named else ""


def workers_beside(ranks: Sequence[Rank]) -> str:
    """That loader workers compute on the cores that the training needs, as a sentence; empty where there are cores for both."""
    if not (busy := crowding_cores(ranks)):
        return ""
    return (
        f"Loader workers keep {busy:.1f} of {ranks[0].cpus} cores busy, where the model computes"
        " too: each slows the other down."
    )


def unseen_in_words(rank: Rank) -> str:
    """What a training often has besides its steps and this rank had not, such as "no evaluation"; empty where it had all."""
    unseen = [name for name, share in rank.occasions.items() if not share]
    return f"no {' or '.join(unseen)}" if unseen else ""


def _is_crowded(recording: Recording) -> bool:
    return bool(recording.busy) or max(r.delayed_share for r in recording.ranks) >= DELAYED


def _warnings(recording: Recording) -> list[str]:
    ranks = recording.ranks
    warnings = []
    if recording.exit_code not in (0, None) and all(r.carried_out for r in ranks):
        warnings.append(
            f"the command {ending_of(recording.exit_code)} after Trainpace had ended the training,"
            " which a launcher such as Ray reports as a failure. The diagnosis is complete."
        )
    elif recording.exit_code not in (0, None):
        ended, trial = f"the command {ending_of(recording.exit_code)}", ranks[0].ended_in
        tried = (
            f"tried batches of {FEW} samples" if trial == FEW_SAMPLES else "ran its model in bf16"
        )
        warnings.append(
            f"{ended} while Trainpace {tried}, one of the last interventions. All earlier steps are"
            f" counted; --without {trial} leaves that intervention out."
            if ranks[0].ended_among_the_last
            else f"{ended}; what it did before is counted."
        )
    if not all(r.complete for r in ranks):
        warnings.append("a process was killed: its last moments may be missing.")
    if len(ranks) < ranks[0].world_size:
        warnings.append(f"{len(ranks)} of {ranks[0].world_size} ranks were recorded here.")
    if _is_crowded(recording) and not recording.busy:
        delayed = min(1.0, max(r.delayed_share for r in ranks))
        warnings.append(
            f"a training process waited for a core in {delayed:.0%} of its time: other programs, or"
            " more threads than cores, slow it down."
        )
    if recording.seen:
        warnings.append(recording.seen)
    warnings += clocks_in_words(recording.together)
    fewest = min(r.steps for r in ranks)
    if fewest < 20:
        warnings.append(f"only {fewest} steps were counted.")
    if any(r.blocks or r.stopped for r in ranks) and (unseen := unseen_in_words(ranks[0])):
        warnings.append(
            f"the counted steps had {unseen}; trainpace watch tells what a whole training spends on"
            " that."
        )
    if max(r.allocator_retries for r in ranks):
        warnings.append(
            "the memory allocator had to retry: memory is nearly full, a smaller batch may be"
            " faster."
        )
    return warnings


MOST_NAMED = 3
SET_OTHERWISE_MS = 1000.0
"""Clocks that a network keeps differ by some milliseconds."""


def faults_in_words(recording: Recording) -> list[str]:
    """The one that costs most first; none for one rank alone, and where nothing stands out."""
    found = recording.together
    if found is None:
        return []
    stragglers = [
        (s.ms, _straggler(s, recording.ranks) + _proved(s, recording.ranks))
        for s in found.stragglers[:MOST_NAMED]
    ]
    links = [(s.ms, _link(s)) for s in found.slow_links[:MOST_NAMED]]
    lines = [line for _, line in sorted([*stragglers, *links], key=lambda pair: -pair[0])]
    return lines + list(_rest(found))


def _straggler(s: Straggler, ranks: Sequence[Rank]) -> str:
    between = f"{format_number(max(0.0, s.ms_low))} to {format_number(s.ms_high)}"
    says = (
        f"Rank {s.rank} on {s.node} is a straggler, {format_number(s.ms)} ms a step behind"
        f" ({between})"
    )
    part = f"{format_number(s.cause_ms)} ms more"
    if s.cause == "inputs":
        return (
            f"{says}: {part} in computing, since its inputs hold {s.elements:,.0f} elements a step"
            f" and the others' {s.usual_elements:,.0f}, as with longer sequences."
        )
    if s.cause == "compute":
        same = ", with inputs as large as the others'" if s.elements else ""
        where = "node is" if len({r.host for r in ranks}) > 1 else "device or cores are"
        return f"{says}: {part} in computing{same}: its {where} probably slower, or busy."
    if s.cause == "data":
        mine, usual = _sample_ms(ranks, s.rank)
        reads = (
            f"; a sample takes {format_number(mine)} ms there, elsewhere {format_number(usual)}"
            if mine and usual
            else ""
        )
        return (
            f"{says}: {part} in waiting for its data, probably from a slower disk or loader{reads}."
        )
    return (
        f"{says}: {part} neither computing nor waiting for data, as in output, checkpoints or the"
        " script's own code."
    )


def _proved(s: Straggler, ranks: Sequence[Rank]) -> str:
    """What the interventions say of it: each rank's own pace where nobody waits for another, and a step for which no rank waits
    for data. Empty where they were not tried."""
    paces = own_pace_ms(ranks)
    own = {} if paces is None else {r.rank: ms for r, ms in zip(ranks, paces, strict=True)}
    if s.rank not in own:
        return ""
    mine = own.pop(s.rank)
    says = (
        f" With the exchange between ranks left out, its step took {format_number(mine)} ms and the"
        f" others' {format_number(fmean(own.values()))} ms."
    )
    cached = proof(ranks, "cached_batch") if s.cause == "data" else None
    if cached is not None and cached.low_ms > 0:
        says += (
            f" With one cached batch on every rank, a step took {format_number(cached.without_ms)}"
            f" ms instead of {format_number(cached.plain_ms)}."
        )
    return says


def _sample_ms(ranks: Sequence[Rank], number: int) -> tuple[float, float]:
    mine = [r.fetch.sample_wall_ms for r in ranks if r.fetch is not None and r.rank == number]
    others = [r.fetch.sample_wall_ms for r in ranks if r.fetch is not None and r.rank != number]
    return (mine[0], fmean(others)) if mine and others else (0.0, 0.0)


def _link(s: SlowLink) -> str:
    costs = f"{'at least ' if s.at_least else ''}{format_number(s.ms)} ms a step"
    return (
        f"The link from {s.sender} to {s.receiver} is slow: {format_number(s.mbit_per_s)} Mbit/s"
        f" where the fastest give {format_number(s.usual_mbit_per_s)}; that costs {costs}."
    )


def clocks_in_words(found: Together | None) -> list[str]:
    """Nodes on which it is another time of day."""
    others = (
        [c for c in found.clocks if abs(c.wall_ms) > max(SET_OTHERWISE_MS, c.uncertainty_ms)]
        if found
        else []
    )
    return [
        f"the clock of {c.node} is {format_duration(abs(c.wall_ms) / 1000)}"
        f" {'ahead of' if c.wall_ms > 0 else 'behind'} that of the first rank's node. Trainpace's"
        " results allow for that; times in logs and of files do not."
        for c in others[:MOST_NAMED]
    ]


def _rest(found: Together) -> Iterator[str]:
    if found.uneven_ms is not None:
        yield (
            f"No rank is always behind, but ranks wait {format_number(found.uneven_ms)} ms a step"
            " for the one with the largest inputs: batches of like length, or packed sequences,"
            " would save that."
        )
