"""The model that the user names, parsed once. Does not import numpy or torch."""

import functools
import importlib
from typing import Any, Literal, NamedTuple, Protocol, get_args

from trainpace.core.errors import TrainpaceError

Library = Literal["timm", "torchvision", "transformers", "diffusers"]
Kind = Literal["built_in", Library, "code", "script", "workload", "unknown"]
"""built_in: NAME. code: FILE.py:NAME. script: FILE.py without a name, which is not a model.
workload: a saved trace, FILE.json. unknown: WORD:NAME with a word that is not in `Kind`."""
LIBRARIES: tuple[Library, ...] = get_args(Library)
FORMS = (
    "timm:NAME, torchvision:NAME, transformers:CONFIG.json, diffusers:CONFIG.json, FILE.py:FUNCTION"
)
"""All ways to name a model that is not built in, for messages."""


class Traced(Protocol):
    """A `Workload`, whose class this module cannot import."""

    @property
    def model(self) -> str: ...


class ModelSpec(NamedTuple):
    """A model spec and its parts. FILE.py:NAME can also name a dataset or a DataLoader.

    Attributes:
        text: The spec as the user wrote it. For a `Workload` in memory, the name of its model.
        kind: How the model is defined.
        name: The spec without its prefix: a model's name, a function's name, or a path.
        path: The file that defines the model, or "" if a library or this package does.
    """

    text: str
    kind: Kind
    name: str
    path: str = ""

    @classmethod
    def of(cls, model: str | Traced) -> "ModelSpec":
        """Return the spec of a text or of a `Workload`. Accepts any text and reads no file."""
        return _parse(model) if isinstance(model, str) else cls(model.model, "workload", "")

    @property
    def is_saved(self) -> bool:
        """True if the model is traced already: a workload in memory or in a file."""
        return self.kind == "workload"

    @property
    def runs_code(self) -> bool:
        """True if building the model runs the user's own code, which also provides its data."""
        return self.kind == "code"

    @property
    def is_library(self) -> bool:
        """True if another package than this one defines the model."""
        return self.kind in LIBRARIES

    @property
    def has_fixed_length(self) -> bool:
        """True if the model cannot be traced at another sequence length."""
        return self.is_saved or self.runs_code

    @property
    def can_checkpoint(self) -> bool:
        """True if the model surely supports activation checkpointing. The user's code may not."""
        return self.kind in ("workload", "transformers", "timm", "diffusers")

    @property
    def in_words(self) -> str:
        return self.text if self.path or not self.is_saved else f"this workload of {self.text}"

    @property
    def plain_name(self) -> str:
        """The name without its library, where libraries agree on what a name means."""
        return self.name if self.kind in ("built_in", "timm", "torchvision") else self.text

    @property
    def aliases(self) -> tuple[str, ...]:
        """All specs of this model. Built-in models are torchvision's, layer by layer."""
        if self.kind in ("built_in", "torchvision"):
            return self.name, f"torchvision:{self.name}"
        return (self.text,)

    def with_path(self, path: object) -> str:
        """Return the spec of the same model if its file lies at `path`."""
        if self.kind == "code":
            return f"{path}:{self.name}"
        if self.kind in ("transformers", "diffusers"):
            return f"{self.kind}:{path}"
        return str(path) if self.path else self.text


@functools.cache
def _parse(text: str) -> ModelSpec:
    for library in LIBRARIES:
        if text.startswith(f"{library}:"):
            name = text.removeprefix(f"{library}:")
            has_file = library in ("transformers", "diffusers")
            return ModelSpec(text, library, name, name if has_file else "")
    path, colon, name = text.rpartition(":")
    if path.endswith(".py"):
        return ModelSpec(text, "code", name, path)
    if text.endswith(".py"):
        return ModelSpec(text, "script", "", text)
    if text.endswith(".json"):
        return ModelSpec(text, "workload", text, text)
    return ModelSpec(text, "unknown" if colon else "built_in", name)


def import_package(module: str, package: str) -> Any:
    """Import a module of a package that may be missing.

    Raises:
        TrainpaceError: With the command that installs the package.
    """
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        if isinstance(error, ImportError):
            raise TrainpaceError(
                f"{package} cannot be imported ({reason}).", f"pip install 'trainpace[{package}]'."
            ) from None
        hint = f"Install the {package} build that belongs to this torch."
        raise TrainpaceError(
            f"{package} cannot be imported with this torch ({reason}).", hint
        ) from None
