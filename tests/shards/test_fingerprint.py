"""The fingerprint changes only with the inputs of the samples."""

import os
import subprocess
import sys
import textwrap

import pytest

CODE = """
    # a remark
    from pathlib import Path

    from helper import double

    class Files:
        def __init__(self):
            self.names = sorted(str(p) for p in Path(__file__).parent.glob("*.txt"))
            self.side = 32
        def __len__(self):
            return len(self.names)
        def __getitem__(self, index):
            return double(Path(self.names[index]).read_text())
"""
HELPER = "def double(text):\n    return 2 * text\n"
SHOW = """
import sys
from trainpace.shards.user_dataset import load_dataset
from trainpace.shards.user_dataset import fingerprint, settings_of
from trainpace.core.records import to_json
dataset = load_dataset(sys.argv[1])
print(to_json(fingerprint(dataset, sys.argv[1], settings_of(dataset))))
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "data.py").write_text(textwrap.dedent(CODE))
    (tmp_path / "helper.py").write_text(HELPER)
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text(str(i))
        os.utime(tmp_path / f"{i}.txt", (1, 1))
    return tmp_path


def taken(project):
    from trainpace.core.records import from_json
    from trainpace.shards.files import Fingerprint

    done = subprocess.run(
        [sys.executable, "-c", SHOW, str(project / "data.py:Files")],
        capture_output=True,
        text=True,
        check=True,
    )
    return from_json(done.stdout, Fingerprint)


def rewrite(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_fingerprint_ignores_changed_comments(project):
    first = taken(project)
    assert set(first.code) == {"data.py", "helper.py"}
    assert {"0.txt", "1.txt", "2.txt"} <= set(first.source)
    rewrite(project / "data.py", "# a remark", "# another remark\n\n")
    assert first.differences(taken(project)) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: rewrite(p / "helper.py", "2 *", "30 *"), ["helper.py has changed"]),
        (lambda p: (p / "1.txt").write_text("other"), ["1.txt has changed"]),
        (
            lambda p: rewrite(p / "data.py", "32", "128"),
            ["data.py has changed", "dataset settings has changed"],
        ),
        (
            lambda p: (p / "9.txt").write_text("9"),
            ["number of samples has changed", "dataset settings has changed"],
        ),
    ],
)
def test_fingerprint_reports_each_change(project, change, words):
    first = taken(project)
    change(project)
    found = first.differences(taken(project))
    assert all(word in found for word in words), found


def test_fingerprint_covers_code_outside_the_folder(project):
    inner = project / "inner"
    inner.mkdir()
    (inner / "data.py").write_text(
        f"import sys\nsys.path.append({str(project)!r})\n{textwrap.dedent(CODE)}"
    )
    (inner / "0.txt").write_text("0")
    first = taken(inner)
    rewrite(project / "helper.py", "2 *", "3 *")
    assert first.differences(taken(inner)) == ["../helper.py has changed"]
