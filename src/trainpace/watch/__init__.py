"""An unchanged training script, recorded: where its steps' time goes."""

from trainpace.watch.command import watch
from trainpace.watch.recording import Recording, read_recording

__all__ = ["Recording", "read_recording", "watch"]
