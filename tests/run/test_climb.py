"""The climb over a simulated world keeps changes that help and undoes the others."""

import pytest
from msgspec.structs import replace

from ladder_world import LOSSES, World, ladder, result, rung
from trainpace.core.errors import TrainpaceError, UserCodeError
from trainpace.core.records import from_json, to_json
from trainpace.job import Schedule
from trainpace.run.climbing import END_TO_END, climb, preview
from trainpace.run.results import LadderResult, rows_of
from trainpace.run.trial import FailedTrial


def by(setup):
    """Return a step of 100 ms. Workers halve it, bf16 makes it worse, shards divide it by ten, a larger micro-batch saves a little."""
    ms = 100.0
    ms /= 2 if setup.loader.workers else 1
    ms *= 2 if setup.execution.precision == "amp_bf16" else 1
    ms /= 10 if setup.loader.shards else 1
    return ms * {16: 1.0, 8: 1.5, 4: 2.0}[setup.execution.micro_batch]


def test_climb_keeps_gains_and_undoes_losses():
    world = World(by)
    found = climb(
        ladder(rung("workers", workers=2), rung("bf16", precision="amp_bf16"), rung("shards")),
        world.actions(),
    )
    assert [r.kept for r in found.rungs] == [True, False, True]
    assert found.rungs[1].reason.startswith("slower: 0.50x")
    setup, measured = found.kept
    assert (setup.execution.precision, setup.loader.workers, setup.loader.shards) == (
        "fp32",
        2,
        "shards",
    )
    assert measured.step_time_ms == 5
    assert world.precomputed == ["train.py:photos"]
    assert found.finished
    assert world.kept[-1] == found


def test_fastest_alternative_of_a_rung_is_kept():
    start = ladder(rung("micro-batch", micro_batch=(4, 16, 8)))
    start = replace(
        start,
        start=replace(
            start.start, execution=replace(start.start.execution, micro_batch=4, accumulation=4)
        ),
    )
    found = climb(start, World(by).actions())
    assert found.rungs[0].chosen == 1
    assert found.kept[0].execution.micro_batch == 16


def test_impossible_alternatives_are_skipped():
    found = climb(
        ladder(rung("five", micro_batch=5), rung("some", micro_batch=(5, 16), workers=2)),
        World(by).actions(),
    )
    assert not found.rungs[0].kept
    assert "does not divide" in found.rungs[0].reason
    assert found.rungs[1].chosen == 1
    assert "does not divide" in found.rungs[1].tried[0].failure


def test_diverging_rung_is_undone_even_if_faster():
    def ms_of(setup):
        if setup.execution.precision != "amp_bf16":
            return 100.0
        return result(10.0, [loss + 0.5 * i / 40 for i, loss in enumerate(LOSSES)])

    found = climb(ladder(rung("bf16", precision="amp_bf16")), World(ms_of).actions())
    assert not found.rungs[0].kept
    assert found.rungs[0].losses.verdict == "diverges"
    assert found.rungs[0].gain.faster


@pytest.mark.parametrize("kind", ["timed out", "out of memory", "failed", "misuse"])
def test_failed_or_hanging_rung_is_undone_with_reason(kind):
    def ms_of(setup):
        return FailedTrial(kind=kind, reason="it went wrong.") if setup.loader.workers else 100.0

    found = climb(ladder(rung("workers", workers=2), rung("shards")), World(ms_of).actions())
    assert not found.rungs[0].kept
    assert found.rungs[0].reason == f"{kind}: it went wrong."
    assert found.rungs[1].tried[0].setup.loader.workers == 0


def test_failing_baseline_ends_the_climb():
    with pytest.raises(UserCodeError):
        climb(
            ladder(rung("shards")),
            World(lambda _: FailedTrial(kind="failed", reason="no disk.")).actions(),
        )


def test_failed_precompute_undoes_shards_rung():
    world = World(by)
    actions = world.actions()._replace(
        precompute=lambda _: (_ for _ in ()).throw(TrainpaceError("the disk is full."))
    )
    found = climb(ladder(rung("shards"), rung("workers", workers=1)), actions)
    assert [r.kept for r in found.rungs] == [False, True]
    assert "the disk is full" in found.rungs[0].reason


def test_close_times_are_repeated_alternately():
    world = World(lambda setup: 98.0 if setup.loader.workers else 100.0)
    found = climb(ladder(rung("workers", workers=1)), world.actions())
    again = [(s.loader.workers, name) for s, _, name in world.tried if "again" in name]
    assert [workers for workers, _ in again] == [0, 1, 0, 1]
    assert found.rungs[0].gain.trials == 5
    assert len(found.rungs[0].best.measured.trials_ms) == 3


def test_first_and_last_setup_are_compared_end_to_end():
    """The machine is slow in the two baseline trials, so the product of the rungs exceeds the end-to-end speed-up."""
    trials = iter(range(100))

    def ms_of(setup):
        return (2.0 if next(trials) < 2 else 1.0) * by(setup)

    world = World(ms_of)
    found = climb(ladder(rung("workers", workers=2), rung("shards")), world.actions())
    ends = [
        (setup.loader.workers, setup.loader.shards)
        for setup, _, name in world.tried
        if name.startswith(END_TO_END)
    ]
    assert ends == [(0, None), (2, "shards")] * 2
    assert found.end_to_end.first_ms == (100.0, 100.0)
    assert found.end_to_end.last_ms == (5.0, 5.0)
    assert found.end_to_end.gain.ratio == pytest.approx(20)
    assert rows_of(found)[-1].total == pytest.approx(40)


def test_failed_end_to_end_trial_falls_back_to_product():
    world = World(by)
    plain = world.try_it

    def try_it(setup, seed, name):
        failed = name.startswith(END_TO_END) and setup.loader.shards
        return FailedTrial(kind="failed", reason="no disk.") if failed else plain(setup, seed, name)

    world.try_it = try_it
    found = climb(ladder(rung("workers", workers=2), rung("shards")), world.actions())
    assert found.finished
    assert found.end_to_end is None
    assert world.said[-1] == "one of them failed: the total is the product of the rungs' speed-ups"


def test_single_kept_rung_skips_end_to_end_trials():
    world = World(by)
    found = climb(
        ladder(rung("workers", workers=2), rung("bf16", precision="amp_bf16")), world.actions()
    )
    assert found.end_to_end is None
    assert not [name for _, _, name in world.tried if name.startswith(END_TO_END)]


def test_baseline_is_measured_with_two_seeds():
    world = World(by)
    climb(ladder(rung("workers", workers=1), seed=7), world.actions())
    assert [seed for _, seed, _ in world.tried] == [7, 8, 7]


def test_climb_stops_early_only_on_request():
    rungs = (rung("bf16", precision="amp_bf16"), rung("workers", workers=2))
    assert len(climb(ladder(*rungs), World(by).actions()).rungs) == 2
    early = climb(ladder(*rungs), World(by).actions(), stop_early=True)
    assert len(early.rungs) == 1
    assert not early.finished
    assert "bf16" in early.stopped


def test_interrupted_climb_resumes_without_repeating_trials():
    rungs = (rung("workers", workers=2), rung("shards"), rung("bf16", precision="amp_bf16"))
    world = World(by)
    world.try_it = _interrupted_at(world.try_it, 4)
    with pytest.raises(KeyboardInterrupt):
        climb(ladder(*rungs), world.actions())
    state = from_json(to_json(world.kept[-1]), LadderResult)
    assert [r.title for r in state.rungs] == ["workers"]
    second = World(by)
    found = climb(ladder(*rungs), second.actions(), state)
    assert [name for _, _, name in second.tried if not name.startswith(END_TO_END)] == [
        "shards-0",
        "bf16-0",
    ]
    assert found == replace(
        climb(ladder(*rungs), World(by).actions()), rungs=found.rungs, baseline=found.baseline
    )


def _interrupted_at(try_it, count):
    left = iter(range(count - 1))

    def inner(*arguments):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return try_it(*arguments)

    return inner


def test_resume_reuses_only_unchanged_rungs():
    rungs = (rung("workers", workers=2), rung("shards"))
    done = climb(ladder(*rungs), World(by).actions())
    for other in (
        ladder(rung("workers", workers=(1, 2)), rungs[1]),  # other settings
        ladder(rungs[1], rungs[0]),  # different earlier rungs
    ):
        world = World(by)
        climb(other, world.actions(), done)
        assert {name for _, _, name in world.tried} >= {"shards-0"} or "workers-1" in str(
            world.tried
        )
        assert "baseline" not in {name for _, _, name in world.tried}
    world = World(by)
    climb(replace(ladder(*rungs), seconds=1.0), world.actions(), done)  # another kind of trial
    assert len([name for _, _, name in world.tried if not name.startswith(END_TO_END)]) == 4
    world = World(by)
    assert climb(ladder(*rungs), world.actions(), done) == done
    assert world.tried == []


@pytest.mark.parametrize(
    ("kind", "again"), [("timed out", 0), ("out of memory", 0), ("misuse", 1), ("failed", 1)]
)
def test_resume_retries_failures_that_may_be_fixed(kind, again):
    rungs = ladder(rung("workers", workers=2))
    failing = World(lambda s: FailedTrial(kind=kind, reason="x.") if s.loader.workers else 100.0)
    done = climb(rungs, failing.actions())
    world = World(by)
    assert climb(rungs, world.actions(), done).rungs[0].kept == bool(again)
    assert len(world.tried) == again


def test_changed_global_batch_is_compared_per_sample():
    world = World(lambda setup: 100.0 if setup.execution.global_batch == 16 else 200.0)
    found = climb(
        ladder(rung("64", global_batch=64, micro_batch=16), allow_global_batch=True),
        world.actions(),
    )
    assert found.rungs[0].kept
    assert found.rungs[0].gain.ratio == pytest.approx(2)
    assert found.rungs[0].losses.verdict == "not compared"


def test_every_measured_alternative_is_journaled():
    world = World(by)
    climb(ladder(rung("micro", micro_batch=(4, 8)), job=Schedule(max_steps=10)), world.actions())
    assert [t.setup.execution.micro_batch for t in world.journal] == [16, 4, 8]


def test_preview_starts_no_trial():
    world = World(by)
    ahead = preview(
        ladder(rung("shards"), rung("five", micro_batch=5), rung("workers", workers=(1, 2))),
        world.actions(),
    )
    assert world.tried == world.precomputed == []
    assert [a.title for a in ahead] == ["baseline", "shards", "five", "workers"]
    assert ahead[2].attempts[0].failure
    assert [len(a.attempts) for a in ahead] == [1, 1, 1, 2]
