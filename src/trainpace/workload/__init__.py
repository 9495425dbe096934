"""Turn a model into a table of operators: model specs, tasks, and tracing on the meta device.

The imports below are for type checkers. `exports` reads their text, and imports a name when it is
first used.
"""

from typing import TYPE_CHECKING

from trainpace.core import exports

if TYPE_CHECKING:
    from trainpace.workload.blocks import longest_chain
    from trainpace.workload.documents import Documents, PackedRow, nearest_multiple
    from trainpace.workload.kinds import FUNCTIONS, GATHERS, KINDS, ROW_WORK, TRAFFIC_SHARES, WORK
    from trainpace.workload.meta import (
        Copier,
        map_tensors,
        meta_memo,
        meta_optimizer,
        on_meta,
        sparse,
        tensors_in,
    )
    from trainpace.workload.model_spec import ModelSpec, import_package
    from trainpace.workload.operators import Row, rows_of
    from trainpace.workload.optimizers import make_optimizer, optimizer_name
    from trainpace.workload.specs import build_task
    from trainpace.workload.task import (
        Task,
        WholeStep,
        image_task,
        longest_first,
        recomputes_itself,
        usual_optimizer,
    )
    from trainpace.workload.trace import in_short, trace_task
    from trainpace.workload.workload import (
        AS_IT_IS,
        ATTENTION,
        ATTENTION_BACKWARD_MODEL_SHARE,
        ATTENTION_KINDS,
        CONV,
        CONV_KERNEL,
        CONV_OUT,
        CONV_STRIDE,
        CONVOLUTION_KINDS,
        GEMM,
        GROUPED,
        LARGEST,
        MATRIX_KINDS,
        MOST_SIZES,
        OTHER,
        PHASES,
        PLAIN,
        Adaptation,
        AttentionSizes,
        Blocks,
        Counts,
        Flags,
        Floats,
        Form,
        MemoryProfile,
        Mode,
        Operators,
        OtherBlocks,
        OtherSizes,
        Phase,
        TracedForm,
        Variant,
        Workload,
        at_batch,
        attention_widths,
        form_of,
        multiplies_activations,
    )
    from trainpace.workload.workloads import (
        load_workload,
        load_workloads,
        packaged_names,
        packaged_workload,
        stored_precision,
        trace_many,
    )

__getattr__, __all__ = exports(__name__, __file__)
