"""Is this machine in order, and do Trainpace's own measurements work here? Every part is tried in a process of its own."""

from typing import TYPE_CHECKING

from trainpace.lazy import exports

if TYPE_CHECKING:
    from trainpace.doctor.checks import Check, Elsewhere, Expected, Status
    from trainpace.doctor.examination import Examination, examine, unusable

__getattr__, __all__ = exports(__name__, __file__)
