"""The sizes of an operator table's rows beside the rates at which they run."""

from typing import Any

import numpy as np

from trainpace.workload import Flags, Floats


class OperatorSizes:
    """The sizes of an operator table's rows, and the rates at which they run."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dims: list[Floats],
        rate: Floats,
        tensor: Flags,
        sms: Floats,
        channels_last: Flags,
    ) -> None:
        self.shape, self.tensor = shape, tensor
        self._dims, self._rates = dims, (rate, tensor, sms)
        self.channels_last = np.broadcast_to(channels_last, shape)

    def of(self, rows: Flags, *positions: int) -> tuple[Any, ...]:
        """The sizes of some rows at these positions, then their rate, whether a matrix unit gives it, and SMs."""
        return tuple(
            part(array, rows) for array in (*(self._dims[i] for i in positions), *self._rates)
        )


def part(array: Any, rows: Flags) -> Any:
    """Some rows of an array, which may lack the operators' axis or have others before it."""
    return array if array.ndim == 0 or array.shape[-1] == 1 else array[..., rows]
