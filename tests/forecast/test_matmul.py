"""The matmul model: invariants, known and unknown cards, and published measurements."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainpace.core.execution import Precision
from trainpace.core.hardware import find_device
from trainpace.forecast.constants import fitted_constants
from trainpace.forecast.matmul import (
    MatmulFigures,
    Network,
    evaluate,
    fitted_matmuls,
    is_modelled,
    matmul_times,
)
from trainpace.forecast.rates import Rates, sustained_rates

sizes = st.integers(1, 200).map(lambda x: 64.0 * x)


def figures(name: str, precision: Precision = "bf16") -> MatmulFigures:
    rates = sustained_rates(find_device(name), precision, False, True, fitted_constants())
    assert isinstance(rates, Rates)
    return rates.weights


def seconds(
    name: str, m: float, n: float, k: float, b: float = 1, precision: Precision = "bf16"
) -> float:
    return float(matmul_times(*map(np.asarray, (b, m, n, k)), figures(name, precision)).seconds)


def tflops(name: str, m: int, n: int, k: int, precision: Precision = "bf16") -> float:
    return 2e-12 * m * n * k / seconds(name, m, n, k, precision=precision)


@pytest.mark.parametrize(
    ("card", "low", "high"),
    [
        ("A100 SXM 80GB", 210, 290),
        ("H100 SXM", 600, 800),
        ("B200", 1250, 1750),
        ("L40S", 160, 260),
        ("RTX 4090", 140, 175),
    ],
)
def test_large_matmuls_match_published_rates(card: str, low: float, high: float) -> None:
    """cuBLAS on 8192 cubed: Stas Bekman's MAMF tables (ml-engineering, 2024-2025) have 0.86 of an A100's sheet at best, 0.80 of an
    H100's, 0.79 of a B200's; an L40S is short of watts."""
    assert low < tflops(card, 8192, 8192, 8192) < high


def test_fp8_is_faster_than_16_bit_for_large_matmuls() -> None:
    assert (
        1.3
        < tflops("H100 SXM", 8192, 8192, 8192, "fp8") / tflops("H100 SXM", 8192, 8192, 8192)
        < 2.0
    )


def test_unaligned_rows_are_slow_on_hopper() -> None:
    aligned, odd = seconds("H100 SXM", 8192, 8192, 4096), seconds("H100 SXM", 8192, 8192, 4095)
    assert odd > 3 * aligned


@given(m=sizes, n=sizes, k=sizes)
def test_doubled_matmul_is_not_faster(m: float, n: float, k: float) -> None:
    one = seconds("H100 SXM", m, n, k)
    assert seconds("H100 SXM", m, n, 2 * k) > 0.97 * one
    assert seconds("H100 SXM", m, n, k, b=2) > 0.97 * one


@given(m=sizes, n=sizes, k=sizes)
def test_no_matmul_beats_the_datasheet(m: float, n: float, k: float) -> None:
    peak = find_device("A100 SXM 80GB").bf16_tensor_tflops
    assert peak is not None
    assert tflops("A100 SXM 80GB", int(m), int(n), int(k)) < peak.value


def test_unmeasured_card_uses_constants_of_its_generation() -> None:
    parameters = fitted_matmuls().widths["16"].parameters
    a10 = find_device("A10")
    assert parameters.familiarity(a10) == "generation"
    assert parameters.familiarity(find_device("H100 SXM")) == "card"
    shared = dict(zip(parameters.names, parameters.shared, strict=True))
    own = dict(zip(parameters.names, parameters.generations["8.6"], strict=True))
    assert parameters.of(a10)["prologue"] == pytest.approx(
        np.exp(shared["prologue"] + own["prologue"])
    )


def test_is_modelled_covers_only_fitted_generations() -> None:
    assert not is_modelled(find_device("P100 SXM2"))
    assert not is_modelled(find_device("MI250X"))
    assert is_modelled(find_device("T4"))


def test_matmul_times_accepts_arrays() -> None:
    m = np.array([512.0, 1024.0, 4096.0])
    many = matmul_times(np.ones(3), m, np.full(3, 2048.0), np.full(3, 4096.0), figures("H200 SXM"))
    each = [seconds("H200 SXM", size, 2048, 4096) for size in m]
    np.testing.assert_allclose(many.seconds, each)
    np.testing.assert_array_less(many.latency_s, many.seconds)


def test_network_evaluation_matches_manual_computation() -> None:
    network = fitted_matmuls().widths["16"].network
    n = len(network.means)
    assert isinstance(network, Network)
    at_means = evaluate(network, np.array(network.means)[None, :])
    hidden = np.zeros(n)
    for layer in network.layers[:-1]:
        hidden = np.tanh(np.array(layer.weights) @ hidden + np.array(layer.biases))
    last = network.layers[-1]
    assert at_means[0] == pytest.approx(
        float((np.array(last.weights) @ hidden + np.array(last.biases))[0])
    )
