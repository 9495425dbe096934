"""A long chain of alike blocks: a few of them run, and what was recorded of one is repeated for the rest.

Llama-405B has 126 layers that do the same; five of them tell all. The chain is shortened only where its blocks have the same
modules with the same settings, and the recording is repeated only where the blocks that ran did the same: one that does
something else in every sixth layer runs whole, unless there are so many layers that a few times six tell all.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from trainpace.workload.blocks import PERIODS, Chain
from trainpace.workload.recorder import Recorded, Recorder

KEPT = 5
"""Blocks that run, the first ones and the last: the second is repeated, and those after it show that it may be. Periods of blocks
that take turns, where they do."""
SHORTEST_CUT = 8
"""A chain of fewer blocks runs whole."""
_NUMBERED_BY = frozenset(
    "layer_idx layer_id layer_index layer_number block_idx block_index idx index depth_index".split()
)
"""Attributes that number a block, and so differ from one to the next."""
_SETTINGS = (bool, int, float, str, type(None))


def in_turns(chain: Chain) -> Chain:
    """The chain with the period of its blocks' settings: layers of the same shapes may attend to a window and to all tokens in
    turn. Where no period divides it, it stays as it is."""
    settings = [_settings(block) for block in chain.modules]
    periods = (
        n
        for n in PERIODS
        if chain.length % n == 0 and n % chain.period == 0 and 2 * n <= chain.length
    )
    return next((chain._replace(period=n) for n in periods if settings[n:] == settings[:-n]), chain)


def shortened(model: nn.Module, chain: Chain) -> Chain:
    """The chain with a few blocks to run, or as it is where the others may do something else."""
    parent, period = model.get_submodule(chain.name.rpartition(".")[0]), chain.period
    listed = isinstance(parent, nn.ModuleList | nn.Sequential)
    settings = [_settings(block) for block in chain.modules]
    if (
        chain.length < SHORTEST_CUT * period
        or not listed
        or settings[period:] != settings[:-period]
    ):
        return chain
    return chain._replace(modules=(*chain.modules[: (KEPT - 1) * period], *chain.modules[-period:]))


def _settings(block: nn.Module) -> tuple[Any, ...]:
    """Every module inside with what it was told that is a number, a flag or a word."""
    found = []
    for name, module in block.named_modules():
        told = {key: value for key, value in vars(module).items() if isinstance(value, _SETTINGS)}
        found.append(
            (
                name,
                type(module),
                tuple(item for item in sorted(told.items()) if item[0] not in _NUMBERED_BY),
            )
        )
    return tuple(found)


@contextlib.contextmanager
def only_these_blocks(model: nn.Module, chain: Chain | None) -> Iterator[None]:
    """Take the blocks that do not run out of the model."""
    if chain is None or len(chain.modules) == chain.length:
        yield
        return
    parent = model.get_submodule(chain.name.rpartition(".")[0])
    every = parent._modules
    names = list(every)
    start = next(i for i, module in enumerate(every.values()) if module is chain.modules[0])
    left = (
        names[: start + len(chain.modules) - chain.period]
        + names[start + chain.length - chain.period :]
    )
    numbered = all(name.isdigit() for name in names)  # which a list looks its modules up by
    parent._modules = {str(i) if numbered else name: every[name] for i, name in enumerate(left)}
    try:
        yield
    finally:
        parent._modules = every


def idle_parameters(model: nn.Module, chain: Chain) -> list[nn.Parameter]:
    """The parameters of the blocks that do not run. Call it outside of `only_these_blocks`."""
    if len(chain.modules) == chain.length:
        return []
    with only_these_blocks(model, chain):
        running = {id(parameter) for parameter in model.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in running]


def repeated(run: Recorder, chain: Chain | None) -> list[Recorded] | None:
    """What a step of the whole chain would have recorded; None where the blocks that ran did not do the same."""
    recorded = run.recorded
    if chain is None or len(chain.modules) == chain.length:
        return recorded
    entered = [hidden for *_, hidden in run.entered]
    if len(entered) != len(chain.modules) or entered[1:] != run.left[:-1]:
        return None  # modules beside each other may be as many as something else has parts
    period = chain.period
    times = (chain.length - len(chain.modules)) // period
    first: dict[tuple[str, int], int] = {}
    for i, one in enumerate(recorded):
        first.setdefault((one.phase, one.origin.place), i)
    forward = [first.get(("forward", n * period + 1), -1) for n in (1, 2, 3)]
    backward = [first.get(("backward", n * period), -1) for n in (4, 3, 2)]
    trained = any(one.phase == "backward" for one in recorded)
    stretches = [forward, backward] if trained else [forward]
    if not all(_alike(recorded, *stretch) for stretch in stretches):
        return None
    grown = _growth(recorded, *forward[:2])
    saved = sum(
        s.size for s in run.saved if s.call >= 0 and period < run.places[s.call] <= 2 * period
    )
    result = recorded[: forward[1]]
    result += _copies(recorded[forward[0] : forward[1]], times, grown)
    end = backward[1] if trained else len(recorded)
    for one in recorded[forward[1] : end]:
        # a cast of a weight lives until the forward pass ends, and is no part of what is saved
        result.append(_moved(one, times, grown if one.phase == "forward" else (0.0, saved)))
    if not trained:
        return result
    shrunk = _growth(recorded, *backward[:2])
    base = [_moved(one, times, (0.0, saved)) for one in recorded[backward[0] : backward[1]]]
    result += _copies(base, times, shrunk)
    left = (shrunk[0], saved + shrunk[1])
    return result + [
        one if one.phase == "optimizer" else _moved(one, times, left)
        for one in recorded[backward[1] :]
    ]


def _alike(recorded: Sequence[Recorded], a: int, b: int, c: int) -> bool:
    """Whether two stretches that follow each other hold the same rows, and as many bytes more at their ends."""
    if not 0 <= a < b < c or [one.row for one in recorded[a:b]] != [
        one.row for one in recorded[b:c]
    ]:
        return False
    return _growth(recorded, a, b) == _growth(recorded, b, c)


def _growth(recorded: Sequence[Recorded], a: int, b: int) -> tuple[float, float]:
    """Bytes of gradients and of activations by which a stretch grows what is alive."""
    return (
        recorded[b].gradient_bytes - recorded[a].gradient_bytes,
        recorded[b].activation_bytes - recorded[a].activation_bytes,
    )


def _moved(one: Recorded, times: int, growth: tuple[float, float]) -> Recorded:
    gradients, activations = (
        one.gradient_bytes + times * growth[0],
        one.activation_bytes + times * growth[1],
    )
    # said in full: dataclasses.replace takes several times as long, and Llama-405B has 100,000 of them
    return Recorded(
        one.row, one.phase, one.module, one.origin, gradients, activations, one.set_aside_bytes
    )


def _copies(stretch: Sequence[Recorded], times: int, growth: tuple[float, float]) -> list[Recorded]:
    return [_moved(one, i, growth) for i in range(1, times + 1) for one in stretch]
