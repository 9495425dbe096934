"""Models that look whether their numbers are finite, and mend them if not: in a trace, which has no numbers, they all are. So are
the parameters of a distribution within its bounds, which torch asserts by `_is_all_true`.

The tests and the sums of their results are recorded as they run; what Python asks of the last of them is answered.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

_MARK = "_trainpace_answer"
_TESTS: dict[Any, bool] = {
    torch.isfinite: True,
    torch.Tensor.isfinite: True,
    torch.isnan: False,
    torch.Tensor.isnan: False,
    torch.isinf: False,
    torch.Tensor.isinf: False,
    torch._is_all_true: True,
}
_KEPT = {torch.all, torch.any, torch.Tensor.all, torch.Tensor.any}
_TURNED = {torch.logical_not, torch.Tensor.logical_not, torch.Tensor.__invert__, torch.bitwise_not}
_ASKED = {torch.Tensor.__bool__, torch.Tensor.item}
_KNOWN = {*_TESTS, *_KEPT, *_TURNED, *_ASKED}


def taken_for_finite(func: Any, args: Sequence[Any]) -> Callable[..., Any] | None:
    """What to call in the place of a function that tests for finite numbers or reads such a test; None for all others."""
    if func not in _KNOWN:
        return None
    if func in _TESTS:
        return lambda *a, **k: _marked(func(*a, **k), _TESTS[func])
    answer = getattr(args[0], _MARK, None) if args else None  # torch.any(input=x) has none
    if answer is None:
        return None
    if func in _ASKED:
        return lambda *_, **__: answer
    return lambda *a, **k: _marked(func(*a, **k), answer != (func in _TURNED))


def _marked(tensor: torch.Tensor, answer: bool) -> torch.Tensor:
    setattr(tensor, _MARK, answer)
    return tensor
