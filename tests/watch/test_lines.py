"""Tests of the source line that a stack sample names."""

import sys
from pathlib import Path

from trainpace.watch.inside import script
from trainpace.watch.inside.event_log import DATA, FORWARD


def test_line_in_a_library_loop_names_the_library_line(monkeypatch):
    seen, loop = [], script._Loop()
    monkeypatch.setattr(script, "is_installed", lambda name: name == "library.py")

    def look(part):
        frame = sys._getframe(1)
        code = loop.seen_in(frame, part)
        seen.append((code, *script.line_of(frame, code)))

    library = "def reads():\n    look(DATA)\ndef trains():\n    look(FORWARD)\ndef fit():\n    for _ in range(20):\n        reads()\n        trains()\n"
    names = {"look": look, "__name__": "library", "DATA": DATA, "FORWARD": FORWARD}
    exec(compile(library, "library.py", "exec"), names)
    names["fit"]()
    first, last = seen[0], seen[-1]
    assert first[0] is None
    assert Path(__file__).name in first[1]
    assert (last[0], *last[1:]) == (names["fit"].__code__, "library.py:8 fit", "library.trains")


def test_loading_alone_does_not_define_the_training_loop(monkeypatch):
    loop = script._Loop()
    monkeypatch.setattr(script, "is_installed", lambda name: True)
    assert [loop.seen_in(sys._getframe(), DATA) for _ in range(40)] == [None] * 40
    assert loop.seen_in(sys._getframe(), FORWARD) is sys._getframe().f_code


def test_script_loop_is_not_replaced_by_a_library_loop(monkeypatch):
    loop = script._Loop()
    monkeypatch.setattr(script, "is_installed", lambda name: False)
    codes = [loop.seen_in(sys._getframe(), part) for part in (DATA, FORWARD) * 20]
    assert codes == [None] * 40
