import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

# Tests neither write to the user's journal nor read a profile from it.
DATA_HOME = os.environ["XDG_DATA_HOME"] = tempfile.mkdtemp(prefix="trainpace-tests-")
os.environ["TRAINPACE_TRACES"] = "off"  # Tests of tracing do not use packaged traces.
os.environ.pop("TRAINPACE_JOURNAL", None)
# Two test processes with two threads each on two cores would wait for the scheduler in every parallel region.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Commands started by tests find bytecode, as users' commands do. Compiling all modules takes as long as a forecast.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Background jobs of a shell ignore Ctrl-C (and SIGHUP under nohup), and so would every command that a test interrupts.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

# A busy machine must not fail tests: none of them is timed.
settings.register_profile("trainpace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("trainpace")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Run the tests of a file in one process, but distribute documentation pages freely: each takes a minute or two."""
    from xdist.scheduler import LoadFileScheduling

    class PagesApart(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return (
                nodeid
                if "test_page_commands_print_shown_output" in nodeid
                else super()._split_scope(nodeid)
            )

    return PagesApart(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Begin with the longest files, so that no process is left alone with one of them at the end."""
    items.sort(key=lambda item: item.path.parent.name not in ("watch", "web"))


def pytest_runtest_setup():
    """Make the output as wide as in a log, in any terminal."""
    os.environ.pop("COLUMNS", None)


def pytest_unconfigure():
    shutil.rmtree(DATA_HOME, ignore_errors=True)
