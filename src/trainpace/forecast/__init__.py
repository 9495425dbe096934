"""Forecasts of step time and memory for a workload on a cluster, and their measured accuracy."""

from typing import TYPE_CHECKING

from trainpace.core import exports

if TYPE_CHECKING:
    from trainpace.core.stats import Z_95, student_t_95
    from trainpace.forecast.attention import (
        IMPLEMENTATIONS,
        Implementation,
        default_implementation,
        implementation_on,
    )
    from trainpace.forecast.collectives import TCP_SHARE, meets_itself, steps, wire_bytes
    from trainpace.forecast.constants import CardConstants, KernelConstants, fitted_constants
    from trainpace.forecast.explanations import (
        MemoryOverStep,
        Roofline,
        RooflinePoint,
        alike,
        memory_over_step,
    )
    from trainpace.forecast.forecaster import Forecaster
    from trainpace.forecast.forecasts import ForecastTable
    from trainpace.forecast.grid import CLASHES, RULES, Grid, divisors, doublings, usable
    from trainpace.forecast.matmul import MatmulModel
    from trainpace.forecast.measured_runs import (
        Case,
        MeasuredRun,
        as_precision,
        case_of,
        execution_of,
        measured_ms,
        mode_of,
        number,
        read_parallelism,
        read_runs,
        read_table,
        run_of,
    )
    from trainpace.forecast.memory import CONTEXT_GIB, needed_gib, room_gib, usable_gib
    from trainpace.forecast.published import (
        FOLDER,
        RUNS_FILE,
        TRACES_FILE,
        CardFigures,
        Near,
        Nearness,
        PublicJournal,
        PublicRun,
        fingerprint_of_constants,
        model_kind,
        nearest,
        public_journal,
        public_runs,
        signature_of,
    )
    from trainpace.forecast.rewrites import has_vocabulary_loss
    from trainpace.forecast.software import RunningSoftware, packed, running_software
    from trainpace.forecast.target import FITTED, CalibratedKernels, FittedKernels, Target, host_of
    from trainpace.forecast.timings import (
        FUSED,
        MachineModel,
        MachineRoofline,
        OperatorTimings,
        fit_classes,
        step_factor,
    )
    from trainpace.forecast.uncertainty import (
        LARGEST_RATIO,
        PARTS,
        REPEAT_SD,
        Knowledge,
        Measured,
        Observed,
        Posterior,
        Run,
        Variant,
        observe,
        observe_elsewhere,
        run_of_stored,
    )
    from trainpace.forecast.validation import (
        PAGEABLE_COPY_GB_PER_S,
        Conditions,
        PackagedTraces,
        Row,
        Score,
        ScoreLine,
        Summary,
        by,
        case_table,
        evaluate,
        family_of,
        forecast_case,
        packaged_traces,
        score,
        score_of,
        stated_peak_gib,
        summarise,
        trace_file,
        way_of,
    )

__getattr__, __all__ = exports(__name__, __file__)
