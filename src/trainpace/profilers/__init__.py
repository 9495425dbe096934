"""Traces of other tools, read where nothing of ours ran: torch.profiler (Kineto) and Nsight Systems."""

from typing import TYPE_CHECKING

from trainpace.lazy import exports

if TYPE_CHECKING:
    from trainpace.profilers.bounds import Bound
    from trainpace.profilers.profiled import ProfiledTraining
    from trainpace.profilers.ranks import Kernel, RankShares
    from trainpace.profilers.reading import read_profiled
    from trainpace.profilers.recognising import is_trace

__getattr__, __all__ = exports(__name__, __file__)
