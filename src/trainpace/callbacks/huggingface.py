"""Remaining time for the Hugging Face Trainer.

    trainer = Trainer(...)
    trainer.add_callback(TimeLeft(trainer))

The Trainer's progress bar extrapolates all elapsed time over the remaining steps. The elapsed time
includes skipped batches of a resumed run, slow first steps and the latest evaluation.

This callback reads the number of steps from `state.max_steps`, which accounts for gradient
accumulation, partial batches and resumed runs. It counts evaluations and checkpoints separately.
"""

import atexit
import math
import os
from typing import Any

from msgspec.structs import replace
from transformers import TrainerCallback

from trainpace.callbacks.time_left import Reporter, harmless, in_training, multiples_in
from trainpace.callbacks.time_left import TimeLeft as Left
from trainpace.configs import Reading, execution_of, put_training_arguments
from trainpace.core.execution import Checkpointing, Execution

_READ = (
    "per_device_train_batch_size gradient_accumulation_steps bf16 fp16 tf32 optim torch_compile"
).split()


class TimeLeft(Reporter, TrainerCallback):
    """Reports the remaining time with a 90% interval and stores the run in the journal at its end.

    The run is also stored if it is interrupted.

    Args:
        trainer: The Trainer. With it, the estimate includes evaluations before the first one has
            run.
        options: The arguments of `Reporter`.
    """

    def __init__(self, trainer: Any = None, **options: Any) -> None:
        super().__init__(**options)
        self._trainer = trainer
        self._args: Any = None
        self._state: Any = None
        self._resumed = False
        self._done_epochs: dict[str, int] = {}
        """Epoch of the latest evaluation ("eval") and of the latest checkpoint ("save")."""

    @harmless
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._args, self._state, self._resumed = args, state, state.global_step > 0
        self._total = state.max_steps
        self._done_epochs = dict.fromkeys(("eval", "save"), int(state.epoch or 0))
        if self._name is None:
            config = getattr(kwargs.get("model"), "config", None)
            self._name = getattr(config, "_name_or_path", "") or type(kwargs.get("model")).__name__
        self._begin(state.is_world_process_zero, state.global_step)
        # The Trainer has no hook for a run that ends by Ctrl-C or by an exception.
        atexit.unregister(self._interrupted)
        atexit.register(self._interrupted)

    @in_training
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Charge the time since the last mark to the next step, or to the start of an epoch."""
        watch = self._watch
        watch.done("evaluation")
        if "epoch" not in watch.pending:
            watch.mark("step")
            return
        watch.mark("epoch")
        if self._resumed:  # A resumed run skips batches once. That time is not charged.
            del watch.pending["epoch"]
            self._resumed = False
        watch.done("epoch")

    @in_training
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._done(state.global_step, lambda: self.time_left(control))

    @in_training
    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._watch.mark("epoch")

    on_epoch_end = on_epoch_begin

    @in_training
    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # `done` is called later, because the Trainer calls this hook once per evaluation dataset.
        self._watch.mark("evaluation")
        self._done_epochs["eval"] = round(state.epoch or 0)

    @in_training
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._watch.mark("checkpoint")
        self._watch.done("checkpoint")
        self._done_epochs["save"] = round(state.epoch or 0)

    @in_training
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if isinstance((logs or {}).get("loss"), int | float):
            self._losses.append(float(logs["loss"]))

    @harmless
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._close("")

    def time_left(self, control: Any = None) -> Left | None:
        """Return the remaining time, or None before the first steps.

        Args:
            control: The Trainer's control object. It says if an evaluation or a checkpoint is due
                now.
        """
        if not self._running:
            return None
        state, args = self._state, self._args
        epochs = max(0, math.ceil(state.num_train_epochs) - math.ceil((state.epoch or 0) - 1e-9))
        samples = args.train_batch_size * args.gradient_accumulation_steps
        evaluations = self._times_left("eval", control)
        checkpoints = self._times_left("save", control)
        guess_s = self._guess_evaluation_s(self._evaluation_samples(), samples)
        steps_left = max(0, state.max_steps - state.global_step)
        return self._left(steps_left, evaluations, guess_s, checkpoints, epochs)

    def _times_left(self, what: str, control: Any) -> int:
        """Return the number of remaining evaluations or checkpoints, with one due now included.

        Args:
            what: "eval" or "save".
            control: The Trainer's control object, or None.
        """
        args, state = self._args, self._state
        strategy = str(getattr(args, f"{what}_strategy", "no")).rpartition(".")[2].lower()
        asked = {"eval": "should_evaluate", "save": "should_save"}[what]
        due = int(bool(getattr(control, asked, False)))
        if strategy == "epoch":
            return max(0, math.ceil(state.num_train_epochs) - self._done_epochs[what])
        if strategy != "steps":
            return due
        every = int(getattr(state, f"{what}_steps", 0) or 0)
        after, last = state.global_step, state.max_steps
        # The Trainer always ends with an evaluation and a checkpoint.
        at_the_end = int(every > 0 and last % every != 0 and after < last)
        if what == "eval":
            after = max(after, math.ceil(args.eval_delay) - 1)
        return due + multiples_in(every, after, last) + at_the_end

    def _evaluation_samples(self) -> float | None:
        data: Any = getattr(self._trainer, "eval_dataset", None)
        sets = data.values() if isinstance(data, dict) else [data]
        try:
            return sum(len(one) for one in sets) / max(1, self._args.world_size)
        except TypeError:  # There is no dataset, or it is a stream without a length.
            return None

    @harmless
    def _interrupted(self) -> None:
        self._close("an interruption")

    def _close(self, ended: str) -> None:
        atexit.unregister(self._interrupted)
        if self._running:
            args = self._args
            self._end(
                _execution_of(args), args.device.type, ended, engine="transformers", seed=args.seed
            )


def _execution_of(args: Any) -> Execution:
    """Return the execution that a settings file with these arguments would describe."""
    data = args.to_dict()
    reading = Reading("TrainingArguments", "Hugging Face TrainingArguments")
    put_training_arguments(reading, {name: data[name] for name in _READ if name in data})
    read: dict[str, Any] = {setting.name: setting.value for setting in reading.done().settings}
    world = max(1, args.world_size)
    # torchrun sets LOCAL_WORLD_SIZE.
    local = min(world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    checkpointing: Checkpointing = "full" if data.get("gradient_checkpointing") else "none"
    base = Execution(
        nnodes=world // local, nproc_per_node=local, activation_checkpointing=checkpointing
    )
    return replace(execution_of(read, base), optimizer=read.get("optimizer", "adamw"))
