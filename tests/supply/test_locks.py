"""Every locked package has a hash, and a file with another hash is rejected."""

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
LOCKS = sorted((ROOT / "locks").glob("*.lock"))
MAIN = ROOT / "locks/trainpace.lock"
PIN = re.compile(r"^([\w.-]+)==([^\s;]+)(.*?)(?=^[\w#]|\Z)", re.MULTILINE | re.DOTALL)


def pins_of(lock):
    """Return the name, version and hashes of every pin."""
    text = lock.read_text()
    return [
        (name, version, re.findall(r"--hash=sha256:[0-9a-f]{64}\b", rest))
        for name, version, rest in PIN.findall(text)
    ]


def test_every_pin_has_hashes():
    for lock in LOCKS:
        lines = [line for line in lock.read_text().splitlines() if line and line[0] not in " #"]
        pins = pins_of(lock)
        assert len(pins) == len(lines) > 0
        assert [name for name, _, hashes in pins if not hashes] == []


def test_lock_sections_agree_on_versions():
    versions = {}
    for name, version, _ in pins_of(MAIN):
        versions.setdefault(name.lower(), set()).add(version)
    assert {name: found for name, found in versions.items() if len(found) > 1} == {}


def test_locks_name_no_registry():
    assert not [lock.name for lock in LOCKS if "://" in lock.read_text()]


def test_installing_requires_hashes():
    script = (ROOT / "tools/install.sh").read_text().replace("\\\n", " ")
    lines = [
        line for line in script.splitlines() if " pip install" in line or "pip install " in line
    ]
    unchecked = [line for line in lines if "--require-hashes" not in line]
    assert len(lines) >= 3
    assert [x for x in unchecked if "--dry-run" not in x and "--editable ." not in x] == []


def test_lowest_lock_has_the_oldest_admitted_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = project["dependencies"] + [x for e in ("data", "serve", "demo") for x in extras[e]]
    oldest = dict(one.split(">=") for one in wanted)
    pinned = {name: version for name, version, _ in pins_of(ROOT / "locks/lowest.lock")}
    differs = {
        name: version
        for name, version in oldest.items()
        if not (pinned[name] + ".0.0").startswith(version + ".")
    }
    assert differs == {"torch": "2.6"}


def wheel_of(folder):
    """Write a tiny wheel and return its hash."""
    info = "tiny-1.0.dist-info"
    wheel = folder / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny.py", "here = True\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", tags)
        files = ("tiny.py", f"{info}/METADATA", f"{info}/WHEEL", f"{info}/RECORD")
        archive.writestr(f"{info}/RECORD", "".join(f"{file},,\n" for file in files))
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


@pytest.fixture
def clone(tmp_path):
    """Return a folder with the Makefile, an environment and a local wheel registry."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / "locks", tmp_path / "locks")
    (tmp_path / "tools").mkdir()
    for needed in ("pyproject.toml", "tools/install.sh"):
        shutil.copy(ROOT / needed, tmp_path / needed)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/bin").symlink_to(Path(sys.executable).parent)
    return tmp_path


def lock_of_tiny(clone, section, kind):
    digest = wheel_of(clone)
    tampered = ("0" if digest[0] != "0" else "1") + digest[1:]
    expected = {"right": digest, "tampered": tampered, "missing": None}[kind]
    pin = "tiny==1.0" + (f" \\\n    --hash=sha256:{expected}" if expected else "")
    (clone / "locks/trainpace.lock").write_text(f"# == {section}: a test\n{pin}\n")
    (clone / ".venv/installed").touch()


def run_offline(clone, *command):
    offline = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(clone),
        "PIP_CONFIG_FILE": os.devnull,
        "PYTHON": sys.executable,
    }
    environment = os.environ | offline
    return subprocess.run(
        command, cwd=clone, env=environment, capture_output=True, text=True, timeout=240
    )


REFUSALS = {
    "tampered": "THESE PACKAGES DO NOT MATCH THE HASHES",
    "missing": "Hashes are required in --require-hashes mode",
}


@pytest.mark.parametrize("kind", ["right", "tampered", "missing"])
def test_a_group_is_installed_only_with_the_right_hash(clone, kind):
    lock_of_tiny(clone, "zoo", kind)
    done = run_offline(clone, "make", ".zoo/installed")
    assert (done.returncode == 0) == (kind == "right"), done.stderr
    assert (clone / ".zoo/installed").exists() == (kind == "right")
    assert (clone / ".zoo/tiny.py").exists() == (kind == "right")
    assert all((words in done.stderr) == (name == kind) for name, words in REFUSALS.items())


@pytest.mark.slow
def test_main_environment_rejects_a_wrong_hash(clone):
    lock_of_tiny(clone, "main", "tampered")
    done = run_offline(clone, "tools/install.sh", "main", "made")
    assert done.returncode != 0
    assert REFUSALS["tampered"] in done.stderr
    assert not list(clone.glob("made/lib/*/site-packages/tiny.py"))
