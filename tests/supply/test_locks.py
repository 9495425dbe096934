"""What is installed has a hash in a lock, and a file with another hash is refused."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = sorted(ROOT.glob("requirements*.lock"))
PIN = re.compile(r"^([\w.-]+)==([^\s;]+)(.*?)(?=^[\w#]|\Z)", re.MULTILINE | re.DOTALL)


def pins_of(lock):
    return {
        name: (version, re.findall(r"--hash=sha256:[0-9a-f]{64}\b", rest))
        for name, version, rest in PIN.findall(lock.read_text())
    }


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_every_pin_has_hashes(lock):
    lines = [line for line in lock.read_text().splitlines() if line and line[0] not in " #"]
    pins = pins_of(lock)
    assert len(pins) == len(lines) > 0
    assert [name for name, (_, hashes) in pins.items() if not hashes] == []


def test_the_makefile_installs_nothing_without_hashes():
    recipes = (
        (ROOT / "Makefile").read_text() + (ROOT / "tools/environment.sh").read_text()
    ).replace("\\\n", " ")
    installing = [
        line
        for line in recipes.splitlines()
        if re.search(r"pip install|\$\(HASHED\)", line) and not line.startswith("#")
    ]
    unchecked = [
        line for line in installing if not re.search(r"--require-hashes|\$\(HASHED\)", line)
    ]
    assert len(installing) >= 8
    assert [
        line for line in unchecked if "--dry-run" not in line and "--editable ." not in line
    ] == []


def test_the_oldest_versions_are_those_that_pyproject_names():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = declared["project"]["dependencies"] + [
        one
        for extra in ("data", "serve", "demo")
        for one in declared["project"]["optional-dependencies"][extra]
    ]
    oldest = dict(one.split(">=") for one in wanted)
    pinned = {
        name: version for name, (version, _) in pins_of(ROOT / "requirements-lowest.lock").items()
    }
    assert {
        name: version
        for name, version in oldest.items()
        if not (pinned[name] + ".0.0").startswith(version + ".")
    } == {"torch": "2.6"}


def wheel_of(folder):
    """A tiny wheel, as pip wants it; its path and hash."""
    wheel = folder / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny.py", "here = True\n")
        archive.writestr(
            "tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n"
        )
        archive.writestr(
            "tiny-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(
            "tiny-1.0.dist-info/RECORD",
            "tiny.py,,\ntiny-1.0.dist-info/METADATA,,\ntiny-1.0.dist-info/WHEEL,,\ntiny-1.0.dist-info/RECORD,,\n",
        )
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


@pytest.fixture
def clone(tmp_path):
    """A folder with this Makefile, an environment that counts as installed, and no registry but a folder of wheels."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/bin").symlink_to(Path(sys.executable).parent)
    (tmp_path / "tools").mkdir()
    for needed in (
        "requirements.lock",
        "requirements-cuda.lock",
        "pyproject.toml",
        "tools/environment.sh",
    ):
        shutil.copy(ROOT / needed, tmp_path / needed)
    (tmp_path / ".venv/installed").touch()
    return tmp_path


def lock_of_tiny(clone, lock, kind):
    digest = wheel_of(clone)
    expected = {
        "right": digest,
        "tampered": ("0" if digest[0] != "0" else "1") + digest[1:],
        "missing": None,
    }[kind]
    (clone / lock).write_text(
        "tiny==1.0" + (f" \\\n    --hash=sha256:{expected}" if expected else "") + "\n"
    )


def run_offline(clone, *command):
    offline = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(clone),
        "PIP_CONFIG_FILE": os.devnull,
        "PYTHON": sys.executable,
    }
    return subprocess.run(
        command, cwd=clone, env=os.environ | offline, capture_output=True, text=True, timeout=240
    )


REFUSALS = {
    "tampered": "THESE PACKAGES DO NOT MATCH THE HASHES",
    "missing": "Hashes are required in --require-hashes mode",
}


CASES = [
    ("docs", "right"),
    ("docs", "tampered"),
    ("docs", "missing"),
    ("zoo", "tampered"),
    ("engines", "missing"),
]


@pytest.mark.parametrize(("part", "kind"), CASES)
def test_a_file_with_another_hash_or_none_is_refused(clone, part, kind):
    lock_of_tiny(clone, f"requirements-{part}.lock", kind)
    done = run_offline(clone, "make", f".{part}/installed")
    assert (done.returncode == 0) == (clone / f".{part}/installed").exists() == (kind == "right"), (
        done.stderr
    )
    assert (clone / f".{part}/tiny.py").exists() == (kind == "right")
    assert {refusal: words in done.stderr for refusal, words in REFUSALS.items()} == {
        one: one == kind for one in REFUSALS
    }


@pytest.mark.slow
def test_the_environment_of_the_tests_refuses_it_too(clone):
    lock_of_tiny(clone, "requirements.lock", "tampered")
    (clone / "requirements-cuda.lock").write_text("")
    done = run_offline(clone, "tools/environment.sh", "made", "requirements.lock")
    assert done.returncode != 0
    assert REFUSALS["tampered"] in done.stderr
    assert not list(clone.glob("made/lib/*/site-packages/tiny.py"))
