"""Train one variant on the samples that the seed and the step alone decide, and keep its weights."""

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from trainpace.records import to_json, write_whole
from trainpace.trace import Task, build_task, make_optimizer, map_tensors
from trainpace.verify.changes import (
    dropout_off,
    hooks_of,
    loss_weight,
    statistics_of_next_batch,
    targets_of,
    training_batch_norms,
)
from trainpace.verify.question import INITIAL, RANKS, Facts, Question, Variant

_SAMPLES, _MODEL, _STEPS = 1, 2, 3


def train(question: Question, variant: Variant, folder: Path, rank: int = 0) -> None:
    """Train, and let rank 0 write ``KEY.npz`` (the parameters) and ``KEY.json`` (Facts) into `folder`, the facts last.

    The first training of all also leaves the weights that it began with; the others begin with those.
    """
    q, changes = question, variant.changes
    torch.use_deterministic_algorithms(True, warn_only=True)
    _seed(q.seed, _MODEL)
    task = build_task(q.model, q.sequence_length, q.image_size)
    model = _begin(task.model, folder)
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer = task.optimizer if q.optimizer is None else None
    optimizer = optimizer or make_optimizer(q.optimizer or "sgd_momentum", model)
    precision = "fp64" if "fp64" in changes else "fp32" if "fp32" in changes else q.precision
    dtype = {"fp64": torch.float64, "bf16": torch.bfloat16}.get(precision, torch.float32)
    model.to(dtype=dtype).train()
    norms, hooks = training_batch_norms(model), hooks_of(model, remove="no_hooks" in changes)
    model, optimizer = _wrapped(model, optimizer, names, variant)
    losses: list[float] = []
    draws = uneven = False
    autocast = torch.autocast("cpu", torch.bfloat16) if precision == "amp_bf16" else contextlib.nullcontext()
    sizes = q.sizes(variant.way)
    with dropout_off(model) if "no_dropout" in changes else contextlib.nullcontext():
        for step in range(q.steps):
            parts = [_place(part, dtype) for part in _parts(task, q, step, sizes)]
            targets = [targets_of(part) for part in parts]
            uneven |= any(t / n != targets[0] / sizes[0] for t, n in zip(targets, sizes, strict=True) if t)
            if "whole_batch_norm" in changes:
                _seed(q.seed, _STEPS, step)
                with torch.no_grad(), statistics_of_next_batch(norms):
                    task.loss(model, _place(_parts(task, q, step, (q.batch,))[0], dtype))
            _seed(q.seed, _STEPS, step, rank)
            before = torch.get_rng_state()
            optimizer.zero_grad(set_to_none=True)
            loss_of_step = 0.0
            for i in [rank] if variant.way in RANKS else range(len(parts)):
                weight = loss_weight(changes, i, sizes, targets)
                with autocast:
                    loss = task.loss(model, parts[i])
                # ranks take the mean of their gradients, so that a rank's own share of the batch counts so many times
                shares = len(sizes) if variant.way in RANKS else 1
                (loss * weight * shares).backward()
                loss_of_step += float(loss.detach()) * weight
            draws |= not torch.equal(before, torch.get_rng_state())
            optimizer.step()
            losses.append(_sum(loss_of_step) if variant.way in RANKS else loss_of_step)
    parameters = _parameters(model)
    if rank == 0:
        _save(folder / f"{variant.key}.npz", parameters)
        facts = Facts(losses=_finite(losses), batch_norms=len(norms), random=draws, hooks=hooks, uneven_targets=uneven)
        write_whole(folder / f"{variant.key}.json", to_json(facts))


def _begin(model: nn.Module, folder: Path) -> nn.Module:
    states, arrays = folder / f"{INITIAL}.pt", folder / f"{INITIAL}.npz"
    if states.exists():
        model.load_state_dict(torch.load(states, weights_only=True))
    else:
        torch.save(model.state_dict(), states)
        _save(arrays, _parameters(model))
    return model


def _wrapped(
    model: nn.Module, optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str], variant: Variant
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model in its engine, and the optimizer over the parameters that it has there."""
    if variant.way == "ddp":
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True), optimizer
    if variant.way == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        sharded = dict(model.named_parameters())
        for group in optimizer.param_groups:
            group["params"] = [sharded[names[parameter]] for parameter in group["params"]]
    return model, optimizer


def _parts(task: Task, q: Question, step: int, sizes: tuple[int, ...]) -> list[Any]:
    """The step's samples, divided into parts. Those of a data set are drawn one by one, each with a seed of its own, so that
    random augmentation gives every way the same ones."""
    if task.dataset is None:
        _seed(q.seed, _SAMPLES, step)
        return list(_divided(task.make_batch(q.batch), sizes))
    assert task.collate is not None, "a task with a data set knows how to make batches of it"
    order = np.random.default_rng((q.seed, step * q.batch // len(task.dataset))).permutation(len(task.dataset))
    samples = []
    for i in range(step * q.batch, (step + 1) * q.batch):
        _seed(q.seed, _SAMPLES, i)
        samples.append(task.dataset[int(order[i % len(order)])])
    ends = np.cumsum(sizes)
    return [task.collate(samples[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def _divided(batch: Any, sizes: tuple[int, ...]) -> Iterator[Any]:
    if isinstance(batch, torch.Tensor):
        yield from batch.split(list(sizes))
    elif isinstance(batch, dict):
        for values in zip(*(_divided(value, sizes) for value in batch.values()), strict=True):
            yield dict(zip(batch, values, strict=True))
    else:
        for values in zip(*(_divided(value, sizes) for value in batch), strict=True):
            yield type(batch)(values)


def _place(batch: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, batch)


def _parameters(model: nn.Module) -> dict[str, np.ndarray[Any, Any]]:
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    found = {}
    for name, parameter in inner.named_parameters():
        value: Any = parameter.detach()
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        found[name] = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    return found


def _sum(value: float) -> float:
    """The sum over all ranks."""
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def _save(path: Path, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    np.savez(path, **arrays)  # type: ignore[arg-type]


def _finite(losses: list[float]) -> tuple[float, ...]:
    """The finite losses; JSON has no place for the others."""
    return tuple(loss for loss in losses if np.isfinite(loss))


def _seed(*numbers: int) -> None:
    """Seed all generators that a user's code draws from."""
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
