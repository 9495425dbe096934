"""Terminal pictures show what a terminal would show, and the committed pictures are small."""

import json
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import session  # noqa: E402
import terminal_svg  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
SVG = "{http://www.w3.org/2000/svg}"


def words(lines):
    return ["".join(text for text, _ in line).rstrip() for line in lines]


def shown(text, columns=40):
    screen = terminal_svg.Screen(columns)
    screen.feed(text)
    return screen.shown()


def test_carriage_return_and_erase_overwrite_a_line():
    assert words(shown("at 1 %\r\x1b[2Kat 99 %\r\n")) == ["at 99 %", ""]
    assert words(shown("done 1\r\n\x1b[1A\x1b[2Kanswer")) == ["answer", ""]
    assert words(shown("abcdef\rxy")) == ["xycdef"]


def test_long_lines_wrap():
    assert words(shown("a" * 45, 40)) == ["a" * 40, "a" * 5]


def test_color_escapes_style_only_their_text():
    ((bold, plain),) = shown("\x1b[1;38;5;32mbold\x1b[0m plain")
    assert bold == ("bold", terminal_svg.Style(terminal_svg.of_256(32), bold=True))
    assert plain == (" plain", terminal_svg.PLAIN)


def test_svg_places_words_and_block_characters():
    picture = ET.fromstring(terminal_svg.still(shown("ms & <b>     12 %   ███⣿"), 40, "a & b"))
    texts = {e.text: float(e.get("x")) for e in picture.iter(f"{SVG}text")}
    assert texts == {"ms & <b>": 0.0, "12 %": pytest.approx(13 * terminal_svg.WIDTH, abs=0.1)}
    (path,) = picture.iter(f"{SVG}path")
    assert path.get("d").count("z") == 1 + 8  # one block as wide as three, eight dots
    assert picture.find(f"{SVG}title").text == "a & b"


def test_session_records_command_in_a_terminal(tmp_path):
    code = "import sys; print('tty' if sys.stdout.isatty() else 'pipe', sys.argv[0], end=''); print('é')"
    (tmp_path / "says.py").write_text(code)
    ran = session.record("what?", [sys.executable, str(tmp_path / "says.py")], tmp_path)
    assert "".join(text for _, text in ran.output) == "tty says.pyé\r\n"
    with pytest.raises(RuntimeError, match="exit code 3"):
        session.record("", [sys.executable, "-c", "raise SystemExit(3)"], tmp_path)


def test_shortened_session_states_its_speed():
    ran = session.Ran(
        "how?", ["trainpace", "x"], [(0.5, "working\r"), (60.0, "\x1b[2Kdone in a minute\r\n")]
    )
    listed, end_s = session.events([ran], 6.0)
    assert end_s < 30
    assert any("60 s, shown 10 times as fast" in text for _, text in listed)
    picture = session.played([ran])
    whole = "".join(e.text or "" for e in ET.fromstring(picture).iter(f"{SVG}text"))
    assert "working" in whole
    assert "done in a minute" in whole
    real, real_end_s = session.events([ran])
    assert real_end_s > 60
    assert not any("as fast" in text for _, text in real)


@pytest.mark.parametrize("name", ["look.svg", "session.svg", "session.cast"])
def test_committed_pictures_are_small_and_contain_no_paths(name):
    text = (PICTURES / name).read_text(encoding="utf-8")
    assert len(text.encode()) < session.MOST_BYTES
    assert not re.search(r"/(?:tmp|work|home|root)/", text)
    if name.endswith(".svg"):
        ET.fromstring(text)
    else:
        head, *lines = map(json.loads, text.splitlines())
        assert head["version"] == 2
        times = [at for at, kind, _ in lines if kind == "o"]
        assert len(times) == len(lines) > 50
        assert times == sorted(times)


def test_readme_picture_matches_readme_command():
    """The text of the picture comes from a real run of the command next to it."""
    picture = ET.fromstring((PICTURES / "look.svg").read_text(encoding="utf-8"))
    texts = [e.text for e in picture.iter(f"{SVG}text")]
    assert texts[0] == "$ trainpace train.py --epochs 20"
    assert "trainpace train.py --epochs 20 " in (ROOT / "README.md").read_text()
    assert any(
        text.startswith("The whole training (20 epochs, 600 steps) takes ") for text in texts
    )
