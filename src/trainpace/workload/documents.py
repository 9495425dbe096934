"""How long the documents of a data set are: what packing them into rows of one length leaves to do, and what padding adds."""

import bisect
import math
from collections import Counter
from collections.abc import Mapping

import numpy as np

from trainpace.core.errors import TrainpaceError
from trainpace.core.records import Record

SAMPLE = 4096
"""Documents, at even quantiles, that are packed to find out how full rows become."""


class PackedRow(Record):
    """A row of `tokens` that holds several documents, none of which attends to another.

    fill: share of the row that is documents. documents: in a row, in the mean. attended: tokens that a token's document has, in
    the mean over tokens: sum of squared lengths / sum of lengths. cut: share of the data's tokens that do not fit into a row of
    their own, and are left out. source: where the documents' lengths are from, in words.
    """

    tokens: int
    fill: float
    documents: float
    attended: float
    cut: float
    source: str


class Documents(Record):
    """Lengths in tokens, ascending, and how many documents have each.

    source: where they are from, in words. drawn: whether they stand for a data set of any size, rather than being all of one.
    """

    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    source: str
    drawn: bool = False

    def __post_init__(self) -> None:
        if not self.lengths or len(self.lengths) != len(self.counts):
            raise TrainpaceError("document lengths need one length at least, and a count for each.")
        if (
            min(self.lengths) < 1
            or min(self.counts) < 1
            or list(self.lengths) != sorted(set(self.lengths))
        ):
            raise TrainpaceError(
                "document lengths are whole numbers from 1 in ascending order, each with a count"
                " from 1."
            )

    @classmethod
    def of(cls, counts: Mapping[int, int], source: str, *, drawn: bool = False) -> "Documents":
        """So many documents of each length; empty ones are left out."""
        lengths = sorted(length for length, count in counts.items() if length > 0 < count)
        return cls(
            lengths=tuple(lengths),
            counts=tuple(counts[length] for length in lengths),
            source=source,
            drawn=drawn,
        )

    @classmethod
    def with_mean(cls, mean: float) -> "Documents":
        """Documents of a mean length, taken to be exponentially distributed: of all distributions on positive numbers with that
        mean the one that takes the least for granted (largest entropy)."""
        quantiles = (np.arange(SAMPLE) + 0.5) / SAMPLE
        lengths = np.maximum(np.rint(-mean * np.log1p(-quantiles)), 1).astype(np.int64)
        return cls.of(
            Counter(lengths.tolist()),
            f"documents of {mean:,.0f} tokens in the mean, taken to be exponentially distributed",
            drawn=True,
        )

    @property
    def mean(self) -> float:
        return float(np.average(self.lengths, weights=self.counts))

    def packed(self, tokens: int) -> PackedRow:
        """Rows of `tokens`, filled best fit first, the longest documents before shorter ones, and longer ones than a row cut to
        it: TRL's packing ("bfd"; Ding et al. 2024, arXiv:2404.10830).

        Of documents that stand for more of them, the emptiest row, which more of them would fill, counts by its filled share.
        """
        sample = self._sample()
        lengths = np.minimum(sample, tokens)
        room: list[int] = []  # of the rows that are not full, ascending
        rows = 0.0
        for length in sorted(lengths.tolist(), reverse=True):
            at = bisect.bisect_left(room, length)
            rows += at == len(room)
            left = (tokens if at == len(room) else room.pop(at)) - length
            if left:
                bisect.insort(room, left)
        total = float(lengths.sum())
        if room and (self.drawn or len(sample) < sum(self.counts)):
            rows -= room[-1] / tokens
        return PackedRow(
            tokens=tokens,
            fill=total / (rows * tokens),
            documents=len(lengths) / rows,
            attended=float((lengths.astype(float) ** 2).sum() / total),
            cut=1.0 - total / float(sample.sum()),
            source=self.source,
        )

    def longest_of(self, documents: int, most: int) -> float:
        """The mean of the longest of so many documents, drawn at random and cut to `most` tokens: what a batch is padded to."""
        share = np.cumsum(self.counts) / np.sum(self.counts)
        of_longest = np.diff(share**documents, prepend=0.0)
        return float((of_longest * np.minimum(self.lengths, most)).sum())

    def mean_up_to(self, most: int) -> float:
        """The mean length of documents that are cut to `most` tokens."""
        return float(np.average(np.minimum(self.lengths, most), weights=self.counts))

    def _sample(self) -> np.ndarray:
        n = int(np.sum(self.counts))
        if n <= SAMPLE:
            return np.repeat(self.lengths, self.counts)
        at = np.searchsorted(np.cumsum(self.counts), (np.arange(SAMPLE) + 0.5) / SAMPLE * n)
        return np.array(self.lengths)[np.minimum(at, len(self.lengths) - 1)]


def nearest_multiple(length: float, unit: int) -> int:
    """Of `unit`, and not below it."""
    return max(unit, unit * math.floor(length / unit + 0.5))
