import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

# tests keep nothing in the user's own journal, and find no profile there
DATA_HOME = os.environ["XDG_DATA_HOME"] = tempfile.mkdtemp(prefix="trainpace-tests-")
os.environ["TRAINPACE_TRACES"] = "off"  # tests of tracing trace
os.environ.pop("TRAINPACE_JOURNAL", None)
# two test processes whose steps take two threads each, on two cores, wait for the scheduler in every parallel region
os.environ.setdefault("OMP_NUM_THREADS", "1")
# commands that tests start find bytecode, as users' do; compiling the modules anew takes as long as a forecast
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# a shell's background jobs ignore Ctrl-C, under nohup also a closed terminal, and so would every command that a test ends
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

# a busy machine is no reason to fail: nothing here is a timed test
settings.register_profile("trainpace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("trainpace")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """The tests of a file run in one process, one after another; pages of the documentation wherever there is room, since a page
    takes a minute or two."""
    from xdist.scheduler import LoadFileScheduling

    class PagesApart(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return (
                nodeid
                if "test_a_page_does_what_it_shows" in nodeid
                else super()._split_scope(nodeid)
            )

    return PagesApart(config, log)


def pytest_runtest_setup():
    """Answers are as wide as in a log, whatever terminal the tests are started in."""
    os.environ.pop("COLUMNS", None)


def pytest_unconfigure():
    shutil.rmtree(DATA_HOME, ignore_errors=True)
