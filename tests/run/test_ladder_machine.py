"""Stateful test of climbs with interruptions, failed writes, changed files and changed ladders.

A rung that was measured and kept is not measured again, no other rung is reused, and the result equals one undisturbed climb.
"""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from msgspec.structs import replace

from ladder_world import World, ladder, rung
from trainpace.core.records import load, save
from trainpace.run.climbing import END_TO_END, climb
from trainpace.run.results import LadderResult
from trainpace.run.trial import FailedTrial

RUNGS = {
    "workers": rung("workers", workers=2),
    "more workers": rung("workers", workers=(4, 8)),
    "bf16": rung("bf16", precision="amp_bf16"),
    "micro": rung("micro", micro_batch=(4, 8)),
    "shards": rung("shards"),
    "hangs": rung("hangs", prefetch_factor=7, workers=1),
    "breaks": rung("breaks", pin_memory=True),
}


class Climbs(RuleBasedStateMachine):
    @initialize()
    def begin(self):
        self.folder = Path(tempfile.mkdtemp(prefix="trainpace-machine-"))
        self.file, self.state = self.folder / "train.py", self.folder / "ladder.json"
        self.rungs, self.seconds, self.mended = ["workers", "bf16"], 8.0, False
        self.slow_down(1)

    def teardown(self):
        shutil.rmtree(self.folder)

    def ms_of(self, setup):
        """Return the step time of a setup. Setups differ enough that noise repeats no trial."""
        if setup.loader.prefetch_factor == 7:
            return FailedTrial(kind="timed out", reason="it hung.")
        if setup.loader.pin_memory and not self.mended:
            return FailedTrial(kind="failed", reason="no such device.")
        ms = 100.0 * self.slowness
        ms *= {0: 1.0, 1: 0.8, 2: 0.5, 4: 0.3, 8: 0.4}[setup.loader.workers]
        ms *= 2.0 if setup.execution.precision == "amp_bf16" else 1.0
        ms *= 0.1 if setup.loader.shards else 1.0
        return (
            ms
            * {16: 1.0, 8: 0.7, 4: 2.0}[setup.execution.micro_batch]
            * (0.6 if setup.loader.pin_memory else 1.0)
        )

    @property
    def ladder(self):
        named = ladder(*(RUNGS[name] for name in self.rungs), seconds=self.seconds)
        return replace(named, start=replace(named.start, task=f"{self.file}:task"))

    def world(self):
        world = World(self.ms_of)
        actions = world.actions()._replace(keep=lambda climbed: save(climbed, self.state))
        return world, actions

    def kept(self):
        return load(self.state, LadderResult) if self.state.exists() else None

    @rule(slowness=st.integers(1, 3))
    def slow_down(self, slowness):
        """Change the code and its times."""
        self.slowness = slowness
        self.file.write_text(f"# {slowness}\n")

    @rule(rungs=st.lists(st.sampled_from(sorted(RUNGS)), unique=True, max_size=4))
    def change_the_ladder(self, rungs):
        self.rungs = rungs

    @rule(seconds=st.sampled_from([4.0, 8.0]))
    def change_the_trials(self, seconds):
        self.seconds = seconds

    @rule()
    def mend_the_machine(self):
        """Repair the machine permanently. Measured rungs are not measured again, so a new fault would not be seen."""
        self.mended = True

    @rule(
        after=st.integers(0, 6),
        writing=st.booleans(),
        error=st.sampled_from([KeyboardInterrupt, MemoryError]),
    )
    def climb_and_be_ended(self, after, writing, error):
        """End a climb at a trial or while its state is written. Earlier results remain."""
        before = measured_in(self.kept())
        _, actions = self.world()
        left = iter(range(after))

        def until(action):
            def inner(*arguments):
                if next(left, None) is None:
                    raise error
                return action(*arguments)

            return inner

        actions = (
            actions._replace(keep=until(actions.keep))
            if writing
            else actions._replace(try_it=until(actions.try_it))
        )
        try:
            climb(self.ladder, actions, self.kept())
        except error:
            assert before <= measured_in(self.kept())

    @rule()
    def climb_to_the_end(self):
        before = measured_in(self.kept())
        world, actions = self.world()
        found = climb(self.ladder, actions, self.kept())
        assert replace(self.kept(), others=()) == found
        assert before <= measured_in(self.kept())
        assert found.finished
        new = measured_in(self.kept()) - before
        assert {one.title for one in found.rungs if one.key in new} - {"breaks"} == titles_tried(
            world
        ) - {"breaks"}
        alone = climb(self.ladder, World(self.ms_of).actions())
        assert [what_of(one) for one in found.rungs] == [what_of(one) for one in alone.rungs]
        assert found.kept[0] == alone.kept[0]
        again, actions = self.world()
        assert climb(self.ladder, actions, self.kept()) == found or "breaks" in self.rungs
        assert titles_tried(again) <= {"breaks"}


def titles_tried(world):
    """Return the titles of the tried rungs, without the baseline and earlier setups that may be repeated next to a rung."""
    setups = [
        name
        for _, _, name in world.tried
        if not name.startswith(("baseline", END_TO_END)) and "-before" not in name
    ]
    titles = {name.partition("-again")[0].rstrip("0123456789").rstrip("-") for name in setups}
    return {title.replace("-", " ") for title in titles}


def what_of(result):
    """Return everything that does not depend on earlier trials, such as whether the kept setup was repeated."""
    return (
        result.key,
        result.kept,
        result.chosen,
        [(one.setup, one.failure) for one in result.tried],
    )


def measured_in(state):
    """Return the rungs that need not be measured again."""
    return (
        set()
        if state is None
        else {one.key for one in (*state.rungs, *state.others) if one.lasting}
    )


def run_machine(examples, steps):
    run_state_machine_as_test(
        Climbs, settings=settings(max_examples=examples, stateful_step_count=steps)
    )


def test_climbs_survive_any_order_of_interruptions():
    run_machine(60, 20)


@pytest.mark.long
def test_climbs_survive_long_orders_of_interruptions():
    run_machine(1500, 50)
