"""`python -m fitting.cards`: fit the families of kernels on measured kernels, and write the
package's constants of cards.

With --out DEVICES (a regular expression) the cards that match are left out of the fit, and their
errors shown.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from fitting.card_fit import fit_family
from fitting.families import FAMILIES, UNDECIDED
from fitting.kernel_rows import KernelRows, joined, kernel_rows
from fitting.kernels import read_kernels
from fitting.measured_kernels import measured_kernels
from fitting.problem import FIXED_BY_KERNELS
from trainpace.core.records import to_json, write_whole
from trainpace.forecast.constants import (
    NO_CARDS,
    CardConstants,
    KernelConstants,
    Pooled,
    fitted_constants,
)

CARDS = Path(__file__).parents[1] / "src/trainpace/forecast/kernel_models/cards.json"


def start_constants() -> KernelConstants:
    """Where the fit of kernels begins:

    guesses for the families, the package's constants for what is not theirs.
    """
    guesses = KernelConstants()
    own = {name: getattr(guesses, name) for names in FAMILIES.values() for name in names}
    return replace(fitted_constants(), **own)


def all_kernels(data: Path, kept: Path | None = None) -> KernelRows:
    """The measured kernels of the families:

    of the lent cards, of others in 16 bits, and in fp32.
    """
    old = read_kernels(data)
    return joined([kernel_rows(measured_kernels(data, kept)), old.select(old.family != "")])


def fit_cards(kernels: KernelRows, c: KernelConstants) -> CardConstants:
    """The constants of every family, each from its own kernels."""
    families: dict[str, Pooled] = {}
    for family, names in FAMILIES.items():
        own = kernels.family == family
        if own.any() and family not in UNDECIDED:
            families |= fit_family(kernels.select(own), names, c)
    return CardConstants(families=families)


def shared_constants(cards: CardConstants, c: KernelConstants) -> KernelConstants:
    """What the families know of a card that was not measured: where whole steps begin."""
    own = {
        name: float(np.exp(log))
        for f in cards.families.values()
        for name, log in zip(f.names, f.shared, strict=True)
    }
    return replace(c, **own)


def start_of_steps(cards: CardConstants) -> KernelConstants:
    """Where the fit of whole steps begins: guesses, and what kernels tell of every card."""
    shared, guesses = shared_constants(cards, KernelConstants()), KernelConstants()
    return replace(guesses, **{name: getattr(shared, name) for name in FIXED_BY_KERNELS})


def log_ratios(kernels: KernelRows, c: KernelConstants, cards: CardConstants) -> np.ndarray:
    """log(forecast / measured) of every kernel."""
    ms = 1e3 * kernels.by_kernel(kernels.device_s(c, cards)) + kernels.floor_ms
    return np.asarray(np.log(ms / kernels.measured_ms))


def table(kernels: KernelRows, before: np.ndarray, after: np.ndarray) -> str:
    """Errors by family and card, in per cent."""
    lines = [
        "| family | card | n | median before | mean before | median | mean | bias |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for family in FAMILIES:
        for card in sorted(set(kernels.device[kernels.family == family])):
            rows = (kernels.family == family) & (kernels.device == card)
            old, new = (100 * (np.exp(r[rows]) - 1) for r in (before, after))
            figures = [
                np.median(abs(old)),
                abs(old).mean(),
                np.median(abs(new)),
                abs(new).mean(),
                np.median(new),
            ]
            lines.append(
                f"| {family} | {card} | {rows.sum()} | "
                + " | ".join(f"{v:.0f}" for v in figures)
                + " |"
            )
    return "\n".join(lines)


def main() -> None:
    """Fit on all kernels and write, or on those of other cards, or of other shapes, and show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--kept", type=Path, default=Path("out/kernels.pickle"))
    parser.add_argument("--out", help="cards to leave out, a regular expression")
    parser.add_argument(
        "--shapes", type=int, default=0, help="leave out every so-manieth kernel of every card"
    )
    options = parser.parse_args()
    every, c = all_kernels(options.data, options.kept), start_constants()
    is_out = np.zeros(len(every.measured_ms), bool)
    if options.out:
        is_out |= np.array([bool(re.match(options.out, name)) for name in every.device])
    if options.shapes:
        is_out |= np.random.default_rng(1).random(len(is_out)) < 1 / options.shapes
    cards = fit_cards(every.select(~is_out), c)
    kernels = every.select(is_out) if is_out.any() else every
    before = log_ratios(kernels, fitted_constants(), NO_CARDS)
    print(table(kernels, before, log_ratios(kernels, shared_constants(cards, c), cards)))
    if not is_out.any():
        CARDS.parent.mkdir(exist_ok=True)
        write_whole(CARDS, to_json(cards, indent=1) + "\n")


if __name__ == "__main__":
    main()
