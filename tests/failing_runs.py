"""Simulation of a training run fault by fault, to check closed forms."""

import random


def simulated_s(work_s, segments, checkpoint_s, interruptions, rng: random.Random):
    """Return the wall-clock seconds of one run. `interruptions` are (mean time between, restart) pairs."""
    rate = sum(1 / mean for mean, _ in interruptions)
    weights = [1 / mean for mean, _ in interruptions]
    clock, length = 0.0, work_s / segments + checkpoint_s
    for _ in range(segments):
        while (failure := rng.expovariate(rate)) < length:
            clock += failure
            while True:
                _, restart = rng.choices(interruptions, weights)[0]
                if (again := rng.expovariate(rate)) >= restart:
                    clock += restart
                    break
                clock += again
        clock += length
    return clock


def mean_simulated_s(runs, seed, *case):
    """Return the mean of many runs."""
    rng = random.Random(seed)
    return sum(simulated_s(*case, rng) for _ in range(runs)) / runs
