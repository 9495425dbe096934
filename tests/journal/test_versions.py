"""Several processes create one journal together; a journal of another version is rejected."""

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


def test_concurrent_opens_create_one_journal(place):
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
def test_journal_of_other_version_is_rejected_unchanged(place, version):
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
