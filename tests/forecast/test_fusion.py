"""Fusion by torch.compile: a chain of operators between matmuls only reads its inputs and writes its outputs."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainpace.core.hardware import find_device
from trainpace.forecast.constants import fitted_constants
from trainpace.forecast.fusion import fused
from trainpace.forecast.kernels import KernelTable
from trainpace.forecast.rates import sustained_rates
from trainpace.workload import FUNCTIONS, MOST_SIZES, Operators

WIDTH = 512
"""Elements of a sample's tensors. Matmuls are WIDTH x WIDTH."""


class Call(NamedTuple):
    """One fp32 operator on tensors of WIDTH elements per sample, or a matmul of such tensors."""

    function: str
    inputs: int = 1
    outputs: int = 1
    phase: str = "forward"
    count: int = 1


def product(phase="forward", count=1):
    return Call("mm", phase=phase, count=count)


def table(*calls):
    n = len(calls)
    dims, flops, read, written = (np.zeros(s) for s in ((n, MOST_SIZES, 2), (n, 2), (n, 2), (n, 2)))
    for i, call in enumerate(calls):
        if call.function == "mm":
            dims[i, :4] = (1, 0), (0, 1), (WIDTH, 0), (WIDTH, 0)
            flops[i], read[i], written[i] = (
                (0, 2 * WIDTH**2),
                (4 * WIDTH**2, 4 * WIDTH),
                (0, 4 * WIDTH),
            )
        else:
            dims[i, :2, 1] = call.inputs * WIDTH, call.outputs * WIDTH
            read[i, 1], written[i, 1] = 4 * call.inputs * WIDTH, 4 * call.outputs * WIDTH
    kinds = (
        "gemm"
        if c.function == "mm"
        else FUNCTIONS[c.function].name
        if c.function in FUNCTIONS
        else "elementwise"
        for c in calls
    )
    return Operators(
        kind=tuple(kinds),
        function=tuple(c.function for c in calls),
        phase=tuple(c.phase for c in calls),
        module=("",) * n,
        half=np.zeros(n, bool),
        count=np.array([c.count for c in calls]),
        launches=np.ones(n, int),
        flops=flops,
        read_bytes=read,
        written_bytes=written,
        dims=dims,
    )


def tensors(operators, batch=16):
    """Return how many tensors of WIDTH elements per sample the element-wise operators read and write after fusion."""
    left = fused(operators)
    moved = left.traffic * operators.moved_bytes(batch) * operators.count
    return float(moved[left.joined].sum()) / (4 * WIDTH * batch)


def kernels(operators):
    left = fused(operators)
    return float((left.launches * operators.launches * operators.count)[left.joined].sum())


def test_single_operator_between_matmuls_keeps_traffic_and_kernel():
    left = fused(table(product(), Call("relu"), product()))
    assert left.traffic.tolist() == [1, 1, 1]
    assert left.launches.tolist() == [1, 1, 1]
    assert left.joined.tolist() == [False, True, False]


@pytest.mark.parametrize("length", [2, 3, 10])
def test_unary_chain_fuses_into_one_kernel_with_one_read_and_write(length):
    chain = table(product(), *(Call(f"unary{i}") for i in range(length)), product())
    assert tensors(chain) == 2
    assert kernels(chain) == 1


def test_chain_reads_each_tensor_once():
    swish = table(product(), Call("sigmoid"), Call("mul", inputs=2), product())
    assert tensors(swish) == 2


def test_gated_chain_reads_both_matmul_outputs():
    gated = table(product(count=2), Call("silu"), Call("mul", inputs=2), product())
    assert tensors(gated) == 3
    assert kernels(gated) == 1


def test_residual_adds_one_read_from_another_chain():
    without = table(Call("exp"), product(), Call("tanh"), product())
    with_residual = table(Call("exp"), product(), Call("tanh"), Call("add", inputs=2), product())
    assert tensors(with_residual) == tensors(without) + 1


def test_matmuls_split_fused_chains():
    """Each of the two chains reads the output of a matmul and writes the input of the next one."""
    assert tensors(table(product(), Call("relu"), product(), Call("gelu"), product())) == 4


def test_training_batch_norm_takes_extra_pass_for_statistics():
    trained = table(product(), Call("native_batch_norm"), Call("relu"), product())
    known = table(product(), Call("native_batch_norm_inference"), Call("relu"), product())
    assert (tensors(trained), tensors(known)) == (3, 2)
    assert kernels(trained) == 2


def test_fused_backward_recomputes_intermediates_from_forward_inputs():
    forward = (product(), Call("mul"), Call("tanh"), Call("exp"), product())
    backward = (
        product("backward"),
        *(
            Call(name, inputs=2, phase="backward")
            for name in ("exp_backward", "tanh_backward", "mul_backward")
        ),
        product("backward"),
    )
    # 2 forward; 3 backward: the gradient, the matmul output that is read again, and the result
    assert tensors(table(*forward, *backward)) == 5


def test_optimizer_and_lookups_are_not_fused():
    operators = table(
        Call("embedding"), Call("relu"), Call("_foreach_add_", inputs=2, phase="optimizer")
    )
    left = fused(operators)
    assert left.joined.tolist() == [False, True, False]
    assert left.traffic[[0, 2]].tolist() == [1, 1]


calls = st.builds(
    Call,
    st.sampled_from(
        [
            "mm",
            "relu",
            "mul",
            "add",
            "native_layer_norm",
            "_softmax",
            "sum",
            "native_batch_norm",
            "clone",
        ]
    ),
    st.integers(1, 3),
    st.just(1),
    st.sampled_from(["forward", "backward"]),
    st.integers(1, 4),
)


def test_operator_without_output_keeps_its_traffic():
    """A custom operator without an output keeps its traffic in both passes."""
    lonely = Call("relu", outputs=0)
    assert fused(table(product(), lonely, product())).traffic[1] == 1
    assert np.isfinite(fused(table(product(), lonely._replace(phase="backward"))).traffic).all()


@pytest.mark.parametrize("function", ["clone", "fill", "relu", "native_batch_norm"])
def test_compiling_single_operator_is_not_slower(function):
    kernel_table, c, device = (
        KernelTable(table(product(), Call(function), product())),
        fitted_constants(),
        find_device("A100"),
    )
    rates = sustained_rates(device, "fp32", True, False, c)
    eager_s, compiled_s = (
        kernel_table.times(np.array(64.0), rates, c, compiled=np.array(compiled)).device_s
        for compiled in (False, True)
    )
    assert (compiled_s <= eager_s).all()


@given(st.lists(calls, min_size=1, max_size=25))
def test_compiled_never_has_more_traffic_or_launches_than_eager(rows):
    operators = table(*rows)
    left = fused(operators)
    once = np.array([name != "native_batch_norm" for name in operators.function])
    read, written = operators.read_bytes[:, 1], operators.written_bytes[:, 1]
    most = np.where(once, 1.0, (2 * read + written) / (read + written))
    assert ((left.traffic >= 0) & (left.traffic <= most + 1e-12)).all()
    assert ((left.launches >= 0) & (left.launches <= 1)).all()
    assert (left.traffic[~left.joined] == 1).all()


@given(st.lists(calls, min_size=1, max_size=12), st.integers(2, 7))
def test_fusion_of_repeated_layers_equals_one_layer(rows, layers):
    one, many = table(*rows), table(*(row._replace(count=row.count * layers) for row in rows))
    for single, several in zip(fused(one), fused(many), strict=True):
        assert several == pytest.approx(single)


def test_compile_changes_only_rows_that_request_it():
    operators, c = table(product(), Call("exp"), Call("tanh"), product()), fitted_constants()
    kernel_table = KernelTable(operators)
    rates = sustained_rates(find_device("A100"), "fp32", True, False, c)
    assert not isinstance(rates, str)
    compiled = np.array([[False], [True]])
    both = kernel_table.times(np.array([[4096.0], [4096.0]]), rates, c, compiled=compiled).device_s
    eager, faster = (
        kernel_table.times(np.array(4096.0), rates, c, compiled=flag).device_s
        for flag in (False, True)
    )
    assert both[0].tolist() == eager.tolist()
    assert both[1].tolist() == faster.tolist()
    assert faster[[0, 3]].tolist() == eager[[0, 3]].tolist()
    assert (faster[1:3] < eager[1:3]).all()
