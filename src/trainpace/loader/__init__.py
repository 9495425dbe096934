"""What a DataLoader costs, alone: workers, settings, transforms."""

from typing import TYPE_CHECKING

from trainpace.lazy import exports

if TYPE_CHECKING:
    from trainpace.loader.advice import LoaderAdvice, advise
    from trainpace.loader.model import LoaderCost, batch_ms, fewest_workers, step_ms
    from trainpace.loader.records import LoaderConditions, LoaderMeasurement, LoaderPoint, loader_costs, measure_loader

__getattr__, __all__ = exports(__name__, __file__)
