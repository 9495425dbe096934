"""Check that different ways of training on the same samples give the same weights.

The model is trained in each way, and the weights are compared with those of one process and one
batch. If the weights differ, the cause is searched: a change that makes the weights equal shows it.
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
"""Ways of training. Each is compared with "whole": one process with the whole batch at once.

"again" repeats "whole". "data_parallel" uses the replicas of nn.DataParallel, one after another.
"deepspeed" is ZeRO stage 2.
"""
WAYS: tuple[Way, ...] = get_args(Way)[2:]
"""Ways that are compared with "whole"."""
RANKS: tuple[Way, ...] = ("ddp", "fsdp2", "deepspeed")
"""Ways that run several processes."""

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
"""Intervention that is applied to both sides of a comparison.

The loss weights (weight_by_samples, weight_by_targets, sum) only matter if a batch is divided.
"""
CHANGES: tuple[Change, ...] = get_args(Change)
WEIGHTS: tuple[Change, ...] = ("weight_by_samples", "weight_by_targets", "sum")
"""Changes of the loss weights of parts. At most one of them is applied."""

TOLERANCE = 1e-5
"""Default relative tolerance.

The unit roundoff of fp32 is 6e-8. A different order of summation gives multiples of it.
"""
INITIAL = "initial"
"""File name of the weights before the first step."""
FLOOR = 1e-3
"""Smallest scale for a relative difference, as a share of the root mean square of all weights.

Some tensors start at 0 and have a gradient of 0 up to rounding, such as the bias of an attention
key. Such a tensor holds only noise.
"""
LEAST_MOVED = 100.0
"""Minimum ratio of how far the weights moved to how far they differ.

Below it, equal weights prove nothing.
"""
FORMATS: tuple[Change, ...] = ("fp32", "fp64")
"""Changes of the number format. At most one of them is applied."""
WORKER = "trainpace.run.equivalence_training"
"""Module of the worker process."""

Tell = Callable[[str], None]


class Question(Record):
    """Request to compare several ways of training for `steps` steps of `batch` samples.

    Attributes:
        parts: Number of micro-batches for "accumulate".
        ranks: Number of processes or replicas for the other ways.
        optimizer: None for the task's own optimizer, or sgd_momentum if the task has none.
        tolerance: Largest relative difference of weights that counts as equal.
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
        """Return the number of parts into which a way divides the batch."""
        return self.parts if way == "accumulate" else 1 if way in ("whole", "again") else self.ranks

    def sizes(self, way: Way) -> tuple[int, ...]:
        """Return the number of samples in each part, the larger parts first."""
        shares = self.shares(way)
        if way == "data_parallel":
            # Divide like torch.chunk(): no part is larger than the first. There may be fewer parts.
            each = -(-self.batch // shares)
            return tuple(min(each, self.batch - begin) for begin in range(0, self.batch, each))
        return tuple(self.batch // shares + (i < self.batch % shares) for i in range(shares))


class Variant(Record):
    """One training: a way of training with the changes applied to it."""

    way: Way
    changes: tuple[Change, ...] = ()

    @property
    def key(self) -> str:
        """Name of the variant, used in file names."""
        return "-".join((self.way, *self.changes))

    @property
    def whole(self) -> Variant:
        """The reference variant: the same changes on an undivided batch, without loss weights."""
        return Variant(way="whole", changes=tuple(c for c in self.changes if c not in WEIGHTS))


class Facts(Record):
    """Facts about a training other than its weights.

    Attributes:
        random: True if the model draws random numbers.
        hooks: Number of gradient hooks on parameters.
        uneven_targets: True if parts of the batch have different numbers of targets. Targets of
            -100 do not count.
        divided: True if every part has its own loss. Replicas of nn.DataParallel have one only if
            the model computes its loss.
    """

    losses: tuple[float, ...]
    batch_norms: int = 0
    random: bool = False
    hooks: int = 0
    uneven_targets: bool = False
    divided: bool = True


class Tried(Record):
    """Changes that were tried, and the largest relative difference with them.

    The difference is None if the training failed.
    """

    changes: tuple[Change, ...]
    difference: float | None


class WayResult(Record):
    """Comparison of one way of training with the whole batch in one process.

    Attributes:
        difference: Largest max |a - b| / max(|a|, |b|) over all tensors, after the last step.
        worst: Name of the tensor with that difference.
        moved: The same measure between the first and the last weights.
        first_loss: Loss of the first step, combined from the parts.
        cause: Minimal set of changes that makes the weights equal. It is empty if the weights are
            equal or if no such set was found.
        failed: Reason why there is no difference, or "".
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
    """Answer to a `Question`.

    `repeated` is the difference between two runs of one process, or None if it was not measured.
    """

    question: Question
    ways: tuple[WayResult, ...]
    facts: Facts
    repeated: float | None = None
    environment: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """True if every way gave the same weights as the whole batch."""
        return all(way.equal for way in self.ways)


def verify(question: Question, tell: Tell = lambda _: None) -> Equivalence:
    """Compare the ways of training in a question. `tell` reports progress.

    A way that fails does not raise an error. Its result has the reason in `failed`.

    Raises:
        TrainpaceError: If the model cannot be trained in one process.
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
            if not repeated:  # If runs of one process differ, changes prove nothing.
                causes = _causes(trainings, apart)
                results = [replace(r, **causes.get(r.way, {})) for r in results]
        return Equivalence(
            question=question, ways=tuple(results), facts=trainings.facts(whole), repeated=repeated
        )


def candidates(question: Question, facts: Facts, way: Way) -> tuple[Change, ...]:
    """Return the changes that can affect this way of training with this model."""
    divided = facts.divided
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
    """Largest relative difference between two sets of weights, and the name of its tensor.

    The difference is NaN if a weight is NaN or infinite.
    """

    relative: float
    tensor: str


def difference(
    a: Mapping[str, NDArray[np.floating]], b: Mapping[str, NDArray[np.floating]]
) -> Difference:
    """Return the largest max |a - b| / max(|a|, |b|) over all tensors. It is at most 2.

    A tensor's scale max(|a|, |b|) is at least FLOOR times the root mean square of all weights in
    `a`.
    """
    names = sorted(a)
    assert names == sorted(b), "two trainings of one model have the same parameters"
    squares = sum(float(np.square(a[name], dtype=np.float64).sum()) for name in names)
    floor = FLOOR * math.sqrt(squares / max(1, sum(a[name].size for name in names)))
    worst = Difference(0.0, names[0] if names else "")
    for name in names:
        left, right = a[name].astype(np.float64), b[name].astype(np.float64)
        apart = float(np.abs(left - right).max(initial=0.0))
        scale = float(np.abs([left, right]).max(initial=floor))
        relative = apart / scale if scale else apart
        if not math.isfinite(relative):
            return Difference(math.nan, name)
        worst = max(worst, Difference(relative, name), key=lambda one: one.relative)
    return worst


def difference_of_files(a: Path, b: Path) -> Difference:
    """Return the difference of two ``.npz`` files. They are read one tensor at a time."""
    with np.load(a) as left, np.load(b) as right:
        return difference(left, right)


def _causes(trainings: _Trainings, apart: Sequence[Way]) -> dict[Way, dict[str, Any]]:
    """Return the fields `cause` and `tried` of `WayResult` for each way."""
    can = {
        way: candidates(trainings.question, trainings.facts(Variant(way=way)), way) for way in apart
    }
    trainings.tell("changing one thing at a time")
    trainings.run_pairs(Variant(way=way, changes=(change,)) for way in apart for change in can[way])
    return {way: _cause(trainings, way, can[way]) for way in apart}


def _cause(trainings: _Trainings, way: Way, can: Sequence[Change]) -> dict[str, Any]:
    """Return the changes that make a way's weights equal, and all changes that were tried.

    Single changes are tried first. If no single change is enough, changes are combined, with at
    most one loss weight and one number format. Then each change is removed if the weights stay
    equal without it.
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
    """Return the sets of changes to try together, in order.

    Each set has all other changes, at most one loss weight and at most one number format.
    """
    free = [change for change in can if change not in (*WEIGHTS, *FORMATS)]
    weights: list[tuple[Change, ...]] = [(), *((weight,) for weight in WEIGHTS if weight in can)]
    formats: list[tuple[Change, ...]] = [("fp32",)] if "fp32" in can else [(), ("fp64",)]
    together = ((*free, *weight, *form) for weight in weights for form in formats)
    return [tuple(sorted(set_, key=CHANGES.index)) for set_ in together if len(set_) > 1]


class _Trainings:
    """Trainings of one question. Each variant trains once and stores its weights in a folder."""

    def __init__(self, question: Question, folder: Path, tell: Tell) -> None:
        self.question, self.tell, self._folder = question, tell, folder
        self._failed: dict[str, str] = {}

    def run_pairs(self, variants: Iterable[Variant]) -> None:
        """Train the variants and their reference variants."""
        self.run([both for variant in variants for both in (variant.whole, variant)])

    def run(self, variants: Sequence[Variant]) -> None:
        """Train the variants without a result: first in one process, then on several ranks."""
        in_one_process = self._missing(v for v in variants if v.way not in RANKS)
        if in_one_process:
            request = self._request(in_one_process) | {"first": not self._weights(INITIAL).exists()}
            what = f"training {self.question.model} in one process"
            self._failed |= json.loads(run_isolated(WORKER, request, self.question.timeout_s, what))
        while on_ranks := self._missing(v for v in variants if v.way in RANKS):
            self._run_ranks(on_ranks)

    def result(self, variant: Variant) -> WayResult:
        """Compare a variant with its reference variant.

        The weights count as equal if their difference is within the tolerance, and the weights
        moved at least LEAST_MOVED times as far as they differ.
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
        """Train the variants on several ranks, until all are done or one has failed."""
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
        """Return the relative difference of two trainings and the name of its tensor.

        If `a` is None, the initial weights are used. The difference is None if a training has no
        result or its weights are not finite.
        """
        if not (self._is_there(b) and (a is None or self._is_there(a))):
            return None, ""
        apart = difference_of_files(
            self._weights(INITIAL if a is None else a.key), self._weights(b.key)
        )
        return (None, "") if math.isnan(apart.relative) else apart

    def _missing(self, variants: Iterable[Variant]) -> list[Variant]:
        """Return the variants that have neither a result nor a failure, without duplicates."""
        return list(
            {
                v.key: v for v in variants if not self._is_there(v) and v.key not in self._failed
            }.values()
        )

    def _is_there(self, variant: Variant) -> bool:
        return (self._folder / f"{variant.key}.json").exists()

    def _weights(self, key: str) -> Path:
        return self._folder / f"{key}.npz"
