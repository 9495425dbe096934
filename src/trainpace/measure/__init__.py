"""Real steps on this machine, over batch sizes. Importing this room imports no torch: the work runs in child processes."""

from typing import TYPE_CHECKING

from trainpace.lazy import exports

if TYPE_CHECKING:
    from trainpace.measure.adaptive import most_probes
    from trainpace.measure.analysis import SweepAnalysis, SweepPoint, analyse
    from trainpace.measure.changes import MeasuredJump
    from trainpace.measure.device import (
        MemoryMeter,
        allow_tf32,
        autocast,
        check_device,
        marks_of,
        place_batch,
        place_model,
    )
    from trainpace.measure.noise_scale import DdpNoiseNorms, NoiseNorms
    from trainpace.measure.probes import Conditions, measure, measure_noise_scale, probe
    from trainpace.measure.suites import SuiteItem, suite
    from trainpace.measure.sweep import Outcome, SweepPlan, run_sweep

__getattr__, __all__ = exports(__name__, __file__)
