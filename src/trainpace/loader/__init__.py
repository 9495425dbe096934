"""What a DataLoader costs, alone: workers, settings, transforms."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainpace.loader.advice import LoaderAdvice, advise
    from trainpace.loader.model import LoaderCost, batch_ms, fewest_workers, step_ms
    from trainpace.loader.probe import measure_loader
    from trainpace.loader.records import LoaderConditions, LoaderMeasurement, LoaderPoint, Stage
    from trainpace.loader.runs import loader_cost
    from trainpace.loader.samples import choose, first_pass, one_thread, sample_cost
    from trainpace.loader.target import LoaderTarget, load_target

_MODULES = {
    "LoaderAdvice": "advice", "LoaderConditions": "records", "LoaderCost": "model", "LoaderMeasurement": "records",
    "LoaderPoint": "records", "LoaderTarget": "target", "Stage": "records", "advise": "advice", "batch_ms": "model",
    "choose": "samples", "fewest_workers": "model", "first_pass": "samples", "load_target": "target",
    "loader_cost": "runs", "measure_loader": "probe", "one_thread": "samples", "sample_cost": "samples",
    "step_ms": "model",
}  # fmt: skip
__all__ = [
    "LoaderAdvice", "LoaderConditions", "LoaderCost", "LoaderMeasurement", "LoaderPoint", "LoaderTarget", "Stage", "advise",
    "batch_ms", "choose", "fewest_workers", "first_pass", "load_target", "loader_cost", "measure_loader", "one_thread",
    "sample_cost", "step_ms",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Late, as some of this room needs torch."""
    import importlib

    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
