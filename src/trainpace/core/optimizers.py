"""Optimizers by name: what each keeps for a parameter, where it can run, and what other tools call it.

`trace.optimizers` makes them; this is what forecasts and readers of settings have to know without torch.
"""

from typing import Literal, NamedTuple

from trainpace.core.errors import UnknownName

Library = Literal["torch", "transformers", "bitsandbytes", "torchao"]


class OptimizerKind(NamedTuple):
    """A kind of optimizer.

    states: numbers that it keeps for each of a parameter's, 0 where factored ones are next to nothing. bits: of each such
    number, None where states have their parameter's dtype, as torch.optim's have. is_paged: states are in memory that CUDA pages
    to the host where the device is full. on_host: an engine updates with it on the host's CPU (DeepSpeed's cpu_adam, cpu_lion
    and cpu_adagrad; plain SGD moves bytes alone). whole_matrices: it needs every gradient as the matrix that it is.
    """

    library: Library
    states: int
    bits: int | None = None
    is_paged: bool = False
    on_host: bool = False
    whole_matrices: bool = False


def _bitsandbytes() -> dict[str, OptimizerKind]:
    """bitsandbytes' optimizers: 32 or 8 bits a state, paged or not."""
    states = {
        "adam": 2,
        "adamw": 2,
        "lion": 1,
        "ademamix": 3,
        "rmsprop": 1,
        "adagrad": 1,
        "sgd_momentum": 1,
    }
    kinds = {}
    for algorithm, n in states.items():
        for bits in (8, 32):
            name = f"{algorithm}_{bits}bit"
            kinds[name] = OptimizerKind("bitsandbytes", n, bits, on_host=name == "lion_32bit")
            if algorithm in ("adam", "adamw", "lion", "ademamix"):
                kinds[f"paged_{name}"] = OptimizerKind("bitsandbytes", n, bits, is_paged=True)
    return kinds


OPTIMIZERS: dict[str, OptimizerKind] = {
    "sgd": OptimizerKind("torch", 0, on_host=True),
    "sgd_momentum": OptimizerKind("torch", 1, on_host=True),
    "adam": OptimizerKind("torch", 2, on_host=True),
    "adamw": OptimizerKind("torch", 2, on_host=True),
    "adagrad": OptimizerKind("torch", 1, on_host=True),
    "nadam": OptimizerKind("torch", 2),
    "radam": OptimizerKind("torch", 2),
    "adamax": OptimizerKind("torch", 2),
    "adadelta": OptimizerKind("torch", 2),
    "rmsprop": OptimizerKind("torch", 1),
    "asgd": OptimizerKind("torch", 1),
    "rprop": OptimizerKind("torch", 2),
    "adafactor": OptimizerKind("torch", 0, whole_matrices=True),
    "muon": OptimizerKind("torch", 1, whole_matrices=True),
    "adafactor_transformers": OptimizerKind("transformers", 0, whole_matrices=True),
    **_bitsandbytes(),
    "adamw_torch_8bit": OptimizerKind("torchao", 2, 8),
    "adamw_torch_4bit": OptimizerKind("torchao", 2, 4),
}
"""Every optimizer that can be named. torch: torch.optim's, muon with AdamW for what is no hidden matrix, as its documentation
asks. adafactor_transformers: the one of transformers, which its Trainer takes for `optim: adafactor`."""

_ALIASES = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_torch_xla": "adamw",
    "adamw_torch_npu_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_apex_fused": "adamw",
    "fused_adam": "adamw",
    "cpu_adam": "adamw",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw": "paged_adamw_32bit",
    "paged_adam": "paged_adam_32bit",
    "lion": "lion_32bit",
    "paged_lion": "paged_lion_32bit",
    "ademamix": "ademamix_32bit",
    "paged_ademamix": "paged_ademamix_32bit",
    "rmsprop_bnb": "rmsprop_32bit",
    "rmsprop_bnb_8bit": "rmsprop_8bit",
    "rmsprop_bnb_32bit": "rmsprop_32bit",
    "fused_lion": "lion_32bit",
    "cpu_lion": "lion_32bit",
    "cpu_adagrad": "adagrad",
    "sgd_8bit": "sgd_momentum_8bit",
    "sgd_32bit": "sgd_momentum_32bit",
}
"""The names of Hugging Face's `optim`, DeepSpeed's and bitsandbytes' classes."""
FOR_LANGUAGE, FOR_OTHERS = "adamw", "sgd_momentum"
"""What a model is taken to be trained with where nobody says it."""


def _folded(name: str) -> str:
    return name.casefold().replace("_", "").replace("-", "")


_KNOWN = {_folded(name): name for name in OPTIMIZERS} | {
    _folded(alias): name for alias, name in _ALIASES.items()
}


def optimizer_called(name: str) -> str:
    """The name here of an optimizer as any tool writes it: adamw_torch, AdamW8bit, paged_adamw_8bit. Others stay as they are."""
    return _KNOWN.get(_folded(name), name)


def find_optimizer(name: str) -> tuple[str, OptimizerKind]:
    """(name here, kind) of an optimizer as any tool writes it. Raises UnknownName with the nearest, and all that there are."""
    known = optimizer_called(name)
    if known not in OPTIMIZERS:
        raise UnknownName(
            "optimizer", name, [*OPTIMIZERS, *_ALIASES], f"Known: {', '.join(OPTIMIZERS)}."
        )
    return known, OPTIMIZERS[known]


def widens(name: str) -> bool:
    """Whether states have their parameters' dtype, so that engines which keep an fp32 copy of 16-bit weights widen them."""
    kind = OPTIMIZERS.get(name)
    return kind is None or kind.bits is None


def host_update_bytes(name: str) -> float | None:
    """Bytes of host memory that an update on the host's CPU moves for a number: gradient, weight and states in fp32 are read,
    weight and states written, and a 16-bit copy of the weight (Ren et al. 2021: 30 for Adam). None where no engine has it.
    """
    kind = OPTIMIZERS.get(name)
    return (
        None
        if kind is None or not kind.on_host
        else 4.0 * (2 + kind.states) + 4.0 * (1 + kind.states) + 2.0
    )
