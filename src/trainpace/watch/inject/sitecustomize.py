"""Start the recorder in the Python processes of a watched command.

This folder comes first on Python's path, and Python imports the first ``sitecustomize`` that it
finds. If the user has another ``sitecustomize``, it is loaded from here.
"""

import os
import sys

_before: list[object] = []
"""Keeps the user's ``sitecustomize`` alive, since nothing else refers to it."""


def _load_the_one_before() -> None:
    import importlib.machinery
    import importlib.util

    here = os.path.dirname(os.path.abspath(__file__))
    elsewhere = [p for p in sys.path if os.path.abspath(p or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        _before.append(module)
        spec.loader.exec_module(module)


def _load_trainpace() -> None:
    """Make ``trainpace`` importable if it is missing, without the other packages in its folder."""
    import importlib.util

    if importlib.util.find_spec("trainpace") is not None:
        return
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    spec = importlib.util.spec_from_file_location(
        "trainpace", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
    )
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["trainpace"] = module
        spec.loader.exec_module(module)


def _start() -> None:
    if "TRAINPACE_WATCH" not in os.environ:
        return
    try:
        _load_trainpace()
        from trainpace.watch.inside.start import begin

        begin()
    except Exception as error:  # The script must run in any case.
        sys.stderr.write(f"trainpace: warning: this process is not recorded ({error}).\n")


try:
    _load_the_one_before()
finally:
    _start()
