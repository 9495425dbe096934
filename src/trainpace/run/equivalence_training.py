"""Worker process that trains variants for `trainpace verify`.

It runs as `python -m trainpace.run.equivalence_training`. The samples depend only on the seed and
the step. The changes of a variant modify the model, its loss or its random generators, to see if a
difference disappears.
"""

import contextlib
import json
import logging
import operator
import os
import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

# Hide DDP's warnings about unused parameters.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.records import to_json, write_whole
from trainpace.core.worker import explain, is_out_of_memory, serve
from trainpace.run.equivalence import FORMATS, INITIAL, RANKS, Change, Facts, Question, Variant
from trainpace.run.trial_worker import deepspeed_config, follow_shards, import_deepspeed
from trainpace.workload import Task, build_task, make_optimizer, map_tensors

_SAMPLES, _MODEL, _STEPS = 1, 2, 3
IGNORED = -100
"""Target value that torch's losses ignore. transformers pads labels with it."""


def train(question: Question, variant: Variant, folder: Path, rank: int = 0) -> None:
    """Train a variant. Rank 0 writes ``KEY.npz`` (the parameters), then ``KEY.json`` (`Facts`).

    The first training in the folder also writes its initial weights. All others start from them.
    """
    q, changes = question, variant.changes
    torch.use_deterministic_algorithms(True, warn_only=True)
    _seed(q.seed, _MODEL)
    task = build_task(q.model, q.sequence_length, q.image_size)
    model = task.model
    _begin(model, folder)
    optimizer = task.optimizer if q.optimizer is None else None
    optimizer = optimizer or make_optimizer(q.optimizer or "sgd_momentum", model)
    precision = next((change for change in FORMATS if change in changes), q.precision)
    dtype = {"fp64": torch.float64, "bf16": torch.bfloat16}.get(precision, torch.float32)
    model.to(dtype=dtype).train()
    norms, hooks = training_batch_norms(model), hooks_of(model, remove="no_hooks" in changes)
    wrapped = _wrapped(model, optimizer, variant, q)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "amp_bf16")
    step = _Step(q, variant, task, wrapped, optimizer, dtype, norms, autocast, rank)
    with dropout_off(wrapped) if "no_dropout" in changes else contextlib.nullcontext():
        losses = [step.run(number) for number in range(q.steps)]
    parameters = _parameters(task.model)
    if rank == 0:
        np.savez(folder / f"{variant.key}.npz", **parameters)
        facts = Facts(
            # JSON has no NaN or infinity.
            losses=tuple(loss for loss in losses if np.isfinite(loss)),
            batch_norms=len(norms),
            random=step.random,
            hooks=hooks,
            uneven_targets=step.uneven_targets,
            divided=step.divided,
        )
        write_whole(folder / f"{variant.key}.json", to_json(facts))


@dataclass
class _Step:
    """Runner of a variant's training steps.

    `random`, `uneven_targets` and `divided` collect facts about the model while the steps run.
    """

    question: Question
    variant: Variant
    task: Task
    model: Any
    optimizer: torch.optim.Optimizer
    dtype: torch.dtype
    norms: Sequence[_BatchNorm]
    autocast: torch.autocast
    rank: int
    random: bool = False
    uneven_targets: bool = False
    divided: bool = True

    def run(self, step: int) -> float:
        """Train step number `step` and return its loss."""
        q, variant = self.question, self.variant
        sizes = q.sizes(variant.way)
        parts = self._parts(step, sizes)
        targets = [targets_of(part) for part in parts]
        self._compare_targets(targets, sizes)
        if "whole_batch_norm" in variant.changes:
            self._fix_norms(step)
        on_ranks = variant.way in RANKS
        _seed(q.seed, _STEPS, step, self.rank)
        before = torch.get_rng_state()
        self.optimizer.zero_grad(set_to_none=True)
        weights = [loss_weight(variant.changes, i, sizes, targets) for i in range(len(sizes))]
        if variant.way == "data_parallel":
            loss = self._backward(self._parts(step, (q.batch,))[0], weights)
        else:
            # Ranks average their gradients, so each rank's loss counts once per rank.
            ranks = len(sizes) if on_ranks else 1
            mine = [self.rank] if on_ranks else range(len(parts))
            loss = sum(self._backward(parts[i], [weights[i]], ranks) for i in mine)
        self.random |= not torch.equal(before, torch.get_rng_state())
        (self.model if variant.way == "deepspeed" else self.optimizer).step()
        if on_ranks:
            total = torch.tensor(loss, dtype=torch.float64)
            dist.all_reduce(total)
            loss = float(total)
        return loss

    def _compare_targets(self, targets: Sequence[int], sizes: Sequence[int]) -> None:
        shares = [t / n for t, n in zip(targets, sizes, strict=True)]
        self.uneven_targets |= any(share not in (0, shares[0]) for share in shares)

    def _fix_norms(self, step: int) -> None:
        """Fix the statistics of all batch norms to those of the whole batch."""
        _seed(self.question.seed, _STEPS, step)
        with torch.no_grad(), statistics_of_next_batch(self.norms):
            self.task.loss(self.task.model, self._parts(step, (self.question.batch,))[0])

    def _backward(self, part: Any, weights: Sequence[float], ranks: int = 1) -> float:
        with self.autocast:
            loss = self.task.loss(self.model, part)
        if self.variant.way == "data_parallel":
            # A model that computes its own loss returns one loss per replica.
            self.divided = loss.ndim > 0
            weights = weights if self.divided else [1.0]
        loss = sum(one * weight for one, weight in zip(loss.reshape(-1), weights, strict=True))
        share = loss * ranks
        if self.variant.way == "deepspeed":
            self.model.backward(share)
        else:
            share.backward()
        return float(loss.detach())

    def _parts(self, step: int, sizes: tuple[int, ...]) -> list[Any]:
        return [_place(part, self.dtype) for part in _parts(self.task, self.question, step, sizes)]


def _begin(model: nn.Module, folder: Path) -> None:
    """Load the shared initial weights. The first training stores its own as the initial weights."""
    states = folder / f"{INITIAL}.pt"
    if states.exists():
        model.load_state_dict(torch.load(states, weights_only=True))
    else:
        torch.save(model.state_dict(), states)
        np.savez(folder / f"{INITIAL}.npz", **_parameters(model))


class _Replicas(nn.Module):
    """Model that runs as nn.DataParallel does: each replica processes a chunk of the batch.

    The outputs are joined before the loss is computed. nn.DataParallel needs GPUs and runs its
    replicas at once. Here they run one after another, with the same weights.
    """

    def __init__(self, model: nn.Module, replicas: int) -> None:
        super().__init__()
        self.model, self.replicas = model, replicas

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        batch = len(next(filter(torch.is_tensor, pytree.tree_leaves((args, kwargs)))))
        each = -(-batch // self.replicas)
        outputs = []
        for begin in range(0, batch, each):
            part = slice(begin, begin + each)
            chunk_args, chunk_kwargs = map_tensors(operator.itemgetter(part), (args, kwargs))
            outputs.append(self.model(*chunk_args, **chunk_kwargs))
        return pytree.tree_map(_joined, *outputs)


def _joined(*values: Any) -> Any:
    """Join the outputs of replicas like torch's `gather`. Scalars become a vector."""
    if not torch.is_tensor(values[0]):
        return values[0]
    return torch.cat([torch.atleast_1d(value) for value in values])


def _deepspeed(model: nn.Module, optimizer: torch.optim.Optimizer, micro_batch: int) -> Any:
    """Return a DeepSpeed engine with ZeRO stage 2.

    Raises:
        TrainpaceError: If DeepSpeed is not installed.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{ranks}"}
    deepspeed = import_deepspeed("cpu")
    config = deepspeed_config(Execution(micro_batch=micro_batch, zero_stage=2))
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", FutureWarning)  # DeepSpeed calls deprecated functions of torch.
    deepspeed.init_distributed(dist_backend="gloo")
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def _wrapped(
    model: nn.Module, optimizer: torch.optim.Optimizer, variant: Variant, q: Question
) -> Any:
    """Wrap the model for the variant's way of training.

    For FSDP2, the optimizer gets the sharded parameters.
    """
    if variant.way == "data_parallel":
        return _Replicas(model, q.ranks)
    if variant.way == "deepspeed":
        return _deepspeed(model, optimizer, q.sizes("deepspeed")[0])
    if variant.way == "ddp":
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    if variant.way == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        names = {id(parameter): name for name, parameter in model.named_parameters()}
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        follow_shards(optimizer, names, model)
    return model


def _parts(task: Task, q: Question, step: int, sizes: tuple[int, ...]) -> list[Any]:
    """Return the samples of a step, divided into parts of the given sizes.

    Samples of a dataset are drawn one by one, each with its own seed. Random augmentation is
    therefore the same in every way of training.
    """
    parts = [
        slice(end - size, end) for size, end in zip(sizes, np.cumsum(sizes).tolist(), strict=True)
    ]
    if task.dataset is None:
        _seed(q.seed, _SAMPLES, step)
        batch = task.make_batch(q.batch)
        return [map_tensors(operator.itemgetter(part), batch) for part in parts]
    assert task.collate is not None, "a task with a data set knows how to make batches of it"
    order = np.random.default_rng((q.seed, step * q.batch // len(task.dataset))).permutation(
        len(task.dataset)
    )
    samples = []
    for i in range(step * q.batch, (step + 1) * q.batch):
        _seed(q.seed, _SAMPLES, i)
        samples.append(task.dataset[int(order[i % len(order)])])
    return [task.collate(samples[part]) for part in parts]


def _place(batch: Any, dtype: torch.dtype) -> Any:
    return map_tensors(
        lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, batch
    )


def _parameters(model: nn.Module) -> dict[str, Any]:
    arrays = {}
    for name, parameter in model.named_parameters():
        value: Any = parameter.detach()
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        arrays[name] = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    return arrays


def _seed(*numbers: int) -> None:
    """Seed the random generators of torch, Python and NumPy."""
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def loss_weight(
    changes: Sequence[Change], part: int, sizes: Sequence[int], targets: Sequence[int]
) -> float:
    """Return the weight of one part's loss. Without changes it is 1 / number of parts."""
    if "sum" in changes:
        return 1.0
    if "weight_by_targets" in changes and any(targets):
        return targets[part] / sum(targets)
    if "weight_by_samples" in changes:
        return sizes[part] / sum(sizes)
    return 1 / len(sizes)


def targets_of(batch: Any) -> int:
    """Return the number of targets in a batch: integer labels other than -100.

    The labels are in the batch's last part or under the key `labels`. In a dictionary, the first
    label of each row is skipped, because language models predict the next token. Return 0 for other
    batches.
    """
    labels = (
        batch.get("labels")
        if isinstance(batch, dict)
        else batch[-1]
        if isinstance(batch, list | tuple)
        else None
    )
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
        return 0
    if isinstance(batch, dict) and labels.dim() > 1:
        labels = labels[..., 1:]
    return int((labels != IGNORED).sum())


def training_batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Return the batch-norm layers that normalize by the statistics of the current batch."""
    return [
        m
        for m in model.modules()
        if isinstance(m, _BatchNorm) and (m.training or m.running_mean is None)
    ]


@contextlib.contextmanager
def statistics_of_next_batch(norms: Sequence[_BatchNorm]) -> Iterator[None]:
    """Set the running statistics of `norms` to those of the batch inside the context.

    After the context, the layers normalize every batch with these statistics.
    """
    for norm in norms:
        if norm.running_mean is None:
            like = norm.weight if norm.weight is not None else torch.zeros(())
            norm.running_mean = like.new_zeros(norm.num_features).detach()
            norm.running_var = like.new_ones(norm.num_features).detach()
            norm.track_running_stats = True
        norm.momentum = 1.0
        norm.train()
    yield
    for norm in norms:
        norm.eval()


def hooks_of(model: nn.Module, remove: bool) -> int:
    """Return the number of gradient hooks on parameters, and remove the hooks if `remove` is True.

    Such hooks act on the gradient of each part of a batch.
    """
    count = 0
    for parameter in model.parameters():
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = getattr(parameter, name, None)
            count += len(hooks or ())
            if hooks and remove:
                hooks.clear()
    return count


class _NoDropout(TorchFunctionMode):
    """Mode without dropout in functional calls, which no module attribute controls."""

    _DROPPING = (
        F.dropout,
        F.dropout1d,
        F.dropout2d,
        F.dropout3d,
        F.alpha_dropout,
        F.feature_alpha_dropout,
        torch.dropout,
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._DROPPING:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            if "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


@contextlib.contextmanager
def dropout_off(model: nn.Module) -> Iterator[None]:
    """Turn off dropout in modules and in functional calls inside the context.

    Dropout modules switch to evaluation mode, and dropout probabilities become 0.
    """
    for module in model.modules():
        if "drop" in type(module).__name__.lower() or type(module).__name__ == "StochasticDepth":
            module.eval()
        for name, value in list(vars(module).items()):
            if "drop" in name.lower() and isinstance(value, float):
                setattr(module, name, 0.0)
    with _NoDropout():
        yield


def _work(request: dict[str, Any]) -> str:
    """Train the requested variants, and return the failures as JSON (variant key -> sentence).

    In one process, out of memory and a failure of the very first training are raised, because they
    are the model's own. On several ranks every failure is raised, because the other ranks wait.
    """
    question, folder = msgspec.convert(request["question"], Question), Path(request["folder"])
    variants = msgspec.convert(request["variants"], list[Variant])
    if "rank" in request:
        return _train_as_rank(question, variants, folder, request["rank"], request["store"])
    failed: dict[str, str] = {}
    for i, variant in enumerate(variants):
        try:
            train(question, variant, folder)
        except Exception as error:
            if (request["first"] and not i) or is_out_of_memory(error):
                raise
            failed[variant.key] = (
                str(error) if isinstance(error, TrainpaceError) else explain(error)
            )
    return json.dumps(failed)


def _train_as_rank(
    question: Question, variants: list[Variant], folder: Path, rank: int, store: str
) -> str:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // question.ranks))
    if sys.platform == "linux":  # Gloo fails if the host name does not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=question.ranks)
    for variant in variants:
        train(question, variant, folder, rank)
        dist.barrier()  # Keep every rank alive while others still need it.
    return "{}"


if __name__ == "__main__":
    serve(_work)
