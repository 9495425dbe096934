"""Stateful test of a journal with failed writes and killed writers: it holds exactly what it acknowledged."""

import os
import resource
import shutil
import signal
import sqlite3
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)
from msgspec.structs import replace

from entries import entry, sweep
from trainpace.core.errors import TrainpaceError, UnknownName, UnreadableInput
from trainpace.core.records import from_json, to_json
from trainpace.journal import Journal, Query, export, import_file, share, store
from trainpace.journal.sharing import SharedRuns

CHUNK = 3
"""In place of a thousand, so that a few runs are written in several statements of one transaction."""
MODELS, DEVICES = ("resnet18", "resnet50", "gpt2"), ("Tesla T4", "NVIDIA A100-SXM4-40GB")
# Few first digits and few times, so prefixes match several runs and times coincide.
ids = st.builds("{:x}{:031x}".format, st.integers(0, 3), st.integers(0, 2**124 - 1))
times = st.integers(0, 20).map(lambda second: f"2026-11-24T00:00:{second:02d}.000000Z")
made = st.builds(
    entry,
    model=st.sampled_from(MODELS),
    device=st.sampled_from(DEVICES),
    id=ids,
    created_at=times,
    step_time_ms=st.sampled_from([None, 10.0, 12.5]),
    kind=st.sampled_from(["measure", "run", "import"]),
    notes=st.text("ab%_' ", max_size=5),
)


class OnlyPartly(Exception):
    """Error that the source of runs raises midway."""


class TheJournal(RuleBasedStateMachine):
    known = Bundle("known")

    @initialize()
    def begin(self):
        self.folder = Path(tempfile.mkdtemp(prefix="trainpace-machine-"))
        self.place = str(self.folder / "journal.db")
        self.runs, self.sweeps = {}, {}
        self.journal = Journal.open(self.place)

    def teardown(self):
        self.journal.close()
        with sqlite3.connect(self.place) as database:
            assert database.execute("pragma integrity_check").fetchall() == [("ok",)]
        database.close()
        shutil.rmtree(self.folder)

    def expect(self, entries):
        for one in entries:
            self.runs.setdefault(one.id, one)

    # --- what is written

    @rule(target=known, one=made)
    def add(self, one):
        assert self.journal.add(one) == (one.id not in self.runs)
        self.expect([one])
        return one.id

    @rule(target=known, some=st.lists(made, max_size=3 * CHUNK), again=st.data())
    def add_many(self, some, again):
        if self.runs:
            some = [
                *some,
                again.draw(st.sampled_from(sorted(self.runs.values(), key=lambda one: one.id))),
            ]
        new = {one.id for one in some} - self.runs.keys()
        assert self.journal.add_many(some) == len(new)
        self.expect(some)
        return multiple(*new)

    @rule(some=st.lists(made, min_size=1, max_size=3 * CHUNK))
    def add_from_a_source_that_breaks(self, some):
        def source():
            yield from some
            raise OnlyPartly

        with pytest.raises(OnlyPartly):
            self.journal.add_many(source())

    @rule(some=st.lists(made, min_size=CHUNK, max_size=3 * CHUNK), room=st.integers(0, 40_000))
    def add_to_a_disk_that_runs_full(self, some, room):
        some = [replace(one, reason="long " * 2000) for one in some]
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        sizes = [
            path.stat().st_size
            for path in self.folder.glob("journal.db*")
            if not path.name.endswith("-shm")
        ]
        resource.setrlimit(resource.RLIMIT_FSIZE, (max(sizes) + room, before[1]))
        try:
            self.journal.add_many(some)
        except UnreadableInput:  # Then none of the runs is stored.
            return
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        self.expect(some)

    @rule(
        some=st.lists(made, min_size=1, max_size=3 * CHUNK),
        at=st.integers(0, 3 * CHUNK),
        kept=st.lists(made, max_size=2),
    )
    def a_writer_is_killed(self, some, at, kept):
        """Let another process store some runs and die of SIGKILL during or right after further writes."""
        self.journal.close()
        child = os.fork()
        if child == 0:
            try:
                with Journal.open(self.place) as journal:
                    journal.add_many(kept)

                    def source():
                        for number, one in enumerate(some):
                            if number == at:
                                os.kill(os.getpid(), signal.SIGKILL)
                            yield one

                    journal.add_many(source())
                os.kill(os.getpid(), signal.SIGKILL)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        self.expect(kept)
        if at >= len(some):
            self.expect(some)
        self.journal = Journal.open(self.place)

    @rule(id_=known, notes=st.text("ab%_' ", max_size=5))
    def annotate(self, id_, notes):
        if id_ in self.runs:
            self.runs[id_] = replace(self.runs[id_], notes=notes)
            assert self.journal.annotate(id_, notes) == self.runs[id_]
        else:
            with pytest.raises(UnknownName):
                self.journal.annotate(id_, notes)

    @rule(id_=consumes(known))
    def delete(self, id_):
        if id_ in self.runs:
            assert self.journal.delete(id_) == self.runs.pop(id_)
        with pytest.raises(UnknownName):
            self.journal.delete(id_)

    @rule(id_=ids, time=times, key=st.sampled_from("kl"), finish=st.booleans())
    def sweep(self, id_, time, key, finish):
        one = self.sweeps.setdefault(id_, sweep(id=id_, created_at=time, key=key))
        self.journal.add(one)
        if finish:
            self.sweeps[id_] = self.journal.finish_sweep(one)

    # --- how it leaves, and comes back

    @rule(suffix=st.sampled_from([".json", ".csv", ".parquet"]))
    def export_and_import(self, suffix):
        file = self.folder / f"exported{suffix}"
        assert export(file, self.journal.every()) == len(self.runs)
        if self.runs:
            back = import_file(self.journal, file)
            assert (back.new, back.already_there) == (0, len(self.runs))
            with Journal.open(str(self.folder / "other.db")) as other:
                assert import_file(other, file).new == len(self.runs)
                assert {one.id: one for one in other.every()} == self.runs
            for path in self.folder.glob("other.db*"):
                path.unlink()

    @rule(some=st.lists(made, min_size=1, max_size=2 * CHUNK), at=st.integers(0, 5000))
    def import_a_damaged_file(self, some, at):
        file = self.folder / "damaged.json"
        export(file, some)
        file.write_bytes(file.read_bytes()[:at])
        try:
            import_file(self.journal, file)
        except UnreadableInput:  # Then none of the runs is stored.
            return
        self.expect(some)

    @rule()
    def share_them(self):
        shared = share(self.journal.every()).runs
        own = [
            one
            for one in self.runs.values()
            if one.kind != "import" and one.step_time_ms is not None
        ]
        assert len(shared.runs) == len(own)
        assert from_json(to_json(shared), SharedRuns) == shared

    # --- what it says

    @rule(reading=st.booleans())
    def reopen(self, reading):
        self.journal.close()
        if reading:
            with Journal.open(self.place, create=False, read_only=True) as journal:
                assert {one.id: one for one in journal.every()} == self.runs
                with pytest.raises(UnreadableInput):
                    journal.add(entry())
        self.journal = Journal.open(self.place)

    @rule(
        model=st.sampled_from(["", "resnet", "gpt2"]),
        kind=st.sampled_from(["", "run"]),
        limit=st.integers(1, 5),
        offset=st.integers(0, 3),
        newest_first=st.booleans(),
    )
    def find(self, model, kind, limit, offset, newest_first):
        wanted = [
            one for one in self.runs.values() if model in one.model and kind in ("", one.kind)
        ]
        wanted.sort(key=lambda one: (one.created_at, one.id), reverse=newest_first)
        query = Query(model=model, kind=kind)
        assert (
            self.journal.find(query, limit, offset, newest_first) == wanted[offset : offset + limit]
        )
        assert self.journal.count(query) == len(wanted)

    @rule(id_=known, digits=st.integers(1, 32))
    def get(self, id_, digits):
        matching = [one for one in self.runs if one.startswith(id_[:digits])]
        if len(matching) == 1:
            assert self.journal.get(id_[:digits]) == self.runs[matching[0]]
        else:
            with pytest.raises(TrainpaceError, match="several runs" if matching else "unknown run"):
                self.journal.get(id_[:digits])

    @invariant()
    def holds_what_it_should(self):
        with Journal.open(self.place) as another:  # as another process sees it
            assert {one.id: one for one in another.every()} == self.runs
            assert {one.id: one for one in another.sweeps()} == self.sweeps
            unfinished = [
                one for one in self.sweeps.values() if one.key == "k" and one.finished_at is None
            ]
            newest = max(unfinished, key=lambda one: (one.created_at, one.id), default=None)
            assert another.open_sweep("k") == newest


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(store, "CHUNK", CHUNK)


def run_machine(examples, steps):
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        TheJournal, settings=settings(max_examples=examples, stateful_step_count=steps)
    )


def test_journal_survives_any_order_of_operations():
    run_machine(15, 25)


@pytest.mark.long
def test_journal_survives_long_orders_of_operations():
    run_machine(150, 40)
