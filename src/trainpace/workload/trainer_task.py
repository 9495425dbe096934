"""A task from a Trainer of Hugging Face's transformers, or from one made after it, such as TRL's SFTTrainer.

Its loss is the Trainer's own `compute_loss` on the batches of its own loader; its arguments say how a step is executed.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from trainpace.core.errors import TrainpaceError, UnknownName
from trainpace.core.execution import find_optimizer
from trainpace.workload.batches import forward
from trainpace.workload.task import Task
from trainpace.workload.tensors import tensors_in
from trainpace.workload.user_data import samples_of, with_samples

T = TypeVar("T")
ARGUMENTS = "transformers.training_args"


def is_trainer(made: Any) -> bool:
    module = sys.modules.get("transformers.trainer")
    return module is not None and isinstance(made, module.Trainer)


def as_with_a_gpu(make: Callable[[], T]) -> T:
    """What `make` returns, also where it asks for bf16, which TrainingArguments refuse on a machine without a GPU."""
    try:
        return make()
    except ValueError as error:
        if "use_cpu" not in str(error) or ARGUMENTS not in sys.modules:
            raise
    with _bf16_is_there(sys.modules[ARGUMENTS]):
        return make()


@contextlib.contextmanager
def _bf16_is_there(arguments: Any) -> Iterator[None]:
    known = arguments.is_torch_bf16_gpu_available
    arguments.is_torch_bf16_gpu_available = lambda: True
    try:
        yield
    finally:
        arguments.is_torch_bf16_gpu_available = known


def trainer_task(name: str, trainer: Any) -> Task:
    """Raises TrainpaceError where its optimizer cannot be made here."""
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
                parameter.keeps_dtype = (
                    True  # adapters, and norms of a model that was prepared for them
                )
    said = ", ".join(f"{word} {value}" for word, value in settings.items())
    _counts_no_metrics(trainer.accelerator)

    def loss(model: Any, batch: Any) -> Any:
        return trainer.compute_loss(model, dict(batch))

    said = (
        f"Read from the {kind}'s arguments, unless the command says otherwise: {said}, optim"
        f" {_word(trainer.args.optim)}."
    )
    made = _optimizer(trainer, kind)
    if isinstance(made, str):
        settings["optimizer"] = made
    optimizer = None if isinstance(made, str) else made
    task = Task(name, trainer.model, forward, loss, samples.batch, optimizer, "", autocast=autocast)
    return with_samples(task._replace(settings=settings, notes=(said,)), samples, name)


def _is_in_bf16(model: torch.nn.Module) -> bool:
    """Whether most of a model's numbers were loaded in bfloat16, so that a Trainer's bf16=True is autocast around them."""
    numbers = [(p.numel(), p.dtype) for p in model.parameters()]
    return 2 * sum(n for n, dtype in numbers if dtype == torch.bfloat16) > sum(
        n for n, _ in numbers
    )


def _settings(arguments: Any, recomputes: bool) -> dict[str, Any]:
    """What the arguments say of an Execution, by the names of its fields. `recomputes`: the model does so already, and is traced
    with it."""
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
    """The Trainer's own; its name, as `make_optimizer` knows it, where its library is not installed here."""
    word = _word(trainer.args.optim)
    try:
        made = trainer.optimizer or trainer.create_optimizer()
    except (ImportError, ValueError, RuntimeError) as error:
        with contextlib.suppress(UnknownName):
            return find_optimizer(word.replace("_bnb", ""))[0]
        reason = str(error).splitlines()[0].rstrip(".")
        raise TrainpaceError(
            f"the optimizer {word} of the {kind} cannot be made here: {reason}.",
            "Give its arguments another `optim`, or install what it needs.",
        ) from None
    made = getattr(made, "optimizer", made)  # inside of accelerate's
    if not isinstance(made, torch.optim.Optimizer):
        raise TrainpaceError(
            f"the {kind} has a {type(made).__name__} as optimizer.", "It should be one of torch's."
        )
    return made


def _counts_no_metrics(accelerator: Any) -> None:
    """Let metrics of a traced batch, which has no values, be those of a one: TRL's trainers look at them beside the loss."""
    gather = accelerator.gather_for_metrics

    def gathered(values: Any, *args: Any, **kwargs: Any) -> Any:
        if any(tensor.device.type == "meta" for tensor in tensors_in(values)):
            return torch.ones((), device="cpu")
        return gather(values, *args, **kwargs)

    accelerator.gather_for_metrics = gathered


def _word(value: Any) -> str:
    return str(getattr(value, "value", value))
