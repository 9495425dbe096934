"""Settings files of other tools: reading, cross-checking and rewriting them."""

from typing import TYPE_CHECKING

from trainpace.core import exports

if TYPE_CHECKING:
    from trainpace.configs.changes import Changes, execution_of, normal, settings_of
    from trainpace.configs.copies import (
        copied_command,
        copied_text,
        has_settings,
        launcher_of,
        names_file,
        split_command,
        with_own_keys,
    )
    from trainpace.configs.files import (
        NO_KEY,
        Rewritten,
        Written,
        is_python,
        lacking,
        new_file,
        new_files,
        parse_config,
        read_configs,
        rewrite,
        save_all,
        still_says,
    )
    from trainpace.configs.huggingface import put_training_arguments
    from trainpace.configs.lightning import LIGHTNING_PRECISIONS
    from trainpace.configs.settings import Note, Reading, Setting, agreed, check_counts, combine
    from trainpace.configs.shell import parse_command, slurm_seconds
    from trainpace.configs.syntax import parse_yaml

__getattr__, __all__ = exports(__name__, __file__)
