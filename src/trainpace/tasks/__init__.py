"""From a model spec to a task: a model with its loss, optimizer and samples, whatever library it was written for."""

from typing import TYPE_CHECKING

from trainpace.lazy import exports

if TYPE_CHECKING:
    from trainpace.tasks.adapters import adapted
    from trainpace.tasks.blockwise import BlockwiseOptimizer
    from trainpace.tasks.generator import RANDOM_FAMILIES, is_random, parse_random
    from trainpace.tasks.optimizers import (
        ScalarsReadAsOne,
        is_torchs,
        make_optimizer,
        optimizer_name,
    )
    from trainpace.tasks.packages import import_package
    from trainpace.tasks.quantised import packed_away
    from trainpace.tasks.skipping_attention import OPERATOR, UNKNOWN, flex_attention
    from trainpace.tasks.specs import build_task
    from trainpace.tasks.stored import stored_precision
    from trainpace.tasks.task import (
        Task,
        WholeStep,
        longest_first,
        recompute_activations,
        usual_optimizer,
    )
    from trainpace.tasks.tensors import map_tensors, tensors_in

__getattr__, __all__ = exports(__name__, __file__)
