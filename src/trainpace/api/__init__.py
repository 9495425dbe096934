"""The verbs as functions: what `trainpace.forecast(...)` and its like call."""

from trainpace.api.verbs import (
    calibrate,
    diagnose,
    forecast,
    gpus,
    journal,
    loader,
    match,
    measure,
    offers,
    plan,
    precompute,
    run,
    schedule,
    trace,
    validate,
    verify,
    watch,
)

__all__ = [
    "calibrate", "diagnose", "forecast", "gpus", "journal", "loader", "match", "measure", "offers", "plan",
    "precompute", "run", "schedule", "trace", "validate", "verify", "watch",
]  # fmt: skip
