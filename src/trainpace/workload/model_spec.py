"""Parse a model spec, the text by which the user names a model. Does not import numpy or torch."""

import functools
import importlib
import importlib.util
from typing import Any, Literal, NamedTuple, Protocol, get_args

from trainpace.core.errors import TrainpaceError, message_of

Library = Literal["timm", "torchvision", "transformers", "diffusers"]
Kind = Literal["built_in", Library, "code", "script", "workload", "unknown"]
"""Kinds of model specs.

- built_in: NAME.
- A library: LIBRARY:NAME.
- code: FILE.py:NAME.
- script: FILE.py without a name. It is not a model.
- workload: A saved trace, FILE.json.
- unknown: WORD:NAME with an unknown word.
"""
LIBRARIES: tuple[Library, ...] = get_args(Library)
FORMS = (
    "timm:NAME, torchvision:NAME, transformers:CONFIG.json, diffusers:CONFIG.json, FILE.py:FUNCTION"
)
"""Forms of a model spec for models that are not built in, for messages."""


class Traced(Protocol):
    """Protocol of `Workload`, since importing its class would import numpy."""

    @property
    def model(self) -> str: ...


class ModelSpec(NamedTuple):
    """Parsed model spec. FILE.py:NAME can also name a dataset or a DataLoader.

    Attributes:
        text: The spec as the user wrote it. For a `Workload` in memory, the name of its model.
        kind: How the model is defined.
        name: The spec without its prefix: a model's name, a function's name, or a path.
        path: The file that defines the model. Empty if a library or this package defines it.
    """

    text: str
    kind: Kind
    name: str
    path: str = ""

    @classmethod
    def of(cls, model: str | Traced) -> "ModelSpec":
        """Parse a text or a `Workload`. Any text is accepted, and no file is read."""
        return _parse(model) if isinstance(model, str) else cls(model.model, "workload", "")

    @property
    def is_saved(self) -> bool:
        """True if the model is already traced: a workload in memory or in a file."""
        return self.kind == "workload"

    @property
    def runs_code(self) -> bool:
        """True if the user's own code builds the model. That code also provides the samples."""
        return self.kind == "code"

    @property
    def is_library(self) -> bool:
        """True if a library other than this package defines the model."""
        return self.kind in LIBRARIES

    @property
    def is_hugging_face(self) -> bool:
        """True for a configuration of a language, vision or diffusion model of Hugging Face."""
        return self.kind in ("transformers", "diffusers")

    @property
    def has_fixed_length(self) -> bool:
        """True if the model cannot be traced at another sequence length."""
        return self.is_saved or self.runs_code

    @property
    def can_checkpoint(self) -> bool:
        """True if the model is known to support activation checkpointing.

        Models of the user's own code may support it too.
        """
        return self.kind in ("workload", "transformers", "timm", "diffusers")

    @property
    def in_words(self) -> str:
        return self.text if self.path or not self.is_saved else f"this workload of {self.text}"

    @property
    def plain_name(self) -> str:
        """Name without its library, if the libraries use this name for the same model."""
        return self.name if self.kind in ("built_in", "timm", "torchvision") else self.text

    @property
    def aliases(self) -> tuple[str, ...]:
        """All specs of this model. Built-in models equal torchvision's layer by layer."""
        if self.kind in ("built_in", "torchvision"):
            return self.name, f"torchvision:{self.name}"
        return (self.text,)

    def with_path(self, path: object) -> str:
        """Return the spec of the same model with its file at another path."""
        if self.kind == "code":
            return f"{path}:{self.name}"
        if self.is_hugging_face:
            return f"{self.kind}:{path}"
        return str(path) if self.path else self.text


@functools.cache
def _parse(text: str) -> ModelSpec:
    for library in LIBRARIES:
        if text.startswith(f"{library}:"):
            name = text.removeprefix(f"{library}:")
            spec = ModelSpec(text, library, name)
            return spec._replace(path=name) if spec.is_hugging_face else spec
    path, colon, name = text.rpartition(":")
    if path.endswith(".py"):
        return ModelSpec(text, "code", name, path)
    if text.endswith(".py"):
        return ModelSpec(text, "script", "", text)
    if text.endswith(".json"):
        return ModelSpec(text, "workload", text, text)
    return ModelSpec(text, "unknown" if colon else "built_in", name)


WITHOUT_EXTRA = ("bitsandbytes", "torchao")
"""Optional packages that no extra of this package installs."""


def check_packages(*packages: str) -> None:
    """Raise TrainpaceError with one command that installs all missing packages, if any."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise TrainpaceError(f"Not installed: {', '.join(missing)}.", _install(*missing))


def _install(*packages: str) -> str:
    extras = ",".join(name for name in packages if name not in WITHOUT_EXTRA)
    words = [f"'trainpace[{extras}]'"] if extras else []
    words += [name for name in packages if name in WITHOUT_EXTRA]
    return f"pip install {' '.join(words)}."


def import_package(module: str, package: str) -> Any:
    """Import a module of an optional package.

    Raises:
        TrainpaceError: If the package is missing. The hint is the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError) as error:
        reason, hint = message_of(error), _install(package)
        if isinstance(error, RuntimeError):
            reason = f"with this torch: {reason}"
            hint = f"Install the {package} build that belongs to this torch."
        raise TrainpaceError(f"{package} cannot be imported ({reason}).", hint) from None
