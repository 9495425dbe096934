"""Several processes make one journal; one of another version is refused."""

import multiprocessing

import pytest
from sqlalchemy import text

from entries import entry
from trainpace.core.errors import UnreadableInput
from trainpace.journal import VERSION, Journal
from trainpace.journal.database import engine_of, url_of, writing

SPAWN = multiprocessing.get_context("spawn")


def versions(place):
    engine = engine_of(url_of(place), create=False)
    with engine.begin() as connection:
        stored = connection.execute(text("SELECT version FROM journal_meta")).scalars().all()
    engine.dispose()
    return stored


def open_at(place, barrier, answers):
    barrier.wait()
    try:
        with Journal.open(place) as journal:
            journal.add(entry())
            answers.put("")
    except Exception as error:
        answers.put(repr(error))


def test_several_open_a_new_journal_at_once(place):
    barrier, answers = SPAWN.Barrier(4), SPAWN.Queue()
    processes = [SPAWN.Process(target=open_at, args=(place, barrier, answers)) for _ in range(4)]
    for p in processes:
        p.start()
    assert [answers.get(timeout=60) for _ in processes] == [""] * 4
    for p in processes:
        p.join()
    with Journal.open(place) as journal:
        assert journal.count() == 4
    assert versions(place) == [VERSION]


@pytest.mark.parametrize("version", [1, 99])
def test_a_journal_of_another_version_is_refused_and_not_touched(place, version):
    with Journal.open(place) as journal:
        journal.add(entry())
    engine = engine_of(url_of(place), create=False)
    writing(
        engine,
        lambda connection: connection.execute(text(f"UPDATE journal_meta SET version = {version}")),
    )
    engine.dispose()
    with pytest.raises(
        UnreadableInput,
        match=rf"version {version}.*reads version {VERSION}.*the trainpace that made it",
    ):
        Journal.open(place)
    assert versions(place) == [version]
