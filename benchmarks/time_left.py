"""How far the callbacks' time left is from what a training then really took.

Real trainings on this machine's CPU, with Lightning and Hugging Face's Trainer: plain, with accumulation, with evaluation every
k steps and checkpoints, and resumed. At 5, 10, 25, 50 and 75 % of the steps of the run, the time left as foretold is laid
beside what was left. As peers at the same moments: tqdm's remaining time as the Trainer's own bar has it, and what has passed
over what is left (Lightning's bar tells only the rest of the epoch). Errors are relative to the time that was left.

The end of `fit` or `train` beyond the last step belongs to what was left. What the callback itself costs is the time inside its
hooks; the processor's caches that it may spoil are not in it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "time_left.md"
AT = (0.05, 0.10, 0.25, 0.50, 0.75)
CASES = ("plain", "accumulation", "evaluation", "resume")
ENGINES = ("transformers", "lightning")
STEPS = 360
EPOCHS = 3
BATCH = 16
EVALUATE_EVERY = 40
GOAL = 0.10
SECONDS = {
    "wall": "",
    "cpu": " Seconds are the process's own on the processor, everywhere and for every peer: the machine did other work.",
}
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


def main() -> None:
    """Run a case in this process, or all of them in processes of their own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--engine", choices=ENGINES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(one(arguments.engine, arguments.case, CLOCKS[arguments.clock])))
        return
    runs = []
    for round_ in range(arguments.rounds):
        for engine in ENGINES:
            for case in CASES:
                command = [
                    sys.executable,
                    __file__,
                    "--engine",
                    engine,
                    "--case",
                    case,
                    "--clock",
                    arguments.clock,
                ]
                found = subprocess.run(command, capture_output=True, text=True, check=False)
                if found.returncode:
                    raise SystemExit(f"{engine}, {case}: {found.stderr[-2000:]}")
                run = json.loads(found.stdout.splitlines()[-1])
                runs.append(run)
                shown = ", ".join(f"{100 * m['error']:+.0f}" for m in run["moments"])
                print(
                    f"round {round_ + 1}, {engine}, {case}: {run['seconds']:.0f} s, off by {shown} %",
                    file=sys.stderr,
                )
    arguments.output.write_text(report(runs, arguments.rounds, arguments.clock))


def one(engine: str, case: str, clock: Clock) -> dict[str, Any]:
    """Train once; what was foretold at each moment, and what was true."""
    with tempfile.TemporaryDirectory() as folder:
        return (_transformers if engine == "transformers" else _lightning)(
            case, Path(folder), Notes(clock)
        )


class Notes:
    """What was foretold, and when."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.foretold: list[dict[str, float]] = []
        self.hooks_s = self.end_s = 0.0
        self.steps = 0
        self.begun = clock()

    def take(
        self, done: int, first: int, total: int, left: Any, peers: dict[str, float | None]
    ) -> None:
        """At the step that passes one of the shares of the run."""
        self.steps = done - first
        share = self.steps / (total - first)
        if left is None or len(self.foretold) == len(AT) or share < AT[len(self.foretold)]:
            return
        moment: dict[str, float] = {
            "at": AT[len(self.foretold)],
            "now": self.clock(),
            "seconds": left.seconds,
        }
        moment |= {"low": left.interval_s.low, "high": left.interval_s.high}
        self.foretold.append(
            moment | {name: value for name, value in peers.items() if value is not None}
        )

    def done(self, engine: str, case: str) -> dict[str, Any]:
        """Against the end, which is now."""
        end = self.clock()
        moments = []
        for f in self.foretold:
            true = end - f["now"]
            moment: dict[str, Any] = {"at": f["at"], "inside": f["low"] <= true <= f["high"]}
            for name, what in (("error", "seconds"), ("tqdm", "tqdm"), ("passed", "passed")):
                if what in f:
                    moment[name] = f[what] / true - 1
            moments.append(moment)
        seconds = end - self.begun
        return {
            "engine": engine,
            "case": case,
            "seconds": seconds,
            "hooks_s": self.hooks_s,
            "end_s": self.end_s,
            "steps": self.steps,
            "moments": moments,
        }


def _timed(callback: Any, notes: Notes) -> Any:
    """Every hook of a callback, timed; `take` itself is the benchmark's and not in it."""
    for name in dir(callback):
        if name.startswith("on_"):
            setattr(callback, name, _timing(name, getattr(callback, name), notes))
    return callback


def _timing(name: str, hook: Any, notes: Notes) -> Any:
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.thread_time()
        try:
            return hook(*args, **kwargs)
        finally:
            passed = time.thread_time() - begin
            if name == "on_train_end":
                notes.end_s += passed
            else:
                notes.hooks_s += passed

    return timed


def _passed(notes: Notes, done: int, first: int, total: int) -> float | None:
    return (notes.clock() - notes.begun) / (done - first) * (total - done) if done > first else None


def _model() -> Any:
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers: list[Any] = [torch.nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(4):
        layers += [torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3, padding=1)]
    return torch.nn.Sequential(
        *layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(16, 10)
    )


def _data(samples: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(1)
    images = torch.randn(256, 3, 48, 48, generator=generator)

    class Images(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return samples

        def __getitem__(self, i: int) -> dict[str, Any]:
            return {"pixels": images[i % 256], "labels": torch.tensor(i % 10)}

    return Images()


def _samples(case: str) -> int:
    """So many that the run has its steps, the last batch of an epoch partial."""
    micro_steps = 3 if case == "accumulation" else 1
    return STEPS // EPOCHS * BATCH * micro_steps - BATCH // 2


def _transformers(case: str, folder: Path, notes: Notes) -> dict[str, Any]:
    import torch
    import tqdm.std
    from transformers import ProgressCallback, Trainer, TrainerCallback, TrainingArguments

    from trainpace.callbacks.huggingface import TimeLeft

    tqdm.std.time = notes.clock  # its bars count the same seconds

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _model()

        def forward(self, pixels: Any, labels: Any = None) -> Any:
            out = self.net(pixels)
            return {"loss": torch.nn.functional.cross_entropy(out, labels), "logits": out}

    evaluates = case in ("evaluation", "resume")

    def trainer_of(**more: Any) -> Any:
        arguments = TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=BATCH,
            gradient_accumulation_steps=3 if case == "accumulation" else 1,
            num_train_epochs=EPOCHS,
            report_to=[],
            eval_strategy="steps" if evaluates else "no",
            eval_steps=EVALUATE_EVERY,
            logging_steps=50,
            save_strategy="steps" if evaluates else "no",
            save_steps=EVALUATE_EVERY,
            dataloader_pin_memory=False,
            **more,
        )
        return Trainer(
            Net(), arguments, train_dataset=_data(_samples(case)), eval_dataset=_data(40 * BATCH)
        )

    resume = None
    if case == "resume":
        first = trainer_of()

        class Stop(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                control.should_training_stop = state.global_step >= EVALUATE_EVERY * 4 + 1

        first.add_callback(Stop())
        first.train()
        resume = str(folder / f"checkpoint-{EVALUATE_EVERY * 4}")
    trainer = trainer_of()
    callback = _timed(
        TimeLeft(
            trainer, tell=lambda left: None, clock=notes.clock, journal=str(folder / "journal.db")
        ),
        notes,
    )

    class Watch(TrainerCallback):
        first = 0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.first = state.global_step

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            done, total = state.global_step, state.max_steps
            peers = {"tqdm": _tqdm(trainer), "passed": _passed(notes, done, self.first, total)}
            notes.take(done, self.first, total, callback.time_left(control), peers)

    def _tqdm(trainer: Any) -> float | None:
        bar: Any = next(
            c for c in trainer.callback_handler.callbacks if isinstance(c, ProgressCallback)
        ).training_bar
        state = bar.format_dict
        rate = state["rate"] or (
            (state["n"] - state["initial"]) / state["elapsed"] if state["elapsed"] else 0
        )
        return (state["total"] - state["n"]) / rate if rate else None

    trainer.add_callback(callback)
    trainer.add_callback(Watch())
    notes.begun = notes.clock()
    trainer.train(resume_from_checkpoint=resume)
    return notes.done("transformers", case)


def _lightning(case: str, folder: Path, notes: Notes) -> dict[str, Any]:
    import logging
    import warnings

    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader

    from trainpace.callbacks.lightning import TimeLeft

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _model()

        def training_step(self, batch: Any, _: int) -> Any:
            return torch.nn.functional.cross_entropy(self.net(batch["pixels"]), batch["labels"])

        def validation_step(self, batch: Any, _: int) -> None:
            self.net(batch["pixels"])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    evaluates = case in ("evaluation", "resume")

    def trainer_of(callbacks: list[Any], max_steps: int = -1) -> Any:
        return Trainer(
            max_epochs=EPOCHS,
            max_steps=max_steps,
            accelerator="cpu",
            callbacks=callbacks,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=str(folder),
            enable_checkpointing=evaluates,
            accumulate_grad_batches=3 if case == "accumulation" else 1,
            val_check_interval=EVALUATE_EVERY if evaluates else None,
            check_val_every_n_epoch=None if evaluates else 1,
        )

    train = DataLoader(_data(_samples(case)), BATCH, shuffle=True)
    validation = DataLoader(_data(40 * BATCH), BATCH) if evaluates else None
    path = None
    if case == "resume":
        stop = EVALUATE_EVERY * 4
        keep = ModelCheckpoint(dirpath=folder, filename="resume", every_n_train_steps=stop)
        trainer_of([keep], max_steps=stop).fit(Net(), train, validation)
        path = str(folder / "resume.ckpt")
    callback = _timed(
        TimeLeft(tell=lambda left: None, clock=notes.clock, journal=str(folder / "journal.db")),
        notes,
    )

    class Watch(Callback):
        first = 0

        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.first = trainer.fit_loop.epoch_loop.batch_progress.total.ready

        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            done = trainer.fit_loop.epoch_loop.batch_progress.total.ready
            total = trainer.num_training_batches * EPOCHS
            peers = {"passed": _passed(notes, done, self.first, total)}
            notes.take(done, self.first, total, callback.time_left(), peers)

    notes.begun = notes.clock()
    trainer_of([callback, Watch()]).fit(Net(), train, validation, ckpt_path=path)
    return notes.done("lightning", case)


def report(runs: list[dict[str, Any]], rounds: int, clock: str) -> str:
    """Medians and worst errors by case and moment; how often the interval held; the peers."""
    moments = [(run, m) for run in runs for m in run["moments"]]
    errors = [abs(m["error"]) for _, m in moments]
    inside = [m["inside"] for _, m in moments]
    costs = [1e6 * run["hooks_s"] / run["steps"] for run in runs]
    within = sum(error <= GOAL for error in errors)
    lines = [
        "# Time left, as the callbacks tell it",
        "",
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, one thread;"
        f" {rounds} rounds of {STEPS} steps (Lightning with accumulation: batches) in {EPOCHS} epochs; an evaluation and a"
        f" checkpoint every {EVALUATE_EVERY} steps where there are any; resumed runs go on from step {4 * EVALUATE_EVERY}."
        + SECONDS[clock],
        "",
        f"Within {GOAL:.0%} of what was left: **{within} of {len(errors)}** moments. Median error"
        f" {statistics.median(errors):.1%}, largest {max(errors):.1%}. The 90 % interval held the truth in {sum(inside)} of"
        f" {len(inside)}. The callback's hooks took {statistics.median(costs):.1f} us a step at the median of runs,"
        f" {max(costs):.1f} at most; its end, which opens the journal, {statistics.median(run['end_s'] for run in runs):.2f} s.",
        "",
        "Errors: foretold over true, less one, in per cent; of all rounds the median (largest).",
        "",
        "| engine | case | the run, s | " + " | ".join(f"at {at:.0%}" for at in AT) + " |",
        "|---|---|---|" + "---|" * len(AT),
    ]
    for title, key in (("", "error"), ("tqdm, ", "tqdm"), ("passed over left, ", "passed")):
        for engine in ENGINES:
            for case in CASES:
                these = [run for run in runs if run["engine"] == engine and run["case"] == case]
                cells = []
                for at in AT:
                    found = [
                        m[key]
                        for run in these
                        for m in run["moments"]
                        if m["at"] == at and key in m
                    ]
                    if found:
                        cells.append(
                            f"{100 * statistics.median(found):+.1f} ({100 * max(found, key=abs):+.1f})"
                        )
                if cells:
                    seconds = statistics.median(run["seconds"] for run in these)
                    lines.append(
                        f"| {engine} | {title}{case} | {seconds:.1f} | " + " | ".join(cells) + " |"
                    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
