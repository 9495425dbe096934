"""A worker that exhausts memory, starts endless processes or writes an endless answer is stopped with a one-line error."""

import os
import re
import subprocess
import sys
import time

import pytest

from trainpace.core import worker as workers
from trainpace.core.child import Child, Limits, Overstep, usual_limits
from trainpace.core.errors import OutOfMemory, UserCodeError
from trainpace.core.guard import Watch, descendants, free_bytes
from trainpace.core.worker import Pool, run_isolated, run_ranks

GIB = 1 << 30
NEVER = 1 << 20
TAKES_TWO_GIB = "held = []\nfor _ in range(32):\n    held.append(b'1' * (64 << 20))\nimport time; time.sleep(2)\nreturn 'took it all'"
TAKES_HALF_A_GIB = TAKES_TWO_GIB.replace("32", "8")
STARTS_200 = "import subprocess, time\nfor _ in range(200): subprocess.Popen(['sleep', '600'])\ntime.sleep(600)"
FORKS = (
    "import os, time\nend = time.monotonic() + 20\nwhile time.monotonic() < end and len(os.listdir('/proc')) < 3000:\n"
    "    os.fork()\n    time.sleep(0.02)\ntime.sleep(600)"
)
ENDLESS_ANSWER = "import sys\nwith open(sys.argv[2], 'w') as file:\n    for _ in range(4096): file.write('1' * (1 << 20))"


# --- with real processes


def test_worker_that_fills_memory_is_stopped(worker, monkeypatch):
    monkeypatch.setattr(workers, "LIMITS", Limits(free_bytes() - GIB, NEVER))
    with pytest.raises(OutOfMemory) as caught:
        run_isolated(worker(TAKES_TWO_GIB), {}, 60, "measuring m at batch 8")
    used = re.search(r"measuring m at batch 8 .* (\S+) GiB, and only", str(caught.value))
    assert 0.4 < float(used[1]) < 2


def test_worker_within_memory_limit_finishes(worker, monkeypatch):
    monkeypatch.setattr(workers, "LIMITS", Limits(max(0, free_bytes() - 3 * GIB), NEVER))
    assert run_isolated(worker(TAKES_HALF_A_GIB), {}, 60, "asking") == "took it all"


def test_small_worker_is_not_stopped_on_full_machine(worker, monkeypatch):
    monkeypatch.setattr(workers, "LIMITS", Limits(1 << 60, NEVER))
    assert run_isolated(worker("import time; time.sleep(1); return 'so'"), {}, 60, "asking") == "so"


@pytest.mark.parametrize("body", [STARTS_200, FORKS], ids=["a loop", "a fork bomb"])
def test_worker_that_forks_endlessly_is_stopped(worker, monkeypatch, body):
    monkeypatch.setattr(workers, "LIMITS", Limits(0, 50))
    before = descendants(os.getpid())  # for example a browser of another test
    with pytest.raises(
        UserCodeError, match=r"^tracing m was ended: it ran \d[\d,]* processes at once\.$"
    ) as caught:
        run_isolated(worker(body), {}, 60, "tracing m")
    assert int(str(caught.value).split("it ran ")[1].split()[0].replace(",", "")) > 50
    assert set(descendants(os.getpid())) <= set(before)


def test_rank_that_exceeds_process_limit_is_named(worker, monkeypatch):
    monkeypatch.setattr(workers, "LIMITS", Limits(0, 50))
    module = worker(f"import time\nif request['rank'] == 0: time.sleep(600)\n{STARTS_200}")
    with pytest.raises(UserCodeError, match="rank 1 of a test was ended: it ran "):
        run_ranks(module, [{"rank": 0}, {"rank": 1}], 60, "a test")


def test_pool_worker_that_exceeds_process_limit_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(workers, "LIMITS", Limits(0, 50))
    (tmp_path / "limited_pool.py").write_text(
        "from trainpace.core.worker import serve_lines\nrequests, answers = serve_lines()\nfor request in requests:\n"
        + "\n".join(f"    {line}" for line in STARTS_200.splitlines())
    )
    with Pool("limited_pool", "", 1) as pool:
        pool.ask(0, n=1)
        with pytest.raises(UserCodeError, match="computing samples was ended: it ran "):
            next(pool.answers(lambda _: "computing samples"))


@pytest.mark.parametrize(
    "run",
    [run_isolated, lambda module, request, *rest: run_ranks(module, [request], *rest)],
    ids=["alone", "a rank"],
)
def test_worker_with_endless_answer_is_stopped(worker, monkeypatch, run):
    monkeypatch.setattr(workers, "MOST_BYTES", 1 << 24)
    monkeypatch.setattr(workers, "_SIZE_POLL_S", 0.05)
    module, begun = worker(f"{ENDLESS_ANSWER}\nimport time; time.sleep(600)"), time.monotonic()
    with pytest.raises(UserCodeError, match="asking was ended: its answer was longer than 16 MiB"):
        run(module, {}, 60, "asking")
    assert time.monotonic() - begun < 50


def test_pool_worker_with_endless_line_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(workers, "MOST_BYTES", 1 << 20)
    (tmp_path / "endless_pool.py").write_text(
        "from trainpace.core.worker import serve_lines\nrequests, answers = serve_lines()\nnext(requests)\n"
        "while True: answers.write('1' * 4096)\n"
    )
    with Pool("endless_pool", "", 1) as pool:
        pool.ask(0, n=1)
        with pytest.raises(UserCodeError, match="a worker's answer was longer than 1 MiB"):
            next(pool.answers(lambda _: "waiting"))


def test_child_without_limits_is_not_stopped():
    with Child(["sh", "-c", "for i in $(seq 80); do sleep 600 & done; sleep 1; exit 3"]) as child:
        assert child.wait(30) == 3
        assert child.overstep is None


def test_own_exit_code_of_child_is_not_reported_as_overstep():
    with Child(["sh", "-c", "exit 137"], limits=usual_limits()) as child:
        assert child.wait(30) == 137
        assert child.overstep is None


@pytest.mark.skipif(not os.path.exists("/proc/self/oom_score_adj"), reason="Linux's own")
def test_oom_score_of_limited_child_is_raised():
    show = [
        sys.executable,
        "-c",
        "import time; time.sleep(1); print(open('/proc/self/oom_score_adj').read())",
    ]
    with Child(show, limits=usual_limits(), stdout=subprocess.PIPE) as child:
        assert int(child.stdout.read()) >= 500
    with open("/proc/self/oom_score_adj") as own, Child(show, stdout=subprocess.PIPE) as child:
        assert int(child.stdout.read()) == int(own.read())


# --- free memory, from the files of a simulated machine


@pytest.mark.parametrize(
    ("files", "gib"),
    [
        ({}, 8),
        ({"proc/meminfo": "MemTotal: 1 kB\n"}, None),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/memory.max": 4 * GIB,
                "sys/fs/cgroup/a/memory.current": GIB,
            },
            3,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max"}, 8),
        (
            {
                "proc/self/cgroup": "0::/../x\n",
                "sys/fs/cgroup/memory.max": 4 * GIB,
                "sys/fs/cgroup/memory.current": 4 * GIB,
                "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file {GIB // 2}\n",
            },
            1.5,
        ),
        (
            {
                "proc/self/cgroup": "9:cpu:/\n4:memory,x:/j\n",
                "sys/fs/cgroup/memory/j/memory.limit_in_bytes": 2 * GIB,
                "sys/fs/cgroup/memory/j/memory.usage_in_bytes": 2 * GIB,
                "sys/fs/cgroup/memory/j/memory.stat": f"total_inactive_file {GIB}\n",
            },
            1,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
            },
            8,
        ),
        ({"proc/self/cgroup": "nonsense\n"}, 8),
    ],
)
def test_free_bytes_respects_cgroup_limits(tmp_path, files, gib):
    machine = {
        "proc/meminfo": f"MemTotal: {16 << 20} kB\nMemAvailable: {8 << 20} kB\nHugePages_Total: 0\n"
    }
    for name, text in {**machine, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(str(text))
    assert free_bytes(str(tmp_path)) == (None if gib is None else gib * GIB)


def test_free_bytes_include_swap_and_limit_is_one_percent(tmp_path):
    (tmp_path / "proc").mkdir()
    text = f"MemTotal: {16 << 20} kB\nMemAvailable: 0 kB\nSwapFree: {1 << 20} kB\n"
    (tmp_path / "proc/meminfo").write_text(text)
    assert free_bytes(str(tmp_path)) == GIB
    assert usual_limits(str(tmp_path)) == Limits(16 * GIB // 100, 2000)
    (tmp_path / "proc/meminfo").write_text(text.replace(str(16 << 20), str(1024 << 20)))
    assert usual_limits(str(tmp_path)).least_free_bytes == GIB


def test_watch_polls_faster_when_memory_is_low(tmp_path):
    (tmp_path / "proc").mkdir()
    counted = []

    def descend():
        counted.append(1)
        return list(range(2, 60))

    def machine(left_gib, threads):
        (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {int(left_gib * (1 << 20))} kB\n")
        (tmp_path / "proc/loadavg").write_text(f"0.1 0.1 0.1 1/{threads} 99\n")

    machine(50, 700)
    watch = Watch(GIB, 50, descend, str(tmp_path))
    assert watch.overstep() is None
    assert watch.pause_s == 0.5
    machine(3, 745)
    assert watch.overstep() is None
    assert 0.02 < watch.pause_s < 0.2
    assert not counted
    machine(3, 755)
    assert watch.overstep() == Overstep(processes=58)
