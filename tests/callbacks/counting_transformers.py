"""Train with Hugging Face's Trainer under each setting in argv[1].

The script prints one line per setting. A line lists, for every step, the counts that the callback
predicted and the actual ones.
"""

import json
import sys
import tempfile

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from trainpace.callbacks.huggingface import TimeLeft


class Data(torch.utils.data.Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, i):
        return {"x": torch.ones(4), "labels": torch.tensor(0)}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 2)

    def forward(self, x, labels=None):
        out = self.net(x)
        return {"loss": torch.nn.functional.cross_entropy(out, labels), "logits": out}


class Count(TrainerCallback):
    def __init__(self, callback):
        self.callback, self.said = callback, []
        self.steps = self.evaluations = self.checkpoints = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1
        left = ()
        callback = self.callback

        def keep(steps, evaluations, guess_s, checkpoints, epochs):
            nonlocal left
            left = (steps, evaluations, checkpoints)

        real, callback._left = callback._left, keep
        callback.time_left(control)
        callback._left = real
        self.said.append({"now": (self.steps, self.evaluations, self.checkpoints), "left": left})

    def on_evaluate(self, args, state, control, **kwargs):
        self.evaluations += 1

    def on_save(self, args, state, control, **kwargs):
        self.checkpoints += 1


class Stop(TrainerCallback):
    def __init__(self, at):
        self.at = at

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step >= self.at:
            control.should_training_stop = True


def train(settings):
    resume, samples = settings.pop("resume", None), settings.pop("samples", 50)
    raises, no_journal = settings.pop("raises", 0), settings.pop("no_journal", True)
    with tempfile.TemporaryDirectory() as folder:

        def trainer():
            arguments = TrainingArguments(
                output_dir=folder,
                use_cpu=True,
                report_to=[],
                disable_tqdm=True,
                dataloader_pin_memory=False,
                **settings,
            )
            return Trainer(Net(), arguments, train_dataset=Data(samples), eval_dataset=Data(8))

        path = None
        if resume:
            first = trainer()
            first.add_callback(Stop(resume))
            first.train()
            path = f"{folder}/checkpoint-{resume}"
        last = trainer()
        told = []
        callback = TimeLeft(last, no_journal=no_journal, tell=told.append, every_s=0.0)
        last.add_callback(callback)
        count = Count(callback)
        last.add_callback(count)
        if raises:
            callback._tell = lambda left: 1 / 0
        last.train(resume_from_checkpoint=path)
    end = (count.steps, count.evaluations, count.checkpoints)
    print(json.dumps({"said": count.said, "end": end, "told": len(told), "off": callback.off}))


for one in json.loads(sys.argv[1]):
    train(one)
