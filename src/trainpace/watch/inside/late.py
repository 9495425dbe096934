"""Callbacks that run once a module has been imported, now or later."""

import contextlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

Callback = Callable[[ModuleType], None]

_waiting: dict[str, Callback] = {}


def warn(message: str) -> None:
    """Print one line on stderr: a failure of ours must not become one of the script's."""
    with contextlib.suppress(Exception):  # a closed stderr
        sys.stderr.write(f"trainpace: warning: {message}\n")


def when_imported(name: str, callback: Callback) -> None:
    """Call ``callback(module)`` after the module's own code has run. An exception in it becomes a warning."""
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        _call(name, callback, module)
        return
    _waiting[name] = callback
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _call(name: str, callback: Callback, module: ModuleType) -> None:
    try:
        callback(module)
    except Exception as error:
        warn(f"{name} is not recorded ({type(error).__name__}: {error}).")


class _Finder(importlib.abc.MetaPathFinder):
    """A finder that adds callbacks to the modules that the other finders find."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _waiting:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
                with contextlib.suppress(Exception):  # a loader that takes no attribute
                    _wrap(spec.loader, fullname)
                return spec
        return None


def _wrap(loader: Any, name: str) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        loader.exec_module = execute
        execute(module)
        callback = _waiting.pop(name, None)
        if callback is not None:
            _call(name, callback, module)

    loader.exec_module = exec_module
