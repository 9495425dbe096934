"""The man page is up to date, valid roff and part of the wheel."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import man_page  # noqa: E402


def test_man_page_is_up_to_date():
    assert man_page.PAGE.read_text() == man_page.text(), "python -m tools generate"


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_groff_renders_the_man_page_without_warnings():
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", man_page.PAGE],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    for part in (
        "trainpace forecast",
        "--gpu",
        "TRAINPACE_JOURNAL",
        "TRAINPACE JOURNAL SHARE",
        "EXIT STATUS",
    ):
        assert part in re.sub(".\b", "", done.stdout)  # bold overprints each letter


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (".end", r"\&.end"),
        ("'s", r"\&'s"),
        (r"a\n --x `y`", r"a\en \-\-x \(gay\(ga"),
        ("plain.", "plain."),
    ],
)
def test_text_is_escaped_for_roff(text, shown):
    assert man_page._plain(text) == shown


@pytest.mark.slow
def test_wheel_contains_the_man_page(tmp_path):
    build = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "--target",
        "wheel",
        "--directory",
        tmp_path,
    ]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (page,) = (
            name
            for name in archive.namelist()
            if name.endswith(".data/data/share/man/man1/trainpace.1")
        )
        assert archive.read(page).decode() == man_page.PAGE.read_text()
