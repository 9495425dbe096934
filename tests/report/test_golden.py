"""Output of commands at three widths, compared word for word.

TRAINPACE_WRITE_GOLDEN=1 writes the golden files. Review the difference before you commit it.
"""

import contextlib
import io
import os
import re
from pathlib import Path

import pytest
from rich.cells import cell_len

from scenes import GOLDEN, OTHERS
from trainpace.report import show
from trainpace.report.terminal import LINES

FOLDER = Path(__file__).parent / "golden"


def shown(scene, width, details=False):
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setenv("COLUMNS", str(width))
        patch.delenv("FORCE_COLOR", raising=False)
        show(scene(), details)
    return out.getvalue()


FORMS = [(60, False), (80, False), (120, False), (80, True)]


def golden(name, width, details):
    return FOLDER / f"{name}-{'details-' if details else ''}{width}.txt"


@pytest.mark.parametrize(("width", "details"), FORMS)
@pytest.mark.parametrize("name", GOLDEN)
def test_output_matches_golden_file(name, width, details):
    out, file = shown(GOLDEN[name], width, details), golden(name, width, details)
    if os.environ.get("TRAINPACE_WRITE_GOLDEN"):
        file.write_text(out, encoding="utf-8")
    assert out == file.read_text(encoding="utf-8")


def test_no_golden_file_is_left_over():
    assert set(FOLDER.iterdir()) == {golden(name, *form) for name in GOLDEN for form in FORMS}


@pytest.mark.parametrize("name", [*GOLDEN, *OTHERS])
def test_output_fits_one_screen(name):
    out = shown((GOLDEN | OTHERS)[name], 80)
    assert out.count("\n") <= LINES
    assert not out.startswith("\n")
    assert not out.endswith("\n\n")


@pytest.mark.parametrize("name", [*GOLDEN, *OTHERS])
def test_details_contain_every_number_of_short_output(name):
    """The details contain every number of the short output, except the counts of hidden rows."""
    scene = (GOLDEN | OTHERS)[name]
    brief, whole = shown(scene, 80), shown(scene, 80, details=True)
    number = r"\d[\d,.]*\d|\d"
    told = re.sub(r"\.\.\. .* \(--details\)", "", brief)
    assert set(re.findall(number, told)) <= set(re.findall(number, whole))
    assert "--details" not in whole
    assert ("--details" in brief) == (brief.split() != whole.split())


@pytest.mark.parametrize(
    ("width", "details"),
    [
        *((width, True) for width in (60, 72, 80, 100, 120, 200)),
        (60, False),
        (80, False),
        (120, False),
    ],
)
@pytest.mark.parametrize("name", [*GOLDEN, *OTHERS])
def test_output_stays_within_terminal_width(name, width, details):
    out = shown((GOLDEN | OTHERS)[name], width, details)
    assert all(cell_len(line) <= width for line in out.splitlines())
    assert all(line == line.rstrip() for line in out.splitlines())
    assert "\n\n\n" not in out
    assert not re.search(r"Columns hidden for lack of width: \.", out)


@pytest.mark.parametrize("name", [*GOLDEN, *OTHERS])
def test_numbers_do_not_depend_on_terminal_width(name):
    """Verdict and notes have the same numbers in a narrow and a wide terminal. Tables name what they hide."""
    scene = (GOLDEN | OTHERS)[name]
    number = r"\d[\d,.]*"
    narrow, wide = (shown(scene, width, details=True) for width in (60, 200))
    if "Columns hidden" not in narrow and "└" not in narrow:
        assert sorted(re.findall(number, narrow)) == sorted(re.findall(number, wide))
