"""The kinds of operators, a module each: what they are called, which ATen calls are one, and what is assumed of their time.

A module here with a `KINDS` is all that a new kind needs: traces, saved workloads, the constants that are fitted and the kernel
model take what they know of kinds from this room.
"""

from importlib import import_module
from pkgutil import iter_modules

from trainpace.kinds.kind import Kind

__all__ = ["FUNCTIONS", "KINDS", "TRAFFIC_SHARES", "Kind"]

KINDS: dict[str, Kind] = {
    kind.name: kind
    for module in sorted(module.name for module in iter_modules(__path__))
    for kind in getattr(import_module(f"{__name__}.{module}"), "KINDS", ())
}
FUNCTIONS: dict[str, Kind] = {function: kind for kind in KINDS.values() for function in kind.functions}
"""The kind of every ATen call that has one by its name; calls that are in none are elementwise."""
TRAFFIC_SHARES: dict[str, float] = {name: share for kind in KINDS.values() for name, share in kind.traffic.items()}
"""First guesses of the share of the memory bandwidth that each class of traffic reaches."""
