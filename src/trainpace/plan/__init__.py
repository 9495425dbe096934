"""Plans of changes to a training: their order, and how much time each change saves."""

from typing import TYPE_CHECKING

from trainpace.core import exports

if TYPE_CHECKING:
    from trainpace.plan.changes import NOISE, Change, Choice, Plan, Projection, data_paths
    from trainpace.plan.evaluate import Evaluator, Problem, forecast_of
    from trainpace.plan.plan import plan_changes
    from trainpace.plan.search import PARALLELISM, Limit, SearchSpace
    from trainpace.plan.settings import config_line, resolution

__getattr__, __all__ = exports(__name__, __file__)
