"""Document lengths of a dataset, to compute how full packed rows are and how much padding adds."""

import bisect
import math
from collections import Counter
from collections.abc import Mapping

import numpy as np

from trainpace.core.errors import TrainpaceError
from trainpace.core.records import Record

SAMPLE = 4096
"""Number of documents, at evenly spaced quantiles, that are packed to estimate how full rows are.
"""


class PackedRow(Record):
    """Row of tokens with several packed documents, which do not attend to each other.

    Attributes:
        tokens: Length of the row.
        fill: Share of the row that is filled with documents.
        documents: Mean number of documents per row.
        attended: Mean over tokens of the length of the token's document: sum of squared lengths /
            sum of lengths.
        cut: Share of the dataset's tokens that are dropped because a document exceeds a row.
        source: Source of the document lengths, in words.
    """

    tokens: int
    fill: float
    documents: float
    attended: float
    cut: float
    source: str


class Documents(Record):
    """Histogram of document lengths in tokens, in ascending order.

    Attributes:
        source: Source of the lengths, in words.
        drawn: True if the lengths are a sample. False if they cover the whole dataset.
    """

    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    source: str
    drawn: bool = False

    def __post_init__(self) -> None:
        if not self.lengths or len(self.lengths) != len(self.counts):
            raise TrainpaceError("document lengths need at least one length, and a count for each.")
        ascend = list(self.lengths) == sorted(set(self.lengths))
        if not ascend or min(*self.lengths, *self.counts) < 1:
            raise TrainpaceError(
                "document lengths must ascend from 1, each with a count of at least 1."
            )

    @classmethod
    def of(cls, counts: Mapping[int, int], source: str, *, drawn: bool = False) -> "Documents":
        """Return documents from {length: count}. Empty documents are dropped."""
        lengths = sorted(length for length, count in counts.items() if length > 0 < count)
        return cls(
            lengths=tuple(lengths),
            counts=tuple(counts[length] for length in lengths),
            source=source,
            drawn=drawn,
        )

    @classmethod
    def with_mean(cls, mean: float) -> "Documents":
        """Return documents with exponentially distributed lengths of a given mean.

        If only the mean is known, this distribution has the largest entropy.
        """
        quantiles = (np.arange(SAMPLE) + 0.5) / SAMPLE
        lengths = np.maximum(np.rint(-mean * np.log1p(-quantiles)), 1).astype(np.int64)
        return cls.of(
            Counter(lengths.tolist()),
            f"documents of {mean:,.0f} tokens on average, assumed to be exponentially distributed",
            drawn=True,
        )

    @property
    def mean(self) -> float:
        return float(np.average(self.lengths, weights=self.counts))

    def packed(self, tokens: int) -> PackedRow:
        """Pack the documents into rows by best-fit decreasing, as in TRL ("bfd").

        Documents longer than a row are cut (Ding et al. 2024, arXiv:2404.10830). If the documents
        are a sample, the emptiest row counts by its filled share, since more documents would fill
        it.

        Args:
            tokens: Length of a row.
        """
        sample = self._sample()
        lengths = np.minimum(sample, tokens)
        room: list[int] = []  # free tokens of the rows that are not full, ascending
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
        """Return the mean length of the longest document in a random batch, cut to `most` tokens.

        The batch is padded to this length.
        """
        share = np.cumsum(self.counts) / np.sum(self.counts)
        of_longest = np.diff(share**documents, prepend=0.0)
        return float((of_longest * np.minimum(self.lengths, most)).sum())

    def mean_up_to(self, most: int) -> float:
        """Return the mean document length if documents are cut to `most` tokens."""
        return float(np.average(np.minimum(self.lengths, most), weights=self.counts))

    def _sample(self) -> np.ndarray:
        n = int(np.sum(self.counts))
        if n <= SAMPLE:
            return np.repeat(self.lengths, self.counts)
        at = np.searchsorted(np.cumsum(self.counts), (np.arange(SAMPLE) + 0.5) / SAMPLE * n)
        return np.array(self.lengths)[np.minimum(at, len(self.lengths) - 1)]


def nearest_multiple(length: float, unit: int) -> int:
    """Round a length to the nearest multiple of `unit`, at least `unit` itself."""
    return max(unit, unit * math.floor(length / unit + 0.5))
