"""Hooks for packages that a script may import.

They cover collectives, DDP's own counters, Lightning, transformers, DeepSpeed, loggers and
safetensors. Each hook is installed when the script imports the package. Names that a version of the
package lacks are skipped.
"""

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable
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
from trainpace.watch.inside.recorder import Recorder

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


def _patch(owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    function = getattr(owner, name, None)
    if function is not None:
        setattr(owner, name, change(function))


def _charged(recorder: Recorder, part: int, name: str) -> Callable[[Any], Any]:
    return lambda function: recorder.wraps(function, part, name)


def _collectives(module: ModuleType, recorder: Recorder) -> None:
    public: Any = sys.modules.get("torch.distributed")
    for name in (*REDUCTIONS, *OTHER_COLLECTIVES):
        plain = getattr(module, name, None)
        if plain is None:
            continue
        charged = _collective(recorder, plain, name)
        watched = trials.collective(recorder, charged) if name in REDUCTIONS else charged
        setattr(module, name, watched)
        if getattr(public, name, None) is plain:
            setattr(public, name, watched)
    _patch(getattr(module, "Work", None), "wait", _charged(recorder, COMMUNICATION, "wait"))


def _collective(recorder: Recorder, plain: Callable[..., Any], name: str) -> Callable[..., Any]:
    charged: dict[str, Callable[..., Any]] = {}

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        named = name
        with contextlib.suppress(Exception):  # The kind of group is unknown.
            named = ranks.collective_name(name, args, kwargs)
        if named not in charged:
            charged[named] = recorder.wraps(plain, COMMUNICATION, named)
        return charged[named](*args, **kwargs)

    return call


def _data_parallel(module: Any, recorder: Recorder) -> None:
    kind = module.DistributedDataParallel
    kind.forward = trials.unsynchronised(recorder, kind.forward)

    def remembered(begin: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(begin)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            begin(self, *args, **kwargs)
            _ddp.add(self)
            recorder.synchronizes = lambda: any(m.require_backward_grad_sync for m in tuple(_ddp))

        return init

    _patch(kind, "__init__", remembered)


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
        recorder.log.note({"ddp": {key: data[key] for key in wanted if key in data}})


def _saved_beside(recorder: Recorder, name: str, file: str) -> Callable[[Any], Any]:
    return lambda save: files.checkpoints(recorder, recorder.wraps(save, CHECKPOINT, name), file)


def _lightning(module: ModuleType, recorder: Recorder) -> None:
    _patch(
        getattr(module, "Trainer", None),
        "save_checkpoint",
        _saved_beside(recorder, "save_checkpoint", "filepath"),
    )


def _lightning_evaluation(module: ModuleType, recorder: Recorder) -> None:
    _patch(
        getattr(module, "_EvaluationLoop", None),
        "run",
        _charged(recorder, EVALUATION, "evaluation"),
    )


def _transformers(module: ModuleType, recorder: Recorder) -> None:
    trainer = getattr(module, "Trainer", None)
    _patch(trainer, "evaluate", _charged(recorder, EVALUATION, "evaluate"))
    _patch(
        trainer,
        "_save_checkpoint",
        _saving(recorder, "checkpoint", lambda self, *_, **__: self.args.output_dir),
    )
    _patch(trainer, "save_model", _saving(recorder, "save_model", _folder_of_save_model))
    _patch(trainer, "log", _charged(recorder, LOGGING, "log"))


def _folder_of_save_model(trainer: Any, output_dir: str | None = None, *_: Any, **__: Any) -> Any:
    return output_dir or trainer.args.output_dir


def _saving(recorder: Recorder, name: str, folder: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a wrapper for a method that saves checkpoints. Under trials, the method is skipped.

    transformers names the folder itself and removes older folders, so nothing may be written there.
    Under `trainpace look`, the method is skipped if the folder holds checkpoints of an earlier run.

    Args:
        recorder: The recorder of this process.
        name: Name of the span.
        folder: Returns the folder, given the arguments of the method.
    """

    def change(save: Callable[..., Any]) -> Callable[..., Any]:
        charged = recorder.wraps(save, CHECKPOINT, name)

        @functools.wraps(save)
        def call(*args: Any, **kwargs: Any) -> Any:
            skips = recorder.trials is not None
            if recorder.earlier is not None:
                with contextlib.suppress(Exception):
                    skips = recorder.earlier.has_some_in(folder(*args, **kwargs))
            if not skips:
                return charged(*args, **kwargs)
            recorder.log.note({"skipped": "a checkpoint of transformers"})
            return None

        return call

    return change


def _safetensors(module: ModuleType, recorder: Recorder) -> None:
    """Hook into functions whose files compiled code writes. Audit hooks do not see such files."""
    _patch(module, "save_file", _saved_beside(recorder, "save_file", "filename"))
    _patch(module, "save_model", _charged(recorder, CHECKPOINT, "save_model"))


def _deepspeed(module: ModuleType, recorder: Recorder) -> None:
    engine = getattr(module, "DeepSpeedEngine", None)
    if engine is None:
        return
    _patch(
        engine,
        "backward",
        lambda f: _micro_step(recorder, recorder.wraps(f, BACKWARD, "engine.backward")),
    )
    if recorder.losses is not None:
        _patch(engine, "backward", lambda f: recorder.losses.within(f, engine=True))
    _patch(
        engine,
        "save_checkpoint",
        _saving(recorder, "checkpoint", lambda self, save_dir, *_, **__: save_dir),
    )

    def ending(step: Callable[..., Any]) -> Callable[..., Any]:
        charged = recorder.wraps(step, OTHER, "engine.step")

        @functools.wraps(step)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            last = self.is_gradient_accumulation_boundary()
            result = charged(self, *args, **kwargs)
            if last:
                recorder.ends_step()
            return result

        return call

    def beginning(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def call(*args: Any, **kwargs: Any) -> None:
            # DeepSpeed's optimizer steps once per parameter group. ZeRO's also steps to create its
            # states.
            recorder.step_is_the_engines = True
            init(*args, **kwargs)

        return call

    _patch(engine, "__init__", beginning)
    _patch(engine, "step", ending)


def _micro_step(recorder: Recorder, backward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(backward)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = recorder.micro_steps
        result = backward(*args, **kwargs)
        # torch's own backward may be called several times inside.
        recorder.micro_steps = before + 1
        return result

    return call


def _writer(module: ModuleType, recorder: Recorder) -> None:
    writer = getattr(module, "SummaryWriter", None)
    for name in ("add_scalar", "add_scalars", "add_histogram", "add_image", "add_text", "flush"):
        charged = _charged(recorder, LOGGING, name)
        _patch(writer, name, lambda f, charged=charged: trials.muted(recorder, charged(f)))  # type: ignore[misc]


def _functions(
    part: int, *names: str, of: str | None = None
) -> Callable[[ModuleType, Recorder], None]:
    def install(module: ModuleType, recorder: Recorder) -> None:
        owner = getattr(module, of, None) if of else module
        for name in names:
            _patch(owner, name, _charged(recorder, part, name))

    return install


HOOKS: dict[str, Callable[..., None]] = {
    "torch.optim.lr_scheduler": lambda module, recorder: trials.steps_beyond(
        module.OneCycleLR, recorder
    ),
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
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector": _functions(
        LOGGING, "log_metrics", "update_train_step_metrics", of="_LoggerConnector"
    ),
    "transformers.trainer": _transformers,
    "deepspeed.runtime.engine": _deepspeed,
    "wandb.sdk.wandb_run": _functions(LOGGING, "log", of="Run"),
    "mlflow.tracking.fluent": _functions(LOGGING, "log_metric", "log_metrics", "log_artifact"),
    "tqdm.std": _functions(LOGGING, "refresh", "display", of="tqdm"),
}
