"""What a DataLoader costs, alone: workers, settings, transforms."""

from typing import TYPE_CHECKING

from trainpace.lazy import exports

if TYPE_CHECKING:
    from trainpace.loader.advice import LoaderAdvice, advise
    from trainpace.loader.model import LoaderCost, batch_ms, fewest_workers, step_ms
    from trainpace.loader.records import LoaderConditions, LoaderMeasurement, LoaderPoint, Stage, measure_loader
    from trainpace.loader.runs import loader_cost
    from trainpace.loader.samples import LoaderTarget, choose, first_pass, load_target, one_thread, sample_cost

__getattr__, __all__ = exports(__name__, __file__)
