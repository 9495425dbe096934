"""What verbs print at three widths, word for word. TRAINPACE_WRITE_GOLDEN=1 writes it anew; look at the difference before it is kept."""

import contextlib
import io
import os
import re
from pathlib import Path

import pytest
from rich.cells import cell_len

from scenes import GOLDEN, OTHERS

FOLDER = Path(__file__).parent / "golden"


def shown(scene, width):
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setenv("COLUMNS", str(width))
        patch.delenv("FORCE_COLOR", raising=False)
        scene()
    return out.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name, width):
    out, file = shown(GOLDEN[name], width), FOLDER / f"{name}-{width}.txt"
    if os.environ.get("TRAINPACE_WRITE_GOLDEN"):
        file.write_text(out, encoding="utf-8")
    assert out == file.read_text(encoding="utf-8")


def test_no_golden_file_is_left_over():
    assert {f.name for f in FOLDER.iterdir()} == {f"{name}-{width}.txt" for name in GOLDEN for width in (60, 80, 120)}


@pytest.mark.parametrize("width", [60, 72, 80, 100, 120, 200])
@pytest.mark.parametrize("name", [*GOLDEN, *OTHERS])
def test_every_verb_keeps_to_the_width(name, width):
    out = shown((GOLDEN | OTHERS)[name], width)
    assert all(cell_len(line) <= width for line in out.splitlines())
    assert all(line == line.rstrip() for line in out.splitlines())
    assert "\n\n\n" not in out
    assert not re.search(r"Columns hidden for lack of width: \.", out)


@pytest.mark.parametrize("name", [*GOLDEN, *OTHERS])
def test_numbers_do_not_depend_on_the_width(name):
    """Every number of the verdict and the notes stands in a narrow terminal as in a wide one; of tables, what is left out is named."""
    scene = (GOLDEN | OTHERS)[name]
    number = r"\d[\d,.]*"
    narrow, wide = (shown(scene, width) for width in (60, 200))
    if "Columns hidden" not in narrow and "└" not in narrow:
        assert sorted(re.findall(number, narrow)) == sorted(re.findall(number, wide))
