"""``python -m trainpace.trace.worker``: trace a model spec in a process of its own."""

from __future__ import annotations

from typing import Any

from trainpace.isolation import serve
from trainpace.records import to_json
from trainpace.trace.trace import trace


def _work(request: dict[str, Any]) -> str:
    return to_json(trace(request["spec"], request["optimizer"], request["forms"], request["sequence_length"]))


if __name__ == "__main__":
    serve(_work)
