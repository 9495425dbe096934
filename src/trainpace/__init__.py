"""How long will this training take, what will it cost, why, and how do I make it faster?

The commands are functions here, with the same names: `trainpace.forecast("resnet50", gpu="A100")`.
Several have the name of a package, such as `trainpace.forecast`: that module can then be called,
and `import trainpace.forecast` works as for any other.
"""

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from trainpace.verbs import SUMMARIES

if TYPE_CHECKING:
    from trainpace.api import *  # noqa: F403
    from trainpace.core.errors import TrainpaceError as TrainpaceError

__version__ = "0.1.0"

_FUNCTIONS = {*SUMMARIES, "trace"} - {"serve"}


class _CallablePackage(ModuleType):
    """A package with a command's name. Called, it runs the command."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        api = importlib.import_module("trainpace.api")
        return getattr(api, self.__name__.rpartition(".")[2])(*args, **options)


class _Package(ModuleType):
    """Python binds an imported submodule here; those with a command's name become callable. A
    module's class may be assigned (Python's data model, "Customizing module attribute access")."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FUNCTIONS and type(value) is ModuleType:
            value.__class__ = _CallablePackage
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_FUNCTIONS, "TrainpaceError"})


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """Import a function or package when it is first used."""
    if name == "TrainpaceError":
        return importlib.import_module("trainpace.core.errors").TrainpaceError
    if name not in _FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec(f"{__name__}.{name}"):
        return importlib.import_module(f"{__name__}.{name}")
    return getattr(importlib.import_module("trainpace.api"), name)
