import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

# tests keep nothing in the user's own journal, and find no profile there
DATA_HOME = os.environ["XDG_DATA_HOME"] = tempfile.mkdtemp(prefix="trainpace-tests-")
os.environ.pop("TRAINPACE_JOURNAL", None)
# two test processes whose steps take two threads each, on two cores, wait for the scheduler in every parallel region
os.environ.setdefault("OMP_NUM_THREADS", "1")
# commands that tests start find bytecode, as users' do; compiling the modules anew takes as long as a forecast
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# a busy machine is no reason to fail: nothing here is a timed test
settings.register_profile("trainpace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("trainpace")


def pytest_collection_modifyitems(items):
    """The tests of a file run in one process, one after another; those with a group of their own wherever there is room."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


def pytest_unconfigure():
    shutil.rmtree(DATA_HOME, ignore_errors=True)
