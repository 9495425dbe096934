"""A task: model, loss, optimizer and samples, from a model spec or from one function in the user's own file."""

import contextlib
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import default_collate

from trainpace.errors import TrainpaceError, UnknownName, UnreadableInput
from trainpace.records import read_json
from trainpace.trace import zoo
from trainpace.trace.cuda_mapping import fuse_mpt_attention
from trainpace.trace.generated import build_generated
from trainpace.trace.generator import is_random
from trainpace.trace.operators import tensors_in
from trainpace.user_file import load_name

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
}
LOOKED_AT = 1000
TASK = "FILE.py:FUNCTION must return (model, loss, optimizer, dataset)"


class Task(NamedTuple):
    """A model with its loss, optimizer and samples.

    `make_batch(n)` gives n samples on the default device; `loss(model, batch)` a scalar; `forward(model, batch)` is the
    model alone. `loss_name`: of the loss's class or function, None where it has none (a lambda, a model that computes its own).
    """

    name: str
    model: nn.Module
    forward: Callable[[nn.Module, Any], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    make_batch: Callable[[int], Any]
    optimizer: torch.optim.Optimizer | None
    sample: str
    sequence_length: int | None = None
    dataset: Any = None
    collate: Callable[[list[Any]], Any] | None = None
    loss_name: str | None = None


def build_task(
    spec: str, sequence_length: int | None = None, image_size: int | None = None, fused_attention: bool = True
) -> Task:
    """A task from `NAME`, `torchvision:NAME`, `timm:NAME`, `transformers:CONFIG.json`, `random:FAMILY:SEED` or
    `FILE.py:FUNCTION`.

    `image_size` is the side in pixels, for image models. Without `fused_attention` transformers and timm compute it from
    plain products, as they did before torch 2.0. Call under ``torch.device("meta")`` to get a model without weights.
    A FILE.py's function decides for itself.
    """
    kind, _, name = spec.rpartition(":")
    if spec.endswith((".py", ".py:")):
        raise TrainpaceError(f"name the function: {spec.rstrip(':')}:FUNCTION.", f"{TASK}.")
    if kind.endswith(".py"):
        return _from_file(Path(kind), name)
    if is_random(spec):
        model, criterion, batches, sample, length = build_generated(spec, sequence_length, image_size)
        loss, loss_name = _loss_by(criterion), name_of_loss(criterion)
        return Task(spec, model, _forward, loss, batches, None, sample, length, loss_name=loss_name)
    if kind == "transformers":
        return _transformer(name, sequence_length, image_size, fused_attention)
    if sequence_length is not None:
        raise TrainpaceError(f"{spec} has no sequence length.", "Leave --sequence-length out.")
    if kind == "timm":
        return _timm(spec, name, image_size, fused_attention)
    if kind == "torchvision" and name not in zoo.MODELS:
        models = import_package("torchvision.models", "torchvision")
        if name not in models.list_models():
            raise UnknownName("torchvision model", name, models.list_models())
        try:
            model = models.get_model(name, weights=None, weights_backbone=None)  # which others would download
        except TypeError:
            model = models.get_model(name, weights=None)
        side = image_size or (299 if name == "inception_v3" else 224)
        return _image_task(spec, model, (3, side, side), 1000)
    if kind in ("", "torchvision"):
        if name not in zoo.MODELS:
            raise UnknownName(
                "model",
                spec,
                zoo.MODELS,
                "Or name it timm:NAME, torchvision:NAME, transformers:CONFIG.json, random:FAMILY:SEED, FILE.py:FUNCTION.",
            )
        side = image_size or 224
        model = zoo.MODELS[name](**{"image_size": side} if name.endswith("_keras") else {})
        return _image_task(spec, model, (3, side, side), 1000)
    raise UnknownName("kind of model", f"{kind}:", ["timm:", "torchvision:", "transformers:", "random:", "FILE.py:"])


def _timm(spec: str, name: str, image_size: int | None, fused_attention: bool) -> Task:
    timm = import_package("timm", "timm")
    timm.layers.set_fused_attn(fused_attention)

    def create(**options: Any) -> nn.Module:
        try:
            made: nn.Module = timm.create_model(name, **options)  # which also understands names of older releases
        except RuntimeError as error:
            if "nknown model" not in str(error):
                raise
            raise UnknownName("timm model", name, timm.list_models()) from None
        return made

    model: Any = create()
    shape = tuple(model.default_cfg.get("input_size", (3, 224, 224)))
    if image_size is not None and image_size != shape[-1]:
        shape = (shape[0], image_size, image_size)
        # convolutional models take any size and refuse the option; transformers have to know it
        with contextlib.suppress(TypeError):
            model = create(img_size=image_size)
    return _image_task(spec, model, shape, model.num_classes or 1)  # 0 for models without a head


def _forward(model: nn.Module, batch: Any) -> Any:
    return model(*batch[:-1])


def _loss_by(criterion: Callable[[Any, Any], Any]) -> Callable[[nn.Module, Any], Any]:
    """The loss of a model on a batch of (input, ..., target)."""

    def loss(model: nn.Module, batch: Any) -> Any:
        *inputs, target = batch
        return criterion(model(*inputs), target)

    return loss


def _image_task(name: str, model: nn.Module, shape: tuple[int, ...], classes: int) -> Task:
    def criterion(out: Any, labels: torch.Tensor) -> torch.Tensor:
        scores = out[0] if isinstance(out, tuple) else getattr(out, "logits", out)
        return nn.functional.cross_entropy(scores, labels)

    def make_batch(n: int) -> Any:
        return torch.randn(n, *shape), torch.randint(0, classes, (n,))

    sample, loss_name = " x ".join(map(str, shape)) + " image", name_of_loss(nn.functional.cross_entropy)
    return Task(name, model, _forward, _loss_by(criterion), make_batch, None, sample, loss_name=loss_name)


def _transformer(path: str, sequence_length: int | None, image_size: int | None, fused_attention: bool) -> Task:
    transformers = import_package("transformers", "transformers")
    transformers.logging.set_verbosity_error()
    values = read_json(path)
    if not isinstance(values, dict) or "model_type" not in values:
        raise UnreadableInput(f'{path} is not a transformers configuration: it has no "model_type".')
    try:
        config = transformers.AutoConfig.for_model(**values)
    except ValueError as error:
        raise UnreadableInput(f"{path}: {str(error).splitlines()[0]}") from None
    name = (getattr(config, "architectures", None) or ["AutoModelForCausalLM"])[0]
    architecture = getattr(transformers, name, None)
    if architecture is None:
        raise UnknownName("transformers architecture", name, [n for n in dir(transformers) if n.startswith(name[:4])])
    build = getattr(architecture, "_from_config", None) or architecture.from_config
    _longer_positions(config, sequence_length)
    config._attn_implementation = "sdpa" if fused_attention else "eager"
    try:
        model = build(config)
    except (ValueError, ImportError):
        config._attn_implementation = "eager"  # this architecture has no other
        model = build(config)
    if fused_attention and config.model_type == "mpt":
        fuse_mpt_attention(model)
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        size = image_size or (config.image_size if isinstance(config.image_size, int) else config.image_size[0])
        return _image_task(f"transformers:{path}", model, (config.num_channels, size, size), config.num_labels)
    longest = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None) or 1024
    length = sequence_length or min(longest, 1024)
    if length > longest:
        raise TrainpaceError(f"the sequence length {length} is more than the {longest} positions of {path}.")
    vocabulary = config.vocab_size

    def make_batch(n: int) -> dict[str, torch.Tensor]:
        batch = {"input_ids": torch.randint(0, vocabulary, (n, length))}
        if "QuestionAnswering" in name:
            return batch | {key: torch.randint(0, length, (n,)) for key in ("start_positions", "end_positions")}
        if "SequenceClassification" in name:
            return batch | {"labels": torch.randint(0, config.num_labels, (n,))}
        return batch | {"labels": torch.randint(0, vocabulary, (n, length))}

    def loss(model: nn.Module, batch: Any) -> Any:
        return model(**batch).loss

    def forward(model: nn.Module, batch: Any) -> Any:
        return model(input_ids=batch["input_ids"])

    return Task(f"transformers:{path}", model, forward, loss, make_batch, None, f"{length} tokens", length)


def _longer_positions(config: Any, sequence_length: int | None) -> None:
    """Rotary and linear (ALiBi) positions have no table that ends: such a model takes any length."""
    endless = config.model_type in ("mpt", "bloom") or any(
        getattr(config, name, None) for name in ("rope_theta", "rope_parameters", "rope_scaling")
    )
    for name in ("max_position_embeddings", "max_seq_len"):
        if endless and sequence_length and (getattr(config, name, None) or sequence_length) < sequence_length:
            setattr(config, name, sequence_length)


def _from_file(path: Path, function: str) -> Task:
    """The function returns (model, loss, optimizer, dataset); `loss` takes (output, target).

    A data set whose samples differ in length brings its own `collate_fn` (a list of samples into a batch), as an attribute.
    """
    task_function = load_name(path, function, "function")
    try:
        parts = task_function() if callable(task_function) else task_function
    except SystemExit as error:
        raise TrainpaceError(
            f"{path}:{function} ended its process ({error}), as a program that reads its command line does.",
            f"{TASK}, without arguments of its own. To time a whole program: trainpace watch -- python {path.name}",
        ) from None
    if not isinstance(parts, tuple | list) or len(parts) != 4:
        raise TrainpaceError(f"{path}:{function} returned {type(parts).__name__}.", f"{TASK}.")
    model, criterion, optimizer, dataset = parts
    if not isinstance(model, nn.Module) or not callable(criterion):
        raise TrainpaceError(f"{path}:{function} returned a {type(model).__name__} as model.", f"{TASK}.")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TrainpaceError(f"{path}:{function} returned a {type(optimizer).__name__} as optimizer.", f"{TASK}.")
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or not len(dataset):
        raise TrainpaceError(f"the dataset of {path}:{function} needs __len__ above 0 and __getitem__.")
    first = dataset[0]
    if not isinstance(first, tuple | list) or len(first) < 2:
        raise TrainpaceError(
            f"a sample of {path}:{function} is a {type(first).__name__}.", "It should be (input, ..., target)."
        )
    own_collate = getattr(dataset, "collate_fn", None) or default_collate

    def make_batch(n: int) -> Any:
        return own_collate([dataset[i % len(dataset)] for i in range(n)])

    shape = " x ".join(map(str, getattr(first[0], "shape", ()))) or type(first[0]).__name__
    name, loss = f"{path.name}:{function}", _loss_by(criterion)
    loss_name = name_of_loss(criterion)
    return Task(name, model, _forward, loss, make_batch, optimizer, shape, None, dataset, own_collate, loss_name)


def recompute_activations(model: nn.Module) -> None:
    """Switch on activation checkpointing by the model's own means, block by block."""
    # transformers renamed its switch in 5.x; the random state of a meta device cannot be saved, and need not be
    options = {"use_reentrant": False, "preserve_rng_state": False}
    for switch in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        if hasattr(model, switch):
            getattr(model, switch)(options)
            return
    if hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing(True)  # type: ignore[operator]
    else:
        raise TrainpaceError(
            f"{type(model).__name__} has no switch for activation checkpointing.",
            "transformers and timm models have one; in your own file, call torch.utils.checkpoint in the model.",
        )


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name not in OPTIMIZERS:
        raise UnknownName("optimizer", name, OPTIMIZERS)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise TrainpaceError("the model has no trainable parameters.")
    return OPTIMIZERS[name](parameters)


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """The name of an optimizer as this package uses it: its class in small letters, and sgd_momentum for SGD with momentum."""
    has_momentum = any(group.get("momentum") for group in optimizer.param_groups)
    name = type(optimizer).__name__.lower()
    return "sgd_momentum" if name == "sgd" and has_momentum else name


def name_of_loss(criterion: Callable[..., Any]) -> str | None:
    """The name of a loss as its code has it, ``CrossEntropyLoss`` or ``cross_entropy``; None for a lambda."""
    inner = getattr(criterion, "func", criterion)  # of functools.partial
    name = getattr(inner, "__name__", type(inner).__name__)
    return None if name == "<lambda>" else name.lstrip("_")


def import_package(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        if isinstance(error, ImportError):
            raise TrainpaceError(
                f"{package} cannot be imported ({reason}).", f"pip install 'trainpace[{package}]'."
            ) from None
        hint = f"Install the {package} build that belongs to this torch."
        raise TrainpaceError(f"{package} does not load beside this torch ({reason}).", hint) from None


def longest_first(task: Task, n: int) -> Any | None:
    """A batch of the n samples with the most elements, where samples vary in length; None where all are alike.

    Only the first 1,000 samples are looked at: reading a data set whole may take hours.
    """
    if task.dataset is None:
        return None
    assert task.collate is not None, "a task with a data set knows how to make batches of it"
    looked = min(len(task.dataset), LOOKED_AT)
    sizes = [sum(t.numel() for t in tensors_in(task.dataset[i])) for i in range(looked)]
    if len(set(sizes)) == 1:
        return None
    longest = sorted(range(looked), key=lambda i: -sizes[i])[:n]
    return task.collate([task.dataset[longest[i % len(longest)]] for i in range(n)])
