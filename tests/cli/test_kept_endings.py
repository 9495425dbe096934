"""An exception raised by a signal handler ends the program even if other code swallows it."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from trainpace import cli
from trainpace.cli import kept

LOST = """
    import contextlib, signal, sys, time
    from trainpace.cli import kept

    class Swallows:
        def __del__(self):  # what is raised here is printed and forgotten
            signal.raise_signal(getattr(signal, sys.argv[1]))

    def work():
        times = int(sys.argv[2])
        for _ in range(times):
            Swallows()
        print("went on", flush=True)
        time.sleep(20)

    try:
        with kept() if sys.argv[3] == "kept" else contextlib.nullcontext():
            work()
    except KeyboardInterrupt:
        sys.exit(130)
"""


def ended(*arguments, timeout_s=60):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LOST), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


@pytest.mark.parametrize("times", ["1", "3"])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_signal_swallowed_by_a_finalizer_is_raised_again(name, times):
    process = ended(name, times, "kept")
    assert "went on" in process.stdout
    assert "Exception ignored in" in process.stderr
    assert process.returncode == 128 + getattr(signal, name)


def test_swallowed_signal_without_kept_does_not_end_the_program():
    with pytest.raises(subprocess.TimeoutExpired):
        ended("SIGINT", "1", "plain", timeout_s=8)


def test_handled_signal_is_not_raised_again():
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    }
    with pytest.raises(KeyboardInterrupt), kept():
        os.kill(os.getpid(), signal.SIGINT)
    assert {number: signal.getsignal(number) for number in before} == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with kept():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_suppressed_signal_leaves_no_timer_behind(monkeypatch):
    monkeypatch.setattr(cli, "AGAIN_S", 600.0)
    with kept():
        with contextlib.suppress(KeyboardInterrupt):  # pytest.raises would keep the exception
            signal.raise_signal(signal.SIGINT)
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
