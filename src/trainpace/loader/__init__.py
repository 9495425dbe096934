"""What a DataLoader costs, alone: workers, settings, transforms."""

from typing import TYPE_CHECKING

from trainpace.lazy import exports

if TYPE_CHECKING:
    from trainpace.loader.comparison import LoaderComparison, compare_loaders
    from trainpace.loader.costs import (
        LoaderAdvice,
        LoaderConditions,
        LoaderCost,
        LoaderMeasurement,
        LoaderPoint,
        advise,
        batch_ms,
        fewest_workers,
        loader_costs,
        measure_loader,
        step_ms,
    )

__getattr__, __all__ = exports(__name__, __file__)
