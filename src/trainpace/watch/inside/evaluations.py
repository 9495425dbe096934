"""The end of an evaluation: where the script switches gradients on again after it called its model without.

Known limit: an evaluation that sets gradients by `torch.set_grad_enabled`, as a function, is taken to last up to the next batch.
"""

import functools
from typing import Any

from trainpace.watch.inside.recorder import Recorder, get_ident


class EndOfEvaluations:
    """Wraps the contexts that switch gradients off while an evaluation is under way, and not between: torch's optimizers use them
    in every step."""

    def __init__(self, torch: Any, recorder: Recorder) -> None:
        self.torch, self.recorder = torch, recorder
        self.wrapped: dict[Any, tuple[Any, Any]] = {}
        """By class: its own `__exit__`, and ours in its place."""

    def begins(self) -> None:
        if not self.wrapped:
            for kind in (self.torch.no_grad, self.torch.inference_mode):
                plain = kind.__exit__
                kind.__exit__ = ours = self._told(plain)
                self.wrapped[kind] = plain, ours

    def _told(self, plain: Any) -> Any:
        @functools.wraps(plain)
        def leave(context: Any, *error: Any) -> Any:
            result = plain(context, *error)
            if get_ident() == self.recorder.thread and self.torch.is_grad_enabled():
                self._ends()
            return result

        return leave

    def _ends(self) -> None:
        for kind, (plain, ours) in self.wrapped.items():
            if kind.__exit__ is ours:  # else it is the script's own by now
                kind.__exit__ = plain
        self.wrapped.clear()
        self.recorder.leaves_evaluation()
