"""What a DataLoader costs, alone: workers, settings, transforms."""

from typing import TYPE_CHECKING

from trainpace.lazy import exports

if TYPE_CHECKING:
    from trainpace.loader.advice import LoaderAdvice, advise
    from trainpace.loader.model import LoaderCost, batch_ms, fewest_workers, step_ms
    from trainpace.loader.probe import measure_loader
    from trainpace.loader.records import LoaderConditions, LoaderMeasurement, LoaderPoint, Stage
    from trainpace.loader.runs import loader_cost
    from trainpace.loader.samples import choose, first_pass, one_thread, sample_cost
    from trainpace.loader.target import LoaderTarget, load_target

__getattr__, __all__ = exports(__name__, __file__)
