"""The verdict on a recorded training: where its steps' time goes, proved by interventions, and what is worth changing."""

from typing import TYPE_CHECKING

from trainpace.lazy import exports

if TYPE_CHECKING:
    from trainpace.diagnose.advice import WORTH
    from trainpace.diagnose.among_ranks import clocks_in_words, faults_in_words
    from trainpace.diagnose.diagnosis import (
        Advice,
        Diagnosis,
        Proof,
        Share,
        diagnose,
        unseen_in_words,
        workers_beside,
    )
    from trainpace.diagnose.loader_advice import HANDOVER_MS, SEND_MS, loader_cost, with_workers_ms
    from trainpace.diagnose.shares import IN_WORDS, split

__getattr__, __all__ = exports(__name__, __file__)
