"""Get a Workload: from its file, or by tracing a spec in a child process."""

from __future__ import annotations

from collections.abc import Sequence

from trainpace import records
from trainpace.isolation import run_isolated
from trainpace.workload import Form, Workload

TRACE_TIMEOUT_S = 300.0


def load_workload(
    spec: str,
    forms: Sequence[Form],
    optimizer: str | None = None,
    sequence_length: int | None = None,
    timeout_s: float = TRACE_TIMEOUT_S,
) -> Workload:
    """The workload of a spec. ``WORKLOAD.json`` is read as it is; everything else is traced."""
    if spec.endswith(".json") and not spec.startswith("transformers:"):
        return records.load(spec, Workload)
    return trace_isolated(spec, forms, optimizer, sequence_length, timeout_s)


def trace_isolated(
    spec: str,
    forms: Sequence[Form],
    optimizer: str | None = None,
    sequence_length: int | None = None,
    timeout_s: float = TRACE_TIMEOUT_S,
) -> Workload:
    """Trace in a process of its own; whatever the model's code does is one sentence at worst."""
    request = {"spec": spec, "optimizer": optimizer, "forms": list(forms), "sequence_length": sequence_length}
    answer = run_isolated("trainpace.trace.worker", request, timeout_s, f"tracing {spec}")
    return records.from_json(answer, Workload, f"the trace of {spec}")
