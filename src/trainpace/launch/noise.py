"""What the gradient noise scale needs, gathered from a trial's own steps: gradients of a part of the batch against the whole's.

With accumulation the part is the first micro-batch (under FSDP2, whose gradients are reduced in every one, all ranks'); under DDP
without it, each rank's share. It costs one pass over the gradients for each of the two norms, so it is done in steps after those
that are timed.
"""

from torch import nn

from trainpace.errors import TrainpaceError
from trainpace.launch.engines.engine import Engine
from trainpace.launch.trial import Trial
from trainpace.measure import DdpNoiseNorms, NoiseNorms
from trainpace.schedule import noise_scale

Norms = NoiseNorms | DdpNoiseNorms


def norms_of(trial: Trial, engine: Engine) -> Norms:
    """What gathers the norms, for an engine and an execution that show a part's gradients (`engines.rules`)."""
    e = trial.execution
    if e.accumulation > 1:
        ranks = e.data_parallel_size if trial.engine == "fsdp2" else 1
        samples = e.micro_batch * ranks
        return NoiseNorms(engine.model, samples, e.accumulation, e.global_batch, lambda: engine.loss_scale)
    # inside of Fabric's module, and of a compiled one
    ddp = next(m for m in engine.model.modules() if isinstance(m, nn.parallel.DistributedDataParallel))
    return DdpNoiseNorms(ddp, e.micro_batch)


def estimate(norms: Norms) -> tuple[dict[str, float], tuple[str, ...]]:
    """(samples, low, high (90 %) and steps, as far as the steps tell them; notes)."""
    try:
        scale = noise_scale(norms.norms())
    except TrainpaceError as error:
        return {}, (str(error),)
    values = {"samples": scale.samples, "low": scale.low, "high": scale.high, "steps": float(scale.steps)}
    return {name: value for name, value in values.items() if value is not None}, (scale.reason,) if scale.reason else ()
