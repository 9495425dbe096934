"""Steps of several models: a function of a batch does forward, backward and updates by itself.

trainpace forecast examples/tasks/several_models.py:gan --gpu A100 --batch 16,64
trainpace forecast examples/tasks/several_models.py:distillation --gpu A100
trainpace forecast examples/tasks/several_models.py:preference --gpu A100

`model` names every model that the step calls, frozen ones too; `optimizer` every optimizer. All
that the step does is counted.
"""

import itertools

import torch
from torch import nn
from torch.nn.functional import kl_div, log_softmax, logsigmoid, softmax, softplus
from torch.utils.data import TensorDataset

LATENT, PIXELS, CLASSES = 16, 32, 10
VOCABULARY, WIDTH, LENGTH = 100, 32, 24


def layers(*widths):
    modules = []
    for before, after in itertools.pairwise(widths):
        modules += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def gan():
    generator, discriminator = layers(LATENT, 64, PIXELS), layers(PIXELS, 64, 1)
    of_generator, of_discriminator = (
        torch.optim.Adam(m.parameters()) for m in (generator, discriminator)
    )

    def step(batch):
        (real,) = batch
        fake = generator(torch.randn(len(real), LATENT, device=real.device))
        of_discriminator.zero_grad()
        loss = softplus(-discriminator(real)).mean() + softplus(discriminator(fake.detach())).mean()
        loss.backward()
        of_discriminator.step()
        of_generator.zero_grad()
        softplus(-discriminator(fake)).mean().backward()
        of_generator.step()
        return loss

    return {
        "model": {"generator": generator, "discriminator": discriminator},
        "optimizer": [of_generator, of_discriminator],
        "step": step,
        "dataset": TensorDataset(torch.randn(256, PIXELS)),
    }


def distillation():
    """The teacher is frozen: it has a forward pass, and nothing else."""
    student, teacher = (
        layers(PIXELS, 64, CLASSES),
        layers(PIXELS, 256, 256, CLASSES).requires_grad_(False).eval(),
    )
    optimizer = torch.optim.AdamW(student.parameters())

    def step(batch):
        (inputs,) = batch
        with torch.no_grad():
            targets = softmax(teacher(inputs), dim=-1)
        loss = kl_div(log_softmax(student(inputs), dim=-1), targets, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return {
        "model": [student, teacher],
        "optimizer": optimizer,
        "step": step,
        "dataset": TensorDataset(torch.randn(256, PIXELS)),
    }


class Scores(nn.Module):
    """A small causal model:

    the log-probability of each token, or with one output a reward a token.
    """

    def __init__(self, outputs):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, outputs)

    def forward(self, tokens):
        return self.head(self.rnn(self.embedding(tokens))[0])


def log_probability(model, tokens):
    scores = log_softmax(model(tokens[:, :-1]), dim=-1)
    return scores.gather(-1, tokens[:, 1:, None]).squeeze(-1).sum(1)


def preference():
    """As in learning from human feedback:

    a policy that is trained, its frozen reference, and a frozen model of the reward.
    """
    policy, reference, reward = Scores(VOCABULARY), Scores(VOCABULARY), Scores(1)
    for frozen in (reference, reward):
        frozen.requires_grad_(False).eval()
    optimizer = torch.optim.AdamW(policy.parameters())

    def step(batch):
        one, other = batch
        with torch.no_grad():
            prefers_one = torch.sigmoid(reward(one)[:, -1, 0] - reward(other)[:, -1, 0])
            base = log_probability(reference, one) - log_probability(reference, other)
        margin = log_probability(policy, one) - log_probability(policy, other) - base
        loss = -(prefers_one * logsigmoid(margin) + (1 - prefers_one) * logsigmoid(-margin)).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    pairs = TensorDataset(*(torch.randint(0, VOCABULARY, (128, LENGTH)) for _ in range(2)))
    return {
        "model": {"policy": policy, "reference": reference, "reward": reward},
        "optimizer": optimizer,
        "step": step,
        "dataset": pairs,
    }
