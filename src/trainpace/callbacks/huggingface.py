"""Remaining time for Hugging Face's Trainer.

    trainer = Trainer(...)
    trainer.add_callback(TimeLeft(trainer))

The Trainer's own bar extrapolates all elapsed time over the remaining steps: skipped batches of a resumed run, slow first
steps and the latest evaluation included. Here steps come from `state.max_steps`, which allows for accumulation, partial
batches and resumes; evaluations and checkpoints are counted separately.
"""

import atexit
import math
import os
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from trainpace.callbacks.reporter import Reporter, harmless
from trainpace.callbacks.time_left import Other, multiples_in
from trainpace.callbacks.time_left import TimeLeft as Left
from trainpace.configs import Reading, put_training_arguments
from trainpace.execution import Execution

_READ = ("per_device_train_batch_size gradient_accumulation_steps bf16 fp16 tf32 optim torch_compile").split()


class TimeLeft(Reporter, TrainerCallback):
    """Reports the remaining time with a 90 % interval, and stores the run in the journal at its end, also when it is interrupted.

    With `trainer`, evaluations are included before the first one has run. Other arguments: see `Reporter`.
    """

    def __init__(self, trainer: Any = None, **options: Any) -> None:
        super().__init__(**options)
        self._trainer = trainer
        self._args: Any = None
        self._state: Any = None
        self._resumed = False
        self._evaluated_epochs = self._saved_epochs = 0
        self._at_exit: Callable[[], None] | None = None

    @harmless
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._args, self._state, self._resumed = args, state, state.global_step > 0
        self._total = state.max_steps
        self._evaluated_epochs = self._saved_epochs = int(state.epoch or 0)
        if self._name is None:
            config = getattr(kwargs.get("model"), "config", None)
            self._name = getattr(config, "_name_or_path", "") or type(kwargs.get("model")).__name__
        self._begin(state.is_world_process_zero, state.global_step)
        if self._at_exit is None:
            # the Trainer has no hook for a run that Ctrl-C or an exception ends
            self._at_exit = self._interrupted
            atexit.register(self._at_exit)

    @harmless
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Charge the time between two steps to the next one's data or, where one began, to the start of an epoch."""
        watch = self._watch
        if watch is None:
            return
        watch.done("evaluation")
        if "epoch" in watch.pending:
            watch.mark("epoch")
            if self._resumed:  # batches that were trained already were skipped: once
                watch.forget("epoch")
                self._resumed = False
            watch.done("epoch")
        else:
            watch.mark("step")

    @harmless
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        watch = self._watch
        if watch is None:
            return
        now = watch.mark("step")
        watch.done("step")
        self._step = state.global_step
        if self._due(now):
            self._report(now, self.time_left(control))

    @harmless
    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._watch is not None:
            self._watch.mark("epoch")

    @harmless
    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._watch is not None:
            self._watch.mark("epoch")

    @harmless
    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._watch is not None:
            self._watch.mark("evaluation")  # and not done: of several evaluation sets, each calls this
            self._evaluated_epochs = round(state.epoch or 0)

    @harmless
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._watch is not None:
            self._watch.mark("checkpoint")
            self._watch.done("checkpoint")
            self._saved_epochs = round(state.epoch or 0)

    @harmless
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self._watch is not None and isinstance((logs or {}).get("loss"), int | float):
            self._losses.append(float(logs["loss"]))

    @harmless
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._close("")

    def time_left(self, control: Any = None) -> Left | None:
        """The remaining time, None before the first steps. `control` tells whether an evaluation or a checkpoint is due."""
        if self._watch is None:
            return None
        watch, state, args = self._watch, self._state, self._args
        steps_left = max(0, state.max_steps - state.global_step)
        epochs = max(0, math.ceil(state.num_train_epochs) - math.ceil((state.epoch or 0) - 1e-9))
        samples = args.train_batch_size * args.gradient_accumulation_steps
        evaluations = self._times_left("eval", control, epochs)
        checkpoints = self._times_left("save", control, epochs)
        guess = self._guess_evaluation_s(self._evaluation_samples(), samples) if evaluations else None
        others = [
            Other("evaluation", watch.times["evaluation"], evaluations, guess),
            Other("checkpoint", watch.times["checkpoint"], checkpoints),
            Other("epoch", watch.times["epoch"], epochs if watch.times["epoch"] else 0),
        ]
        return self._left(steps_left, others)

    def _times_left(self, what: str, control: Any, epochs: int) -> int:
        """The number of evaluations or checkpoints to come, including one that is due at this step."""
        args, state = self._args, self._state
        strategy = str(getattr(args, f"{what}_strategy", "no")).rpartition(".")[2].lower()
        due = int(bool(getattr(control, "should_evaluate" if what == "eval" else "should_save", False)))
        if strategy == "epoch":
            done = self._evaluated_epochs if what == "eval" else self._saved_epochs
            return max(0, math.ceil(state.num_train_epochs) - done)
        if strategy != "steps":
            return due
        every = int(getattr(state, f"{what}_steps", 0) or 0)
        after = max(state.global_step, math.ceil(args.eval_delay) - 1) if what == "eval" else state.global_step
        last = state.max_steps
        # the Trainer ends with an evaluation and a checkpoint, wherever the last step lies
        at_the_end = int(every > 0 and last % every != 0 and state.global_step < last)
        return due + multiples_in(every, after, last) + at_the_end

    def _evaluation_samples(self) -> float | None:
        """Samples of an evaluation on one device."""
        data: Any = getattr(self._trainer, "eval_dataset", None)
        try:
            sets: Any = data.values() if isinstance(data, dict) else [data]
            return None if data is None else sum(len(one) for one in sets) / max(1, self._args.world_size)
        except TypeError:  # a stream
            return None

    @harmless
    def _interrupted(self) -> None:
        self._close("an interruption")

    def _close(self, ended: str) -> None:
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
            self._at_exit = None
        if self._watch is None:
            return
        args = self._args
        self._end(_execution_of(args), args.device.type, ended, model=self._name, engine="transformers", seed=args.seed)


def _execution_of(args: Any) -> Execution:
    """The execution that a settings file with these arguments states."""
    data = args.to_dict()
    reading = Reading("TrainingArguments", "Hugging Face TrainingArguments")
    put_training_arguments(reading, {name: data[name] for name in _READ if name in data})
    read = {setting.name: setting.value for setting in reading.done().settings}
    world = max(1, args.world_size)
    local = min(world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))  # as torchrun says it
    fields: dict[str, Any] = {
        "micro_batch": read.get("micro_batch", 1), "accumulation": read.get("accumulation", 1),
        "nnodes": world // local, "nproc_per_node": local,
        "precision": read.get("precision", "fp32"), "optimizer": read.get("optimizer", "adamw"),
        "compile": bool(read.get("compile", False)),
        "activation_checkpointing": "full" if data.get("gradient_checkpointing") else "none",
    }  # fmt: skip
    return Execution(**fields)
