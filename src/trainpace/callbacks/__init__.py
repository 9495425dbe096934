"""Callbacks that tell a training's time left with an interval, and keep the run in the journal.

`trainpace.callbacks.huggingface.TimeLeft` and `trainpace.callbacks.lightning.TimeLeft` import their engine; this does not.
"""

from trainpace.callbacks.time_left import Other, TimeLeft, time_left

__all__ = ["Other", "TimeLeft", "time_left"]
