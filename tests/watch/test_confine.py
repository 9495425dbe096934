"""A script under trials can write only into the trial's own folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainpace.watch import environment

DO = """
import os, pathlib, shutil, sqlite3, sys
os.chdir(sys.argv[1])
{0}
"""
REFUSED = [
    "open('mine/model.pt', 'w')",
    "open('mine/model.pt', 'ab')",
    "open('mine/model.pt', 'r+')",
    "open('new.txt', 'x')",
    "pathlib.Path('new.txt').touch()",
    "os.open('mine/model.pt', os.O_WRONLY | os.O_TRUNC)",
    "os.remove('mine/model.pt')",
    "pathlib.Path('mine/model.pt').unlink()",
    "os.rename('mine/model.pt', 'mine/other.pt')",
    "os.replace('trial/own.txt', 'mine/model.pt')",
    "shutil.rmtree('mine')",
    "shutil.move('mine', 'trial/mine')",
    "shutil.copy('trial/own.txt', 'mine/model.pt')",
    "os.makedirs('runs/1')",
    "os.rmdir('mine/empty')",
    "os.truncate('mine/model.pt', 0)",
    "os.symlink('trial/own.txt', 'link')",
    "open('trial/link', 'w')",
    "sqlite3.connect('runs.db')",
    "open('trial/../mine/model.pt', 'w')",
    "open(b'mine/model.pt', 'w')",
    "os.link('own.txt', 'mine/linked', src_dir_fd=os.open('trial', os.O_RDONLY))",
    "os.rename('own.txt', 'mine/own.txt', src_dir_fd=os.open('trial', os.O_RDONLY))",
    "os.rename('mine/model.pt', 'taken.pt', dst_dir_fd=os.open('trial', os.O_RDONLY))",
    "os.chmod('mine/model.pt', 0)",
    "os.chmod('trial/link', 0)",
    "os.truncate('trial/link', 0)",
    "os.chown('mine/model.pt', os.getuid(), os.getgid())",
    "os.utime('mine/model.pt', (0, 0))",
    "os.setxattr('mine/model.pt', 'user.a', b'1')",
    "sqlite3.connect('file:runs.db?mode=rwc', uri=True)",
]
ALLOWED = [
    "open('mine/model.pt').read()",
    "os.makedirs('mine/empty', exist_ok=True)",
    "open('trial/new.txt', 'w').close()",
    "os.makedirs('trial/a/b'); shutil.rmtree('trial/a')",
    "shutil.copytree('mine', 'trial/copy'); shutil.rmtree('trial/copy')",
    "os.remove('trial/link')",
    "import tempfile; tempfile.TemporaryFile().close()",
    "import multiprocessing.shared_memory as m; s = m.SharedMemory(create=True, size=8); s.close(); s.unlink()",
    "open(os.devnull, 'w').close()",
    "os.close(os.dup(1)); open(1, 'w', closefd=False)",
    "sqlite3.connect(':memory:').close()",
    "sqlite3.connect('file:mine/model.pt?mode=ro', uri=True).close()",
    "sqlite3.connect('file:mine/model.pt?cache=private&immutable=1', uri=True).close()",
    "sqlite3.connect('file::memory:?cache=shared', uri=True).close()",
    "sqlite3.connect('file:trial/runs.db', uri=True).close()",
    "os.link('own.txt', 'linked', src_dir_fd=(t := os.open('trial', os.O_RDONLY)), dst_dir_fd=t)",
    "os.chmod('trial/own.txt', 0o600); os.utime('trial/own.txt', (0, 0))",
]


@pytest.fixture
def do(tmp_path):
    mine, trial = tmp_path / "mine", tmp_path / "trial"
    (mine / "empty").mkdir(parents=True)
    (trial / "tmp").mkdir(parents=True)
    (mine / "model.pt").write_text("theirs")
    (trial / "own.txt").write_text("the trial's")
    (trial / "link").symlink_to(mine / "model.pt")

    def inner(what):
        around = environment(trial, os.environ, {"writes_in": [str(trial)]}) | {
            "TMPDIR": str(trial / "tmp")
        }
        command = [sys.executable, "-c", DO.format(what), str(tmp_path)]
        done = subprocess.run(command, env=around, capture_output=True, text=True, timeout=60)
        theirs = sorted(str(p.relative_to(tmp_path)) for p in (mine, *mine.rglob("*")))
        assert theirs == ["mine", "mine/empty", "mine/model.pt"]
        assert (mine / "model.pt").read_text() == "theirs"
        assert {p.name for p in tmp_path.iterdir()} == {"mine", "trial"}
        return done

    return inner


@pytest.mark.parametrize("what", REFUSED)
def test_trial_cannot_write_outside_its_folder(what, do):
    done = do(what)
    assert done.returncode == 1
    assert (
        "PermissionError: [Errno 13] trainpace: a trial may write only into its own folder"
        in done.stderr
    )


@pytest.mark.parametrize("what", ALLOWED)
def test_trial_may_read_anything_and_write_its_own_folder(what, do):
    assert do(what).returncode == 0, do(what).stderr


def test_python_child_processes_are_confined(do):
    inner = json.dumps("open('mine/model.pt', 'w')")
    assert (
        do(
            f"import subprocess; subprocess.run([sys.executable, '-c', {inner}], check=True)"
        ).returncode
        == 1
    )
    assert (
        do(
            "import multiprocessing as m\nm.get_context('fork').Process(target=open, args=('new', 'w')).start()"
        ).returncode
        == 0
    )


def test_script_without_a_trial_is_not_confined(tmp_path):
    command = [sys.executable, "-c", "open('new', 'w').close()"]
    subprocess.run(
        command, env=environment(tmp_path, os.environ), cwd=tmp_path, check=True, timeout=60
    )
    assert Path(tmp_path, "new").exists()
