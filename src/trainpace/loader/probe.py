"""A loader, measured from outside: in a fresh process, so that a dataset that crashes or hangs costs that process alone."""

import msgspec

from trainpace import records
from trainpace.loader.records import LoaderConditions, LoaderMeasurement
from trainpace.process import run_isolated


def measure_loader(conditions: LoaderConditions) -> LoaderMeasurement:
    """Samples/s of a DataLoader alone over its settings, and where the time of a sample goes.

    Raises `TrainpaceError` for a target without samples, and `UserCodeError` or `TimedOut` where its code raises or hangs.
    """
    answer = run_isolated(
        "trainpace.loader.worker", msgspec.to_builtins(conditions), conditions.timeout_s,
        f"measuring the loader of {conditions.target}",
    )  # fmt: skip
    return records.from_json(answer, LoaderMeasurement, "the loader's measurement")
