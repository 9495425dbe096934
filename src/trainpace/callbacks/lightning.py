"""Remaining time for the Lightning Trainer.

    trainer = L.Trainer(callbacks=[TimeLeft()])

The Trainer's progress bar shows the remaining time of the epoch instead of the whole training, and
excludes validation.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback
else:
    try:
        from lightning.pytorch.callbacks import Callback
    except ImportError:
        from pytorch_lightning.callbacks import Callback  # The same package under its other name.

from trainpace.callbacks.time_left import (
    FitState,
    Remaining,
    Reporter,
    Work,
    harmless,
    in_training,
    remaining_counts,
)
from trainpace.callbacks.time_left import TimeLeft as Left
from trainpace.configs import LIGHTNING_PRECISIONS
from trainpace.core.execution import Execution


class TimeLeft(Reporter, Callback):
    """Reports the remaining time with a 90% interval and stores the run in the journal at its end.

    The run is also stored if it is interrupted. Counts are batches. For the arguments, see
    `Reporter`.
    """

    counted = "batch"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._trainer: Any = None
        self._begun_step = self._begun_batch = 0

    @harmless
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._trainer = trainer
        if self._name is None:
            self._name = type(pl_module).__name__
        progress = trainer.fit_loop.epoch_loop.batch_progress
        self._begun_step, self._begun_batch = trainer.global_step, progress.total.ready
        self._begin(trainer.is_global_zero, self._begun_batch)

    @in_training
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._settle("epoch")

    on_train_epoch_end = on_train_epoch_start

    @in_training
    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Charge the time since the last mark to a step, a checkpoint, or the start of an epoch."""
        starts_epoch = "epoch" in self._watch.pending
        self._settle("epoch" if starts_epoch else "step")
        if starts_epoch:
            self._watch.done("epoch")

    @in_training
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._done(trainer.fit_loop.epoch_loop.batch_progress.total.ready, self.time_left)

    @in_training
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._settle("step")

    @in_training
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._watch.mark("evaluation")
        self._watch.done("evaluation")

    @in_training
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Charge the time until the next hook to the checkpoint that is about to be written."""
        if "checkpoint" not in self._watch.pending:
            self._settle("step")
            self._watch.pending["checkpoint"] = 0.0

    @in_training
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close(type(exception).__name__)

    @in_training
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._close("")

    def time_left(self) -> Left | None:
        """Return the remaining time. None before the first steps, or if the end is unknown."""
        counts = self._counts() if self._running else None
        if counts is None:
            return None
        self._total = counts.total_batches
        guess_s = self._guess_evaluation_s(self._val_batches(), 1)
        checkpoints = self._checkpoints_left(counts)
        return self._left(counts.batches, counts.evaluations, guess_s, checkpoints, counts.epochs)

    def _settle(self, work: Work) -> None:
        """Charge the time since the last mark to `work`, or to a checkpoint in progress."""
        watch = self._watch
        if "checkpoint" in watch.pending:
            watch.mark("checkpoint")
            watch.done("checkpoint")
            watch.pending.setdefault(work, 0.0)
        else:
            watch.mark(work)

    def _counts(self) -> Remaining | None:
        trainer = self._trainer
        loop = trainer.fit_loop.epoch_loop
        batches_done = max(1, loop.batch_progress.total.ready - self._begun_batch)
        steps_done = trainer.global_step - self._begun_step
        automatic = trainer.lightning_module.automatic_optimization
        accumulation = int(trainer.accumulate_grad_batches) if automatic else 1
        validated = trainer.enable_validation and self._val_batches() > 0
        every = trainer.val_check_batch
        return remaining_counts(
            FitState(
                epoch=trainer.current_epoch,
                batch=loop.batch_progress.current.ready,
                total_batch=loop.batch_progress.total.ready,
                epoch_batches=_finite(trainer.num_training_batches),
                max_epochs=None if trainer.max_epochs in (None, -1) else int(trainer.max_epochs),
                global_step=trainer.global_step,
                max_steps=None if trainer.max_steps == -1 else int(trainer.max_steps),
                accumulation=accumulation,
                steps_per_batch=1.0 if automatic or not steps_done else steps_done / batches_done,
                val_every_batches=_finite(every) if validated else 0,
                val_every_epochs=trainer.check_val_every_n_epoch,
            )
        )

    def _val_batches(self) -> float:
        return sum(count for count in self._trainer.num_val_batches or [0] if count != float("inf"))

    def _checkpoints_left(self, counts: Remaining) -> float:
        """Return the number of checkpoints to come, from the settings of each ModelCheckpoint.

        The actual number may differ, because it can depend on a metric.
        """
        left, trainer = 0.0, self._trainer
        for callback in trainer.checkpoint_callbacks:
            steps = getattr(callback, "_every_n_train_steps", 0)
            epochs = getattr(callback, "_every_n_epochs", 0)
            if steps:
                left += counts.batches / trainer.accumulate_grad_batches / steps
            elif epochs:
                at_epoch_ends = callback._should_save_on_train_epoch_end(trainer)
                validates = counts.evaluations and not at_epoch_ends
                left += (counts.evaluations if validates else counts.epochs + 1) / epochs
        return left

    def _close(self, ended: str) -> None:
        trainer = self._trainer
        if "checkpoint" in self._watch.pending:
            self._settle("step")
        counts = self._counts()
        self._total = counts.total_batches if counts else self._step
        logged = trainer.logged_metrics.items()
        self._losses = [
            float(v) for k, v in logged if k in ("loss", "train_loss") and v.numel() == 1
        ]
        self._end(
            _execution_of(trainer),
            trainer.strategy.root_device.type,
            ended,
            micro_steps=int(trainer.accumulate_grad_batches),
            engine=Callback.__module__.partition(".")[0].replace("_", "-"),
        )


def _execution_of(trainer: Any) -> Execution:
    loader = trainer.train_dataloader
    sampler = getattr(loader, "batch_sampler", None)
    size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
    fields: dict[str, Any] = {
        "micro_batch": size if isinstance(size, int) else 1,
        "accumulation": int(trainer.accumulate_grad_batches),
        "nnodes": trainer.num_nodes,
        "nproc_per_node": max(1, trainer.world_size // max(1, trainer.num_nodes)),
        "precision": LIGHTNING_PRECISIONS.get(str(trainer.precision), "fp32"),
        "optimizer": "unknown",
    }
    if trainer.optimizers:
        fields["optimizer"] = type(trainer.optimizers[0]).__name__.lower()
    return Execution(**fields)


def _finite(count: float | None) -> int | None:
    return None if count is None or count == float("inf") else int(count)
