"""``python -m trainpace.trace.worker``: trace model specs in a process of its own."""

import gc
import json
import warnings
from collections.abc import Callable
from typing import Any

from trainpace.errors import TrainpaceError
from trainpace.process import explain, serve
from trainpace.records import save, to_json
from trainpace.workload import Variant, Workload


def _work(request: dict[str, Any]) -> str:
    trace = _tracer()
    if "files" not in request:
        return to_json(_traced(trace, request))
    reasons: dict[str, str] = {}
    for file, one in request["files"].items():
        try:
            save(_traced(trace, one), file)
        except TrainpaceError as error:
            reasons[file] = str(error)
        except Exception as error:  # a model's code may raise anything, and the next ones are to be traced all the same
            reasons[file] = explain(error)
    return json.dumps(reasons)


def _tracer() -> Callable[..., Workload]:
    gc.disable()  # of what importing torch makes nothing is garbage, and looking for it again and again takes a tenth of the time
    from trainpace.trace.light_torch import keep_torch_light
    from trainpace.trace.trace import trace

    keep_torch_light()
    gc.freeze()
    gc.enable()
    return trace


def _traced(trace: Callable[..., Workload], request: dict[str, Any]) -> Workload:
    return trace(request["spec"], request["forms"], Variant(**request["variant"]))


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # timm and transformers warn of old names that somebody else chose
    serve(_work)
