"""Real steps on this machine, over batch sizes. Importing this room imports no torch: the work runs in child processes."""

from typing import TYPE_CHECKING

from trainpace.lazy import exports

if TYPE_CHECKING:
    from trainpace.measure.adaptive import most_probes
    from trainpace.measure.analysis import SweepAnalysis, SweepPoint, analyse
    from trainpace.measure.changes import MeasuredJump
    from trainpace.measure.conditions import Conditions
    from trainpace.measure.formats import allow_tf32, autocast, check_device, map_tensors, place_batch, place_model
    from trainpace.measure.marks import marks_of
    from trainpace.measure.memory import MemoryMeter
    from trainpace.measure.noise_norms import DdpNoiseNorms, NoiseNorms
    from trainpace.measure.probes import measure, measure_noise_scale, probe
    from trainpace.measure.repeats import noise_of, repeat_interval
    from trainpace.measure.suites import SuiteItem, suite
    from trainpace.measure.sweep import Outcome, SweepPlan, run_sweep

__getattr__, __all__ = exports(__name__, __file__)
