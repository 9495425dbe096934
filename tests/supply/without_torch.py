"""pytest -p supply.without_torch: a test that comes to import torch is skipped. For Pythons which have no torch at hand."""

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
    """A fixture that traces a model has a worker import torch, which then says that there is none."""
    try:
        return (yield)
    except Exception as error:
        if "No module named 'torch'" in str(error):
            pytest.skip("needs torch, which is not installed for this Python")
        raise
