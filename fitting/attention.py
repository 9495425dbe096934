"""Fits fused attention on measured kernels, and says how far it errs on kernels, cards and
generations that it has not seen.

    python -m fitting.attention --data ../shared/data        writes
    src/trainpace/forecast/kernel_models/attention.json python -m fitting.attention --data
    ../shared/data --folds    also refits without each card and each generation

Two families share what they know of cards: kernels of Ampere's instructions (FlashAttention-2,
memory-efficient), and kernels written for Hopper and Blackwell (cuDNN, FlashAttention-3 and 4). A
parameter's logarithm is a sum: shared + generation + card + implementation + backward pass. So a
card whose backward pass was never measured gets what the pass costs where it was. A serving
library's rows also carry its own share, start and copies into a paged cache, which training does
not have.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow.dataset
from scipy.optimize import least_squares

from fitting.public_cards import NAMES
from trainpace.core.hardware import find_device
from trainpace.core.records import to_jsonable
from trainpace.forecast.attention import (
    PARAMETERS,
    SMOOTHNESS,
    TF32_MATMULS,
    AttentionModel,
    attention_s,
    exponentials_per_s,
    instruction_share,
)
from trainpace.forecast.attention import AttentionFigures as Figures
from trainpace.forecast.constants import Pooled, generation_of
from trainpace.forecast.rates import consumer_boost

OUTPUT = Path(__file__).parents[1] / "src/trainpace/forecast/kernel_models/attention.json"
LENT = Path(__file__).parent / "data"
CARDS = {
    name: NAMES[name]
    for name in (
        "A100-SXM-80GB",
        "H100-SXM-80GB",
        "H100-PCIe-80GB",
        "H200-SXM",
        "H200-NVL",
        "B200",
        "B300",
        "GB200",
        "GB300",
        "L40S",
        "RTX-4090",
        "NVIDIA H100 80GB HBM3",
        "NVIDIA H200",
    )
}
FLASH2, FLASH3, FLASH4, CUDNN = "flash2", "flash3", "flash4", "cudnn"
KERNELS = {
    "flash_attention": FLASH2,
    "vllm_flash_attn": FLASH2,
    "flashinfer": FLASH2,
    "vllm_flash_attn_fa2": FLASH2,
    "vllm_vit_flash_attn_fa2": FLASH2,
    "vllm": FLASH2,
    "fa3": FLASH3,
    "flash_attention_v3": FLASH3,
    "vllm_flash_attn_fa3": FLASH3,
    "vllm_vit_flash_attn_fa3": FLASH3,
    "vllm__backend.flash_attn": FLASH3,
    "flash_attention_v4": FLASH4,
    "vllm_vit_flash_attn_fa4": FLASH4,
    "trtllm_mha": CUDNN,
    "vllm_flashinfer_trtllmprefill": CUDNN,
    "cudnn": CUDNN,
}
"""The implementation of every kernel name of kernels16 that is used. TensorRT's and Triton's own
are none of torch's. What flashinfer and TensorRT-LLM bring for Blackwell stands for cuDNN's there,
with a share of its own: NVIDIA's kernels both.
"""
ON_HOPPER = {"flash_attention": FLASH3}
ON_BLACKWELL = {"flashinfer": CUDNN}
FAMILIES = {"ampere": (FLASH2, "efficient", "efficient_full"), "native": (CUDNN, FLASH3, FLASH4)}
REFERENCE = {"torch", "cudnn", "flash_attention_v3", "vllm_vit_flash_attn_fa4"}
"""Libraries whose rows are the implementation itself; others differ from it by what is theirs."""

START = dict(
    zip(PARAMETERS, (0.7, 4.0, 100.0, 0.5, 0.5, 1.0, 0.8, 4.0, 0.7, 0.9, 128.0), strict=True)
)
FREE = PARAMETERS[:-1]
"""Rows a block are set, not fitted:

256 in the kernels for Blackwell (two tiles at a time), 128 elsewhere.
"""
SHARED_SD = (1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.3, 1.0, 0.7, 0.3)
GENERATION_SD = (0.3, 0.3, 0.3, 0.3, 0.3, 0.2, 0.15, 0.15, 0.1, 0.1)
CARD_SD = (0.2, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1, 0.05, 0.03, 0.05)
WAY_SD = (0.5, 0.5, 0.5, 0.5, 0.5, 0.3, 0.3, 0.5, 0.5, 0.2)
"""Of an implementation, of the backward pass, and of both together."""
ALIKE_SD = 0.1
"""Of the share of FlashAttention-3 and 4 beside cuDNN's: version 4 was measured with heads of 64 to
80 alone, which do not tell products from exponentials.
"""
LIBRARY_SD = (0.3, 0.2, 0.5, 0.7)
"""Of a serving library's share, memory, start, and passes over keys and values that are copied into
its cache.
"""
PLAIN, PLAIN_SD = ("flash_attention", "fa3", "vllm"), 0.02
"""Libraries that call FlashAttention's kernels as they are, so that they are no slower or faster at
the products themselves.
"""
PRIOR = 0.08
"""Weight of the priors:

residuals are in logarithms, and those of one library and card are no independent draws.
"""
OUTLIER = 0.1
MOST, EFFECTIVE = 400, 300.0
"""Kernels drawn from one library on one card, and how many of them count."""
TORCHS = 2.0
"""Weight of torch's own calls, which trainings run, beside those of serving libraries."""
HELD_OUT = 1 / 3
HOST_BOUND_US = 200.0
"""Lent cards' backward passes below this took 90 to 190 microseconds whatever their size:

autograd's own work on a slow host.
"""
SHORTEST = 128
"""Queries below which a grouped serving kernel is no training's:

libraries pack several heads into a block.
"""


def read_rows(data: Path) -> pd.DataFrame:
    """Measured attention in 16 bits with as many queries as keys or many queries, one row a kernel; times in microseconds."""
    table = pyarrow.dataset.dataset(data / "kernels16.parquet")
    field = pyarrow.dataset.field
    wanted = field("op").isin(["attention_fwd", "attention_bwd"]) & field("dtype").isin(
        ["bf16", "fp16"]
    )
    found = table.to_table(filter=wanted).to_pandas()
    found = found[found.gpu.isin(list(CARDS)) & (found.window.fillna(0) == 0)]
    found = found[
        ~found.extra.str.contains('"deterministic_bwd": "True"') | (found.op == "attention_fwd")
    ]
    library = found.kernel.where(found.kernel != "", found.library.astype(str))
    card = found.gpu.map(CARDS)
    way = library.map(KERNELS)
    way = way.mask(found.gpu.str.startswith("H"), library.map(ON_HOPPER).fillna(way))
    way = way.mask(found.gpu.str.contains("B[23]00"), library.map(ON_BLACKWELL).fillna(way))
    rows = pd.DataFrame(
        {
            "card": card,
            "way": way,
            "library": library,
            "backward": found.op == "attention_bwd",
            "b": found.b,
            "heads": found.heads,
            "kv_heads": found.kv_heads.fillna(found.heads),
            "queries": found.seq_q,
            "keys": found.seq_kv,
            "head": (found.head_dim + found.head_dim_v.fillna(found.head_dim)) / 2,
            "causal": found.causal,
            "us": found.time_us,
        }
    )
    lent = [read(card) for card in ("h100", "h200") for read in (_lent, _profiled)]
    rows = pd.concat([rows[rows.way.notna()], *lent], ignore_index=True).fillna({"bias": 0})
    numbers = ["b", "heads", "kv_heads", "queries", "keys", "head", "bias", "us"]
    rows[numbers], rows["causal"] = rows[numbers].astype(float), rows.causal.astype(bool)
    alike = rows.heads == rows.kv_heads
    rows = rows[(rows.queries >= SHORTEST) | (alike & (rows.queries >= 32))]
    rows["generation"] = rows.card.map(
        {name: generation_of(find_device(name)) for name in rows.card.unique()}
    )
    rows["draw"] = [
        _draw(tuple(key))
        for key in rows[["b", "heads", "kv_heads", "queries", "head", "causal"]].to_numpy()
    ]
    return rows.reset_index(drop=True)


def _lent(card: str) -> pd.DataFrame:
    """Torch's own, of the lent cards; products and softmax in separate kernels (`math`) left out."""
    found = pd.read_parquet(LENT / f"{card}_kernels.parquet")
    found = found[found.op.str.startswith("attention")]
    sizes = pd.DataFrame([json.loads(text) for text in found["sizes"]], index=found.index)
    full = np.where(found.dtype == "tf32", "_full", "")
    rows = pd.DataFrame(
        {
            "card": found.gpu.map(CARDS),
            "way": sizes.kernel.replace("flash", FLASH2) + full,
            "library": "torch",
            "backward": found.op == "attention_bwd",
            "b": sizes.b,
            "heads": sizes.heads,
            "kv_heads": sizes.heads,
            "queries": sizes.m,
            "keys": sizes.m,
            "head": sizes.head_dim,
            "causal": sizes.causal,
            "us": found.latency_us,
        }
    )
    waited = rows.backward & (rows.us < HOST_BOUND_US)
    return rows[(sizes.kernel != "math") & (found.spread < 0.3) & ~waited]


CALLS = {
    "aten::_cudnn_attention_forward": (0, 9, 10),
    "aten::_cudnn_attention_backward": (1, 13, 14),
    "aten::_efficient_attention_forward": (0, 8, 9),
    "aten::_efficient_attention_backward": (1, 11, 14),
}
"""ATen's calls:

where their queries, the share that is dropped, and whether (or how) they are causal stand.
"""


def _profiled(card: str) -> pd.DataFrame:
    """Attention inside the profiled steps of the lent cards: all kernels of a call, whose shapes
    are real models'. With dropout cuDNN's forward pass takes twice as long, which a workload's
    table does not tell: left out.
    """
    found = pd.read_parquet(LENT / f"{card}_step_kernels.parquet")
    found = found[found.call.isin(list(CALLS))]
    rows = {}
    for (_, call, text, options), kernels in found.groupby(["case", "call", "dims", "concrete"]):
        first, dropout, causal = CALLS[call]
        dims, said = json.loads(text), json.loads(options)
        query, key, bias = dims[first], dims[first + 1], dims[first + 3]
        if float(said[dropout] or 0) > 0:
            continue
        if "efficient" in call:  # lengths before heads
            query, key = ([size[0], size[2], size[1], size[3]] for size in (query, key))
        full = "_full" if json.loads(kernels.types.iloc[0])[first] == "float" else ""
        us = (kernels.mean_us * kernels["count"]).sum() / kernels["count"].min()
        sizes = (*query, key[1], said[causal] in ("True", "1"), call, full)
        rows[sizes] = {
            "card": CARDS["NVIDIA H200" if card == "h200" else "NVIDIA H100 80GB HBM3"],
            "library": "torch",
            "way": (CUDNN if "cudnn" in call else "efficient") + full,
            "backward": "backward" in call,
            "b": query[0],
            "heads": query[1],
            "kv_heads": key[1],
            "queries": query[2],
            "keys": key[2],
            "head": query[3],
            "causal": said[causal] in ("True", "1"),
            "bias": math.prod(bias) if "efficient" in call and bias else 0,
            "us": us,
        }
    return pd.DataFrame(rows.values())


def _draw(key: tuple[Any, ...]) -> float:
    """From 0 to 1 by the sizes alone, so that a shape is held out on all cards and in both passes."""
    return int(hashlib.sha256(repr(key).encode()).hexdigest()[:8], 16) / 16**8


class Rows(NamedTuple):
    """Kernels ready for the model, and what of the datasheets their figures are shares of."""

    table: pd.DataFrame
    sizes: tuple[np.ndarray, ...]
    moved_bytes: np.ndarray
    key_bytes: np.ndarray
    peak: np.ndarray
    exponentials: np.ndarray
    bandwidth: np.ndarray
    sms: np.ndarray
    l2_bytes: np.ndarray


def prepared(table: pd.DataFrame) -> Rows:
    devices = {name: find_device(name) for name in table.card.unique()}
    c = {
        name: table[name].to_numpy()
        for name in ("b", "heads", "queries", "keys", "head", "kv_heads")
    }
    full = table.way.str.endswith("_full").to_numpy()
    width = np.where(full, 4.0, 2.0) * np.where(
        table.backward, 2.0, 1.0
    )  # a gradient beside each tensor

    def of(figure: Any) -> np.ndarray:
        return table.card.map({name: figure(device) for name, device in devices.items()}).to_numpy(
            float
        )

    peak = np.where(
        full,
        of(lambda d: d.tf32_tensor_tflops.value / TF32_MATMULS),
        of(lambda d: d.bf16_tensor_tflops.value),
    )
    pairs = zip(table.card, table.way, strict=True)
    boost = of(consumer_boost)
    exponentials = boost * of(lambda d: exponentials_per_s(d, 1e12 * d.fp32_tflops.value))
    peak = boost * peak * np.array([instruction_share(devices[card], way) for card, way in pairs])
    key_bytes = width * 2 * c["b"] * c["kv_heads"] * c["keys"] * c["head"]
    sizes = (
        *(c[name] for name in ("b", "heads", "queries", "keys", "head")),
        table.causal.to_numpy(),
        np.zeros(len(table)),
    )
    bias = width * table.bias.to_numpy()
    return Rows(
        table,
        sizes,
        bias + key_bytes + width * 2 * c["b"] * c["heads"] * c["queries"] * c["head"],
        key_bytes,
        1e12 * peak,
        exponentials,
        of(lambda d: 1e9 * d.memory_bandwidth_gb_per_s.value),
        of(lambda d: d.sms.value),
        of(lambda d: d.l2_mib.value * 2**20),
    )


def block_rows(way: str, generation: str) -> float:
    return 256.0 if generation == "10" and way in FAMILIES["native"] else 128.0


def seconds(rows: Rows, logs: np.ndarray, copies: np.ndarray) -> np.ndarray:
    """What the model says of rows under their logarithms of `FREE` (rows x parameters).

    copies: passes over keys and values.
    """
    v = dict(zip(FREE, np.exp(logs).T, strict=True))
    v["block_rows"] = np.array(
        [block_rows(*key) for key in zip(rows.table.way, rows.table.generation, strict=True)]
    )
    share = np.minimum(v["share"], 1.0)
    figures = Figures(
        share * rows.peak,
        rows.exponentials / v["exponentials"],
        v["prologue"],
        v["quantum"],
        v["tail"],
        v["alone"],
        v["memory"] * rows.bandwidth,
        1e-6 * v["start_us"],
        v["overlap"],
        v["wide"],
        v["block_rows"],
    )
    result = np.zeros(len(rows.table))
    for kind, chosen in (
        ("attention", ~rows.table.backward.to_numpy()),
        ("attention_backward", rows.table.backward.to_numpy()),
    ):
        part = Figures(*(f[chosen] for f in figures))
        sizes = tuple(s[chosen] for s in rows.sizes)
        t = attention_s(
            kind, sizes, rows.moved_bytes[chosen], part, rows.sms[chosen], rows.l2_bytes[chosen]
        )
        result[chosen] = (t.compute_s**SMOOTHNESS + t.memory_s**SMOOTHNESS) ** (
            1 / SMOOTHNESS
        ) + t.start_s
    return result + copies * rows.key_bytes / (figures.bytes_per_s)


class Family:
    """The fit of one family."""

    def __init__(self, rows: Rows) -> None:
        self._rows, t, p = rows, rows.table, len(FREE)
        self._groups: dict[tuple[str, str], int] = {}
        self._sds: list[tuple[float, ...]] = []
        for key in [key for keys in self._keys(t) for key in dict.fromkeys(keys)]:
            if key not in self._groups and key[1]:
                self._groups[key] = sum(map(len, self._sds))
                self._sds.append(_sd(*key))
        self._sd = np.concatenate(self._sds)
        count = t.groupby(["card", "library", "way", "backward"]).us.transform("size").to_numpy()
        own = np.where(t.library == "torch", TORCHS, 1.0)
        self._weight = own * np.sqrt(np.minimum(1.0, EFFECTIVE / count))
        self._log_us = np.log(t.us.to_numpy())
        self._start = np.zeros(len(self._sd))
        self._start[:p] = [math.log(START[name]) for name in FREE]
        self.x = self._start

    def _keys(self, t: pd.DataFrame) -> list[list[tuple[str, str]]]:
        """For each level of the sum, every row's group; "" for none."""
        ways = t.way.astype(str).to_numpy()
        passes = np.where(t.backward, "backward", "")
        libraries = np.where(t.library.isin(list(REFERENCE)), "", t.library)
        levels = {
            "shared": ["all"] * len(t),
            "generation": t.generation,
            "card": t.card,
            "way": np.where(np.isin(ways, (FLASH2, CUDNN)), "", ways),
            "pass": passes,
            "way pass": np.where(t.backward, ways, ""),
            "library": libraries,
        }
        return [[(level, str(name)) for name in names] for level, names in levels.items()]

    def _positions(self, t: pd.DataFrame) -> list[np.ndarray]:
        return [np.array([self._groups.get(key, -1) for key in keys]) for keys in self._keys(t)]

    def _logs(
        self, x: np.ndarray, positions: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        p = len(FREE)
        total, padded = np.zeros((len(positions[0]), p)), np.concatenate([x, np.zeros(p)])
        for starts in positions[:-1]:
            total += padded[np.where(starts[:, None] < 0, len(x), starts[:, None]) + np.arange(p)]
        own = padded[
            np.where(positions[-1][:, None] < 0, len(x), positions[-1][:, None])
            + np.arange(len(LIBRARY_SD))
        ]
        for name, change in (
            ("share", own[:, 0]),
            ("exponentials", -own[:, 0]),
            ("memory", own[:, 1]),
            ("start_us", own[:, 2]),
        ):
            total[:, FREE.index(name)] += change
        return total, np.maximum(own[:, 3], 0.0)

    def fit(self, rounds: int = 30) -> Family:
        positions, p = self._positions(self._rows.table), len(FREE)
        n, m = len(self._log_us), len(self._sd)

        def residuals(x: np.ndarray) -> np.ndarray:
            error = np.log(1e6 * seconds(self._rows, *self._logs(x, positions))) - self._log_us
            return np.concatenate([error * self._weight, PRIOR * (x - self._start) / self._sd])

        def jacobian(x: np.ndarray) -> np.ndarray:
            logs, copies = self._logs(x, positions)
            base, step = np.log(seconds(self._rows, logs, copies)), 1e-4
            slopes = np.empty((n, p + 1))
            for j in range(p):
                moved = logs.copy()
                moved[:, j] += step
                slopes[:, j] = (np.log(seconds(self._rows, moved, copies)) - base) / step
            slopes[:, p] = (np.log(seconds(self._rows, logs, copies + step)) - base) / step
            slopes *= self._weight[:, None]
            result, every = np.zeros((n + m, m)), np.arange(n)
            for starts in positions[:-1]:
                has = starts >= 0
                for j in range(p):
                    result[every[has], starts[has] + j] = slopes[has, j]
            has = positions[-1] >= 0
            share, exponentials, memory, start = (
                FREE.index(k) for k in ("share", "exponentials", "memory", "start_us")
            )
            own = (
                slopes[:, share] - slopes[:, exponentials],
                slopes[:, memory],
                slopes[:, start],
                slopes[:, p],
            )
            for j, slope in enumerate(own):
                result[every[has], positions[-1][has] + j] = slope[has]
            result[n + np.arange(m), np.arange(m)] = PRIOR / self._sd
            return result

        first = self._start.copy()
        for (level, _), at in self._groups.items():
            if level == "library":
                first[at + 3] = 0.5  # off the edge, where no slope would tell that copies cost
            elif level == "pass":
                first[at + FREE.index("prologue")] = 1.0  # of two optima the one that errs less
        found = least_squares(
            residuals,
            first,
            jacobian,
            loss="soft_l1",
            f_scale=OUTLIER,
            max_nfev=rounds,
            x_scale=0.3,
        )
        self.x = found.x
        return self

    def us(self, rows: Rows) -> np.ndarray:
        """Microseconds of other rows; groups that the fit did not see add nothing."""
        return 1e6 * seconds(rows, *self._logs(self.x, self._positions(rows.table)))

    def pooled(self, way: str, backward: bool) -> Pooled:
        """The parameters of one pass of an implementation, without any library's own."""

        def of(level: str, name: str) -> np.ndarray:
            at = self._groups.get((level, name))
            return np.zeros(len(FREE)) if at is None else self.x[at : at + len(FREE)]

        shared = of("shared", "all") + of("way", way)
        if backward:
            shared = shared + of("pass", "backward") + of("way pass", way)
        twice = math.log(2.0) if block_rows(way, "10") > block_rows(way, "8.0") else 0.0
        names: dict[str, list[str]] = {"generation": [], "card": []}
        for level, name in self._groups:
            if level in names:
                names[level].append(name)
        return Pooled(
            names=PARAMETERS,
            shared=_rounded([*shared, math.log(block_rows(way, ""))]),
            generations={
                g: _rounded([*of("generation", g), twice * (g == "10")])
                for g in sorted(names["generation"])
            },
            devices={c: _rounded([*of("card", c), 0.0]) for c in sorted(names["card"])},
        )


def _sd(level: str, name: str) -> tuple[float, ...]:
    if (level, name) in (("way", FLASH3), ("way", FLASH4)):
        return (ALIKE_SD, *WAY_SD[1:])
    if level == "library" and name in PLAIN:
        return (PLAIN_SD, *LIBRARY_SD[1:])
    return {
        "shared": SHARED_SD,
        "generation": GENERATION_SD,
        "card": CARD_SD,
        "way": WAY_SD,
        "pass": WAY_SD,
        "way pass": WAY_SD,
        "library": LIBRARY_SD,
    }[level]


def _rounded(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(round(float(v), 3) for v in values)


def thinned(table: pd.DataFrame) -> pd.DataFrame:
    """At most `MOST` kernels of one library on one card, drawn by their sizes."""
    ordered = table.assign(order=(table.draw * 1e6) % 1.0).sort_values("order", kind="stable")
    return ordered[ordered.groupby(["card", "library", "way", "backward"]).cumcount() < MOST].drop(
        columns="order"
    )


def fitted(table: pd.DataFrame, family: str) -> Family:
    return Family(prepared(thinned(table[table.way.isin(FAMILIES[family])]))).fit()


def errors(table: pd.DataFrame, models: dict[str, Family]) -> pd.DataFrame:
    """The rows with `log_error`, logarithms of forecast over measured."""
    parts = []
    for family, model in models.items():
        rows = prepared(thinned(table[table.way.isin(FAMILIES[family])]))
        parts.append(
            rows.table.assign(log_error=np.log(model.us(rows)) - rows.table.us.map(math.log))
        )
    return pd.concat(parts)


def summary(rows: pd.DataFrame, by: Sequence[str]) -> str:
    """Errors in per cent:

    mean, median and 90th percentile of their size, and the median with its sign.
    """
    pct = 100 * np.expm1(rows.log_error)
    groups = rows.assign(size=pct.abs(), pct=pct).groupby(list(by))
    found = groups.agg(
        n=("size", "count"),
        mean=("size", "mean"),
        median=("size", "median"),
        p90=("size", lambda s: s.quantile(0.9)),
        bias=("pct", "median"),
    )
    return found.round(1).to_string()


def unseen(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """Errors on each value of `column`, from fits without it."""
    parts = []
    for family, ways in FAMILIES.items():
        rows = table[table.way.isin(ways)]
        for name in sorted(rows[column].unique()):
            if rows[column].nunique() > 1:
                parts.append(
                    errors(
                        rows[rows[column] == name],
                        {family: fitted(rows[rows[column] != name], family)},
                    )
                )
    return pd.concat(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument(
        "--folds", action="store_true", help="also refit without each card and each generation"
    )
    options = parser.parse_args()
    table = read_rows(options.data)
    held_out = table.draw < HELD_OUT
    known = errors(
        table[held_out], {family: fitted(table[~held_out], family) for family in FAMILIES}
    )
    print(
        "shapes held out on known cards",
        summary(known, ["backward", "way", "card", "library"]),
        sep="\n",
    )
    sms = known.card.map({name: find_device(name).sms.value for name in known.card.unique()})  # type: ignore[union-attr]
    full = known.b * known.heads * np.ceil(known.queries / 128) >= 4 * sms
    trained = known[full & (known.queries >= 512)]
    print("of them with 512 queries or more and four blocks a multiprocessor")
    print(summary(trained, ["backward", "way", "card"]))
    if options.folds:
        for column in ("card", "generation"):
            found = unseen(table, column)
            print(f"{column} left out", summary(found, ["backward", "way", "card"]), sep="\n")
    passes = {}
    for family, ways in FAMILIES.items():
        model = fitted(table, family)
        for way in ways:
            for backward in (False, True):
                passes[way + "_backward" * backward] = model.pooled(way, backward)
    OUTPUT.write_text(_text(AttentionModel(passes=passes)))


def _text(model: AttentionModel) -> str:
    """JSON with a line for every list of numbers."""
    text = json.dumps(to_jsonable(model), indent=1)
    lines: list[str] = []
    for line in text.splitlines():
        joins = (
            lines
            and not lines[-1].endswith(("{", "},", "],", "}"))
            and lines[-1].count("[") > lines[-1].count("]")
        )
        if joins:
            lines[-1] += line.strip() if lines[-1].endswith("[") else " " + line.strip()
        else:
            lines.append(line)
    return "\n".join(lines).replace(" ]", "]") + "\n"


if __name__ == "__main__":
    main()
