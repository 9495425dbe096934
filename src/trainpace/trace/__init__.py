"""From a task to a Workload. Importing this room imports no torch: the tracing runs in a child process."""

from typing import TYPE_CHECKING

from trainpace.lazy import exports

if TYPE_CHECKING:
    from trainpace.trace.bare import Copier, meta_memo, meta_optimizer, on_meta, sparse
    from trainpace.trace.blocks import longest_chain
    from trainpace.trace.explaining import in_short
    from trainpace.trace.operators import Row, rows_of
    from trainpace.trace.trace import trace_task
    from trainpace.trace.workloads import (
        is_saved,
        load_workload,
        load_workloads,
        names_code,
        packaged_names,
        packaged_workload,
        trace_many,
        workload_on_its_way,
    )

__getattr__, __all__ = exports(__name__, __file__)
