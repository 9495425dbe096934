"""Packages that a model spec may need and that trainpace does not bring along."""

import importlib
from typing import Any

from trainpace.core.errors import TrainpaceError


def import_package(module: str, package: str) -> Any:
    """A module of a package that may be missing. Raises TrainpaceError with how to install it."""
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
            f"{package} does not load beside this torch ({reason}).", hint
        ) from None
