"""Callbacks that report the remaining time of a training and store the run in the journal.

Import them from `trainpace.callbacks.huggingface` or `trainpace.callbacks.lightning`. These modules
import their engine. This package does not.
"""

from trainpace.callbacks.time_left import Other, TimeLeft, time_left

__all__ = ["Other", "TimeLeft", "time_left"]
