"""The pieces in which a device takes the work of a product or convolution: what gives its time stairs over the batch size."""

from enum import IntEnum
from typing import Any, NamedTuple

from trainpace.workload import Floats


class Algorithm(IntEnum):
    """How a product or convolution is computed."""

    GEMM = 0
    PADDED_WINOGRAD = 1
    WINOGRAD = 2


ALGORITHMS = {
    Algorithm.GEMM: "implicit GEMM",
    Algorithm.PADDED_WINOGRAD: "Winograd with a padded batch",
    Algorithm.WINOGRAD: "Winograd without padding",
}


class Cut(NamedTuple):
    """Arrays of the same shape. algorithm: of `Algorithm`. images: of a convolution, before padding; 0 for a product. waves:
    rounds of tiles over the multiprocessors, the last perhaps in part; 0 where nothing is known of them. aligned: the largest of
    8, 4, 2 and 1 of which the rows of a product in 16 bits are a multiple; 8 for all others."""

    algorithm: Any
    images: Floats
    waves: Floats
    aligned: Floats
