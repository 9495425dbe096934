"""``python -m trainpace.trace.worker``: trace model specs in a process of its own."""

from __future__ import annotations

import json
import warnings
from typing import Any

from trainpace.errors import TrainpaceError
from trainpace.isolation import explain, serve
from trainpace.records import save, to_json
from trainpace.trace.trace import trace
from trainpace.workload import Variant


def _work(request: dict[str, Any]) -> str:
    if "files" not in request:
        return to_json(_trace(request))
    reasons: dict[str, str] = {}
    for file, one in request["files"].items():
        try:
            save(_trace(one), file)
        except TrainpaceError as error:
            reasons[file] = str(error)
        except Exception as error:  # a model's code may raise anything, and the next ones are to be traced all the same
            reasons[file] = explain(error)
    return json.dumps(reasons)


def _trace(request: dict[str, Any]) -> Any:
    return trace(request["spec"], request["forms"], Variant(**request["variant"]))


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # timm and transformers warn of old names that somebody else chose
    serve(_work)
