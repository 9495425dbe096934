"""A writer killed at any moment leaves a valid journal with everything it acknowledged."""

import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainpace.journal import Journal

WRITER = """
import sys
from entries import entry, whole_entry
from trainpace.journal import Journal
with Journal.open(sys.argv[1]) as journal:
    while True:
        one = whole_entry()
        assert journal.add(one)
        print(one.id, flush=True)
        many = [entry(notes=one.id) for _ in range(20)]
        journal.add_many(many)
        print(*(e.id for e in many), flush=True)
"""


@pytest.mark.slow
def test_killed_writer_leaves_valid_journal(place, tmp_path):
    random.seed(7)
    acknowledged = set()
    for _ in range(8):
        with (tmp_path / "said").open("w+") as said:
            command = [sys.executable, "-c", WRITER, place]
            writer = subprocess.Popen(
                command, stdout=said, stderr=subprocess.PIPE, cwd=Path(__file__).parents[1]
            )
            while not (tmp_path / "said").stat().st_size and writer.poll() is None:
                time.sleep(0.01)
            time.sleep(random.uniform(0, 0.3))
            assert writer.poll() is None, writer.stderr.read().decode()
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            writer.stderr.close()
            said.seek(0)
            lines = said.read().splitlines()
        acknowledged |= {word for line in lines for word in line.split() if len(word) == 32}
        with Journal.open(place) as journal:
            found = journal.find(limit=None)
        assert acknowledged <= {e.id for e in found}
        groups = {}
        for e in found:
            groups.setdefault(e.notes, []).append(e)
        assert {len(group) for notes, group in groups.items() if notes} <= {
            20
        }  # many at once: all or none
        if not place.startswith("postgresql"):
            connection = sqlite3.connect(place)
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            connection.close()
    assert len(acknowledged) > 8
