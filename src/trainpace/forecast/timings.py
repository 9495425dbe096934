"""Operator times of one machine, learned from its own micro-benchmarks.

A roofline gives a first estimate. Its error log(measured / roofline) is interpolated between the
micro-benchmarks by Gaussian-process regression (Rasmussen and Williams 2006, section 2.2). Each
class of operators has its own process over the logarithms of the operator sizes. Far from all
micro-benchmarks, the error returns to the median of the class, with a large standard deviation.

Shapes: arrays of timed operators have shape (n,). Arrays over a table have one value per row.
Features have shape (rows, features).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trainpace.core.errors import TrainpaceError
from trainpace.core.records import Record
from trainpace.core.stats import student_t_95
from trainpace.forecast.kernels import KernelTimes
from trainpace.forecast.uncertainty import COVERAGE, Spread
from trainpace.workload import (
    ATTENTION,
    CONV,
    CONV_KERNEL,
    CONV_OUT,
    CONV_STRIDE,
    GEMM,
    LARGEST,
    MATRIX_KINDS,
    MOST_SIZES,
    OTHER,
    Floats,
    Operators,
    at_batch,
)

UNTIMED_SD = 0.7
"""Standard deviation of log(time) for operators without a micro-benchmark: a factor of two."""
WHOLE_STEP_SD = 0.2
"""Standard deviation of log(step time), for a calibration without timed networks."""
MOST_OF_A_KIND = 300
"""Largest number of micro-benchmarks used for the fit of one class."""
FUSED = ("conv_bias", "conv_bias_backward")
"""Rows that are part of the convolution on a CPU. On a GPU they are separate kernels."""


class ClassFit(Record):
    """Smoothness of a class of operators: length scale and noise, both in logarithms."""

    length_scale: float
    noise: float


class OperatorTimings(Record):
    """n timed operators.

    flops, bytes, seconds and half have shape (n,). dims has shape (n, `MOST_SIZES`), in the order
    of the operator's kind (see `Operators`).

    Raises:
        TrainpaceError: If the columns differ in length, or if a value is invalid.
    """

    kind: tuple[str, ...]
    function: tuple[str, ...]
    half: np.ndarray
    flops: np.ndarray
    bytes: np.ndarray
    dims: np.ndarray
    seconds: np.ndarray
    fits: dict[str, ClassFit]

    def __post_init__(self) -> None:
        n = len(self.kind)
        columns = {array.shape for array in (self.half, self.flops, self.bytes, self.seconds)}
        shapes = len(self.function), columns, self.dims.shape
        if n == 0 or shapes != (n, {(n,)}, (n, MOST_SIZES)):
            raise TrainpaceError(
                "the operator timings are empty, or their columns differ in length."
            )
        if self.half.dtype.kind != "b" or not all(
            (np.abs(a) < LARGEST).all() for a in (self.flops, self.bytes, self.dims)
        ):
            raise TrainpaceError(
                "the operator timings must be finite numbers, and `half` true or false."
            )
        if not ((self.seconds > 0).all() and (self.seconds < LARGEST).all()):
            raise TrainpaceError("operator timings must be above zero.")

    def __len__(self) -> int:
        return len(self.kind)

    def log_ratios(self, form: MachineRoofline) -> Floats:
        """Return log(measured / roofline) of every timed operator."""
        return np.log(self.seconds / form.seconds(self.kind, self.flops, self.bytes))

    def classes(self) -> list[str]:
        """Return the class of every timed operator."""
        return classes_of(self.kind, self.function, self.half)


class MachineRoofline(NamedTuple):
    """Roofline of a CPU: the maximum of arithmetic and traffic time, plus a start time."""

    flop_per_s: float
    bytes_per_s: float
    start_s: float

    def seconds(self, kind: tuple[str, ...], flops: Floats, traffic: Floats) -> Floats:
        """Return the seconds of one operator of each row."""
        compute = np.where(np.isin(kind, list(MATRIX_KINDS)), flops, 0.0) / self.flop_per_s
        return np.maximum(compute, traffic / self.bytes_per_s) + self.start_s


class MachineModel(Record):
    """Calibration of one machine's CPU: roofline, timed operators and host overhead."""

    timings: OperatorTimings
    flop_per_s: float
    bytes_per_s: float
    start_us: float
    host_us_per_operator: float
    host_us_per_view: float
    host_us_per_module: float
    basis: str
    step_factors: tuple[float, ...] = ()
    """Ratios measured / forecast for whole steps of random networks on the same machine.

    They show effects between operators (colder caches, the allocator), and the error of forecasts.
    """

    @property
    def form(self) -> MachineRoofline:
        """Roofline that the timings correct."""
        return MachineRoofline(self.flop_per_s, self.bytes_per_s, 1e-6 * self.start_us)


class Predicted(NamedTuple):
    """Seconds of one operator of each row, and the standard deviation of its logarithm."""

    seconds: Floats
    log_sd: Floats


def classes_of(kind: tuple[str, ...], function: tuple[str, ...], half: np.ndarray) -> list[str]:
    """Return the class of every operator.

    The class of a matrix operator is its kind, and of another operator its function. 16-bit
    operators have separate classes.
    """
    names = [k if k in MATRIX_KINDS else f for k, f in zip(kind, function, strict=True)]
    return [
        f"{name}/half" if is_half else name
        for name, is_half in zip(names, half.tolist(), strict=True)
    ]


def features(kind: str, dims: Floats, traffic: Floats) -> Floats:
    """Return the features of operators for the Gaussian process, shape (rows, features).

    They are weighted logarithms of the sizes that determine the efficiency of this kind.
    """

    def log(x: Floats) -> Floats:
        return np.log(np.maximum(x, 1.0))

    if kind.startswith("conv"):
        groups = np.maximum(dims[:, CONV.groups], 1.0)
        channels = dims[:, CONV.c_in] / groups, dims[:, CONV.c_out] / groups
        sizes = [dims[:, CONV.images], *channels, groups, dims[:, CONV_OUT].prod(axis=1)]
        # Kernel size and stride determine the algorithm, so they count more than channels.
        shapes = [dims[:, CONV_KERNEL].prod(axis=1), dims[:, CONV_STRIDE].prod(axis=1)]
        return np.stack([*map(log, sizes), *(1.5 * log(shape) for shape in shapes)], axis=1)
    if kind == "gemm":
        return log(dims[:, GEMM])
    if kind.startswith("attention"):
        return np.concatenate(
            [log(dims[:, ATTENTION[: ATTENTION.causal]]), 2.0 * dims[:, [ATTENTION.causal]]], axis=1
        )
    # The ratio of inputs to outputs distinguishes sums, lookups and broadcasts.
    general = [
        log(traffic),
        0.5 * (log(dims[:, OTHER.elements_in]) - log(dims[:, OTHER.elements_out])),
    ]
    if kind in ("norm", "softmax", "pool"):
        general.append(log(dims[:, OTHER.extent]))
    return np.stack(general, axis=1)


class Interpolator:
    """Gaussian processes of one machine's timings. Each is solved once, at its first use."""

    def __init__(self, timings: OperatorTimings, form: MachineRoofline) -> None:
        self._timings, self._form = timings, form
        self._log_ratio = timings.log_ratios(form)
        self._class, self._kind = np.array(timings.classes()), np.array(timings.kind)
        self._processes: dict[tuple[str, str], Process | None] = {}

    def predict(self, operators: Operators, batch: int) -> Predicted:
        """Return the time of one operator of every row at a batch size.

        The time is 0 for rows that only the host runs.
        """
        flops, dims = at_batch(operators.flops, batch), at_batch(operators.dims, batch)
        traffic = operators.moved_bytes(batch)
        wanted = np.array(classes_of(operators.kind, operators.function, operators.half))
        on_device = (operators.launches > 0) & ~np.isin(operators.function, FUSED)
        log_ratio, log_sd = np.zeros(len(wanted)), np.full(len(wanted), UNTIMED_SD)
        for name in sorted(set(wanted[on_device].tolist())):
            rows = np.flatnonzero((wanted == name) & on_device)
            kind = operators.kind[rows[0]]
            process = self._process(name, kind, bool(operators.half[rows[0]]))
            if process is not None:
                log_ratio[rows], log_sd[rows] = process.at(
                    features(kind, dims[rows], traffic[rows])
                )
        base = self._form.seconds(operators.kind, flops, traffic)
        seconds = np.where(on_device, base * np.exp(log_ratio), 0.0)
        return Predicted(seconds, np.where(on_device, log_sd, 0.0))

    def _process(self, name: str, kind: str, half: bool) -> Process | None:
        if (name, kind) not in self._processes:
            near = np.flatnonzero(self._class == name)
            if not len(near):  # Use other functions of the same kind as the next best estimate.
                near = np.flatnonzero((self._kind == kind) & (self._timings.half == half))[
                    :MOST_OF_A_KIND
                ]
            fits = self._timings.fits
            fit = fits.get(name) or fits.get(kind) or ClassFit(length_scale=2.0, noise=0.3)
            sizes = features(kind, self._timings.dims[near], self._timings.bytes[near])
            self._processes[name, kind] = (
                Process(sizes, self._log_ratio[near], fit) if len(near) else None
            )
        return self._processes[name, kind]


def machine_times(
    operators: Operators, batch: int, model: MachineModel, interpolator: Interpolator
) -> tuple[KernelTimes, Floats]:
    """Return the times of every row, and the standard deviations of their logarithms.

    The time of a row includes all of its operators.
    """
    predicted, count = interpolator.predict(operators, batch), operators.count
    flops = np.where(operators.is_matrix, at_batch(operators.flops, batch), 0.0)
    compute, memory = (
        count * flops / model.flop_per_s,
        count * operators.moved_bytes(batch) / model.bytes_per_s,
    )
    latency = count * operators.launches * model.start_us * 1e-6
    return KernelTimes(predicted.seconds * count, compute, memory, latency), predicted.log_sd


def step_factor(model: MachineModel) -> float:
    """Return the correction factor of a whole step.

    It is the geometric mean over the random networks, or 1 without any.
    """
    return float(np.exp(np.mean(np.log(model.step_factors)))) if model.step_factors else 1.0


def machine_spread(model: MachineModel, device_s: Floats, log_sd: Floats) -> Spread:
    """Return the 90% interval of a corrected step.

    Its width comes from the scatter of the random networks and the uncertainty of the operators.
    Errors of operators are independent, so their variances add up.
    """
    n = len(model.step_factors)
    shares = device_s / max(float(device_s.sum()), 1e-12)
    variance = float(((shares * log_sd) ** 2).sum())
    scatter = float(np.var(np.log(model.step_factors), ddof=1)) if n > 1 else WHOLE_STEP_SD**2
    half = student_t_95(n - 1 if n > 1 else 30) * np.sqrt(scatter * (1 + 1 / max(n, 1)) + variance)
    basis = f"{n} random networks timed on this machine" if n else "only micro-benchmarks"
    return Spread(float(np.exp(-half)), float(np.exp(half)), COVERAGE, basis)


class Process:
    """Gaussian-process regression with a squared-exponential kernel around the median."""

    def __init__(self, x: Floats, y: Floats, fit: ClassFit) -> None:
        self._x, self._fit = x, fit
        self._centre = float(np.median(y))
        self._variance = max(float(np.var(y)), 0.05)
        covariance = self._kernel(x, x) + fit.noise**2 * np.eye(len(y))
        self._inverse = np.linalg.inv(covariance)
        self._weights = self._inverse @ (y - self._centre)

    def at(self, x: Floats) -> tuple[Floats, Floats]:
        """Return the mean and the standard deviation at each row of `x`.

        Outside the range of known sizes, the ratio to the formula stays constant.
        """
        x = np.clip(x, self._x.min(axis=0), self._x.max(axis=0))
        cross = self._kernel(x, self._x)
        mean = self._centre + cross @ self._weights
        variance = (
            self._variance - ((cross @ self._inverse) * cross).sum(axis=1) + self._fit.noise**2
        )
        return mean, np.sqrt(np.maximum(variance, 1e-6))

    def left_out(self) -> Floats:
        """Return the leave-one-out error at each point (Rasmussen and Williams, equation 5.12)."""
        return self._weights / np.diag(self._inverse)

    def _kernel(self, a: Floats, b: Floats) -> Floats:
        squared = ((a[:, None, :] - b[None, :, :]) ** 2).sum(axis=-1)
        return self._variance * np.exp(-0.5 * squared / self._fit.length_scale**2)


def fit_classes(timings: OperatorTimings, form: MachineRoofline) -> dict[str, ClassFit]:
    """Fit the smoothness of each class and each kind by leave-one-out cross-validation."""
    log_ratio = timings.log_ratios(form)
    classes, kinds = np.array(timings.classes()), np.array(timings.kind)
    fits = {}
    for names in (classes, kinds):
        for name in sorted(set(names.tolist())):
            rows = np.flatnonzero(names == name)[:MOST_OF_A_KIND]
            if name in fits or len(rows) < 8:
                continue
            x = features(str(kinds[rows[0]]), timings.dims[rows], timings.bytes[rows])
            candidates = [
                ClassFit(length_scale=scale, noise=noise)
                for scale in (1.0, 2.0, 4.0)
                for noise in (0.1, 0.25)
            ]
            fits[name] = min(
                candidates,
                key=lambda fit: float(np.abs(Process(x, log_ratio[rows], fit).left_out()).mean()),
            )
    return fits
