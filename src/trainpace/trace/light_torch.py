"""Keep torch from importing its compiler for a trace, which compiles nothing: a quarter of the time of a small model's trace.

Optimizers, dispatch modes and `out=` wrappers mark functions as not to be compiled, and import `torch._dynamo` for it. A stand-in
does that much. Asked for anything else, as by a model that calls torch.compile, it gives way to the module itself.
"""

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"


class _StandIn(ModuleType):
    def __init__(self) -> None:
        super().__init__(COMPILER)
        self.__spec__ = importlib.util.find_spec(COMPILER)

    @staticmethod
    def disable(function: Any, *_: Any, **__: Any) -> Any:
        return function

    @staticmethod
    def graph_break(*_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # the import system looks for these
            raise AttributeError(name)
        if sys.modules.get(COMPILER) is self:
            del sys.modules[COMPILER]
        return getattr(importlib.import_module(COMPILER), name)


def keep_torch_light() -> None:
    """Put the stand-in in the compiler's place, unless it is there already. For a process that only traces."""
    if COMPILER not in sys.modules:
        sys.modules[COMPILER] = _StandIn()
