"""The end of an evaluation: where the script switches gradients on again after it called its model without.

Known limit: an evaluation that calls `torch.set_grad_enabled` as a function is taken to last up to the next batch.
"""

import functools
from typing import Any

from trainpace.watch.inside.recorder import Recorder, get_ident


def ends(torch: Any, recorder: Recorder) -> None:
    """Tell the recorder where the contexts end that switch gradients off. A `with` takes its `__exit__` where it begins, so it
    would be too late to wrap it once an evaluation is under way."""
    for kind in (torch.no_grad, torch.inference_mode, torch.set_grad_enabled):
        kind.__exit__ = _told(kind.__exit__, torch.is_grad_enabled, recorder)


def _told(plain: Any, is_grad_enabled: Any, recorder: Recorder) -> Any:
    @functools.wraps(plain)
    def leave(context: Any, *error: Any) -> Any:
        result = plain(context, *error)
        if recorder.evaluating and get_ident() == recorder.thread and is_grad_enabled():
            recorder.leaves_evaluation()
        return result

    return leave
