"""Do accumulation, data parallelism and one big batch give the same training? The difference, and its cause by intervention."""

from trainpace.verify.question import TOLERANCE, Equivalence, Question, Tried, WayResult

__all__ = ["TOLERANCE", "Equivalence", "Question", "Tried", "WayResult"]
