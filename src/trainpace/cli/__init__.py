"""The command line: parse, call, render; nothing else. Verbs are imported when they are called."""

from trainpace.cli.main import main

__all__ = ["main"]
