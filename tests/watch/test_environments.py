"""Collecting experience is told from an evaluation by the environment of the calling functions."""

import torch
from torch.optim.lr_scheduler import StepLR

from trainpace.watch.inside.script import Environments, is_environment


class Environment:
    def reset(self):
        return 0

    def step(self, action):
        return action


class Timer:
    """A timer of ignite's form."""

    def reset(self, *args):
        pass

    def step(self, *args):
        pass


class Agent:
    def __init__(self, env):
        self.env = env

    def act(self, environments):
        return environments.collects()


def collect(env, agent, environments):
    return agent.act(environments)


def evaluate(env, agent, environments):
    return agent.act(environments)


def test_an_object_with_reset_and_step_of_an_action_is_an_environment():
    assert is_environment(Environment())


def test_optimizers_schedulers_and_timers_are_no_environments():
    optimizer = torch.optim.SGD([torch.zeros(1)], 0.1)
    for other in (optimizer, StepLR(optimizer, 1), Timer(), Environment, 3):
        assert not is_environment(other)


def test_only_calls_for_the_training_environment_collect_experience():
    def train():
        env, environments = Environment(), Environments()
        agent = Agent(env)
        held = Environment()  # As an evaluation callback holds its environment.
        del env
        return [
            collect(agent.env, agent, environments),
            evaluate(held, agent, environments),
            collect(agent.env, agent, environments),
        ]

    assert train() == [True, False, True]


def test_an_agent_may_hold_the_environment_itself():
    assert Agent(Environment()).act(Environments())


def test_without_an_environment_nothing_is_collected():
    assert not Environments().collects()
