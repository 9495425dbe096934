import pytest

from trainpace.run.job import TAIL_LINES, Follower, first_error, tail_of

SLURM_KILLED = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "script.py", line 6, in <module>
[rank0]:     dist.all_reduce(mine)
[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:16009: Connection reset by peer. GLHF!
srun: error: node2: task 1: Killed
srun: launch/slurm: _step_signal: Terminating StepId=2.0
slurmstepd-node1: error: *** STEP 2.0 ON node1 CANCELLED AT 2026-11-21T17:25:26 ***
srun: error: node1: task 0: Terminated
"""
TORCHRUN = """\
W1121 17:25:32.146041353 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3
[rank1]: Traceback (most recent call last):
[rank1]:   File "script.py", line 5, in <module>
[rank1]: my.package.TooFew: 3 samples
E1121 17:25:33 torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: 1) local_rank: 1 (pid: 7)
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""
CHAINED = """\
Traceback (most recent call last):
  File "a.py", line 1, in <module>
KeyError: 'labels'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
RuntimeError: no labels
"""
MISSED = (
    "Traceback (most recent call last):\nRuntimeError: Connection closed by peer [127.0.0.1]:1\n"
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", ""),
        ("epoch 1, loss 0.3\nNote: all is well\n", ""),
        (SLURM_KILLED, "a rank died of SIGKILL, most likely out of memory"),
        (TORCHRUN, "my.package.TooFew: 3 samples"),
        (CHAINED, "KeyError: 'labels'"),
        (MISSED, "RuntimeError: Connection closed by peer [127.0.0.1]:1"),
        (
            "Traceback (most recent call last):\nsrun: error: node2: task 0: Exited with exit code 1\nINFO: x\n  File x\n"
            "ValueError: this one\n",
            "ValueError: this one",
        ),
        (MISSED + "Traceback (most recent call last):\nValueError: bad\n", "ValueError: bad"),
        ("Traceback (most recent call last):\n  File x\nAssertionError\n", "AssertionError"),
        ("E x] failed (exitcode: -11) local_rank: 0", "a rank died of SIGSEGV"),
        ("srun: error: node1: task 0: Exited with exit code 3\n", "a rank ended with exit code 3"),
        ("bash: line 1: python: command not found\n", "bash: line 1: python: command not found"),
        (
            "/usr/bin/python: No module named some.rank\n",
            "/usr/bin/python: No module named some.rank",
        ),
        (
            "train.py: error: unrecognized arguments: --x\n",
            "train.py: error: unrecognized arguments: --x",
        ),
        ("Error: no such model.\n", "Error: no such model."),
    ],
)
def test_first_error_in_log_is_the_reason(tmp_path, text, reason):
    (tmp_path / "log").write_text(text)
    assert first_error(tmp_path / "log") == reason


def test_follower_reports_only_whole_lines(tmp_path):
    told = []
    follower = Follower(tmp_path / "log", told.append)
    follower.report()
    assert told == []  # not there yet
    with (tmp_path / "log").open("wb") as file:
        for written, lines in [
            (b"one\ntw", ["one"]),
            (b"o\n", ["two"]),
            (b"1%\r50%\r99%\n\xff", ["99%"]),
            (b"", []),
        ]:
            file.write(written)
            file.flush()
            told.clear()
            follower.report()
            assert told == lines
    follower.report(at_end=True)
    follower.report(at_end=True)
    assert told == ["�"]


def test_tail_returns_last_lines_of_log(tmp_path):
    (tmp_path / "log").write_text("\n".join(map(str, range(100))))
    assert tail_of(tmp_path / "log").split() == [str(i) for i in range(100 - TAIL_LINES, 100)]
    assert tail_of(tmp_path / "none") == ""
