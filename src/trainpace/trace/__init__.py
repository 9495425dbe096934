"""From a model's code to a Workload. Importing this room imports no torch: the tracing runs in a child process."""

from typing import TYPE_CHECKING

from trainpace.lazy import exports

if TYPE_CHECKING:
    from trainpace.trace.blocks import longest_chain
    from trainpace.trace.generator import RANDOM_FAMILIES, is_random, parse_random
    from trainpace.trace.operators import Row, map_tensors, rows_of
    from trainpace.trace.optimizers import make_optimizer, optimizer_name
    from trainpace.trace.packages import import_package
    from trainpace.trace.specs import build_task
    from trainpace.trace.stored import stored_precision
    from trainpace.trace.task import Task, WholeStep, longest_first, usual_optimizer
    from trainpace.trace.trace import on_meta, trace_task
    from trainpace.trace.workloads import is_saved, load_workload, packaged_workload, trace_many, workload_on_its_way

__getattr__, __all__ = exports(__name__, __file__)
