"""Runs for tests of the journal, both ordinary and unusual."""

from hypothesis import strategies as st

from nouns import measurement
from trainpace.core.execution import PRECISIONS, Execution
from trainpace.core.outcome import Interval, StepTime
from trainpace.journal import Entry, Sweep, new_id, now_utc


def entry(model="resnet50", step_time_ms=10.0, batch=8, **fields):
    execution = fields.pop("execution", Execution(micro_batch=batch, optimizer="sgd_momentum"))
    outcome = fields.pop("outcome", "ok" if step_time_ms is not None else "crashed")
    head = {"id": new_id(), "created_at": now_utc(), "kind": "measure", "device": "Tesla T4"}
    return Entry(
        **{
            **head,
            "model": model,
            "execution": execution,
            "step_time_ms": step_time_ms,
            "outcome": outcome,
            **fields,
        }
    )


def whole_entry(**fields):
    m = measurement()
    parts = {
        "step": m.step,
        "interval_ms": m.interval_ms,
        "step_times_ms": m.step_times_ms,
        "warmup_ms": m.warmup_ms,
    }
    return entry(**{**parts, "environment": {"torch": "2.13"}, "peak_memory_gib": 1.5, **fields})


def sweep(**fields):
    head = {
        "id": new_id(),
        "created_at": now_utc(),
        "key": "k",
        "model": "resnet50",
        "device": "cpu",
        "batches": (1, 2),
    }
    return Sweep(**{**head, **fields})


words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)
ids = st.integers(0, 2**128 - 1).map(lambda n: f"{n:032x}")
times = st.datetimes().map(lambda t: f"{t.isoformat(timespec='microseconds')}Z".rjust(27, "0"))
amounts = st.floats(0, 1e300, allow_subnormal=True)
sizes = st.integers(1, 2**31)


def maybe(strategy):
    return st.none() | strategy


@st.composite
def entries(draw):
    outcome = draw(st.sampled_from(["ok", "out_of_memory", "timeout", "crashed"]))
    low, high = sorted((draw(amounts), draw(amounts)))
    interval = Interval(low=low, high=high, coverage=draw(st.floats(0.01, 0.99)), basis=draw(words))
    parts = StepTime(forward_ms=draw(amounts), idle_ms=draw(amounts))
    execution = Execution(
        micro_batch=draw(sizes),
        accumulation=draw(sizes),
        precision=draw(st.sampled_from(PRECISIONS)),
        optimizer=draw(words),
        compile=draw(st.booleans()),
        zero_stage=draw(st.sampled_from([0, 3])),
    )
    return Entry(
        id=draw(ids),
        created_at=draw(times),
        kind=draw(st.sampled_from(["measure", "watch", "run", "import"])),
        outcome=outcome,
        model=draw(words),
        device=draw(words),
        execution=execution,
        reason=draw(words),
        num_devices=draw(sizes),
        sequence_length=draw(maybe(sizes)),
        image_size=draw(maybe(sizes)),
        mode=draw(words),
        step_time_ms=draw(amounts) if outcome == "ok" else None,
        interval_ms=draw(st.sampled_from([None, interval])),
        step=draw(st.sampled_from([None, parts])),
        step_times_ms=tuple(draw(st.lists(amounts, max_size=4))),
        losses=tuple(
            draw(st.lists(maybe(st.floats(allow_nan=False, allow_infinity=False)), max_size=3))
        ),
        peak_memory_gib=draw(maybe(amounts)),
        reserved_memory_gib=draw(maybe(amounts)),
        sweep=draw(maybe(ids)),
        forecast_ms=draw(maybe(amounts)),
        forecast_basis=draw(words),
        seed=draw(maybe(st.integers(-(2**53), 2**53))),
        environment=draw(st.dictionaries(words, words, max_size=3)),
        commit=draw(maybe(words)),
        command=draw(words),
        notes=draw(words),
        source=draw(words),
        workload_key=draw(maybe(words)),
        loss=draw(maybe(words)),
    )
