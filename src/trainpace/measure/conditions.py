"""The conditions under which a model is measured: everything but the batch size. A sweep and its resumption share them."""

from typing import Literal

from trainpace.errors import TrainpaceError
from trainpace.execution import Precision
from trainpace.records import Record


class Conditions(Record):
    """`seconds` is the training time of one probe; `memory_limit_gib` the most memory that its process may map (CPU only).

    `optimizer` None is the task's own, or sgd_momentum.
    """

    model: str
    device: Literal["cpu", "cuda"] = "cpu"
    precision: Precision = "fp32"
    optimizer: str | None = None
    accumulation: int = 1
    sequence_length: int | None = None
    image_size: int | None = None
    channels_last: bool = False
    compile: bool = False
    seconds: float = 2.0
    timeout_s: float = 600.0
    memory_limit_gib: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.seconds >= 0 and self.timeout_s > 0 and self.accumulation >= 1):
            raise TrainpaceError("a probe needs seconds of 0 or more, a time-out above 0 and 1 or more micro-batches.")
        if self.memory_limit_gib is not None and not self.memory_limit_gib > 0:
            raise TrainpaceError("a memory limit is above 0 GiB.")
        if self.memory_limit_gib is not None and self.device == "cuda":
            raise TrainpaceError("a memory limit is for probes on the CPU.", "A GPU's own memory is the limit there.")
