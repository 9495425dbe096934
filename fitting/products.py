"""`python -m fitting matmuls`: fit the model of 16- and 8-bit products on single measured kernels,
and show its errors on unseen ones.

Each card's parameters are fitted with a normal prior around its generation's, these around what all
share, and both are estimated anew from the cards, a few times over (empirical Bayes). Then the
network learns what the form leaves.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute
import pyarrow.parquet
from msgspec.structs import replace
from scipy.optimize import least_squares

from fitting.public_cards import NAMES
from trainpace.core.hardware import Device, find_device
from trainpace.core.records import to_jsonable
from trainpace.forecast.constants import Pooled, generation_of
from trainpace.forecast.matmul import (
    PARAMETERS,
    Layer,
    MatmulFigures,
    MatmulModel,
    Network,
    Width,
    WidthModel,
    evaluate,
    fed,
    form_times,
    matmul_figures,
    network_inputs,
)
from trainpace.forecast.rates import consumer_boost

MODEL = Path(__file__).parents[1] / "src/trainpace/forecast/kernel_models/products.json"
OWN = Path(__file__).parent / "data"
CARDS = {
    name: NAMES[name]
    for name in (
        "A100-SXM-80GB",
        "H100-SXM-80GB",
        "H200-SXM",
        "H200-NVL",
        "B200",
        "B300",
        "GB200",
        "L40S",
        "A40",
        "RTX-A6000",
        "RTX-4090",
        "V100-SXM-16GB",
        "T4",
    )
}
"""The cards of kernels16.parquet whose products are fitted, as the catalogue names them."""
LEFT_OUT = (
    "rocBLAS Tensile logic",
    "LLMCompass",
    "sailor (Aceso op profiles)",
    "ml-engineering MAMF",
    "PipeWeave",
)
"""AMD's cards; a handful of rows; host launches inside; the best of a search."""
FORMATS: dict[Width, tuple[str, ...]] = {"16": ("bf16", "fp16"), "8": ("fp8",)}
START = np.log([0.85, 12.0, 64.0, 0.5, 0.8, 4e-6, 0.5])
BETWEEN_GENERATIONS = np.array([0.15, 0.3, 0.5, 0.5, 0.15, 0.4, 0.5])
BETWEEN_CARDS = np.array([0.10, 0.2, 0.3, 0.3, 0.10, 0.25, 0.3])
"""Prior standard deviations of the logarithms of PARAMETERS."""
ERROR = 0.1
"""Scale of the logarithm of measured / form beyond which an error counts linearly."""
ROUNDS = 3
PER_GROUP = 2000
"""Rows drawn for each card and library with at least LONG rows of the output, and a quarter as many
with fewer.
"""
LONG, SHORTEST = 512, 64
HIDDEN, NETWORK_STEPS, NETWORK_BATCH = 32, 8000, 2048
UNALIGNED = {
    **dict.fromkeys(("7.0", "7.5", "8.0", "8.6", "8.9"), (0.77, 0.6, 0.46)),
    **dict.fromkeys(("9.0", "10", "12"), (0.31, 0.31, 0.17)),
}
"""Share of the rate that is kept where rows are multiples of 4 or 2 numbers, or odd: on an H100 and
an H200 about 220, 220 and 118 TFLOP/s where aligned products have 700 (fitting/data; later
generations are taken to be alike); before, what the whole steps of bigscience's runs told
(docs/log.md).
"""


class Products(NamedTuple):
    """n measured products:

    sizes, seconds, the card's name in the catalogue, and the library that ran them.
    """

    b: np.ndarray
    m: np.ndarray
    n: np.ndarray
    k: np.ndarray
    seconds: np.ndarray
    card: np.ndarray
    library: np.ndarray

    def at(self, rows: np.ndarray) -> Products:
        return Products(*(column[rows] for column in self))


def read_products(data: Path, width: Width) -> Products:
    """Every usable product of one width: kernels16.parquet's and those of the lent cards."""
    table = pyarrow.parquet.read_table(
        data / "kernels16.parquet",
        columns=["source", "gpu", "dtype", "op", "b", "m", "n", "k", "library", "time_us"],
    )
    compute: Any = pyarrow.compute
    keep = compute.and_(
        compute.is_in(table["op"], pyarrow.array(["gemm", "batched_gemm"])),
        compute.and_(
            compute.is_in(table["dtype"], pyarrow.array(FORMATS[width])),
            compute.is_in(table["gpu"], pyarrow.array(list(CARDS))),
        ),
    )
    table = table.filter(keep)
    table = table.filter(compute.invert(compute.is_in(table["source"], pyarrow.array(LEFT_OUT))))
    b, m, n, k = (
        np.nan_to_num(table[name].to_numpy(zero_copy_only=False).astype(float), nan=1.0)
        for name in "bmnk"
    )
    card = np.array([CARDS[name] for name in table["gpu"].to_pylist()])
    parts = [
        Products(
            np.maximum(b, 1.0),
            m,
            n,
            k,
            table["time_us"].to_numpy() * 1e-6,
            card,
            np.array(table["library"].to_pylist()),
        )
    ]
    for file, name in (("h100_kernels.parquet", "H100 SXM"), ("h200_kernels.parquet", "H200 SXM")):
        rows = [
            (json.loads(row["sizes"]), row["latency_us"] * 1e-6)
            for row in pyarrow.parquet.read_table(OWN / file).to_pylist()
            if row["op"] in ("gemm", "batched_gemm") and row["dtype"] in FORMATS[width]
        ]
        b, m, n, k = (
            np.array([float(size.get(letter, 1)) for size, _ in rows]) for letter in "bmnk"
        )
        seconds = np.array([s for _, s in rows])
        parts.append(
            Products(b, m, n, k, seconds, np.full(len(rows), name), np.full(len(rows), "torch"))
        )
    every = Products(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
    aligned = (every.n % 8 == 0) & (every.k % 8 == 0) & (every.m % 8 == 0)
    aligned |= (every.n % 8 == 0) & (every.k % 8 == 0) & (every.library != "torch")
    return every.at(aligned & (every.m >= SHORTEST))


def sample(products: Products, seed: int = 0) -> Products:
    """PER_GROUP rows of each card and library."""
    draw, chosen = np.random.default_rng(seed), []
    groups = np.char.add(products.card, products.library.astype(str))
    for group in sorted(set(groups)):
        for long, most in ((True, PER_GROUP), (False, PER_GROUP // 4)):
            rows = np.flatnonzero((groups == group) & ((products.m >= LONG) == long))
            chosen.append(draw.choice(rows, min(most, len(rows)), replace=False))
    return products.at(np.concatenate(chosen))


def peak(device: Device, width: Width) -> float:
    """The sheet's rate in FLOP/s."""
    figure = device.fp16_tensor_tflops if width == "16" else device.fp8_tensor_tflops
    assert figure is not None, device.name
    return figure.value * 1e12


def fit_width(products: Products, width: Width) -> WidthModel:
    """The parameters of all cards in `products`, and the network."""
    cards = [find_device(name) for name in sorted(set(products.card))]
    at = {card.name: products.at(products.card == card.name) for card in cards}
    own = {card.name: START.copy() for card in cards}
    centre = {card.name: START.copy() for card in cards}
    unpooled = WidthModel(
        parameters=pool({}, {}, START), fed_slope=0.0, fed_slopes={}, network=no_network()
    )
    model = unpooled
    for _ in range(ROUNDS):
        for card in cards:
            own[card.name] = fit_card(at[card.name], card, width, centre[card.name], unpooled)
        model = pooled(cards, own, width)
        centre = {card.name: centre_of(model, card, width) for card in cards}
    return replace(model, network=fit_network(products, width, model))


def centre_of(model: WidthModel, card: Device, width: Width) -> np.ndarray:
    """What a card's parameters are expected to be from the other cards' alone:

    its generation's and what all share.
    """
    logs = np.array(model.parameters.shared) + model.parameters.generations.get(
        generation_of(card), np.zeros(len(PARAMETERS))
    )
    logs[0] += model.fed_slopes.get(generation_of(card), model.fed_slope) * fed(
        card, peak(card, width)
    )
    return np.asarray(logs)


def fit_card(
    products: Products, card: Device, width: Width, centre: np.ndarray, model: WidthModel
) -> np.ndarray:
    """Logarithms of a card's parameters, with a normal prior around `centre`."""
    log_measured, weight = np.log(products.seconds), np.where(products.m >= LONG, 1.0, 0.5)
    # errors of one library's products go together: no card has more than a few hundred independent
    # ones
    weight = weight * np.sqrt(min(1.0, 400 / len(weight)))

    def residuals(x: np.ndarray) -> np.ndarray:
        figures = figures_at(card, width, x, model)
        error = (
            np.log(form_times(products.b, products.m, products.n, products.k, figures).seconds)
            - log_measured
        )
        return np.concatenate(
            [
                weight * np.sqrt(2 * (np.sqrt(1 + (error / ERROR) ** 2) - 1)),
                (x - centre) / BETWEEN_CARDS,
            ]
        )

    return np.asarray(least_squares(residuals, centre, x_scale=BETWEEN_CARDS, max_nfev=25).x)


def figures_at(
    card: Device, width: Width, logs: Sequence[float] | np.ndarray, model: WidthModel
) -> MatmulFigures:
    """A card's figures with parameters of its own, its supply of power among them."""
    alone = replace(
        model,
        parameters=pool({}, {card.name: np.asarray(logs)}, np.zeros(len(PARAMETERS))),
        fed_slope=0.0,
        fed_slopes={},
    )
    both = MatmulModel(widths={width: alone}, unaligned={})
    return matmul_figures(card, peak(card, width), width, consumer_boost(card), both)


def pooled(cards: Sequence[Device], own: dict[str, np.ndarray], width: Width) -> WidthModel:
    """What cards share, what their generations add, and what is left to each:

    ridge regression of all cards' parameters.
    """
    generations = sorted({generation_of(card) for card in cards})
    n, g = len(cards), len(generations)
    place = np.array([generations.index(generation_of(card)) for card in cards])
    power = np.array([fed(card, peak(card, width)) for card in cards])
    # unknowns: shared, generations, and for the share of the rate the slope of power, shared and of
    # each generation
    design = np.zeros((n, 2 + 2 * g))
    design[:, 0], design[:, 1] = 1.0, power
    design[np.arange(n), 2 + place] = 1.0
    design[np.arange(n), 2 + g + place] = power
    y = np.array([own[card.name] for card in cards])
    shared, by_generation, by_card = (
        np.zeros(len(PARAMETERS)),
        np.zeros((g, len(PARAMETERS))),
        np.zeros_like(y),
    )
    slope, slopes = 0.0, np.zeros(g)
    for i in range(len(PARAMETERS)):
        columns = design.copy()
        if i:
            columns[:, 1] = columns[:, 2 + g :] = 0.0
        prior = np.concatenate([[10.0, 0.3], np.full(g, BETWEEN_GENERATIONS[i]), np.full(g, 0.5)])
        precision = columns.T @ columns / BETWEEN_CARDS[i] ** 2 + np.diag(prior**-2.0)
        found = np.linalg.solve(precision, columns.T @ y[:, i] / BETWEEN_CARDS[i] ** 2)
        shared[i], by_generation[:, i] = found[0], found[2 : 2 + g]
        by_card[:, i] = y[:, i] - columns @ found
        if not i:
            slope, slopes = float(found[1]), found[2 + g :]
    parameters = pool(
        dict(zip(generations, by_generation, strict=True)),
        {c.name: row for c, row in zip(cards, by_card, strict=True)},
        shared,
    )
    fed_slopes = {
        name: float(f"{slope + more:.3g}") for name, more in zip(generations, slopes, strict=True)
    }
    return WidthModel(
        parameters=parameters,
        fed_slope=float(f"{slope:.3g}"),
        fed_slopes=fed_slopes,
        network=no_network(),
    )


def pool(
    generations: dict[str, np.ndarray],
    devices: dict[str, np.ndarray],
    shared: np.ndarray,
    digits: int | None = None,
) -> Pooled:
    """A `Pooled` of PARAMETERS."""

    def row(values: np.ndarray) -> tuple[float, ...]:
        return tuple(float(x) if digits is None else round(float(x), digits) for x in values)

    return Pooled(
        names=PARAMETERS,
        shared=row(shared),
        generations={k: row(v) for k, v in generations.items()},
        devices={k: row(v) for k, v in devices.items()},
    )


def no_network() -> Network:
    """A network that corrects nothing."""
    return Network(
        means=(0.0,) * 13,
        deviations=(1.0,) * 13,
        layers=(Layer(weights=((0.0,) * 13,), biases=(0.0,)),),
    )


def gathered(products: Products, width: Width, model: WidthModel) -> MatmulFigures:
    """The figures of every row's card."""
    names = sorted(set(products.card))
    both = MatmulModel(widths={width: model}, unaligned={})
    figures = [
        matmul_figures(
            find_device(n), peak(find_device(n), width), width, consumer_boost(find_device(n)), both
        )
        for n in names
    ]
    place = np.searchsorted(names, products.card)
    return MatmulFigures(
        *(
            np.array([float(column) for column in columns])[place]
            for columns in zip(*figures, strict=True)
        )
    )


def fit_network(products: Products, width: Width, model: WidthModel, seed: int = 0) -> Network:
    """A small network on the logarithm of measured over form."""
    import torch

    torch.manual_seed(seed)
    figures = gathered(products, width, model)
    form = form_times(products.b, products.m, products.n, products.k, figures)
    inputs = network_inputs(products.b, products.m, products.n, products.k, form, figures.latency_s)
    means, deviations = inputs.mean(axis=0), inputs.std(axis=0) + 1e-3
    x = torch.tensor(np.clip((inputs - means) / deviations, -4, 4), dtype=torch.float32)
    y = torch.tensor(np.log(products.seconds / form.seconds), dtype=torch.float32)
    count = {name: (products.card == name).sum() for name in set(products.card)}
    weight = np.array([count[name] ** -0.5 for name in products.card]) * np.where(
        products.m >= LONG, 1.0, 0.4
    )
    weight = weight * np.where(
        np.isin(products.library, ("torch", "sglang", "pytorch (HF eager)")), 1.5, 1.0
    )
    w = torch.tensor(weight / weight.mean(), dtype=torch.float32)
    linear = [
        torch.nn.Linear(13, HIDDEN),
        torch.nn.Linear(HIDDEN, HIDDEN),
        torch.nn.Linear(HIDDEN, 1),
    ]
    torch.nn.init.zeros_(linear[-1].weight)
    torch.nn.init.zeros_(linear[-1].bias)
    net = torch.nn.Sequential(linear[0], torch.nn.Tanh(), linear[1], torch.nn.Tanh(), linear[2])
    optimizer = torch.optim.Adam(net.parameters(), lr=4e-3, weight_decay=1e-5)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NETWORK_STEPS, eta_min=1e-4)
    for _ in range(NETWORK_STEPS):
        rows = torch.randint(0, len(y), (NETWORK_BATCH,))
        error = net(x[rows])[:, 0] - y[rows]
        loss = (w[rows] * torch.sqrt(error**2 + 0.02**2)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()

    def numbers(values: Any) -> tuple[float, ...]:
        return tuple(float(f"{v:.4g}") for v in values)

    layers = tuple(
        Layer(
            weights=tuple(numbers(row) for row in one.weight.tolist()),
            biases=numbers(one.bias.tolist()),
        )
        for one in linear
    )
    return Network(means=numbers(means), deviations=numbers(deviations), layers=layers)


def log_errors(
    products: Products, width: Width, model: WidthModel
) -> tuple[np.ndarray, np.ndarray]:
    """log(forecast / measured) of the form alone, and with the network."""
    figures = gathered(products, width, model)
    form = form_times(products.b, products.m, products.n, products.k, figures)
    inputs = network_inputs(products.b, products.m, products.n, products.k, form, figures.latency_s)
    alone = np.log(form.seconds / products.seconds)
    return alone, alone + evaluate(model.network, inputs)


def is_held_out(products: Products) -> np.ndarray:
    """A quarter of all shapes, the same on every card."""
    mixed = (
        products.m * 7919 + products.n * 104729 + products.k * 1299709 + products.b * 15485863
    ) % 1009
    return np.asarray(mixed % 4 == 0)


def line(name: str, alone: np.ndarray, both: np.ndarray) -> str:
    """A row of the table."""
    cells = [f"{name:28}{len(both):7}"]
    for log_error in (alone, both):
        size = 100 * np.abs(np.expm1(log_error))
        cells.append(
            f"{size.mean():6.1f}{np.median(size):6.1f}{np.quantile(size, 0.9):6.1f}{100 * np.median(log_error):+6.1f}"
        )
    return " |".join(cells)


def main() -> None:
    """Fit, show, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument(
        "--no-folds", action="store_true", help="only fit and write, show nothing that was held out"
    )
    options = parser.parse_args()
    widths: dict[Width, WidthModel] = {}
    for width in FORMATS:
        products = sample(read_products(options.data, width))
        if not options.no_folds:
            show(products, width)
        widths[width] = fit_width(products, width)
    MODEL.parent.mkdir(exist_ok=True)
    MODEL.write_text(
        json.dumps(to_jsonable(MatmulModel(widths=widths, unaligned=UNALIGNED))) + "\n"
    )


def show(products: Products, width: Width) -> None:
    """Print errors on shapes, cards and generations that were held out."""
    print(
        f"{width} bits, m >= {LONG}: mean, median, 90th percentile, bias in % | form alone | with the network"
    )
    out, long = is_held_out(products), products.m >= LONG
    known = fit_width(products.at(~out), width)
    for card in sorted(set(products.card)):
        rows = out & long & (products.card == card)
        if rows.any():
            alone, both = log_errors(products.at(rows), width, known)
            print(line(f"shapes out: {card}", alone, both), flush=True)
    by_card = {card: generation_of(find_device(card)) for card in set(products.card)}
    for card in sorted(by_card):
        alone, both = log_errors(
            products.at(long & (products.card == card)),
            width,
            fit_width(products.at(products.card != card), width),
        )
        print(line(f"card out: {card}", alone, both), flush=True)
    for generation in sorted(set(by_card.values())):
        theirs = np.array([by_card[card] == generation for card in products.card])
        if len({card for card in by_card if by_card[card] == generation}) < 2:
            continue
        alone, both = log_errors(
            products.at(theirs & long), width, fit_width(products.at(~theirs), width)
        )
        print(line(f"generation out: {generation}", alone, both), flush=True)


if __name__ == "__main__":
    main()
