"""Recurrent layers as cuDNN runs them on CUDA; the CPU's path, which meta tensors take, calls a dozen operators a time step.

For each layer and direction one product makes the inputs' part of all gates for all time steps; then each step multiplies the
hidden state, and does all element-wise work in one kernel. Backward the steps run in reverse, and the gradients of the weights
are one product over all steps each (Appleyard et al. 2016, arXiv:1604.01946). Kernels that keep the weights on the chip from step
to step, which cuDNN takes for some sizes in 16 bits, are not known here: such layers run faster than forecast.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from trainpace.workload.workload import GemmSizes

RELU, TANH, LSTM, GRU = range(4)
MODES = {torch.rnn_relu: RELU, torch.rnn_tanh: TANH, torch.lstm: LSTM, torch.gru: GRU}
_GATES = {RELU: 1, TANH: 1, LSTM: 4, GRU: 3}
_KEPT = {RELU: 1, TANH: 1, LSTM: 6, GRU: 5}
"""Numbers a time step and hidden unit that the backward pass needs: the gates, an LSTM's cell state and its tanh, a GRU's hidden
state and the recurrent part of its candidate."""


class Part(NamedTuple):
    """A kernel of a recurrent layer: how often it runs, and a product's sizes, or None and the elements of element-wise work."""

    runs: int
    product: GemmSizes | None
    elements: int = 0


def cudnn_call(mode: int, args: Sequence[Any]) -> Any:
    """`torch.lstm` and its kin by the operator that CUDA has for them; None for packed sequences, whose lengths are data."""
    if isinstance(args[3], list | tuple):
        return None
    x, hidden, weights, has_biases, layers, dropout, train, bidirectional, batch_first = args
    states = hidden if mode == LSTM else (hidden, None)
    h, c = states
    each = 4 if has_biases else 2
    projected = mode == LSTM and len(weights) == layers * (1 + bidirectional) * (each + 1)
    if projected:
        return None
    size = weights[1].shape[1]
    out, h, c, *_ = torch.ops.aten._cudnn_rnn(
        x,
        list(weights),
        each,
        None,
        h,
        c,
        mode,
        size,
        0,
        layers,
        batch_first,
        dropout,
        train,
        bidirectional,
        [],
        None,
    )
    return (out, h, c) if mode == LSTM else (out, h)


def forward_result(*args: Any) -> tuple[torch.Tensor, ...]:
    """Meta tensors of what _cudnn_rnn returns: output, states, and what it keeps for the backward pass."""
    x, _, _, _, h, c, mode, size, _, layers, _, _, train, bidirectional = args[:14]
    directions = 1 + bidirectional
    steps = x.shape[0] * x.shape[1]
    kept = steps * layers * directions * _KEPT[mode] * size if train else 0
    out = x.new_empty(*x.shape[:2], directions * size)
    cell = torch.empty_like(h if c is None else c)
    return out, torch.empty_like(h), cell, x.new_empty(kept), x.new_empty(0)


def backward_result(*args: Any) -> tuple[Any, ...]:
    x, weights, h, c = args[0], args[1], args[4], args[5]
    return (
        torch.empty_like(x),
        torch.empty_like(h),
        torch.empty_like(h if c is None else c),
        [*map(torch.empty_like, weights)],
    )


def parts_of(name: str, args: Sequence[Any]) -> list[Part]:
    """The kernels of one call of _cudnn_rnn or _cudnn_rnn_backward."""
    backward = "backward" in name
    x = args[0]
    mode, size, _, layers, batch_first = args[10:15] if backward else args[6:11]
    bidirectional = args[17] if backward else args[13]
    length, batch = (x.shape[1], x.shape[0]) if batch_first else x.shape[:2]
    gates, directions, tokens = _GATES[mode] * size, 1 + bidirectional, x.shape[0] * x.shape[1]
    parts = []
    for layer in range(layers):
        width = x.shape[2] if layer == 0 else directions * size
        if backward:
            a_layer = [
                Part(length, GemmSizes(1, batch, size, gates)),
                Part(length, None, batch * (gates + 3 * size)),
                Part(1, GemmSizes(1, gates, width, tokens)),
                Part(1, GemmSizes(1, gates, size, tokens)),
                Part(1, None, tokens * gates),  # the biases
            ]
            if layer or args[21][0]:
                a_layer.append(Part(1, GemmSizes(1, tokens, width, gates)))
        else:
            a_layer = [
                Part(1, GemmSizes(1, tokens, gates, width)),
                Part(length, GemmSizes(1, batch, gates, size)),
                Part(length, None, batch * (2 * gates + 3 * size)),
            ]
        parts += a_layer * directions
    return parts
