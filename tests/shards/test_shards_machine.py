"""Stateful test of a shard folder with interruptions, kills, damage, and changes of code and settings.

Finished shards stay, messages are true, and a finished run has every sample exactly as in the dataset.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from trainpace.core.errors import Contradiction
from trainpace.core.records import load
from trainpace.shards import (
    Settings,
    ShardDataset,
    computing,
    files,
    precompute,
    precompute_worker,
    user_dataset,
    verify,
)

SAMPLES = 23
CODE = """
class Numbers:
    def __len__(self):
        return {samples}

    def __getitem__(self, index):
        if index == {bad}:
            raise OSError("cannot identify image file")
        return index * {factor}, float(index)
"""


class Killed(BaseException):
    """Raised where SIGKILL would end the process. No file changes afterwards."""


class Files:
    """Count file changes and block all changes from a given moment on, as after SIGKILL."""

    def __init__(self, patch):
        self.left = None
        for where, name in (
            (os, "replace"),
            (os, "link"),
            (Path, "replace"),
            (Path, "unlink"),
            (Path, "write_text"),
        ):
            patch.setattr(where, name, self._counted(getattr(where, name)))

    def _counted(self, change):
        def changed(*arguments, **options):
            if self.left == 0:
                raise Killed
            self.left = None if self.left is None else self.left - 1
            return change(*arguments, **options)

        return changed


class PoolHere:
    """Replacement for `trainpace.core.Pool` that works in this process, one request after another."""

    interrupted_after = None

    def __init__(self, module, target, count, note=None):
        self._target, self._requests = target, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def ask(self, worker, do, **request):
        self._requests.append((worker, do, request))

    def answers(self, what):
        while self._requests:
            worker, do, request = self._requests.pop(0)
            dataset = user_dataset.load_dataset(self._target)
            now = user_dataset.settings_of(dataset)
            if do == "inspect":
                yield (
                    worker,
                    {
                        "inspection": msgspec.to_builtins(
                            precompute_worker.inspect(dataset, self._target, now)
                        )
                    },
                )
            elif do == "fingerprint":
                yield (
                    worker,
                    {
                        "fingerprint": msgspec.to_builtins(
                            user_dataset.fingerprint(dataset, self._target, now)
                        )
                    },
                )
            else:
                if PoolHere.interrupted_after == 0:
                    raise KeyboardInterrupt
                PoolHere.interrupted_after = (
                    PoolHere.interrupted_after and PoolHere.interrupted_after - 1
                )
                plan = msgspec.convert(request["plan"], files.ShardPlan)
                computed, bad = precompute_worker.compute(
                    dataset, plan, request["number"], lambda *_: None
                )
                shard = files.write_shard(
                    Path(request["folder"]), plan, request["number"], computed, bad
                )
                yield worker, {"shard": msgspec.to_builtins(shard)}


class Shards(RuleBasedStateMachine):
    @initialize()
    def begin(self):
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(computing, "Pool", PoolHere)
        self.patch.setattr(user_dataset, "_users_files", lambda: [self.file])
        self.patch.setattr(sys, "path", list(sys.path))
        self.patch.setattr(
            sys, "dont_write_bytecode", True
        )  # A file may change twice within one second.
        self.home = Path(tempfile.mkdtemp(prefix="trainpace-machine-"))
        self.file, self.out = self.home / "numbers_here.py", self.home / "out"
        self.code = {"samples": SAMPLES, "bad": -1, "factor": 3}
        self.file.write_text(CODE.format(**self.code))
        self.begun = None  # the code and the samples a shard of the folder
        self.originals = {}  # of shards in which a byte was changed
        self.files = Files(self.patch)

    def teardown(self):
        self.patch.undo()
        shutil.rmtree(self.home)

    def request(self, shard_samples=None, **more):
        return Settings(
            target=f"{self.file}:Numbers",
            folder=str(self.out),
            workers=2,
            shard_samples=shard_samples,
            max_bad=0.2,
            **more,
        )

    def run(self, request, ended=()):
        """Precompute. Return None if one of `ended` stopped it. It is rejected exactly if the folder was started otherwise."""
        plan = self.text_of(self.out / files.PLAN)
        other = (
            plan
            and not request.again
            and (self.begun[0] != self.code or request.shard_samples not in (None, self.begun[1]))
        )
        before = self.finished()
        if request.again:
            before = {}
        damaged = {n: self.text_of(files.shard_file(self.out, n)) for n in self.originals}
        try:
            done = precompute(request)
        except Contradiction as error:
            assert other, error
            assert before == self.finished()
            return None
        except ended:
            done = None
        assert not other
        self.files.left = PoolHere.interrupted_after = None
        self.originals = {
            n: original
            for n, original in self.originals.items()
            if self.text_of(files.shard_file(self.out, n)) == damaged[n]
        }
        if self.text_of(self.out / files.PLAN) not in (b"", plan):
            self.begun = dict(self.code), load(self.out / files.PLAN, files.ShardPlan).shard_samples
        now = self.finished()
        if not request.again:
            assert {
                n: text for n, text in before.items() if n not in request.repair
            }.items() <= now.items()
        return done

    def text_of(self, file):
        return file.read_bytes() if file.exists() else b""

    def finished(self):
        """Return number and record of every complete shard."""
        here = (
            (int(path.stem.rpartition("-")[2]) for path in self.out.glob("shard-*.json"))
            if self.out.exists()
            else ()
        )
        return {
            n: files.shard_record(self.out, n).read_text()
            for n in here
            if files.finished_shard(self.out, n)
        }

    def changed(self):
        """Return shards of the right length but with other content, which only `verify` finds."""
        contents = {
            n: files.shard_file(self.out, n).read_bytes()
            for n in self.originals
            if n in self.finished()
        }
        return {n for n, content in contents.items() if content != self.originals[n]}

    def check_whole(self, done):
        assert done.finished
        assert not list(self.out.glob(".shard-*"))
        if self.changed():
            return
        data = ShardDataset(self.out)
        good = [i for i in range(SAMPLES) if i != self.code["bad"]]
        assert [data[i] for i in range(len(data))] == [
            (i * self.code["factor"], float(i)) for i in good
        ]
        bad = [
            json.loads(line)["index"]
            for line in (self.out / files.BAD_SAMPLES).read_text().splitlines()
        ]
        assert bad == [i for i in range(SAMPLES) if i == self.code["bad"]]

    # --- runs

    @rule(
        shard_samples=st.sampled_from([None, None, None, 4, 7]),
        again=st.sampled_from([False, False, False, True]),
    )
    def to_the_end(self, shard_samples, again):
        done = self.run(self.request(shard_samples, again=again))
        if done is not None:
            self.check_whole(done)

    @rule(
        left=st.integers(0, 40),
        again=st.sampled_from([False, False, True]),
        shard_samples=st.sampled_from([None, 4]),
    )
    def killed(self, left, again, shard_samples):
        self.files.left = left
        self.run(self.request(shard_samples, again=again), ended=Killed)
        self.files.left = None

    @rule(after=st.integers(0, 6))
    def interrupted(self, after):
        PoolHere.interrupted_after = after
        self.run(self.request(), ended=KeyboardInterrupt)
        PoolHere.interrupted_after = None

    @rule(part=st.integers(0, 2))
    def a_part(self, part):
        done = self.run(self.request(part=part, parts=3))
        if done is not None:
            mine = set(range(part, done.shards_planned, 3))
            assert mine <= self.finished().keys()
            if done.finished:
                self.check_whole(done)

    # --- changes

    @rule(factor=st.sampled_from([2, 3]), bad=st.sampled_from([-1, 0, 9, 22]))
    def change_the_code(self, factor, bad):
        self.code = {"samples": SAMPLES, "bad": bad, "factor": factor}
        self.file.write_text(CODE.format(**self.code))

    @precondition(lambda self: self.out.exists() and list(self.out.glob("shard-*")))
    @rule(data=st.data(), how=st.sampled_from(["flip", "cut", "remove", "empty"]))
    def damage(self, data, how):
        file = data.draw(st.sampled_from(sorted(self.out.glob("shard-*"))))
        number = int(file.stem.rpartition("-")[2])
        content = bytearray(file.read_bytes())
        if how == "flip" and file.suffix == ".parquet" and content:
            if number not in self.originals and number in self.finished():
                self.originals[number] = bytes(content)
            content[data.draw(st.integers(0, len(content) - 1))] ^= 4
            file.write_bytes(content)
        elif how == "cut":
            file.write_bytes(content[: len(content) // 2])
        elif how == "remove":
            os.remove(file)
        else:
            file.write_bytes(b"")

    @rule(name=st.sampled_from([files.MANIFEST, files.BAD_SAMPLES]))
    def lose(self, name):
        with_it = self.out / name
        if with_it.exists():
            os.remove(with_it)

    # --- what is told

    @precondition(lambda self: (self.out / files.PLAN).exists())
    @rule()
    def verify_and_repair(self):
        plan, damaged = verify(self.out)
        numbers = {one.number for one in damaged}
        assert numbers == set(range(plan.shards)) - self.finished().keys() | self.changed()
        done = self.run(self.request(repair=tuple(sorted(numbers))))
        if done is not None:
            assert self.changed() == set()
            self.check_whole(done)
            assert verify(self.out)[1] == []


def run_machine(examples, steps):
    run_state_machine_as_test(
        Shards, settings=settings(max_examples=examples, stateful_step_count=steps)
    )


def test_shards_survive_any_order_of_runs_and_damage():
    run_machine(25, 20)


@pytest.mark.long
def test_shards_survive_long_orders_of_runs_and_damage():
    run_machine(400, 50)
