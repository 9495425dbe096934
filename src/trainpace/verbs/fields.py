"""Fields that several requests have."""

from typing import Annotated

from trainpace.verbs.request import Argument, Field
from trainpace.verbs.units import AT_LEAST_1

ModelSpec = Annotated[str, Argument("The model, as in trainpace forecast.", metavar="MODEL")]
Optimizer = Annotated[str | None, Field("sgd, sgd_momentum, adam, adamw; without it the task's own, or sgd_momentum.")]
SequenceLength = Annotated[int | None, Field("Tokens in a sample, for transformers.", AT_LEAST_1)]
ImageSize = Annotated[int | None, Field("Side in pixels, for image models.", AT_LEAST_1)]
ChannelsLast = Annotated[bool, Field("NHWC tensors (memory_format=torch.channels_last).")]
JournalPlace = Annotated[
    str | None,
    Field(
        "The journal: a file, or postgresql://user@host/database. Default: $TRAINPACE_JOURNAL, else the user's data folder.",
        metavar="PATH|URL",
    ),
]
KeepIdentity = Annotated[bool, Field("Keep paths and names in the journal as they are.")]
