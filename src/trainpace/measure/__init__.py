"""Real steps on this machine, over batch sizes. Importing this room imports no torch: the work runs in child processes."""

from typing import TYPE_CHECKING

from trainpace.lazy import exports

if TYPE_CHECKING:
    from trainpace.measure.adaptive import most_probes
    from trainpace.measure.analysis import SweepAnalysis, SweepPoint, analyse
    from trainpace.measure.changes import MeasuredJump
    from trainpace.measure.noise_scale import DdpNoiseNorms, NoiseNorms
    from trainpace.measure.running import clock_in_words, run_in_words
    from trainpace.measure.suites import SuiteItem, suite
    from trainpace.measure.sweep import (
        Conditions,
        Outcome,
        SweepPlan,
        measure,
        measure_noise_scale,
        probe,
        run_sweep,
    )

__getattr__, __all__ = exports(__name__, __file__)
