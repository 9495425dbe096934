"""What a kind of operators declares."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """One kind of operators.

    traffic: the classes of its memory traffic, the usual one first, each with a first guess of the share of the bandwidth that
    it reaches; `make fit` replaces the guesses (the constants `traffic_*`). functions: names of ATen calls without their
    overload, with the class of their traffic. extent: (name, arguments, inputs) -> the length that decides its time besides its
    elements. flops: (name, arguments, inputs, outputs) -> FLOPs; half the elements read and written where it is not given.
    compute_s: (FLOPs, FLOP/s in fp32 without matrix units, extent) -> seconds of arithmetic, all arrays; FLOPs at half that rate
    where it is not given. Tensors may be asked for `shape`, `dim()` and `numel()`.
    """

    name: str
    traffic: Mapping[str, float] = {}
    functions: Mapping[str, str] = {}
    extent: Callable[[str, Sequence[Any], Sequence[Any]], int] | None = None
    flops: Callable[[str, Sequence[Any], Sequence[Any], Sequence[Any]], float] | None = None
    compute_s: Callable[[Any, Any, Any], Any] | None = None
    is_matrix: bool = False

    @property
    def usual_traffic(self) -> str:
        """The class of traffic of calls that name none; matrix operators share one constant."""
        return next(iter(self.traffic), self.name)
