"""A policy in evaluation mode collects experience without gradients before each update, as in stable-baselines3.

Every 25th update, the policy is evaluated in an environment of its own. `--fast-environment` makes both environments cheap.
"""

import argparse

import torch
from planting import busy, report
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=150)
parser.add_argument("--fast-environment", action="store_true")
args = parser.parse_args()


class CartPole:
    """An environment of Gym's form, without Gym."""

    def __init__(self, ms: float):
        self.ms, self.state = ms, torch.zeros(4)

    def reset(self):
        self.state = torch.zeros(4)
        return self.state, {}

    def step(self, action):
        busy(self.ms)
        self.state = 0.9 * self.state + 0.1 * (2 * action - 1) + 0.01 * torch.randn(4)
        ends = bool(self.state.abs().max() > 0.5)
        return self.state, 1.0, ends, False, {}


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.action, self.value = nn.Linear(64, 2), nn.Linear(64, 1)

    def forward(self, states):
        hidden = self.body(states)
        return self.action(hidden).argmax(-1), self.value(hidden)

    def scores(self, states):
        hidden = self.body(states)
        return self.action(hidden), self.value(hidden)


class Agent:
    def __init__(self, env: CartPole):
        self.env, self.policy = env, Policy()
        self.optimizer = torch.optim.RMSprop(self.policy.parameters(), lr=1e-3)
        self.last, _ = env.reset()

    def collect(self, env: CartPole, steps: int = 5):
        self.policy.train(False)
        kept = []
        with torch.no_grad():
            for _ in range(steps):
                action, _ = self.policy(self.last[None])
                state, reward, ends, _, _ = env.step(int(action))
                kept.append((self.last, int(action), reward))
                self.last = env.reset()[0] if ends else state
        return kept

    def update(self, kept):
        self.policy.train(True)
        states = torch.stack([state for state, _, _ in kept])
        actions = torch.tensor([action for _, action, _ in kept])
        rewards = torch.tensor([reward for _, _, reward in kept])
        scores, values = self.policy.scores(states)
        loss = nn.functional.cross_entropy(scores, actions)
        loss = loss + nn.functional.mse_loss(values[:, 0], rewards)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def evaluate(agent: Agent, env: CartPole):
    agent.policy.train(False)
    state, _ = env.reset()
    with torch.no_grad():
        for _ in range(20):
            action, _ = agent.policy(state[None])
            state, *_ = env.step(int(action))


torch.manual_seed(0)
ms = 0.02 if args.fast_environment else 0.5
agent, losses = Agent(CartPole(ms)), []
for step in range(args.steps):
    losses.append(agent.update(agent.collect(agent.env)))
    if step % 25 == 24:
        evaluate(agent, CartPole(ms))
report(losses)
