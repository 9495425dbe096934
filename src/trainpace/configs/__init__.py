"""Read the settings files that people already have, and cross-check them."""

from trainpace.configs.combine import Clash, Combined, combine
from trainpace.configs.command import parse_command
from trainpace.configs.read import parse_config, read_configs
from trainpace.configs.settings import ConfigFile, Note, Setting

__all__ = [
    "Clash",
    "Combined",
    "ConfigFile",
    "Note",
    "Setting",
    "combine",
    "parse_command",
    "parse_config",
    "read_configs",
]
