"""The optimizers that a task may be given by name (`trainpace.core.execution`), made for its model."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import find_optimizer
from trainpace.workload.optional_packages import import_package

_TORCH: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adagrad": torch.optim.Adagrad,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "adadelta": torch.optim.Adadelta,
    "rmsprop": torch.optim.RMSprop,
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
    "adafactor": lambda p: _new_in_torch("Adafactor")(p, lr=1e-3),
}
_BITSANDBYTES = {
    "adam": "Adam",
    "adamw": "AdamW",
    "lion": "Lion",
    "ademamix": "AdEMAMix",
    "rmsprop": "RMSprop",
    "adagrad": "Adagrad",
    "sgd_momentum": "SGD",
}
_TORCHAO_BLOCKS = {8: 256, 4: 128}
"""Numbers that share a scale in torchao.optim's AdamW8bit and AdamW4bit by default."""


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of a model's trainable parameters; on the meta device one that only has the states and kernels, where the
    library's own cannot run there. Raises UnknownName for a name that nobody knows."""
    name, kind = find_optimizer(name)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise TrainpaceError("the model has no trainable parameters.")
    if name == "muon":
        return _muon(model, parameters)
    if kind.library == "torch":
        return _TORCH[name](parameters)
    if kind.library == "transformers":
        made = import_package("transformers.optimization", "transformers").Adafactor
        return made(parameters, lr=1e-3, scale_parameter=False, relative_step=False)
    assert kind.bits is not None, "quantised states have a width"
    if parameters[0].device.type == "meta":
        from trainpace.workload.blockwise import BlockwiseOptimizer, StateLayout

        block = _TORCHAO_BLOCKS[kind.bits] if kind.library == "torchao" else 256
        layout = StateLayout(
            kind.states, kind.bits, block, kind.is_paged, kind.library == "torchao"
        )
        return BlockwiseOptimizer(parameters, layout)
    if kind.library == "torchao":
        return getattr(import_package("torchao.optim", "torchao"), f"AdamW{kind.bits}bit")(
            parameters
        )
    algorithm = name.removeprefix("paged_").removesuffix(f"_{kind.bits}bit")
    optim = import_package("bitsandbytes.optim", "bitsandbytes")
    more = {"lr": 1e-4} | ({"momentum": 0.9} if algorithm == "sgd_momentum" else {})
    paged = {"is_paged": True} if kind.is_paged else {}
    return getattr(optim, _BITSANDBYTES[algorithm])(
        parameters, optim_bits=kind.bits, **more, **paged
    )


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """The name of an optimizer as this package uses it: its class in small letters, and sgd_momentum for SGD with momentum."""
    if isinstance(optimizer, _Together):
        return optimizer.name
    has_momentum = any(group.get("momentum") for group in optimizer.param_groups)
    name = type(optimizer).__name__.lower()
    if name == "adafactor" and type(optimizer).__module__.startswith("transformers"):
        return "adafactor_transformers"
    return "sgd_momentum" if name == "sgd" and has_momentum else name


class _Together(torch.optim.Optimizer):
    """Optimizers of different parameters, stepped one after the other."""

    def __init__(self, name: str, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.name, self.optimizers = name, optimizers
        self.defaults: dict[str, Any] = {}
        super().__init__(
            [group for optimizer in optimizers for group in optimizer.param_groups], self.defaults
        )
        self.state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for optimizer in optimizers:
            optimizer.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()


def _muon(model: nn.Module, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Muon for hidden matrices, AdamW for everything else: vocabularies, their heads, biases, norms (Jordan et al. 2024)."""
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    vocabularies = {table.shape[0] for table in tables}
    is_table = {id(table) for table in tables}
    hidden = [
        p
        for p in parameters
        if p.dim() == 2 and id(p) not in is_table and p.shape[0] not in vocabularies
    ]
    if not hidden:
        raise TrainpaceError(
            "the model has no hidden matrices, which are all that Muon updates.",
            "Name another optimizer.",
        )
    chosen = {id(p) for p in hidden}
    others = [p for p in parameters if id(p) not in chosen]
    optimizers: list[torch.optim.Optimizer] = [_new_in_torch("Muon")(hidden)]
    return _Together(
        "muon", [*optimizers, torch.optim.AdamW(others, lr=1e-3)] if others else optimizers
    )


class ScalarsReadAsOne(TorchFunctionMode):
    """Lets torch's own optimizers that read a norm (Adafactor) or a count step on the meta device, where nothing has a value."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.item and args[0].device.type == "meta":
            return 1.0
        return func(*args, **(kwargs or {}))


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of torch.optim's, of which none launches anything else for other values."""
    return type(optimizer).__module__.startswith("torch.optim")


def _new_in_torch(name: str) -> Any:
    """An optimizer that older versions of torch do not have."""
    if not hasattr(torch.optim, name):
        raise TrainpaceError(
            f"torch {torch.__version__} has no torch.optim.{name}.",
            "Install a newer torch, 2.9 or later.",
        )
    return getattr(torch.optim, name)
