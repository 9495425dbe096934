import itertools

import pytest

import postgres

COUNTER = itertools.count()


@pytest.fixture(scope="session")
def postgres_server():
    if postgres.binary("initdb") is None:
        pytest.skip(
            "PostgreSQL is not installed: no initdb on PATH or in /usr/lib/postgresql/*/bin"
        )
    with postgres.server() as url_of:
        yield url_of


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request, tmp_path):
    """Location for a new journal. Every test that uses it runs on both databases."""
    if request.param == "sqlite":
        return str(tmp_path / "journal.db")
    return postgres.create_database(
        request.getfixturevalue("postgres_server"), f"test{next(COUNTER)}"
    )


@pytest.fixture
def journal(place):
    from trainpace.journal import Journal

    with Journal.open(place) as opened:
        yield opened
