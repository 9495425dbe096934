"""Check whether several ways of training on the same samples give the same weights.

Every way is trained, and its weights are compared with those of one process and one batch. Changes
that make the weights equal show the cause of a difference.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from trainpace.core.errors import TrainpaceError
from trainpace.core.records import Record, load
from trainpace.core.worker import run_isolated, run_ranks

Way = Literal["whole", "again", "accumulate", "data_parallel", "ddp", "fsdp2", "deepspeed"]
"""Ways of training. Each is compared with whole: one process with the whole batch at once.

again repeats whole. data_parallel uses the replicas of nn.DataParallel, one after another.
deepspeed is ZeRO stage 2.
"""
WAYS: tuple[Way, ...] = get_args(Way)[2:]
RANKS: tuple[Way, ...] = ("ddp", "fsdp2", "deepspeed")

Change = Literal[
    "fp32",
    "weight_by_samples",
    "weight_by_targets",
    "sum",
    "no_hooks",
    "whole_batch_norm",
    "no_dropout",
    "fp64",
]
"""An intervention on both sides of a comparison. Weights only matter if a batch is divided."""
CHANGES: tuple[Change, ...] = get_args(Change)
WEIGHTS: tuple[Change, ...] = ("weight_by_samples", "weight_by_targets", "sum")

TOLERANCE = 1e-5
"""Relative tolerance. fp32 has a unit roundoff of 6e-8; another order of sums gives multiples of
it."""
INITIAL = "initial"
"""Name of the weights before the first step."""
FLOOR = 1e-3
"""Smallest size, as a share of the model's root mean square, that a tensor's difference is relative
to.

A tensor that starts at 0 and whose gradient is 0 up to rounding (the bias of an attention key) is
only noise.
"""
LEAST_MOVED = 100.0
"""Factor by which the weights must move more than they differ. If not, equality means nothing."""
FORMATS: tuple[Change, ...] = ("fp32", "fp64")
WORKER = "trainpace.run.equivalence_training"

Tell = Callable[[str], None]


class Question(Record):
    """Train `steps` steps of `batch` samples in several ways.

    The batch is used at once, in `parts` micro-batches, and on `ranks` processes or replicas. The
    `optimizer` None is the task's own, or sgd_momentum.
    """

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
                "a comparison needs 1 step of 1 sample, 2 micro-batches and 2 ranks, or more."
            )
        if not self.ways or not set(self.ways) <= set(WAYS):
            raise TrainpaceError(f"unknown way; choose from {', '.join(WAYS)}.")
        shares = max(map(self.shares, self.ways))
        if self.batch < shares:
            raise TrainpaceError(
                f"a batch of {self.batch} cannot be divided into {shares}.",
                "Give a larger --batch.",
            )
        if not 0 < self.tolerance < 1:
            raise TrainpaceError(f"the tolerance {self.tolerance} is not between 0 and 1.")

    def shares(self, way: Way) -> int:
        return self.parts if way == "accumulate" else 1 if way in ("whole", "again") else self.ranks

    def sizes(self, way: Way) -> tuple[int, ...]:
        """Return the samples of each part, the larger ones first; they differ by one at most."""
        shares = self.shares(way)
        if way == "data_parallel":
            # as torch's chunk() divides: none is larger than the first, and there may be fewer
            each = -(-self.batch // shares)
            return tuple(min(each, self.batch - begin) for begin in range(0, self.batch, each))
        return tuple(self.batch // shares + (i < self.batch % shares) for i in range(shares))


class Variant(Record):
    """One training: a way with some changes."""

    way: Way
    changes: tuple[Change, ...] = ()

    @property
    def key(self) -> str:
        return "-".join((self.way, *self.changes))

    @property
    def whole(self) -> Variant:
        """The variant that it is compared with. Its batch is not divided, so it has no weights."""
        return Variant(way="whole", changes=tuple(c for c in self.changes if c not in WEIGHTS))


class Facts(Record):
    """Facts about a training besides its weights.

    `random` is True if the model draws random numbers. `uneven_targets` is True if parts of the
    batch have different numbers of targets that count (targets of -100 do not).
    """

    losses: tuple[float, ...]
    batch_norms: int = 0
    random: bool = False
    hooks: int = 0
    uneven_targets: bool = False


class Tried(Record):
    """Some changes, and the largest relative difference with them; None if the training failed."""

    changes: tuple[Change, ...]
    difference: float | None


class WayResult(Record):
    """The comparison of one way with the whole batch in one process.

    Attributes:
        difference: the largest max |a - b| / max(|a|, |b|) over tensors, after the last step.
        worst: the tensor with that difference.
        moved: the same measure from the first weights to the last.
        first_loss: the loss of the first step, put together from the parts.
        cause: a minimal set of changes that makes the weights equal; empty if they are equal, or if
            none was found.
        failed: reason why no difference is available.
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
    """The answer to a Question. `repeated` is the difference between two runs of one process, if
    measured."""

    question: Question
    ways: tuple[WayResult, ...]
    facts: Facts
    repeated: float | None = None
    environment: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def equal(self) -> bool:
        return all(way.equal for way in self.ways)


def verify(question: Question, tell: Tell = lambda _: None) -> Equivalence:
    """Compare the ways. `tell` reports progress. A way that fails is part of the answer.

    Raises:
        TrainpaceError: if the model cannot be trained in one process.
    """
    with tempfile.TemporaryDirectory(prefix="trainpace-verify-") as folder:
        trainings = _Trainings(question, Path(folder), tell)
        whole = Variant(way="whole")
        tell("training every way")
        trainings.run([whole, *(Variant(way=way) for way in question.ways)])
        results = [trainings.result(Variant(way=way)) for way in question.ways]
        repeated = None
        if apart := [result.way for result in results if not result.equal and not result.failed]:
            again = Variant(way="again")
            trainings.run([again])
            repeated = trainings.result(again).difference
            if not repeated:  # if one process does not repeat itself, changes show nothing
                causes = _causes(trainings, apart)
                results = [replace(r, **causes.get(r.way, {})) for r in results]
        return Equivalence(
            question=question, ways=tuple(results), facts=trainings.facts(whole), repeated=repeated
        )


def candidates(question: Question, facts: Facts, way: Way) -> tuple[Change, ...]:
    """Return the changes that can matter for a way of this model and question."""
    # replicas have one loss for the whole batch and one backward pass
    divided = way != "data_parallel"
    can: dict[Change, bool] = {
        "fp32": question.precision != "fp32",
        "weight_by_samples": divided and len(set(question.sizes(way))) > 1,
        "weight_by_targets": divided and facts.uneven_targets,
        "sum": divided,
        "no_hooks": divided and facts.hooks > 0,
        "whole_batch_norm": facts.batch_norms > 0,
        "no_dropout": facts.random,
        "fp64": True,
    }
    return tuple(change for change in CHANGES if can[change])


class Difference(NamedTuple):
    """The largest relative difference (NaN if a weight is NaN), and its tensor."""

    relative: float
    tensor: str


def difference(
    a: Mapping[str, NDArray[np.floating]], b: Mapping[str, NDArray[np.floating]]
) -> Difference:
    """Return the largest max |a - b| / max(|a|, |b|) over tensors; at most 2.

    The size of a tensor is at least FLOOR x the root mean square of all weights in a.
    """
    names = sorted(a)
    assert names == sorted(b), "two trainings of one model have the same parameters"
    squares = sum(float(np.square(a[name], dtype=np.float64).sum()) for name in names)
    floor = FLOOR * math.sqrt(squares / max(1, sum(a[name].size for name in names)))
    worst = Difference(0.0, names[0] if names else "")
    for name in names:
        left, right = a[name].astype(np.float64), b[name].astype(np.float64)
        apart = float(np.abs(left - right).max(initial=0.0))
        scale = max(float(np.abs(values).max(initial=floor)) for values in (left, right))
        relative = apart / scale if scale else apart
        if not math.isfinite(relative):
            return Difference(math.nan, name)
        if relative > worst.relative:
            worst = Difference(relative, name)
    return worst


def difference_of_files(a: Path, b: Path) -> Difference:
    """Return the difference of two ``.npz`` files, read one tensor at a time."""
    with np.load(a) as left, np.load(b) as right:
        return difference(left, right)


def _causes(trainings: _Trainings, apart: Sequence[Way]) -> dict[Way, dict[str, Any]]:
    """Return `cause` and `tried` for each way."""
    can = {
        way: candidates(trainings.question, trainings.facts(Variant(way=way)), way) for way in apart
    }
    trainings.tell("changing one thing at a time")
    trainings.run_pairs(Variant(way=way, changes=(change,)) for way in apart for change in can[way])
    return {way: _cause(trainings, way, can[way]) for way in apart}


def _cause(trainings: _Trainings, way: Way, can: Sequence[Change]) -> dict[str, Any]:
    """Return the changes that make a way equal, and all that were tried.

    Single changes come first. If none is enough, several are combined, at most one of a kind (a
    weight, a number format). Then each change is removed if equality holds without it.
    """
    results: dict[tuple[Change, ...], WayResult] = {}

    def equal_under(changes: tuple[Change, ...]) -> bool:
        if changes not in results:
            variant = Variant(way=way, changes=changes)
            if len(changes) > 1:
                trainings.tell(f"changing {len(changes)} things together ({way})")
            trainings.run_pairs([variant])
            results[changes] = trainings.result(variant)
        return results[changes].equal

    alone = [(change,) for change in can if equal_under((change,))]
    cause = alone[0] if alone else next(filter(equal_under, _combinations(can)), ())
    for change in cause if len(cause) > 1 else ():
        fewer = tuple(c for c in cause if c != change)
        if equal_under(fewer):
            cause = fewer
    return {
        "cause": cause,
        "tried": tuple(Tried(changes=c, difference=r.difference) for c, r in results.items()),
    }


def _combinations(can: Sequence[Change]) -> list[tuple[Change, ...]]:
    """Return all other changes together, with each weight and each number format."""
    free = [change for change in can if change not in (*WEIGHTS, *FORMATS)]
    if not free and "fp32" not in can:
        return []
    weights: list[tuple[Change, ...]] = [(), *((weight,) for weight in WEIGHTS if weight in can)]
    formats: list[tuple[Change, ...]] = [("fp32",)] if "fp32" in can else [(), ("fp64",)]
    together = ((*free, *weight, *form) for weight in weights for form in formats)
    return [tuple(sorted(set_, key=CHANGES.index)) for set_ in together if len(set_) > 1]


class _Trainings:
    """The trainings of one question. Each runs once and leaves its weights in a folder."""

    def __init__(self, question: Question, folder: Path, tell: Tell) -> None:
        self.question, self.tell, self._folder = question, tell, folder
        self._failed: dict[str, str] = {}

    def run_pairs(self, variants: Iterable[Variant]) -> None:
        """Train the variants and the ones that they are compared with."""
        self.run([both for variant in variants for both in (variant.whole, variant)])

    def run(self, variants: Sequence[Variant]) -> None:
        """Train what is missing: in one process first, then on ranks."""
        in_one_process = self._missing(v for v in variants if v.way not in RANKS)
        if in_one_process:
            request = self._request(in_one_process) | {"first": not self._weights(INITIAL).exists()}
            what = f"training {self.question.model} in one process"
            self._failed |= json.loads(run_isolated(WORKER, request, self.question.timeout_s, what))
        while on_ranks := self._missing(v for v in variants if v.way in RANKS):
            self._run_ranks(on_ranks)

    def result(self, variant: Variant) -> WayResult:
        """Compare a variant with its whole.

        They are equal if the difference is within the tolerance and small beside how far the
        weights moved.
        """
        losses = self.facts(variant).losses if self._is_there(variant) else ()
        apart, tensor = self._difference(variant.whole, variant)
        moved, _ = self._difference(None, variant.whole)
        tolerance = self.question.tolerance
        equal = (
            apart is not None
            and moved is not None
            and apart <= tolerance <= moved
            and LEAST_MOVED * apart <= moved
        )
        return WayResult(
            way=variant.way,
            sizes=self.question.sizes(variant.way),
            difference=apart,
            worst=tensor,
            moved=moved,
            equal=equal,
            first_loss=losses[0] if losses else None,
            failed=self._failed.get(variant.key, ""),
        )

    def facts(self, variant: Variant) -> Facts:
        return load(self._folder / f"{variant.key}.json", Facts)

    def _run_ranks(self, variants: Sequence[Variant]) -> None:
        """Train until all variants are done, or one has failed."""
        q, store = self.question, self._folder / "store"
        store.unlink(missing_ok=True)
        requests = [
            self._request(variants) | {"rank": rank, "store": store.as_uri()}
            for rank in range(q.ranks)
        ]
        try:
            run_ranks(WORKER, requests, q.timeout_s, f"training {q.model} on {q.ranks} ranks")
        except TrainpaceError as error:
            for variant in self._missing(variants)[:1]:
                self._failed[variant.key] = str(error)

    def _request(self, variants: Sequence[Variant]) -> dict[str, Any]:
        request = {"question": self.question, "variants": variants, "folder": str(self._folder)}
        return dict(msgspec.to_builtins(request))

    def _difference(self, a: Variant | None, b: Variant) -> tuple[float | None, str]:
        """Return the difference of two trainings, or of one from the first weights, and its tensor.

        It is None if a training is missing or has a NaN.
        """
        if not (self._is_there(b) and (a is None or self._is_there(a))):
            return None, ""
        apart = difference_of_files(
            self._weights(INITIAL if a is None else a.key), self._weights(b.key)
        )
        return (None, "") if math.isnan(apart.relative) else apart

    def _missing(self, variants: Iterable[Variant]) -> list[Variant]:
        """Return the variants that did not train and did not fail, each once."""
        return list(
            {
                v.key: v for v in variants if not self._is_there(v) and v.key not in self._failed
            }.values()
        )

    def _is_there(self, variant: Variant) -> bool:
        return (self._folder / f"{variant.key}.json").exists()

    def _weights(self, key: str) -> Path:
        return self._folder / f"{key}.npz"
