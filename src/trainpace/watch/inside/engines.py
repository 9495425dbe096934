"""Hooks for packages that a script may import.

They cover collectives, DDP's own counters, Lightning, transformers, DeepSpeed, loggers and
safetensors. Each hook is installed when the script imports the package. Names that a version of the
package lacks are skipped.
"""

import contextlib
import sys
import weakref
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from trainpace.watch.inside import files, loaders, ranks, trials
from trainpace.watch.inside.event_log import (
    BACKWARD,
    CHECKPOINT,
    COMMUNICATION,
    EVALUATION,
    LOGGING,
    OTHER,
)
from trainpace.watch.inside.recorder import Recorder, around

REDUCTIONS = (
    "all_reduce",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "_reduce_scatter_base",
    "reduce_scatter",
    "all_gather_single",
    "all_gather_into_tensor",
    "_all_gather_base",
    "all_gather",
    "all_to_all_single",
)
"""Collectives that the trial without synchronization skips.

torch 2.13 renamed `reduce_scatter_tensor` and `all_gather_into_tensor` to names in `_single`.
"""
OTHER_COLLECTIVES = (
    "broadcast",
    "barrier",
    "all_to_all",
    "gather",
    "scatter",
    "reduce",
    "send",
    "recv",
    "isend",
    "irecv",
    "batch_isend_irecv",
    "all_reduce_coalesced",
    "all_gather_coalesced",
    "all_gather_object",
    "broadcast_object_list",
    "monitored_barrier",
)

_ddp: weakref.WeakSet[Any] = weakref.WeakSet()


def _collectives(module: ModuleType, recorder: Recorder) -> None:
    public: Any = sys.modules.get("torch.distributed")
    for name in (*REDUCTIONS, *OTHER_COLLECTIVES):
        plain = getattr(module, name, None)
        around(module, name, _collective(recorder, name))
        if name in REDUCTIONS:
            around(module, name, trials.skips_collective(recorder))
        if plain is not None and getattr(public, name, None) is plain:
            setattr(public, name, getattr(module, name))
    work = getattr(module, "Work", None)
    around(work, "wait", partial(recorder.charged, COMMUNICATION, "wait"))


def _collective(recorder: Recorder, name: str) -> Callable[..., Any]:
    def act(plain: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        named = name
        with contextlib.suppress(Exception):  # The kind of group is unknown.
            named = ranks.collective_name(name, args, kwargs)
        return recorder.charged(COMMUNICATION, named, plain, *args, **kwargs)

    return act


def _data_parallel(module: Any, recorder: Recorder) -> None:
    def remember(begin: Callable[..., None], model: Any, /, *args: Any, **kwargs: Any) -> None:
        begin(model, *args, **kwargs)
        _ddp.add(model)
        recorder.synchronizes = lambda: any(m.require_backward_grad_sync for m in tuple(_ddp))

    kind = module.DistributedDataParallel
    around(kind, "forward", trials.unsynchronised(recorder))
    around(kind, "__init__", remember)


def note_ddp(recorder: Recorder) -> None:
    """Log DDP's counters of its sampled steps in ns: backward, communication, and their overlap."""
    for model in list(_ddp):
        try:
            data = model._get_ddp_logging_data()
        except Exception:
            continue
        wanted = (
            "avg_forward_compute_time",
            "avg_backward_compute_time",
            "avg_backward_comm_time",
            "avg_backward_compute_comm_overlap_time",
            "bucket_sizes",
            "total_parameter_size_bytes",
        )
        if "avg_backward_comm_time" not in data:  # It is too early, or the ranks have diverged.
            continue
        recorder.log.note(ddp={key: data[key] for key in wanted if key in data})


def _lightning(module: Any, recorder: Recorder) -> None:
    files.checkpoints(recorder, module.Trainer, "save_checkpoint", "filepath")


def _transformers(module: Any, recorder: Recorder) -> None:
    def folder(trainer: Any, output_dir: str | None = None, *_: Any, **__: Any) -> Any:
        return output_dir or trainer.args.output_dir

    trainer = module.Trainer
    around(trainer, "evaluate", partial(recorder.charged, EVALUATION, "evaluate"))
    around(trainer, "log", partial(recorder.charged, LOGGING, "log"))
    around(trainer, "_save_checkpoint", _saving(recorder, lambda self, *_, **__: folder(self)))
    around(trainer, "save_model", _saving(recorder, folder))


def _saving(recorder: Recorder, folder: Callable[..., Any]) -> Callable[..., Any]:
    """Charge a method that saves checkpoints, and skip it under trials.

    transformers names the folder itself and removes older folders, so nothing may be written there.
    Under `trainpace look`, the method is skipped if the folder holds checkpoints of an earlier run.

    Args:
        recorder: The recorder of this process.
        folder: Returns the folder, given the arguments of the method.
    """

    def act(save: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        skips = recorder.trials is not None
        if recorder.earlier is not None:
            with contextlib.suppress(Exception):
                skips = recorder.earlier.has_some_in(folder(*args, **kwargs))
        if not skips:
            return recorder.charged(CHECKPOINT, "checkpoint", save, *args, **kwargs)
        recorder.log.note(skipped="a checkpoint of transformers")
        return None

    return act


def _safetensors(module: ModuleType, recorder: Recorder) -> None:
    """Hook into functions whose files compiled code writes. Audit hooks do not see such files."""
    files.checkpoints(recorder, module, "save_file", "filename")
    around(module, "save_model", partial(recorder.charged, CHECKPOINT, "save_model"))


def _deepspeed(module: Any, recorder: Recorder) -> None:
    def begin(init: Callable[..., None], /, *args: Any, **kwargs: Any) -> None:
        # DeepSpeed's optimizer steps once per parameter group. ZeRO's also steps to create its
        # states.
        recorder.step_is_the_engines = True
        init(*args, **kwargs)

    def backward(plain: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        before = recorder.micro_steps
        result = recorder.charged(BACKWARD, "engine.backward", plain, *args, **kwargs)
        # torch's own backward may be called several times inside.
        recorder.micro_steps = before + 1
        return result

    def step(plain: Callable[..., Any], model: Any, /, *args: Any, **kwargs: Any) -> Any:
        last = model.is_gradient_accumulation_boundary()
        result = recorder.charged(OTHER, "engine.step", plain, model, *args, **kwargs)
        if last:
            recorder.ends_step()
        return result

    engine = module.DeepSpeedEngine
    around(engine, "__init__", begin)
    around(engine, "backward", backward)
    if recorder.losses is not None:
        around(engine, "backward", recorder.losses.engine_backward)
    around(engine, "step", step)
    folder = _saving(recorder, lambda self, save_dir, *_, **__: save_dir)
    around(engine, "save_checkpoint", folder)


def _writer(module: Any, recorder: Recorder) -> None:
    for name in ("add_scalar", "add_scalars", "add_histogram", "add_image", "add_text", "flush"):
        around(module.SummaryWriter, name, trials.charges_output(recorder, name))


def _functions(
    part: int, *names: str, of: str | None = None
) -> Callable[[ModuleType, Recorder], None]:
    def install(module: ModuleType, recorder: Recorder) -> None:
        owner = getattr(module, of, None) if of else module
        for name in names:
            around(owner, name, partial(recorder.charged, part, name))

    return install


def _lightning_evaluation(module: Any, recorder: Recorder) -> None:
    around(module._EvaluationLoop, "run", partial(recorder.charged, EVALUATION, "evaluation"))


def _lightning_epoch(module: Any, recorder: Recorder) -> None:
    """Log the batches of an epoch, which `limit_train_batches` may shorten."""

    def begin(run: Callable[..., Any], loop: Any, /, *args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(Exception):  # An endless loader has infinitely many batches.
            if not recorder.steps:
                recorder.log.note(epoch_batches=int(loop.trainer.num_training_batches))
        return run(loop, *args, **kwargs)

    around(module._TrainingEpochLoop, "run", begin)


HOOKS: dict[str, Callable[..., None]] = {
    "torch.optim.lr_scheduler": trials.steps_beyond,
    "torch.utils.data.dataloader": loaders.loader,
    "torch.utils.data._utils.fetch": loaders.fetchers,
    "torchdata.stateful_dataloader.stateful_dataloader": loaders.stateful_loader,
    "ray.data.iterator": loaders.ray_data,
    "torch.distributed.distributed_c10d": _collectives,
    "torch.nn.parallel.distributed": _data_parallel,
    "torch.distributed.checkpoint.state_dict_saver": _functions(CHECKPOINT, "save", "async_save"),
    "torch.utils.tensorboard.writer": _writer,
    "tensorboardX.writer": _writer,
    "safetensors.torch": _safetensors,
    "lightning.pytorch.trainer.trainer": _lightning,
    "pytorch_lightning.trainer.trainer": _lightning,
    "lightning.pytorch.loops.evaluation_loop": _lightning_evaluation,
    "pytorch_lightning.loops.evaluation_loop": _lightning_evaluation,
    "lightning.pytorch.loops.training_epoch_loop": _lightning_epoch,
    "pytorch_lightning.loops.training_epoch_loop": _lightning_epoch,
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector": _functions(
        LOGGING, "log_metrics", "update_train_step_metrics", of="_LoggerConnector"
    ),
    "transformers.trainer": _transformers,
    "deepspeed.runtime.engine": _deepspeed,
    "wandb.sdk.wandb_run": _functions(LOGGING, "log", of="Run"),
    "mlflow.tracking.fluent": _functions(LOGGING, "log_metric", "log_metrics", "log_artifact"),
    "tqdm.std": _functions(LOGGING, "refresh", "display", of="tqdm"),
}
