"""Worker process that traces model specs: ``python -m trainpace.workload.trace_worker``."""

import gc
import importlib
import importlib.util
import json
import sys
import warnings
from types import ModuleType
from typing import Any

from trainpace.core.errors import TrainpaceError
from trainpace.core.records import from_json, save, to_json
from trainpace.core.worker import explain, serve
from trainpace.workload.workload import Adaptation, Variant, Workload

COMPILER = "torch._dynamo"


class _StandIn(ModuleType):
    """Stand-in for torch's compiler, whose import takes a quarter of the time of a small trace.

    Optimizers, dispatch modes and `out=` wrappers import `torch._dynamo` only to exclude functions
    from compilation. If any other attribute is read, for example by a model that calls
    torch.compile, the real module is imported.
    """

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
        if name.startswith("__") and name != "__path__":  # the import system reads these names
            raise AttributeError(name)
        if sys.modules.get(COMPILER) is self:
            del sys.modules[COMPILER]
        return getattr(importlib.import_module(COMPILER), name)


def keep_torch_light() -> None:
    """Replace torch's compiler by the stand-in, unless it is already imported.

    Call this only in a process that does nothing but trace.
    """
    if COMPILER not in sys.modules:
        sys.modules[COMPILER] = _StandIn()


def _work(request: dict[str, Any]) -> str:
    gc.disable()  # garbage collection would take a tenth of the import time and find no garbage
    from trainpace.workload.trace import trace

    keep_torch_light()
    gc.freeze()
    gc.enable()

    def traced(one: dict[str, Any]) -> Workload:
        variant = Variant(**one["variant"])
        variant = variant._replace(adaptation=Adaptation(*variant.adaptation))
        return trace(one["spec"], one["forms"], variant, one.get("on_meta", False))

    if "workload" in request:
        from trainpace.workload.optimizers import with_optimizer

        workload = from_json(request["workload"], Workload)
        return to_json(with_optimizer(workload, request["optimizer"]))
    if "requests" in request:
        return json.dumps([to_json(traced(one)) for one in request["requests"]])
    reasons: dict[str, str] = {}
    for file, one in request["files"].items():
        try:
            save(traced(one), file)
        except Exception as error:  # the model's code may raise any exception
            reasons[file] = str(error) if isinstance(error, TrainpaceError) else explain(error)
    return json.dumps(reasons)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # timm and transformers warn about deprecated names
    serve(_work)
