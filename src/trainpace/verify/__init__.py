"""Do accumulation, data parallelism and one big batch give the same training? The difference, and its cause by intervention."""

from typing import TYPE_CHECKING

from trainpace.lazy import exports

if TYPE_CHECKING:
    from trainpace.verify.equivalence import Change, Equivalence, Question, WayResult, verify

__getattr__, __all__ = exports(__name__, __file__)
