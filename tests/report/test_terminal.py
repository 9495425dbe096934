"""Terminal layout: no line exceeds the width, no number is cut, and colors are readable but never required."""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.color import Color

from trainpace.report import terminal
from trainpace.report.sections import Column, Next, Table, filled_only, words
from trainpace.report.streams import PLAIN, plain
from trainpace.report.terminal import layout, show

texts = st.text("abcdefgh /_.-é", max_size=40)
numbers = st.one_of(
    st.integers(0, 10**9).map(str), st.floats(0, 1e6).map(lambda x: f"{x:.3g} to {2 * x:.3g}")
)
widths = st.integers(40, 200)


@st.composite
def tables(draw):
    kinds = draw(st.lists(st.booleans(), min_size=1, max_size=9))
    columns = [
        words(draw(texts), draw(st.integers(0, 5)), draw(st.integers(6, 20)))
        if w
        else Column(draw(texts), draw(st.integers(0, 5)))
        for w in kinds
    ]
    row = st.tuples(*(texts if w else numbers for w in kinds))
    return columns, draw(st.lists(row, max_size=5))


def printed(width, section):
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setenv("COLUMNS", str(width))
        show([section])
    return out.getvalue()


@given(tables(), widths)
def test_table_fits_width_without_cutting_numbers(table, width):
    columns, rows = table
    out = printed(width, Table(columns, rows))
    assert all(cell_len(line) <= width for line in out.splitlines())
    assert all(line == line.rstrip() for line in out.splitlines())
    found = layout(columns, rows, width)
    for i, column in enumerate(columns):
        if not column.words and (found is None or i in found.widths):
            assert all(row[i] in out.replace("\n  ", " ") for row in rows)


@given(tables(), widths)
def test_lowest_priority_columns_are_hidden_first(table, width):
    columns, rows = table
    found = layout(columns, rows, width)
    if found is None:
        return
    left_out = [c.rank for i, c in enumerate(columns) if i not in found.widths]
    kept = [c.rank for i, c in enumerate(columns) if i in found.widths]
    assert all(left_out)
    assert not left_out or min(left_out) >= max(kept, default=0)


def test_hidden_columns_are_named():
    columns = [words("GPU"), Column("step ms"), Column("MFU", 1)]
    row = ["GTX 1080 Ti", "123,456 to 234,567", "30%"]
    wide = printed(60, Table(columns, [row]))
    assert "30%" in wide
    assert "Columns hidden" not in wide
    narrow = printed(32, Table(columns, [row]))
    assert "30%" not in narrow
    assert "Columns hidden for lack of width: MFU." in " ".join(narrow.split())
    paragraphs = printed(22, Table(columns, [row]))
    assert "step ms:" in paragraphs


def test_filled_only_drops_empty_columns():
    columns = [words("change"), Column("an epoch"), Column("at most")]
    rows = [["workers", "", "3 ms"], ["batch", "", ""]]
    assert "an epoch" in printed(60, Table(columns, rows))
    told = printed(60, filled_only(columns, rows))
    assert "an epoch" not in told
    assert "3 ms" in told


def test_bars_shrink_with_terminal_width():
    rows = [["forward", "1", "█" * 20], ["backward", "2", "█" * 10], ["none", "3", ""]]
    for width in (60, 26):
        out = printed(width, Table([words("part"), Column("ms"), words("", least=8)], rows))
        long, short = (out.splitlines()[i].count("█") for i in (2, 3))
        assert short == pytest.approx(long / 2, abs=1)
    assert long < 20


@given(
    st.lists(
        st.sampled_from(["a", "words", "12.3 ms", "5 GiB", "90%", "1 h 12 min", "samples,"]),
        max_size=30,
    ),
    widths,
)
def test_number_is_not_wrapped_from_its_unit(parts, width):
    text = " ".join(parts)
    lines = terminal.wrapped(text, width).split("\n")
    assert all(len(line) <= width for line in lines)
    assert " ".join(" ".join(lines).split()) == text
    assert not any(re.match(r"\s*(ms|GiB|%|min)\b", line) for line in lines)


@given(st.lists(st.text("ab-=/ '\"$", min_size=1, max_size=12), min_size=1, max_size=12), widths)
@example(["trainpace", "forecast", "a b.py:f", "--gpu", "RTX 3090"], 40)
def test_next_command_survives_line_wrapping(command, width):
    out = printed(width, Next(command))
    assert out.startswith("Next: ")
    assert shlex.split(out.removeprefix("Next: ").replace(" \\\n", " ")) == command


def test_shell_parses_next_command_correctly():
    command = [
        "printf",
        "%s|",
        "a b.py:f",
        "it's",
        "$HOME",
        "RTX 3090",
        "--gpu",
        "a long one, of many words",
    ]
    out = printed(40, Next(command)).removeprefix("Next: ")
    assert out.count("\\\n") == 2
    said = subprocess.run(["sh", "-c", out], capture_output=True, text=True, check=True).stdout
    assert said == "".join(f"{word}|" for word in command[2:])


def test_next_reason_follows_command_or_moves_below():
    assert printed(60, Next("trainpace gpus", "all cards")) == "Next: trainpace gpus  (all cards)\n"
    below = printed(40, Next("trainpace gpus", "all cards that the catalogue has"))
    assert below.splitlines()[0] == "Next: trainpace gpus"


def luminance(r, g, b):
    linear = [
        c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4
        for c in (r, g, b)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("style", [terminal.GOOD, terminal.BAD, terminal.BAR])
def test_colors_have_contrast_on_white_and_black(style):
    own = luminance(*Color.parse(style.split()[-1]).get_truecolor())
    for other in (luminance(255, 255, 255), luminance(0, 0, 0)):
        assert (max(own, other) + 0.05) / (min(own, other) + 0.05) >= 3, (
            "WCAG 2.2, 1.4.3 and 1.4.11"
        )


SHOWN = """
from trainpace.report.sections import Column, Headline, Table, words
from trainpace.report.streams import never_fail_to_encode
from trainpace.report.terminal import show
never_fail_to_encode()
table = Table([words("part"), Column("ms"), words("", least=8)], [["forward", "3", "█" * 9]])
show([Headline("No: 3 µs are over.", good=False), table])
"""


def run(**environment):
    clean = {
        k: v
        for k, v in os.environ.items()
        if k not in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "PYTHONIOENCODING")
    }
    done = subprocess.run(
        [sys.executable, "-c", SHOWN], env=clean | environment, capture_output=True, check=True
    )
    return done.stdout.decode(environment.get("PYTHONIOENCODING", "utf-8"))


def test_log_output_is_plain_unless_color_is_forced():
    log = run()
    assert "\x1b" not in log
    forced = run(FORCE_COLOR="1", TERM="xterm-256color")
    assert "\x1b[" in forced
    assert re.sub(r"\x1b\[[\d;]*m", "", forced).replace(" \n", "\n").split() == log.split()
    without = run(FORCE_COLOR="1", NO_COLOR="1", TERM="xterm-256color")
    assert "38;5" not in without, "no colour"


def test_invalid_columns_variable_is_ignored():
    assert run(COLUMNS="wide") == run(COLUMNS="0" * 9 + "118") == run()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "cp437"])
def test_output_adapts_to_encoding(encoding):
    out = run(PYTHONIOENCODING=encoding)
    assert "3" in out
    if encoding == "ascii":
        assert "No: 3 us are over." in out
        assert "#########" in out
        assert "----" in out


@given(st.text(st.sampled_from([*PLAIN, "a", "é", "字"])))
def test_plain_returns_ascii_of_same_length(text):
    assert plain(text).isascii()
    assert len(plain(text)) == len(text)


def test_long_name_is_broken_after_a_dot():
    name = "model.layers.31.self_attn.v_proj"
    assert terminal.broken(name, 20) == "model.layers.31.\nself_attn.v_proj"
    assert terminal.broken(f"the {name}", 14) == "the model.layers.\n31.self_attn.\nv_proj"
    assert terminal.broken(name, 40) == name
    assert terminal.broken("a" * 30, 20) == "a" * 30  # there is no place for it
