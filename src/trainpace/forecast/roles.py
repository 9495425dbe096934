"""Where the time of a step goes, by what layers do: all MLP projections of a transformer are one entry, not one row a layer."""

import re
from collections import defaultdict

import numpy as np

from trainpace.core.outcome import RoleShare
from trainpace.forecast.kernels import KernelTimes
from trainpace.workload import CONVOLUTION_KINDS, Counts, Operators

UP = "MLP up projections"
UP_AND_GATE = "MLP up and gate projections"
DOWN = "MLP down projections"
INPUTS = "attention query, key and value projections"
OUTPUT = "attention output projections"
HEAD = "output head"
LINEAR = "linear layers"
_GATES = {"gate_proj", "gate_up_proj", "w3", "wi_1"}
_LAST: dict[str, frozenset[str]] = {
    UP: frozenset(
        "up_proj gate_proj gate_up_proj w1 w3 fc1 c_fc dense_h_to_4h wi wi_0 wi_1 lin1 linear1 up".split()
    ),
    DOWN: frozenset("down_proj w2 fc2 dense_4h_to_h wo lin2 linear2 down".split()),
    INPUTS: frozenset(
        "q_proj k_proj v_proj qkv_proj qkv wqkv query key value c_attn query_key_value in_proj to_q"
        " to_k to_v q_lin k_lin v_lin q k v q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj".split()
    ),
    OUTPUT: frozenset("o_proj out_proj to_out out_lin o".split()),
    HEAD: frozenset("lm_head head classifier score fc output_projection embed_out cls".split()),
}
"""Names that libraries give to a layer (transformers, timm, torchtitan, torchvision)."""
_BY_KIND = {
    "attention": "attention",
    "attention_backward": "attention",
    "norm": "normalisation",
    "softmax": "softmax and loss",
    "pool": "pooling",
    "embedding": "embeddings",
    "optimizer": "optimizer",
}
_REST = "element-wise operators and copies"
_NUMBER = re.compile(r"\.(\d+)\.(?=[\w.]*[a-zA-Z_])")
"""Of a block, whose layers have names."""


def by_role(operators: Operators, times: KernelTimes, repeats: Counts) -> tuple[RoleShare, ...]:
    """Milliseconds of device time in a step, in which each row runs `repeats` times, by role; the longest first."""
    ms: defaultdict[str, float] = defaultdict(float)
    layers: defaultdict[str, int] = defaultdict(int)
    deepest = _layers(operators)
    gated = any(_names(module)[-1:] and _names(module)[-1] in _GATES for module in operators.module)
    spent = 1e3 * times.device_s * repeats
    for i in np.flatnonzero(spent > 0):
        module, kind = operators.module[i], operators.kind[i]
        role = role_of(module, kind, operators.phase[i])
        role = UP_AND_GATE if role == UP and gated else role
        ms[role] += float(spent[i])
        if kind == "gemm" or kind.startswith("attention"):
            layers[role] = max(layers[role], deepest.get(_stack(module), 0))
    shares = [
        RoleShare(role=role, layers=layers[role], time_ms=total) for role, total in ms.items()
    ]
    return tuple(sorted(shares, key=lambda share: -share.time_ms))


def alike(module: str, count: int) -> str:
    """A name for operators of several layers, of which `module` names one: a star stands for their numbers."""
    return _NUMBER.sub(".*.", module) if count > 1 else module


def role_of(module: str, kind: str, phase: str) -> str:
    if phase == "optimizer":
        return "optimizer"
    names = _names(module)
    if kind in CONVOLUTION_KINDS:
        return "convolutions" if not names or len(names) == 1 else f"convolutions of {names[0]}"
    if kind != "gemm":
        normalises = any(
            "norm" in name or re.fullmatch(r"(ln|bn)(_?\w)?", name) for name in names[-1:]
        )
        return _BY_KIND.get(kind) or ("normalisation" if normalises else _REST)
    last, inside = names[-1] if names else "", set(names[:-1])
    attends = any("att" in name for name in inside)
    if last == "c_proj":
        return OUTPUT if attends else DOWN
    if last == "dense":  # BERT's names, in which the parent says what it is
        if attends:
            return OUTPUT
        return UP if "intermediate" in inside else DOWN if "output" in inside else LINEAR
    if last == "proj" and attends:
        return OUTPUT
    return next((role for role, known in _LAST.items() if last in known), LINEAR)


def _names(module: str) -> list[str]:
    return [name for name in module.lower().split(".") if name and not name.isdecimal()]


def _stack(module: str) -> str:
    """What stands before the first number: the list of layers that it is in; empty where there is none."""
    found = _NUMBER.search(module)
    return module[: found.start()] if found else ""


def _layers(operators: Operators) -> dict[str, int]:
    """How many layers each list has. Alike operators of all layers are one row, which names the one that came first: the first
    layer of a forward pass, the last of a backward pass."""
    most: dict[str, int] = {}
    for module in operators.module:
        if found := _NUMBER.search(module):
            stack = module[: found.start()]
            most[stack] = max(most.get(stack, 0), int(found[1]) + 1)
    return {stack: n for stack, n in most.items() if n > 1}
