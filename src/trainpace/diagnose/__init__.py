"""Causes and advice from a recording or profiler trace, and health checks of this machine."""

from typing import TYPE_CHECKING

from trainpace.core import exports

if TYPE_CHECKING:
    from trainpace.diagnose.advice import WORTH
    from trainpace.diagnose.diagnosis import (
        Advice,
        Diagnosis,
        Proof,
        Share,
        clocks_in_words,
        diagnose,
        faults_in_words,
        unseen_in_words,
        workers_beside,
    )
    from trainpace.diagnose.health import (
        Check,
        Elsewhere,
        Examination,
        Expected,
        Status,
        examine,
        unusable,
    )
    from trainpace.diagnose.loader_advice import HANDOVER_MS, SEND_MS, loader_cost, with_workers_ms
    from trainpace.diagnose.profiled import ProfiledTraining, read_profiled
    from trainpace.diagnose.profiled_ranks import Kernel, RankShares
    from trainpace.diagnose.shares import IN_WORDS, split
    from trainpace.diagnose.traces import is_trace

__getattr__, __all__ = exports(__name__, __file__)
