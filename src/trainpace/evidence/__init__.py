"""Measurements of others, packaged with their sources: which of them are near to a training, and how well they are forecast."""

from typing import TYPE_CHECKING

from trainpace.lazy import exports

if TYPE_CHECKING:
    from trainpace.evidence.conditions import Conditions, conditions_of
    from trainpace.evidence.fingerprint import fingerprint_of_constants
    from trainpace.evidence.nearness import Near, Nearness, nearest
    from trainpace.evidence.runs import (
        FOLDER,
        RUNS_FILE,
        TRACES_FILE,
        CardFigures,
        PublicJournal,
        PublicRun,
        public_journal,
        public_runs,
    )
    from trainpace.evidence.scoring import (
        PackagedTraces,
        Score,
        ScoreLine,
        packaged_traces,
        score,
        score_of,
        way_of,
    )
    from trainpace.evidence.signatures import model_kind, signature_of

__getattr__, __all__ = exports(__name__, __file__)
