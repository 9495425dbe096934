"""The least-squares problem:

logarithms of forecast over measured, for steps and single kernels, against bounded constants.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import least_squares

from fitting.families import FAMILIES, PASSES, UNDECIDED
from fitting.kernel_rows import KernelRows
from fitting.runs import RunTable
from trainpace.forecast.constants import KernelConstants
from trainpace.workload import KINDS, PHASES

FILE_WEIGHTS = {
    "timm_train_rtx3090": 300,
    "ryujaehun_pytorch_gpu_benchmark": 150,
    "lambda_aggregated": 200,
    "profet_aws": 60,
    "neusight_labels": 120,
    "mosaic_llm_foundry": 300,
    "timm_inference": 250,
}
"""Effective runs of each file: large files of one GPU should not drown small ones of many."""
KERNEL_WEIGHT = 150.0
PRIOR = 0.15
"""Standard deviation of 1 / PRIOR in the logarithm around the starting constants:

holds what the data do not decide.
"""
FAMILY_PRIOR = 2.0
"""The same for constants that measured kernels tell:

the start is what they know of a card that was not among them.
"""
OUTLIER = 0.15
"""Errors beyond this are counted linearly, not squared."""
ITERATIONS = 28

MATRIX = ("gemm", "conv", "conv_dgrad", "conv_wgrad")
OF_FAMILIES = frozenset(
    name for family, names in FAMILIES.items() if family not in UNDECIDED for name in names
)
ALL: tuple[str, ...] = ("all",)


def bounds(name: str) -> tuple[float, float]:
    """Physical limits of a constant."""
    special = {
        "tile_plain_prologue": (4, 400),
        "tile_tensor_prologue": (4, 600),
        "conv_tile_plain_prologue": (4, 800),
        "conv_tile_tensor_prologue": (4, 1200),
        # an epoch of ResNet-50 in fp32 measured over batches 1 to 70 has no jump on P100, T4 and
        # V100; above 0.3 it would
        "conv_tile_plain_quantisation": (0.02, 0.25),
        "conv_tile_plain_half_intensity": (1, 100),
        "conv_tile_tensor_half_intensity": (1, 200),
        "misaligned": (0.1, 1),
        "transposes": (0.02, 2.5),
        "l2_gain": (0.02, 4),
        "pre_volta": (0.3, 1),
        "kepler": (0.1, 1),
        "kepler_traffic": (0.2, 1),
        "fp8": (0.5, 1),
        "products_sustained": (0.6, 1),
        "consumer_products": (0.9, 1.5),
        "compile_traffic": (0.5, 2),
        "compile_launches": (0.5, 2),
        "compile_host": (0.3, 3),
        "traffic_optimizer": (0.55, 1),
        "watts_floor": (0.05, 1),
        "tensor_feeding": (0.01, 0.5),
        "consumer_boost": (1, 1.25),
        "latency_us": (1.5, 2.6),
        "host_view_us": (0.5, 8),
        "host_module_us": (1, 12),
        "host_launch_us": (2, 15),
        "host_library_us": (5, 60),
        "host_optimizer_us": (3, 60),
        "host_step_us": (50, 1500),
        "host_old_torch": (1, 8),
        "host_tensorflow": (1, 10),
    }
    if name in special:
        return special[name]
    if name.startswith(("work_", "row_work_")):
        return 1.0, 1e6
    if name.endswith("_window"):
        return 0.3, 2.2
    if name.endswith("_channels"):
        return 0.01, 1.5
    if name.endswith("quantisation"):
        return 0.02, 1
    if name.startswith("grouped"):
        return 0.003, 1
    if name.startswith("depthwise"):
        return 0.003, 1
    if name.startswith(("traffic_elementwise", "traffic_pool", "traffic_max_pool")):
        return 0.03, 2
    if name.startswith("conv_tensor"):
        return 0.03, 2  # of a rate that the watts of other cards may have made too low
    if name.startswith(("traffic_", "gemm", "conv", "winograd", "batched")):
        return 0.03, 1
    start = float(getattr(KernelConstants(), name))
    return start / 20, start * 20


def affected(name: str) -> tuple[str, ...]:
    """Classes of operators whose device time a constant enters; () for none."""
    if name.startswith("host_") or name in ("compile_host", "compile_old_host"):
        return ()
    if name.startswith("traffic_conv"):
        return (name.removeprefix("traffic_"),)
    if name.startswith(("traffic_", "work_", "row_work_")) and name != "traffic_matrix":
        return ("t:" + name.removeprefix("row_").partition("_")[2].removesuffix("_nhwc"),)
    if name in (
        "gemm_plain",
        "gemm_tf32",
        "gemm_tensor",
        "batched_tensor",
        "products_sustained",
        "consumer_products",
        "misaligned",
    ):
        return ("gemm",)
    if name.startswith("tile_"):
        return ("gemm",)
    if name.startswith("conv_tile_"):
        return MATRIX[1:]
    if name == "transposes" or name.endswith(("_window", "_channels")):
        return MATRIX[1:]
    if name.startswith(("conv_", "winograd", "grouped", "depthwise")):
        which = next((p for p in PASSES[1:] if name.endswith(p)), "")
        return ("conv" + which,)
    return ALL


MEASURED = ("latency_us", "traffic_optimizer", "traffic_optimizer_fused")
"""What profiled steps of the lent cards show directly. Left to whole steps they went to their
bounds, 6 microseconds and 0.55, and stood for the host and for other kernels.
"""
FIXED_BY_KERNELS: tuple[str, ...] = (
    *sorted(
        name
        for name in OF_FAMILIES
        if name.startswith(("work_", "row_work_", "traffic_fill", "traffic_embedding"))
    ),
    *MEASURED,
    "compile_old_traffic",
    "compile_old_host",
)
"""What kernels tell of every card: work per element, and classes whose kernels are alike
everywhere. Tiles and shares of convolutions are not among them: those of an H100 made an RTX 3090
four times too slow; other cards' are left to whole steps. compile_old_*: by hand, on languini's
GPTs under torch 2.1 with all else as fitted without them (`fitting.runs.is_usable`).
"""


def traffic_classes(columns: dict[str, np.ndarray]) -> list[str]:
    """The class of every row's memory traffic."""
    calls = zip(columns["kind"].tolist(), columns["function"].tolist(), strict=True)
    return [KINDS[kind].functions.get(name) or KINDS[kind].usual_traffic for kind, name in calls]


class _Parts:
    """Device times of a table, and of the rows alone that one constant enters."""

    def __init__(self, table: RunTable, names: Sequence[str]) -> None:
        self._table = table
        kind = table.columns["kind"]
        classes = np.where(
            np.isin(kind, (*MATRIX, "attention", "attention_backward")),
            kind,
            np.char.add("t:", traffic_classes(table.columns)),
        )
        self._parts: dict[tuple[str, ...], tuple[np.ndarray, RunTable]] = {}
        for which in {affected(name) for name in names} - {()}:
            rows = np.arange(len(kind)) if which == ALL else np.flatnonzero(np.isin(classes, which))
            self._parts[which] = (rows, table if which == ALL else table.subset(rows))

    def base(self, c: KernelConstants) -> np.ndarray:
        self._seconds = self._table.device_s(c)
        return self._seconds

    def changed(self, c: KernelConstants, name: str, value: float) -> tuple[np.ndarray, np.ndarray]:
        """(rows, change in seconds) when `name` takes this value."""
        which = affected(name)
        if which == () or not len(self._parts[which][0]):
            return np.zeros(0, int), np.zeros(0)
        rows, part = self._parts[which]
        places, seconds = part.changed(c, name, value)
        return rows[places], seconds - self._seconds[rows[places]]


class Problem:
    """Fits the constants on runs and kernels."""

    def __init__(
        self, runs: RunTable, kernels: KernelRows, start: KernelConstants, fixed: Sequence[str] = ()
    ) -> None:
        self.runs, self.kernels, self.start = runs, kernels, start
        self.names = [name for name in KernelConstants.__struct_fields__ if name not in fixed]
        self._runs, self._kernels = _Parts(runs, self.names), _Parts(kernels, self.names)
        count = {file: int((runs.file == file).sum()) for file in set(runs.file)}
        self._weight = np.array(
            [np.sqrt(FILE_WEIGHTS.get(str(f), 50) / count[f]) for f in runs.file]
        )
        self._kernel_weight = np.sqrt(KERNEL_WEIGHT * kernels.weights())
        self._prior = np.array(
            [FAMILY_PRIOR if name in OF_FAMILIES else PRIOR for name in self.names]
        )
        limits = np.log([bounds(name) for name in self.names])
        self._low, self._high = limits[:, 0], limits[:, 1]
        at = np.log([getattr(start, name) for name in self.names])
        self._x0 = np.clip(at, self._low + 1e-3, self._high - 1e-3)

    def solve(self, iterations: int = ITERATIONS) -> KernelConstants:
        """The fitted constants."""
        found = least_squares(
            self._residuals,
            self._x0,
            self._jacobian,
            bounds=(self._low, self._high),
            loss="soft_l1",
            f_scale=OUTLIER,
            max_nfev=iterations,
            x_scale=0.3,
        )
        return self._constants(found.x)

    def _constants(self, x: np.ndarray) -> KernelConstants:
        values = {name: getattr(self.start, name) for name in KernelConstants.__struct_fields__}
        return KernelConstants(
            **values | {name: float(np.exp(v)) for name, v in zip(self.names, x, strict=True)}
        )

    def _residuals(self, x: np.ndarray) -> np.ndarray:
        c = self._constants(x)
        self._device_ms = self.runs.by_phase(1e3 * self._runs.base(c))
        self._kernel_s = self._kernels.base(c)
        return self._all(self._device_ms, self._kernel_s, c, x)

    def _all(
        self, device_ms: np.ndarray, kernel_s: np.ndarray, c: KernelConstants, x: np.ndarray
    ) -> np.ndarray:
        steps = np.log(self.runs.step_ms(device_ms, c) / self.runs.measured_ms) * self._weight
        kernels = (
            np.log(
                (1e3 * self.kernels.by_kernel(kernel_s) + self.kernels.floor_ms)
                / self.kernels.measured_ms
            )
            * self._kernel_weight
        )
        return np.concatenate([steps, kernels, self._prior * (x - self._x0)])

    def _jacobian(self, x: np.ndarray) -> np.ndarray:
        base, before = self._residuals(x), self._constants(x)
        jacobian = np.zeros((len(base), len(x)))
        n = len(PHASES)
        for j, name in enumerate(self.names):
            step = 0.01 if x[j] + 0.01 < self._high[j] else -0.01
            y = x.copy()
            y[j] += step
            c, value = self._constants(y), float(np.exp(y[j]))
            rows, change = self._runs.changed(before, name, value)
            places = (self.runs.run * n + self.runs.phase)[rows]
            more = np.bincount(places, 1e3 * change, minlength=self._device_ms.size).reshape(
                self._device_ms.shape
            )
            rows, change = self._kernels.changed(before, name, value)
            kernel_s = self._kernel_s.copy()
            kernel_s[rows] += change
            jacobian[:, j] = (self._all(self._device_ms + more, kernel_s, c, y) - base) / step
        return jacobian
