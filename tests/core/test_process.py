"""Child and worker processes end together with their descendants and report errors."""

import os
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from trainpace.core.child import Child, ending_of
from trainpace.core.errors import OutOfMemory, TimedOut, TrainpaceError, UserCodeError
from trainpace.core.guard import descendants
from trainpace.core.worker import Pool, failure_of, run_isolated, run_ranks

STARTS_ANOTHER = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path(sys.argv[1] + ".part").write_text(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".part", sys.argv[1])
"""


def is_there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def gone(pids, seconds=10.0):
    end = time.monotonic() + seconds
    while any(map(is_there, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(is_there, pids))


def pids_in(file, seconds=30.0):
    end = time.monotonic() + seconds
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.02)
    return [int(pid) for pid in file.read_text().split()]


# --- a child


def test_child_has_exit_code_and_pipes():
    with Child(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdin.write(b"said\n")
        child.stdin.close()
        assert child.stdout.read() == b"said\n"
        assert child.wait(30) == 0
    with Child(["sh", "-c", "exit 3"]) as child:
        assert child.wait(30) == 3
    with Child(["sh", "-c", "kill -SEGV $$"]) as child:
        assert child.wait(30) == 128 + signal.SIGSEGV


@pytest.mark.parametrize(
    ("code", "ending"),
    [(3, "ended with exit code 3"), (-11, "died of SIGSEGV"), (139, "died of SIGSEGV")],
)
def test_ending_of_describes_exit_code(code, ending):
    assert ending_of(code) == ending


def test_leaving_context_kills_descendants_in_other_sessions(tmp_path):
    with Child(
        [sys.executable, "-c", STARTS_ANOTHER + "time.sleep(600)", str(tmp_path / "pids")]
    ) as child:
        pids = pids_in(tmp_path / "pids")
        assert child.exit_code is None
    assert not any(map(is_there, pids))


def test_descendants_are_killed_after_child_exits(tmp_path):
    with Child([sys.executable, "-c", STARTS_ANOTHER, str(tmp_path / "pids")]) as child:
        assert child.wait(30) == 0
        assert not any(map(is_there, pids_in(tmp_path / "pids")))


@pytest.mark.parametrize("victim", ["us", "the guard"])
def test_child_is_killed_with_its_parent_or_guard(tmp_path, victim):
    command = [
        sys.executable,
        "-c",
        "import os, pathlib, sys, time; file = pathlib.Path(sys.argv[1] + '.part')\n"
        "file.write_text(f'{os.getpid()} {os.getppid()}'); file.rename(sys.argv[1]); time.sleep(600)",
        str(tmp_path / "pids"),
    ]
    code = f"import time\nfrom trainpace.core.child import Child\nwith Child({command!r}) as child:\n    child.wait()"
    with subprocess.Popen([sys.executable, "-c", code]) as asker:
        pids = pids_in(tmp_path / "pids")
        os.kill(asker.pid if victim == "us" else pids[1], signal.SIGKILL)
    assert gone(pids)


def test_missing_command_exits_1():
    with Child(["no-such-command-anywhere"], stderr=subprocess.PIPE) as child:
        assert child.wait(30) == 1


def test_descendants_include_other_sessions():
    code = "import subprocess, sys; subprocess.Popen(['sleep', '60'], start_new_session=True); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        found = descendants(process.pid)
        process.kill()
    assert len(found) == 1
    os.kill(found[0], signal.SIGKILL)


# --- a worker


def test_isolated_worker_returns_result_and_leaves_no_processes(worker, tmp_path):
    code = STARTS_ANOTHER.replace("sys.argv[1]", "request['file']").strip()
    assert (
        run_isolated(
            worker(f"{code}\nreturn 'said'"), {"file": str(tmp_path / "pids")}, 60, "asking"
        )
        == "said"
    )
    assert not any(map(is_there, pids_in(tmp_path / "pids")))


@pytest.mark.parametrize(
    ("body", "kind", "sentence"),
    [
        (
            "raise ValueError('no such batch')",
            UserCodeError,
            "the model's code raised ValueError at made_worker.py line 3: no such batch.",
        ),
        ("raise MemoryError", OutOfMemory, "out of memory. Try a smaller batch."),
        (
            "from trainpace.core.errors import TrainpaceError\nraise TrainpaceError('misused.', 'Use it well.')",
            TrainpaceError,
            "misused. Use it well.",
        ),
        (
            "import os; os._exit(3)",
            UserCodeError,
            "asking gave no answer: it ended with exit code 3.",
        ),
        (
            "import os; os.kill(os.getpid(), 11)",
            UserCodeError,
            "asking gave no answer: it died of SIGSEGV.",
        ),
        (
            "import os; os.kill(os.getpid(), 9)",
            OutOfMemory,
            "asking gave no answer: it died of SIGKILL, most likely out of memory.",
        ),
        (
            "raise KeyboardInterrupt",
            UserCodeError,
            "the model's code raised KeyboardInterrupt at made_worker.py line 3: no message.",
        ),
        (
            "raise GeneratorExit('so')",
            UserCodeError,
            "the model's code raised GeneratorExit at made_worker.py line 3: so.",
        ),
        (
            "class E(Exception):\n    def __str__(self): raise E\nraise E",
            UserCodeError,
            "the model's code raised E at made_worker.py line 5: unreadable message.",
        ),
        (
            "import json, os\njson.dumps = os.replace = None\nraise ValueError('x')",
            UserCodeError,
            "the model's code raised ValueError at made_worker.py line 5: x.",
        ),
        (
            "import sys, os; open(sys.argv[2], 'w').write('{\"result'); os._exit(0)",
            UserCodeError,
            "asking left an answer that is damaged; it ended with exit code 0.",
        ),
        (
            "import sys, os; open(sys.argv[2], 'wb').write(bytes(range(256))); os._exit(0)",
            UserCodeError,
            "asking left an answer that is damaged; it ended with exit code 0.",
        ),
        (
            "import sys, os; open(sys.argv[2], 'w').write('[1]'); os._exit(0)",
            UserCodeError,
            "asking left an answer that is damaged; it ended with exit code 0.",
        ),
        (
            "import sys, os; os.mkdir(sys.argv[2]); os._exit(0)",
            UserCodeError,
            "asking left an answer that is damaged; it ended with exit code 0.",
        ),
        (
            "import time; time.sleep(600)",
            TimedOut,
            "asking took longer than 3 s. Allow more with --timeout.",
        ),
    ],
)
def test_worker_failure_is_reported_in_one_line(worker, body, kind, sentence):
    with pytest.raises(kind) as caught:
        run_isolated(worker(body), {}, 3 if kind is TimedOut else 60, "asking")
    assert type(caught.value) is kind
    assert str(caught.value) == sentence


def test_temporary_files_of_killed_worker_are_removed(worker, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    body = "import os, tempfile\nopen(tempfile.mkdtemp() + '/left', 'w').write('x')\nos.kill(os.getpid(), 9)"
    before = set(tmp_path.iterdir())
    module = worker(body)
    with pytest.raises(OutOfMemory):
        run_isolated(module, {}, 60, "asking")
    assert {path.name for path in set(tmp_path.iterdir()) - before} <= {
        "made_worker.py",
        "__pycache__",
    }


def test_worker_uses_default_inductor_cache(worker, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    module = worker("import os; return os.environ['TORCHINDUCTOR_CACHE_DIR']")
    assert run_isolated(module, {}, 60, "asking") == default_cache_dir()


def test_run_ranks_returns_answer_of_rank_0(worker):
    module = worker("import time; time.sleep(request['rank'] * 600); return str(request['rank'])")
    assert run_ranks(module, [{"rank": 0}, {"rank": 1}], 60, "a test") == "0"


def test_killed_rank_is_named(worker):
    module = worker(
        "import os, time\nif request['rank']: os.kill(os.getpid(), 11)\ntime.sleep(600)"
    )
    with pytest.raises(UserCodeError, match="rank 1 of a test gave no answer: it died of SIGSEGV"):
        run_ranks(module, [{"rank": 0}, {"rank": 1}], 60, "a test")


# --- a pool


def test_pool_returns_answer_of_every_worker(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "made_pool.py").write_text(
        "import json, sys\nfrom trainpace.core.worker import serve_lines\nrequests, answers = serve_lines()\nprint('noise')\n"
        "for request in requests:\n    if request['n'] < 0: sys.exit(3)\n"
        "    print(json.dumps({'square': request['n'] ** 2, 'argument': sys.argv[1]}), file=answers, flush=True)\n"
    )
    with Pool("made_pool", "given", 2) as pool:
        for number in (0, 1):
            pool.ask(number, n=number + 2)
        answers = pool.answers(lambda number: f"squaring {number}")
        assert sorted(next(answers)[1]["square"] for _ in range(2)) == [4, 9]
        pool.ask(1, n=-1)
        with pytest.raises(UserCodeError, match="a worker ended with exit code 3 while squaring 1"):
            next(answers)


def test_failure_of_describes_error_kind():
    assert failure_of(TrainpaceError("a.", "b."))["misuse"]
    assert not failure_of(UserCodeError("a."))["misuse"]
    assert failure_of(MemoryError(), memory_hint="Fewer.")["hint"] == "Fewer."
    assert failure_of(OSError(5, "input"), "the dataset's code")["error"].startswith(
        "the dataset's code raised OSError"
    )
