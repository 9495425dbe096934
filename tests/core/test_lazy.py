"""Rooms whose names are imported when they are used."""

import importlib
import pkgutil

import pytest

ROOMS = ["configs", "diagnose", "journal", "watch"]


@pytest.mark.parametrize("room", ROOMS)
def test_every_name_is_there_and_none_is_hidden_by_a_module(room):
    package = importlib.import_module(f"trainpace.{room}")
    assert len(package.__all__) > 4
    for module in pkgutil.walk_packages(package.__path__, f"trainpace.{room}."):
        assert (
            module.name.rpartition(".")[2] not in package.__all__
        )  # an imported module would take the name's place
    for name in package.__all__:
        assert getattr(package, name) is not None


def test_a_name_that_a_room_does_not_have():
    with pytest.raises(AttributeError, match=r"'trainpace\.journal' has no attribute 'nonsense'"):
        importlib.import_module("trainpace.journal").nonsense  # noqa: B018
