"""Ask a Question: train every way, hold the weights against each other, and look for the cause of what differs."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from trainpace.errors import TrainpaceError
from trainpace.launch import Job, Launcher
from trainpace.process import run_isolated
from trainpace.records import load
from trainpace.verify.compare import Difference, difference_of_files
from trainpace.verify.question import (
    CHANGES,
    FORMATS,
    INITIAL,
    LEAST_MOVED,
    RANKS,
    WEIGHTS,
    Change,
    Equivalence,
    Facts,
    Question,
    Tried,
    Variant,
    Way,
    WayResult,
)

Tell = Callable[[str], None]
_Found = dict[tuple[Change, ...], Difference | None]


def verify(question: Question, launcher: Launcher, tell: Tell = lambda _: None) -> Equivalence:
    """Raises UserCodeError and its kin where the model cannot be trained in one process; what only one way cannot do is an
    answer. `tell` hears what begins."""
    launcher.check()
    with tempfile.TemporaryDirectory(prefix="trainpace-verify-") as folder:
        trainings = _Trainings(question, launcher, Path(folder), tell)
        tell("training every way")
        trainings.run([Variant(way="whole"), *(Variant(way=way) for way in question.ways)])
        facts = trainings.facts(Variant(way="whole"))
        results = [trainings.result(way) for way in question.ways]
        repeated = None
        apart = [r.way for r in results if not r.equal and not r.failed]
        if apart:
            repeated = trainings.repeated()
            # where one process does not repeat itself, no change would tell anything
            causes = _causes(trainings, apart) if not repeated else {}
            results = [
                msgspec.structs.replace(r, cause=causes[r.way][0], tried=causes[r.way][1]) if r.way in causes else r
                for r in results
            ]
    return Equivalence(question=question, ways=tuple(results), facts=facts, repeated=repeated)


def candidates(question: Question, facts: Facts, way: Way) -> tuple[Change, ...]:
    """Changes that can matter for a way, by what was seen of the model, its batches and the question."""
    sizes = question.sizes(way)
    can: dict[Change, bool] = {
        "fp32": question.precision != "fp32", "weight_by_samples": len(set(sizes)) > 1,
        "weight_by_targets": facts.uneven_targets, "sum": True, "no_hooks": facts.hooks > 0,
        "whole_batch_norm": facts.batch_norms > 0, "no_dropout": facts.random, "fp64": True,
    }  # fmt: skip
    return tuple(change for change in CHANGES if can[change])


def _causes(trainings: _Trainings, apart: Sequence[Way]) -> dict[Way, tuple[tuple[Change, ...], tuple[Tried, ...]]]:
    """For each way, the changes that make it equal, and all that were tried.

    One at a time first. Where none is enough, several together, at most one of a kind (a weight, a number format), from
    which one after another is left out as long as equality stays.
    """
    can = {way: candidates(trainings.question, trainings.facts(Variant(way=way)), way) for way in apart}
    trainings.tell("changing one thing at a time")
    trainings.run_pairs(Variant(way=way, changes=(change,)) for way in apart for change in can[way])
    causes = {}
    for way in apart:
        tried: _Found = {(change,): trainings.difference(Variant(way=way, changes=(change,))) for change in can[way]}
        alone = [change for change in can[way] if trainings.is_equal(Variant(way=way, changes=(change,)))]
        cause: tuple[Change, ...] = (alone[0],) if alone else ()
        if not alone:
            cause = _together(trainings, way, can[way], tried)
        causes[way] = (
            cause,
            tuple(Tried(changes=c, difference=None if d is None else d.relative) for c, d in tried.items()),
        )
    return causes


def _together(trainings: _Trainings, way: Way, can: Sequence[Change], tried: _Found) -> tuple[Change, ...]:
    free = [c for c in can if c not in (*WEIGHTS, *FORMATS)]
    if not free and "fp32" not in can:
        return ()
    weights = [[], *([w] for w in WEIGHTS if w in can)]
    formats = [["fp32"]] if "fp32" in can else [[], ["fp64"]]
    for weight in weights:
        for number_format in formats:
            changes = _ordered((*free, *weight, *number_format))
            if len(changes) < 2:
                continue
            trainings.tell(f"changing {len(changes)} things together ({way})")
            trainings.run_pairs([Variant(way=way, changes=changes)])
            tried[changes] = trainings.difference(Variant(way=way, changes=changes))
            if trainings.is_equal(Variant(way=way, changes=changes)):
                return _fewest(trainings, way, changes, tried)
    return ()


def _fewest(trainings: _Trainings, way: Way, changes: tuple[Change, ...], tried: _Found) -> tuple[Change, ...]:
    for change in changes:
        fewer = tuple(c for c in changes if c != change)
        if fewer not in tried:
            trainings.run_pairs([Variant(way=way, changes=fewer)])
            tried[fewer] = trainings.difference(Variant(way=way, changes=fewer))
        if trainings.is_equal(Variant(way=way, changes=fewer)):
            changes = fewer
    return changes


def _ordered(changes: Iterable[str]) -> tuple[Change, ...]:
    wanted = set(changes)
    return tuple(change for change in CHANGES if change in wanted)


class _Trainings:
    """The trainings of one question: each is run once, and leaves its weights in a folder."""

    def __init__(self, question: Question, launcher: Launcher, folder: Path, tell: Tell) -> None:
        self.question, self.tell = question, tell
        self._launcher, self._folder = launcher, folder
        self._failed: dict[str, str] = {}

    def run_pairs(self, variants: Iterable[Variant]) -> None:
        """Train the variants, and those that they are compared with."""
        self.run([both for variant in variants for both in (variant.whole, variant)])

    def run(self, variants: Sequence[Variant]) -> None:
        """Train what is not there yet: one process first, ranks after it."""
        missing = {v.key: v for v in variants if not self._is_there(v) and v.key not in self._failed}
        alone = [v for v in missing.values() if v.way not in RANKS]
        if alone:
            self._run_alone(alone)
        ranks = [v for v in missing.values() if v.way in RANKS]
        while ranks:
            self._run_ranks(ranks)
            ranks = [v for v in ranks if not self._is_there(v) and v.key not in self._failed]

    def result(self, way: Way) -> WayResult:
        """The result of a way without changes."""
        variant = Variant(way=way)
        difference, moved = self.difference(variant), self._moved(variant)
        losses = self.facts(variant).losses if self._is_there(variant) else ()
        return WayResult(
            way=way, sizes=self.question.sizes(way), difference=_number(difference),
            worst="" if difference is None else difference.tensor,
            moved=_number(moved), equal=self.is_equal(variant), failed=self._failed.get(variant.key, ""),
            first_loss=losses[0] if losses else None,
        )  # fmt: skip

    def facts(self, variant: Variant) -> Facts:
        """The facts of a training that has been run."""
        return load(self._folder / f"{variant.key}.json", Facts)

    def repeated(self) -> float | None:
        """The difference between two trainings that should be the same bit for bit."""
        again = Variant(way="again")
        self.run([again])
        return _number(self.difference(again))

    def difference(self, variant: Variant) -> Difference | None:
        """The difference from the variant that it is compared with; None where one of the two failed."""
        if not (self._is_there(variant) and self._is_there(variant.whole)):
            return None
        difference = difference_of_files(self._weights(variant.whole.key), self._weights(variant.key))
        return difference if difference.relative == difference.relative else None

    def is_equal(self, variant: Variant) -> bool:
        """Whether the difference is within the tolerance, and small beside how far the weights moved."""
        difference, moved = self.difference(variant), self._moved(variant)
        if difference is None or moved is None:
            return False
        tolerance = self.question.tolerance
        return (
            difference.relative <= tolerance <= moved.relative and LEAST_MOVED * difference.relative <= moved.relative
        )

    def _moved(self, variant: Variant) -> Difference | None:
        if not self._is_there(variant.whole):
            return None
        return difference_of_files(self._weights(INITIAL), self._weights(variant.whole.key))

    def _run_alone(self, variants: Sequence[Variant]) -> None:
        request = self._request(variants) | {"first": not self._weights(INITIAL).exists()}
        what = f"training {self.question.model} in one process"
        answer = run_isolated("trainpace.verify.worker", request, self.question.timeout_s, what)
        self._failed |= json.loads(answer)

    def _run_ranks(self, variants: Sequence[Variant]) -> None:
        request, result = self._folder / "request.json", self._folder / "result.json"
        result.unlink(missing_ok=True)
        request.write_text(json.dumps(self._request(variants) | {"result": str(result)}))
        job = Job(
            name="verify", program=("-m", "trainpace.verify.rank", str(request)), folder=str(self._folder / "launch"),
            result=str(result), nproc_per_node=self.question.ranks, timeout_s=self.question.timeout_s,
        )  # fmt: skip
        ended = self._launcher.run(job)
        if ended.state == "cancelled":
            raise TrainpaceError("the ranks were cancelled.")
        for variant in variants:
            sentences = sorted(self._folder.glob(f"{variant.key}.failed-*"))
            if sentences:
                self._failed[variant.key] = sentences[0].read_text()
            elif not self._is_there(variant):
                self._failed[variant.key] = ended.reason or f"its ranks ended without an answer ({ended.state})."
            else:
                continue
            return  # those behind it have not been tried

    def _request(self, variants: Sequence[Variant]) -> dict[str, object]:
        return {
            "question": msgspec.to_builtins(self.question),
            "variants": msgspec.to_builtins(list(variants)),
            "folder": str(self._folder),
        }

    def _is_there(self, variant: Variant) -> bool:
        return (self._folder / f"{variant.key}.json").exists()

    def _weights(self, key: str) -> Path:
        return self._folder / f"{key}.npz"


def _number(difference: Difference | None) -> float | None:
    return None if difference is None or difference.relative != difference.relative else difference.relative
