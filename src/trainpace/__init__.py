"""How long will this training take, what will it cost, why, and how do I make it faster?

The verbs of the command line are functions here, with the same names: `trainpace.forecast("resnet50", gpu="A100")`. Several have
the name of a room of this package, such as `trainpace.forecast`: that module can then be called, and `import
trainpace.forecast.kernels` works as for any other.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from trainpace.core.lazy import exports

if TYPE_CHECKING:
    from trainpace.api import calibrate as calibrate
    from trainpace.api import diagnose as diagnose
    from trainpace.api import doctor as doctor
    from trainpace.api import forecast as forecast
    from trainpace.api import gpus as gpus
    from trainpace.api import journal as journal
    from trainpace.api import loader as loader
    from trainpace.api import look as look
    from trainpace.api import match as match
    from trainpace.api import measure as measure
    from trainpace.api import offers as offers
    from trainpace.api import plan as plan
    from trainpace.api import precompute as precompute
    from trainpace.api import run as run
    from trainpace.api import schedule as schedule
    from trainpace.api import trace as trace
    from trainpace.api import validate as validate
    from trainpace.api import verify as verify
    from trainpace.api import watch as watch
    from trainpace.core.errors import TrainpaceError as TrainpaceError

__version__ = "0.1.0"

_ROOMS = frozenset("diagnose forecast journal measure offers plan run watch".split())
_export, _exported_names = exports(__name__, __file__)


class _Room(ModuleType):
    """A room that has a verb's name; called, it does what the verb does."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return getattr(importlib.import_module("trainpace.api"), self.__name__.rpartition(".")[2])(
            *args, **options
        )


class _Package(ModuleType):
    """Importing a submodule binds it here: those with a verb's name become callable. A module's class may be assigned
    (Python's data model, "Customizing module attribute access")."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ROOMS and type(value) is ModuleType:
            value.__class__ = _Room
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_exported_names})


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """A verb that was not used yet; nothing is imported before it is."""
    return importlib.import_module(f"trainpace.{name}") if name in _ROOMS else _export(name)


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext trainpace`: the magic %trainpace, and records as tables."""
    importlib.import_module("trainpace.api.notebook").load_ipython_extension(shell)
