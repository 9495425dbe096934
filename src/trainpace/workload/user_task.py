"""Build a task from a function in the user's own file.

The function returns one of the following. docs/tasks.md shows an example of each.

- The parts of a training, as a tuple (model, loss, optimizer, dataset) or a dict.
- A Hugging Face Trainer, or a subclass such as TRL's SFTTrainer. The loss is the Trainer's own
  `compute_loss`, on batches of its own loader. Its arguments define how a step is executed.
- A LightningModule with its data. Under automatic optimization it is a task like any other. Under
  manual optimization, `training_step` runs backward and the optimizers, so it is traced as a whole
  step.
"""

import contextlib
import itertools
import logging
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

from trainpace.core.errors import TrainpaceError, UnknownName, message_of
from trainpace.core.execution import find_optimizer
from trainpace.core.worker import load_name
from trainpace.workload.cuda_mapping import replaced
from trainpace.workload.meta import tensors_in
from trainpace.workload.task import (
    NO_LOSS,
    Task,
    WholeStep,
    forward,
    loss_by,
    name_of_loss,
    own_loss,
)

TAKEN_OF_A_STREAM = 256
LOOKED_AT, LOOKED_AT_WHERE_THEY_VARY = 32, 512
BATCHES_TRIED, USUAL_BATCH = 16, 8


class Samples(NamedTuple):
    """Dataset with its collate function, and the batch size of its loader, if any."""

    dataset: Any
    collate: Callable[[list[Any]], Any]
    batch_size: int | None = None
    notes: tuple[str, ...] = ()

    def batch(self, n: int) -> Any:
        """Return a batch of the first n samples. A shorter dataset is repeated."""
        return self.collate([self.dataset[i % len(self.dataset)] for i in range(n)])


def samples_of(data: Any, collate: Callable[[list[Any]], Any] | None, where: str) -> Samples:
    """Return the samples of a dataset, a stream of samples or a DataLoader.

    Args:
        data: The user's data.
        collate: Collate function. None means the loader's one, or else the dataset's `collate_fn`.
        where: Name of the data, for errors.
    """
    batch_size: int | None = None
    notes: tuple[str, ...] = ()
    if isinstance(data, DataLoader):
        batch_size = data.batch_size
        collate = collate or data.collate_fn
        data = data.dataset
    has_items = hasattr(data, "__getitem__")
    if isinstance(data, IterableDataset) or (not has_items and hasattr(data, "__iter__")):
        data = list(itertools.islice(iter(data), TAKEN_OF_A_STREAM))
        notes = (f"Only the first {len(data)} samples of the stream were used.",)
        has_items = True
    if not has_items or isinstance(data, Mapping) or not getattr(data, "__len__", lambda: 0)():
        raise TrainpaceError(f"the dataset of {where} needs __len__ above 0 and __getitem__.")
    return Samples(data, _plain(collate or _collate_of(data)), batch_size, notes)


def with_samples(task: Task, samples: Samples, where: str) -> Task:
    """Return the task with samples, their description and the batch size of their loader.

    Args:
        task: The task.
        samples: The samples.
        where: Name of the samples, for errors and notes.
    """
    batch_to_trace, notes = _typical(samples, where)
    sample, length = _described(batch_to_trace(1), samples.dataset[0])
    settings: dict[str, Any] = (
        {} if samples.batch_size is None else {"micro_batch": samples.batch_size}
    )
    return task._replace(
        make_batch=samples.batch,
        sample=sample,
        sequence_length=length,
        dataset=samples.dataset,
        collate=samples.collate,
        batch_to_trace=batch_to_trace,
        pads=_holds_padding(samples.batch(USUAL_BATCH)),
        settings={**settings, **task.settings},
        notes=(*task.notes, *notes),
    )


def _typical(samples: Samples, where: str) -> tuple[Callable[[int], Any], tuple[str, ...]]:
    """Return a function that makes a batch of equal samples for tracing, and notes.

    Tracing needs equal samples. If the samples vary in size, one sample is repeated: the sample
    closest to the mean size per sample in batches of the loader's size, including padding.
    """
    dataset, sizes = samples.dataset, []
    for looked_at in (LOOKED_AT, LOOKED_AT_WHERE_THEY_VARY):
        sizes = [_elements(dataset[i]) for i in range(min(len(dataset), looked_at))]
        if len(set(sizes)) == 1:
            return samples.batch, samples.notes
    n = min(samples.batch_size or USUAL_BATCH, len(sizes))
    order = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(0)).tolist()
    drawn = [order[i % len(order) :][:n] for i in range(0, BATCHES_TRIED * n, n)]
    in_batches = [
        _elements(samples.collate([dataset[i] for i in batch])) / len(batch)
        for batch in drawn
        if batch
    ]
    alone = [_elements(samples.collate([dataset[i]])) for i in range(len(sizes))]
    mean = sum(in_batches) / len(in_batches)
    chosen = min(range(len(alone)), key=lambda i: abs(alone[i] - mean))
    note = (
        f"Samples of {where} vary in size by a factor of {max(sizes) / max(1, min(sizes)):.1f}. The"
        f" trace uses the mean size in batches of {n}."
    )
    return lambda size: samples.collate([dataset[chosen]] * size), (*samples.notes, note)


def _described(batch: Any, sample: Any) -> tuple[str, int | None]:
    """Return (description, number of tokens or None) of a sample.

    Args:
        batch: A batch with only this sample.
        sample: The sample.
    """
    if isinstance(batch, Mapping):
        ids = batch.get("input_ids")
        if isinstance(ids, torch.Tensor) and ids.dim() == 2:
            return f"{ids.shape[1]} tokens", int(ids.shape[1])
        named = next(
            (f"{name} {_shape(t)}" for name, t in batch.items() if isinstance(t, torch.Tensor)),
            "dict",
        )
        return named.strip(), None
    first = sample[0] if isinstance(sample, tuple | list) and sample else sample
    return _shape(first) or type(first).__name__, None


def _shape(value: Any) -> str:
    shape = getattr(value, "shape", ())
    return " x ".join(map(str, shape)) if isinstance(shape, tuple) else ""


def _collate_of(dataset: Any) -> Callable[[list[Any]], Any]:
    if getattr(dataset, "collate_fn", None):
        return dataset.collate_fn
    if type(dataset[0]).__module__.partition(".")[0] == "torch_geometric":
        of_graphs: Any = import_module("torch_geometric.data").Batch
        return of_graphs.from_data_list
    return default_collate


def _plain(collate: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Wrap a collate function so that mappings such as BatchEncoding become plain dicts."""

    def plain(samples: list[Any]) -> Any:
        batch = collate(samples)
        return dict(batch) if isinstance(batch, Mapping) else batch

    return plain


def _elements(tree: Any) -> int:
    """Count the numbers in a sample or batch: in its tensors, and in lists such as token ids."""
    if isinstance(tree, Mapping):
        return sum(map(_elements, tree.values()))
    if isinstance(tree, list | tuple):
        return sum(map(_elements, tree))
    if isinstance(tree, str | bytes):
        return len(tree)
    if hasattr(tree, "shape"):
        return (
            sum(t.numel() for t in tensors_in(tree))
            if isinstance(tree, torch.Tensor)
            else int(tree.size)
        )
    return sum(t.numel() for t in tensors_in(tree)) or 1


def _holds_padding(batch: Any) -> bool:
    """Return True if the attention mask of a batch masks any token."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return (
        isinstance(mask, torch.Tensor)
        and mask.device.type != "meta"
        and not bool(mask.bool().all())
    )


_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
DATA = "Return (module, DataLoader or dataset), or add train_dataloader() to the module."


def lightning_data(made: Any) -> tuple[Any, Any] | None:
    """Return (LightningModule, data or None) if the user returned a LightningModule, or else None.

    Args:
        made: The result of the user's function: a module, (module, data), {model, dataset}, or
            another object.
    """
    if isinstance(made, dict) and set(made) <= {"model", "dataset"}:
        made = (made.get("model"), made.get("dataset"))
    module, data = made if isinstance(made, tuple | list) and len(made) == 2 else (made, None)
    return (module, data) if _package_of(module) is not None else None


def lightning_task(name: str, module: Any, data: Any, where: str) -> Task:
    """Return the task of a LightningModule.

    Args:
        name: Name of the task.
        module: The LightningModule.
        data: Its data, or None if the module provides the data itself.
        where: Name of the user's function, for errors.
    """
    package = _package_of(module)
    loader = _loader(package, module, data, where)
    samples = samples_of(loader, None, where)
    optimizers = _set_up(package, module, loader, where)
    if not module.automatic_optimization:
        step = WholeStep(lambda batch: module.training_step(batch, 0), optimizers)
        return with_samples(Task.of_step(name, module, step, samples.batch), samples, where)
    if len(optimizers) != 1:
        raise TrainpaceError(
            f"{type(module).__name__} configures {len(optimizers)} optimizers under automatic"
            " optimization, which needs one.",
            "For several set `self.automatic_optimization = False` and step them in training_step.",
        )
    task = Task(name, TrainingStep(module), _forward, _loss, samples.batch, optimizers[0], "")
    return with_samples(task, samples, where)


class TrainingStep(nn.Module):
    """Module whose forward pass is a LightningModule's `training_step`.

    Engines such as DDP can wrap it.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        trainer = module.trainer

        def attach(module: Any) -> None:
            if module._trainer is None:  # a copy of the module has no trainer
                module.trainer = trainer

        self.attach = attach

    def forward(self, batch: Any) -> Any:
        self.attach(self.module)
        return self.module.training_step(batch, 0)


def _forward(model: nn.Module, batch: Any) -> Any:
    return model(batch)


def _loss(model: nn.Module, batch: Any) -> Any:
    out = model(batch)
    loss = out.get("loss") if isinstance(out, dict) else out
    if not isinstance(loss, torch.Tensor):
        raise TrainpaceError(f"training_step returns a {type(out).__name__}.", NO_LOSS)
    return loss


def _package_of(module: Any) -> Any:
    packages = [sys.modules[name] for name in _PACKAGES if name in sys.modules]
    return next(
        (package for package in packages if isinstance(module, package.LightningModule)), None
    )


def _loader(package: Any, module: Any, data: Any, where: str) -> Any:
    if isinstance(data, package.LightningDataModule):
        data.prepare_data()
        data.setup("fit")
        data = data.train_dataloader()
    if data is None and not _overrides(package, module, "train_dataloader"):
        raise TrainpaceError(f"{where} returned a LightningModule without data.", DATA)
    data = module.train_dataloader() if data is None else data
    if (
        isinstance(data, dict | list | tuple)
        and data
        and hasattr(next(iter(data.values() if isinstance(data, dict) else data)), "dataset")
    ):
        raise TrainpaceError(
            f"{where} has several DataLoaders.",
            "Return one whose samples hold everything that a step needs.",
        )
    return data


def _overrides(package: Any, module: Any, name: str) -> bool:
    return getattr(type(module), name, None) is not getattr(package.LightningModule, name)


def _set_up(
    package: Any, module: Any, loader: Any, where: str
) -> tuple[torch.optim.Optimizer, ...]:
    """Attach a Trainer to the module as `fit` does, and return the module's optimizers."""
    for logger in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = package.Trainer(accelerator="cpu", devices=1, barebones=True, max_epochs=1)
        module.trainer = trainer
        trainer.strategy.connect(module)
        with contextlib.suppress(AttributeError):  # estimated_stepping_batches reads this
            trainer.fit_loop._data_source.instance = loader
        module.configure_model()
        if hasattr(module, "setup") and _overrides(package, module, "setup"):
            module.setup("fit")
        trainer.strategy.setup_optimizers(trainer)
    if not trainer.optimizers:
        raise TrainpaceError(f"configure_optimizers of {where} returns no optimizer.")
    return tuple(trainer.optimizers)


T = TypeVar("T")
ARGUMENTS = "transformers.training_args"


def is_trainer(made: Any) -> bool:
    """Return True for a Hugging Face Trainer. Does not import transformers."""
    module = sys.modules.get("transformers.trainer")
    return module is not None and isinstance(made, module.Trainer)


def as_with_a_gpu(make: Callable[[], T]) -> T:
    """Call the user's function on a machine without a GPU, as if there was one.

    Without a GPU, TrainingArguments would reject bf16. A Trainer moves its model, which torch
    rejects for a model on the meta device.
    """
    with replaced(nn.Module, to=_moved):
        try:
            return make()
        except ValueError as error:
            if "use_cpu" not in str(error) or ARGUMENTS not in sys.modules:
                raise
        with replaced(sys.modules[ARGUMENTS], is_torch_bf16_gpu_available=lambda: True):
            return make()


_MOVE = nn.Module.to


def _moved(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Move a module as `Module.to` does, but leave a module of the meta device there."""
    if any(t.device.type != "meta" for t in (*module.parameters(), *module.buffers())):
        return _MOVE(module, *args, **kwargs)
    parse: Any = torch._C._nn._parse_to
    dtype = parse(*args, **kwargs)[1]
    return module if dtype is None else _MOVE(module, dtype)


def trainer_task(name: str, trainer: Any) -> Task:
    """Return the task of a Hugging Face Trainer.

    Args:
        name: Name of the task.
        trainer: The Trainer.

    Raises:
        TrainpaceError: If its optimizer cannot be created here.
    """
    kind = type(trainer).__name__
    if trainer.train_dataset is None:
        raise TrainpaceError(f"the {kind} of {name} has no train_dataset.")
    samples = samples_of(trainer.get_train_dataloader(), None, name)
    samples = samples._replace(batch_size=trainer.args.per_device_train_batch_size)
    settings = _settings(
        trainer.args, recomputes=getattr(trainer.model, "is_gradient_checkpointing", False)
    )
    in_bf16 = _is_in_bf16(trainer.model)
    autocast = in_bf16 and settings.get("precision") == "amp_bf16"
    if in_bf16:
        settings["precision"] = "bf16"
        for parameter in trainer.model.parameters():
            if parameter.dtype == torch.float32:
                # adapters, and norms that were cast to fp32 for training with adapters
                parameter.keeps_dtype = True
    said = ", ".join(f"{word} {value}" for word, value in settings.items())
    _counts_no_metrics(trainer.accelerator)

    def loss(model: Any, batch: Any) -> Any:
        return trainer.compute_loss(model, dict(batch))

    note = (
        f"From the {kind}'s arguments, unless the command overrides them: {said}, optim"
        f" {_word(trainer.args.optim)}."
    )
    made = _optimizer(trainer, kind)
    if isinstance(made, str):
        settings["optimizer"] = made
    optimizer = None if isinstance(made, str) else made
    task = Task(name, trainer.model, forward, loss, samples.batch, optimizer, "", autocast=autocast)
    return with_samples(task._replace(settings=settings, notes=(note,)), samples, name)


def _is_in_bf16(model: torch.nn.Module) -> bool:
    """Return True if most of a model is in bf16. With bf16=True it then runs under autocast."""
    numbers = [(p.numel(), p.dtype) for p in model.parameters()]
    return 2 * sum(n for n, dtype in numbers if dtype == torch.bfloat16) > sum(
        n for n, _ in numbers
    )


def _settings(arguments: Any, recomputes: bool) -> dict[str, Any]:
    """Return fields of `Execution` from TrainingArguments.

    Args:
        arguments: The TrainingArguments.
        recomputes: True if the model already recomputes its activations.
    """
    mixed = "amp_bf16" if arguments.bf16 else "amp_fp16" if arguments.fp16 else None
    settings: dict[str, Any] = {
        "micro_batch": arguments.per_device_train_batch_size,
        "accumulation": arguments.gradient_accumulation_steps,
    }
    if mixed is not None:
        settings["precision"] = mixed
    if arguments.gradient_checkpointing and not recomputes:
        settings["activation_checkpointing"] = "full"
    if arguments.max_grad_norm:
        settings["clip_gradients"] = True
    if arguments.torch_compile:
        settings["compile"] = True
    return settings


def _optimizer(trainer: Any, kind: str) -> torch.optim.Optimizer | str:
    """Return the Trainer's optimizer, or its name if its library is not installed."""
    word = _word(trainer.args.optim)
    try:
        made = trainer.optimizer or trainer.create_optimizer()
    except (ImportError, ValueError, RuntimeError) as error:
        with contextlib.suppress(UnknownName):
            return find_optimizer(word.replace("_bnb", ""))[0]
        reason = message_of(error).rstrip(".")
        raise TrainpaceError(
            f"the optimizer {word} of the {kind} cannot be made here: {reason}.",
            "Change `optim` in its arguments, or install what it needs.",
        ) from None
    made = getattr(made, "optimizer", made)  # accelerate wraps the optimizer
    if not isinstance(made, torch.optim.Optimizer):
        raise TrainpaceError(
            f"the {kind} has a {type(made).__name__} as optimizer.", "Use a torch optimizer."
        )
    return made


def _counts_no_metrics(accelerator: Any) -> None:
    """Let the accelerator gather ones as metrics, since a traced batch has no values.

    TRL's trainers read the gathered metrics in `compute_loss`.
    """
    gather = accelerator.gather_for_metrics

    def gathered(values: Any, *args: Any, **kwargs: Any) -> Any:
        if any(tensor.device.type == "meta" for tensor in tensors_in(values)):
            return torch.ones((), device="cpu")
        return gather(values, *args, **kwargs)

    accelerator.gather_for_metrics = gathered


def _word(value: Any) -> str:
    return str(getattr(value, "value", value))


TASK = (
    "FILE.py:FUNCTION must return (model, loss, optimizer, dataset), a dict of these (with `step`"
    " for a step of your own), a Trainer, or a LightningModule and its data"
)


class Parts(NamedTuple):
    """Parts of a training. The user may return them as a dict with the same names.

    Attributes:
        model: A model. With `step`, also a list or dict of models.
        loss: Function of (output, target). None if the model returns its loss.
        optimizer: An optimizer. With `step`, also a list or dict of optimizers.
        dataset: A dataset, DataLoader or stream of samples.
        step: Function of a batch that runs forward, backward and the optimizers itself.
        collate: Function that makes a batch from a list of samples.
    """

    model: Any = None
    loss: Any = None
    optimizer: Any = None
    dataset: Any = None
    step: Any = None
    collate: Any = None


def task_from_file(path: Path, function: str) -> Task:
    """Run a function of the user's file, and return the task that it describes.

    Args:
        path: The Python file.
        function: Name of the function, which takes no arguments.

    Raises:
        TrainpaceError: If the function fails, or returns something that is not a task.
    """
    if not function:
        raise TrainpaceError(f"name the function: {path}:FUNCTION.", f"{TASK}.")
    name, where = f"{path.name}:{function}", f"{path}:{function}"
    returned = _returned(path, function)
    with torch.device(
        "cpu"
    ):  # the function may have run under the meta device, its loader does not
        if is_trainer(returned):
            return trainer_task(name, returned)
        if (data := lightning_data(returned)) is not None:
            return lightning_task(name, *data, where)
        parts = _parts(returned, where)
        make_task = _plain_task if parts.step is None else _whole_step_task
        return make_task(name, parts, where)


def _returned(path: Path, function: str) -> Any:
    task_function = load_name(path, function, "function")
    if not callable(task_function) or isinstance(task_function, nn.Module):
        return task_function
    try:
        return as_with_a_gpu(task_function)
    except SystemExit as error:
        raise TrainpaceError(
            f"{path}:{function} ended its process ({error}), like a program that reads its command"
            " line.",
            f"{TASK}, and must take no arguments. To time a whole program: trainpace watch --"
            f" python {path.name}",
        ) from None


def _parts(returned: Any, where: str) -> Parts:
    if isinstance(returned, Mapping) and not isinstance(returned, nn.Module):
        for key in returned:
            if key not in Parts._fields:
                raise UnknownName(
                    f"part of the task that {where} returns:",
                    str(key),
                    Parts._fields,
                    f"All: {', '.join(Parts._fields)}.",
                )
        return Parts(**returned)
    if isinstance(returned, tuple | list) and len(returned) == 4:
        return Parts(*returned)
    what = (
        f"{len(returned)} things" if isinstance(returned, tuple | list) else type(returned).__name__
    )
    raise TrainpaceError(f"{where} returned {what}.", f"{TASK}.")


def _plain_task(name: str, parts: Parts, where: str) -> Task:
    """Return a task of one model and one optimizer, without a whole step."""
    _check_one(parts.model, nn.Module, "model", "trains them", where)
    if parts.loss is not None and not callable(parts.loss):
        raise TrainpaceError(
            f"{where} returned a {type(parts.loss).__name__} as loss.",
            "Return a callable of (output, target), or None if the model computes its own loss.",
        )
    if parts.optimizer is not None:
        _check_one(parts.optimizer, torch.optim.Optimizer, "optimizer", "steps them", where)
    samples = samples_of(parts.dataset, parts.collate, where)
    first = samples.dataset[0]
    is_short = isinstance(first, tuple | list) and len(first) < 1 + (parts.loss is not None)
    if is_short or isinstance(first, int | float | str | bytes):
        raise TrainpaceError(
            f"a sample of {where} is a {type(first).__name__}.",
            "Return (input, ..., target), a dict of the model's arguments, or an object with .y.",
        )
    loss = own_loss if parts.loss is None else loss_by(parts.loss)
    loss_name = None if parts.loss is None else name_of_loss(parts.loss)
    task = Task(name, parts.model, forward, loss, samples.batch, parts.optimizer, "")
    return with_samples(task._replace(loss_name=loss_name), samples, where)


def _check_one(value: Any, kind: type, word: str, what: str, where: str) -> None:
    if isinstance(value, kind):
        return
    is_many = isinstance(value, Mapping | list | tuple)
    hint = (
        f"Several {word}s need `step`, a function of a batch that {what}."
        if is_many
        else f"{TASK}."
    )
    raise TrainpaceError(f"{where} returned a {type(value).__name__} as {word}.", hint)


def _whole_step_task(name: str, parts: Parts, where: str) -> Task:
    if not callable(parts.step):
        raise TrainpaceError(
            f"{where} returned a {type(parts.step).__name__} as step.",
            "Return a function of a batch.",
        )
    if parts.loss is not None:
        raise TrainpaceError(
            f"{where} returned both a loss and a step.",
            "A step of your own computes its losses itself.",
        )
    models = _by_name(parts.model, nn.Module, "model", where)
    optimizers = _by_name(parts.optimizer, torch.optim.Optimizer, "optimizer", where)
    model = next(iter(models.values())) if len(models) == 1 else nn.ModuleDict(models)
    step = WholeStep(parts.step, tuple(optimizers.values()))
    samples = samples_of(parts.dataset, parts.collate, where)
    return with_samples(Task.of_step(name, model, step, samples.batch), samples, where)


def _by_name(given: Any, kind: type, word: str, where: str) -> dict[str, Any]:
    """Return {name: object} for one or several objects of a class.

    Args:
        given: An object, or a list or dict of objects.
        kind: Class that every object must have.
        word: Word for such an object, for errors.
        where: Name of the user's function, for errors.
    """
    if isinstance(given, kind):
        return {word: given}
    named: dict[str, Any] = {}
    if isinstance(given, Mapping):
        named = dict(given)
    elif isinstance(given, Sequence):
        named = {f"{word}_{i}": one for i, one in enumerate(given)}
    wrong = next((type(one).__name__ for one in named.values() if not isinstance(one, kind)), None)
    if wrong is not None or not named:
        raise TrainpaceError(
            f"{where} returned a {wrong or type(given).__name__} as {word}.",
            f"With a step, `{word}` is one {kind.__name__}, or a list or dict of all that the step"
            " uses, frozen ones too.",
        )
    return named
