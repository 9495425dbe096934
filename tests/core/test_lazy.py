"""Packages import their exported names lazily."""

import importlib
import pkgutil

import pytest

PACKAGES = ["configs", "diagnose", "journal", "watch"]


@pytest.mark.parametrize("name", PACKAGES)
def test_exported_names_exist_and_are_not_shadowed_by_modules(name):
    package = importlib.import_module(f"trainpace.{name}")
    assert len(package.__all__) > 4
    for module in pkgutil.walk_packages(package.__path__, f"trainpace.{name}."):
        assert (
            module.name.rpartition(".")[2] not in package.__all__
        )  # an imported submodule would shadow the exported name
    for exported in package.__all__:
        assert getattr(package, exported) is not None


def test_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match=r"'trainpace\.journal' has no attribute 'nonsense'"):
        importlib.import_module("trainpace.journal").nonsense  # noqa: B018
