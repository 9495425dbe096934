"""Read the settings files that people already have, cross-check them, and write a plan into them."""

from trainpace.configs.changes import Changes
from trainpace.configs.combine import Clash, Combined, combine
from trainpace.configs.command import parse_command
from trainpace.configs.read import parse_config, read_configs
from trainpace.configs.settings import ConfigFile, Note, Setting
from trainpace.configs.write import Rewritten, Written, rewrite, write_changes

__all__ = [
    "Changes",
    "Clash",
    "Combined",
    "ConfigFile",
    "Note",
    "Rewritten",
    "Setting",
    "Written",
    "combine",
    "parse_command",
    "parse_config",
    "read_configs",
    "rewrite",
    "write_changes",
]
