"""Fit the families of kernels on measured kernels: what all cards share, what a generation adds and
what a card adds.

The logarithm of a constant is their sum; the last two are drawn to 0 with the spreads below, so
that a card with few kernels stays near its generation (partial pooling). Families are fitted one by
one, with all other constants as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from scipy.optimize import least_squares

from fitting.families import group_of
from fitting.kernel_rows import KernelRows
from trainpace.forecast.constants import NO_CARDS, KernelConstants, Pooled, generation_of

KERNEL_SD = 0.25
"""Of log(measured / forecast) of one kernel, as far as it is not the constants' fault."""
EFFECTIVE = 80
"""A card's many kernels of one operator count as so many: their errors are alike."""
FEWEST = 20
"""A generation with fewer kernels of a family is not known by them."""
SHARED_SD, GENERATION_SD, CARD_SD = 1.0, 0.35, 0.1
STEP = 0.01
LEAST = 1e-6
MOST_EVALUATIONS = 20


class Design(NamedTuple):
    """The parameters of a family:

    a column for every name that all share, that a generation adds and that a card adds.
    """

    names: tuple[str, ...]
    generations: tuple[str, ...]
    cards: tuple[str, ...]

    @property
    def size(self) -> int:
        return len(self.names) * (1 + len(self.generations) + len(self.cards))

    def parts(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(shared, by generation, by card): n, generations x n, cards x n."""
        n, g = len(self.names), len(self.generations)
        return x[:n], x[n : n * (1 + g)].reshape(g, n), x[n * (1 + g) :].reshape(-1, n)


def fit_family(kernels: KernelRows, names: Sequence[str], c: KernelConstants) -> dict[str, Pooled]:
    """The family's constants, by group, on these kernels, which are of this family alone."""
    devices = {key[0]: device for key, device in kernels.devices.items()}
    generation = {name: generation_of(device) for name, device in devices.items()}
    cards = tuple(sorted(set(kernels.device)))
    design = Design(tuple(names), tuple(sorted({generation[card] for card in cards})), cards)
    card_of = np.array([cards.index(name) for name in kernels.device])
    generation_of_card = np.array([design.generations.index(generation[card]) for card in cards])
    group = np.unique(
        np.char.add(np.char.add(kernels.operator, "|"), kernels.device), return_inverse=True
    )[1]
    count = np.bincount(group)[group]
    weight = np.sqrt(np.minimum(count, EFFECTIVE) / count) / KERNEL_SD
    start = np.log([max(getattr(c, name), LEAST) for name in names])
    n = len(names)
    spread = np.repeat(
        [SHARED_SD, GENERATION_SD, CARD_SD], [n, n * len(design.generations), n * len(cards)]
    )

    def logs_of_cards(x: np.ndarray) -> np.ndarray:
        shared, of_generations, of_cards = design.parts(x)
        return np.asarray(start + shared + of_generations[generation_of_card] + of_cards)

    def log_ratio(logs: np.ndarray) -> np.ndarray:
        seconds = np.zeros(len(kernels.batch))
        for chunk in kernels.chunks:
            own = logs[cards.index(chunk.device.name)]
            values = {name: float(np.exp(v)) for name, v in zip(names, own, strict=True)}
            seconds[chunk.rows] = chunk.device_s(replace(c, **values), NO_CARDS)
        return np.log((1e3 * kernels.by_kernel(seconds) + kernels.floor_ms) / kernels.measured_ms)

    def residuals(x: np.ndarray) -> np.ndarray:
        return np.concatenate([_robust(log_ratio(logs_of_cards(x)) * weight), x / spread])

    def jacobian(x: np.ndarray) -> np.ndarray:
        logs = logs_of_cards(x)
        base = log_ratio(logs) * weight
        of_kernels = np.zeros((len(base), design.size))
        for j in range(n):
            moved = logs.copy()
            moved[:, j] += STEP
            change = (_robust(log_ratio(moved) * weight) - _robust(base)) / STEP
            rows = np.arange(len(base))
            of_kernels[rows, j] = change
            of_kernels[rows, n * (1 + generation_of_card[card_of]) + j] = change
            of_kernels[rows, n * (1 + len(design.generations) + card_of) + j] = change
        return np.concatenate([of_kernels, np.diag(1 / spread)])

    found = least_squares(
        residuals, np.zeros(design.size), jacobian, max_nfev=MOST_EVALUATIONS, x_scale=0.3
    )
    information = (
        (jacobian(found.x)[: len(weight), n : n * (1 + len(design.generations))] ** 2)
        .sum(axis=0)
        .reshape(-1, n)
    )
    enough = np.bincount(generation_of_card[card_of], minlength=len(design.generations)) >= FEWEST
    known = (information > 1 / GENERATION_SD**2) & enough[:, None]
    return _in_groups(design, design.parts(found.x), start, known, generation_of_card)


def _in_groups(
    design: Design,
    parts: tuple[np.ndarray, np.ndarray, np.ndarray],
    start: np.ndarray,
    known: np.ndarray,
    generation_of_card: np.ndarray,
) -> dict[str, Pooled]:
    """The constants by group, each with the generations whose kernels say more of one of its
    constants than the spread between generations does.
    """
    shared, of_generations, of_cards = parts
    groups = np.array([group_of(name) for name in design.names])
    made = {}
    for group in dict.fromkeys(groups.tolist()):
        names = np.flatnonzero(groups == group)
        own = np.flatnonzero(known[:, names].any(axis=1))
        cards = [i for i, g in enumerate(generation_of_card) if g in own]
        made[group] = Pooled(
            names=tuple(design.names[j] for j in names),
            shared=_rounded((start + shared)[names]),
            generations={design.generations[g]: _rounded(of_generations[g, names]) for g in own},
            devices={design.cards[i]: _rounded(of_cards[i, names]) for i in cards},
        )
    return made


def _robust(z: np.ndarray) -> np.ndarray:
    """Errors beyond one standard deviation count linearly:

    the square root of soft-L1, with its sign.
    """
    return np.sign(z) * np.sqrt(2.0 * (np.sqrt(1.0 + z**2) - 1.0))


def _rounded(values: np.ndarray) -> tuple[float, ...]:
    return tuple(float(f"{v:.3f}") for v in values)
