"""Pytest plugin that skips tests importing torch, for a Python without torch.

Use it with `pytest -p supply.without_torch`.
"""

import sys

import pytest


class NoTorch:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torch":
            pytest.skip(
                "needs torch, which is not installed for this Python", allow_module_level=True
            )


def pytest_configure(config):
    sys.meta_path.insert(0, NoTorch)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    """Skip a test whose fixture imports torch in a worker process."""
    try:
        return (yield)
    except Exception as error:
        if "No module named 'torch'" in str(error):
            pytest.skip("needs torch, which is not installed for this Python")
        raise
