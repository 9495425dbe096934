"""Whether a folder holds installed packages, wherever pip put them."""

import functools
import os

_FOLDERS = ("site-packages", "dist-packages")


def top_of(folder: str) -> str:
    """The folder that holds the package which this folder, an absolute path, belongs to; itself where it belongs to none."""
    while (
        os.path.isfile(os.path.join(folder, "__init__.py"))
        and (above := os.path.dirname(folder)) != folder
    ):
        folder = above
    return folder


@functools.cache
def holds_packages(folder: str) -> bool:
    """Whether pip installed into this folder: beside each package it leaves a folder of its own, named .dist-info."""
    if not {*folder.split(os.sep)}.isdisjoint(_FOLDERS):
        return True
    try:
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    except OSError:
        return False
