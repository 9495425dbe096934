"""Recording of sweeps in the journal, probe by probe, so that they can be resumed."""

import hashlib
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from trainpace.forecast import Forecaster
from trainpace.journal.entry import Sweep, anonymous, entry_of, new_id, now_utc, probe_of, signed
from trainpace.journal.knowledge import with_forecast, workload_key
from trainpace.journal.store import Journal
from trainpace.measure import Conditions, Outcome, SweepPlan, run_sweep


class Circumstances(NamedTuple):
    """Facts that are stored with every run of a sweep.

    `command` is the command that started the sweep, or "". With `keep_identity`, names and paths
    are stored as they are.
    """

    device: str
    command: str = ""
    commit: str | None = None
    notes: str = ""
    versions: str = ""
    keep_identity: bool = False


def program_command() -> str:
    """Return the command that started this Python program, to store with its runs.

    It is "" in a notebook, in an interactive session and for `python -c`.
    """
    main = sys.modules.get("__main__")
    notebook = "ipykernel" in sys.modules or hasattr(sys, "ps1")
    return "" if notebook or not getattr(main, "__file__", None) else shlex.join(sys.orig_argv)


class RecordedSweep(NamedTuple):
    """A sweep's id and all its outcomes.

    `resumed` is the number of outcomes that an earlier, interrupted sweep had measured.
    """

    id: str
    outcomes: list[Outcome]
    resumed: int


def record_sweep(
    journal: Journal,
    conditions: Conditions,
    plan: SweepPlan,
    circumstances: Circumstances,
    forecaster: Forecaster | None = None,
    hints: Sequence[int] = (),
    tell: Callable[[int, int], None] = lambda batch, finished: None,
    fresh: bool = False,
) -> RecordedSweep:
    """Measure a sweep and store each outcome in the journal.

    An unfinished sweep with the same conditions is resumed, unless `fresh` is True.
    """
    c = circumstances
    key = sweep_key(conditions, plan, c, forecaster)
    sweep = None if fresh else journal.open_sweep(key)
    if sweep is None:
        private = str if c.keep_identity else anonymous
        sweep = Sweep(
            id=new_id(),
            created_at=now_utc(),
            key=key,
            model=private(conditions.model),
            device=c.device,
            batches=plan.batches,
            command=private(c.command),
        )
        journal.add(sweep)
    done = [probe_of(entry) for entry in journal.sweep_entries(sweep.id)]

    def store(outcome: Outcome) -> None:
        entry = entry_of(
            outcome,
            keep_identity=c.keep_identity,
            sweep=sweep.id,
            command=c.command,
            commit=c.commit,
            notes=c.notes,
            seed=conditions.seed,
            device=c.device,
        )
        entry = signed(entry, c.keep_identity)
        if forecaster is not None:
            key = workload_key(forecaster.workload, entry.execution)
            table = forecaster.at([entry.execution])
            entry = with_forecast(replace(entry, workload_key=key), table)
        journal.add(entry)

    outcomes = run_sweep(conditions, plan, c.device, store, done, hints, tell)
    journal.finish_sweep(sweep)
    return RecordedSweep(sweep.id, outcomes, len(done))


def sweep_key(
    conditions: Conditions,
    plan: SweepPlan,
    circumstances: Circumstances,
    forecaster: Forecaster | None,
) -> str:
    """Return a key that is equal for sweeps whose runs belong to the same curve.

    The conditions, the machine, the software and the code must be the same.
    """
    question = msgspec.json.encode((conditions, plan, circumstances.device, circumstances.versions))
    workload = (
        "" if forecaster is None else workload_key(forecaster.workload, conditions.execution(1))
    )
    return hashlib.sha256(question + workload.encode()).hexdigest()[:32]
