"""An unchanged training script, recorded: where its steps' time goes."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainpace.watch.command import watch
    from trainpace.watch.recording import Recording, read_recording

__all__ = ["Recording", "read_recording", "watch"]


def __getattr__(name: str) -> Any:
    """Late: the recorder is in this package too, and runs where the packages that these need may be missing."""
    import importlib

    if name not in __all__:
        raise AttributeError(name)
    module = importlib.import_module("trainpace.watch.command" if name == "watch" else "trainpace.watch.recording")
    return getattr(module, name)
