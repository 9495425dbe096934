"""The question and the answer: ways of training on the same samples, and changes that may make them equal."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from trainpace.errors import TrainpaceError
from trainpace.records import Record

Way = Literal["whole", "again", "accumulate", "ddp", "fsdp2"]
"""whole: one process, the whole batch at once, which the others are held against. again: the same once more."""
WAYS: tuple[Way, ...] = get_args(Way)[2:]
RANKS: tuple[Way, ...] = ("ddp", "fsdp2")

Change = Literal[
    "fp32", "weight_by_samples", "weight_by_targets", "sum", "no_hooks", "whole_batch_norm", "no_dropout", "fp64"
]
"""An intervention on both sides of a comparison. Weights only act where a batch is divided."""
CHANGES: tuple[Change, ...] = get_args(Change)
WEIGHTS: tuple[Change, ...] = ("weight_by_samples", "weight_by_targets", "sum")

TOLERANCE = 1e-5
"""Relative. fp32 has a unit roundoff of 6e-8; sums in another order over some steps leave some multiples of it."""
INITIAL = "initial"
"""Name of the weights before the first step."""


class Question(Record):
    """Train `steps` steps of `batch` samples: at once, in `parts` micro-batches, and on `ranks` processes. `optimizer` None is
    the task's own, or sgd_momentum."""

    model: str
    batch: int = 8
    parts: int = 4
    ranks: int = 2
    steps: int = 10
    ways: tuple[Way, ...] = WAYS
    precision: Literal["fp32", "bf16", "amp_bf16"] = "fp32"
    optimizer: str | None = None
    sequence_length: int | None = None
    image_size: int | None = None
    tolerance: float = TOLERANCE
    seed: int = 0
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if min(self.batch, self.steps) < 1 or min(self.parts, self.ranks) < 2:
            raise TrainpaceError(
                "a comparison needs 1 step of 1 sample or more, and 2 micro-batches and 2 ranks or more."
            )
        if not self.ways or not set(self.ways) <= set(WAYS):
            raise TrainpaceError(f"a comparison needs one of the ways {', '.join(WAYS)}.")
        for way in self.ways:
            if self.batch < self.shares(way):
                raise TrainpaceError(
                    f"a batch of {self.batch} cannot be divided into {self.shares(way)}.", "Give a larger --batch."
                )
        if not 0 < self.tolerance < 1:
            raise TrainpaceError(f"a tolerance of {self.tolerance} is not above 0 and below 1.")

    def shares(self, way: Way) -> int:
        return self.ranks if way in RANKS else self.parts if way == "accumulate" else 1

    def sizes(self, way: Way) -> tuple[int, ...]:
        """Samples of each part, the larger ones first; they differ by one at most."""
        shares = self.shares(way)
        return tuple(self.batch // shares + (i < self.batch % shares) for i in range(shares))


class Variant(Record):
    """One training: a way, under some changes."""

    way: Way
    changes: tuple[Change, ...] = ()

    @property
    def key(self) -> str:
        return "-".join((self.way, *self.changes))

    @property
    def whole(self) -> Variant:
        """The variant that it is compared with: nothing is divided there, so nothing is weighted."""
        return Variant(way="whole", changes=tuple(c for c in self.changes if c not in WEIGHTS))


class Facts(Record):
    """Facts about a training beside its weights. `random`: the model draws random numbers; `uneven_targets`: parts of the
    batch differ in how many targets count (those of -100 do not)."""

    losses: tuple[float, ...]
    batch_norms: int = 0
    random: bool = False
    hooks: int = 0
    uneven_targets: bool = False


class Tried(Record):
    """A change, and the largest relative difference that is left under it; None where the training failed, or its loss did."""

    changes: tuple[Change, ...]
    difference: float | None


class WayResult(Record):
    """`difference`: the largest over parameter tensors of max |a - b| / max(|a|, |b|) after the last step; `worst`: that tensor.

    `moved`: the same measure from the first weights to the last. `cause`: changes that together bring equality, none of
    which can be left out; empty where it is equal, or where none was found. `failed`: why there is no difference.
    `first_loss`: of the first step, before any weight has moved, put together from the parts.
    """

    way: Way
    sizes: tuple[int, ...]
    difference: float | None
    worst: str
    moved: float | None
    equal: bool
    first_loss: float | None = None
    cause: tuple[Change, ...] = ()
    tried: tuple[Tried, ...] = ()
    failed: str = ""


class Equivalence(Record):
    """The answer to a Question. `repeated`: the difference between two runs of the same process, where it was asked for."""

    question: Question
    ways: tuple[WayResult, ...]
    facts: Facts
    repeated: float | None = None
    environment: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def equal(self) -> bool:
        return all(way.equal for way in self.ways)
