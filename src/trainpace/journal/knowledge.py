"""What the journal knows of a workload, for forecasts on any cluster: the servers of `match`, say."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

from trainpace.execution import PRECISIONS, Execution, Precision
from trainpace.forecast import LARGEST_RATIO, Forecaster, corrected, run_of
from trainpace.journal.foresight import (
    middle_run,
    newest_repeats,
    observed_beside,
    observed_elsewhere,
    of_workload,
    other_models,
    workload_key,
)
from trainpace.journal.identity import anonymous
from trainpace.outcome import Forecast
from trainpace.workload import form_of

if TYPE_CHECKING:
    from trainpace.journal.entry import Entry
    from trainpace.journal.store import Journal


class Knowledge:
    """Runs of a workload on the GPUs of one node, however they were executed, and of other models, beside their forecasts.

    A run counts for a forecast as far as the two are related (`trainpace.forecast.posterior`): the same card more than another,
    the same execution more than another.
    """

    def __init__(self, journal: Journal, forecaster: Forecaster) -> None:
        self._journal = journal
        workload = forecaster.workload
        self._model = anonymous(workload.model)
        of_form: dict[str, Precision] = {form_of(precision): precision for precision in PRECISIONS}
        keys = {workload_key(workload, Execution(precision=of_form[form])) for form in workload.forms}
        runs = of_workload(journal, self._model, keys, workload.sequence_length, workload.image_side)
        self._runs = frozenset(run.id for run in runs)
        seen = (observed_elsewhere(middle_run(repeats), forecaster) for repeats in newest_repeats(runs).values())
        self._same = tuple(s for s in seen if s is not None and abs(s.log_ratios[0]) <= math.log(LARGEST_RATIO))

    def corrected(self, forecaster: Forecaster, forecast: Forecast) -> Forecast:
        """A forecast of the forecaster, corrected; as it is where nothing is known."""
        others = self._others(forecaster.target.cluster.device.name)
        if forecast.step is None or not (self._same or others):
            return forecast
        asked = run_of(forecast, forecaster.at([forecast.execution]).shares()[0])
        beside = (observed_beside(entry, asked) for entry in others)
        known = (*self._same, *(s for s in beside if abs(s.log_ratios[0]) <= math.log(LARGEST_RATIO)))
        return corrected(forecaster, [forecast], known, "measured runs (journal)")[0]

    def in_words(self) -> str:
        """One sentence; "" where no run of the workload is known."""
        if not self._same:
            return ""
        devices = sorted({seen.run.device for seen in self._same})
        return f"Corrected by the journal: this workload measured on {', '.join(devices)}."

    @functools.cache  # noqa: B019  # lives as long as the answer to one question
    def _others(self, device: str) -> tuple[Entry, ...]:
        return other_models(self._journal, self._model, device, self._runs)
