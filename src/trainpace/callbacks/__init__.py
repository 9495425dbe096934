"""Callbacks that report a training's remaining time with an interval, and store the run in the journal.

`trainpace.callbacks.huggingface.TimeLeft` and `trainpace.callbacks.lightning.TimeLeft` import their engine; this
package does not.
"""

from trainpace.callbacks.time_left import Other, TimeLeft, time_left

__all__ = ["Other", "TimeLeft", "time_left"]
