"""Carry a list of changes out one by one, each forecast, measured, and kept only where it helps."""

from typing import TYPE_CHECKING

from trainpace.lazy import exports

if TYPE_CHECKING:
    from trainpace.ladder.climbed import Climbed, RungResult, Tried, job_time, noise_scale_of
    from trainpace.ladder.climbing import Ahead, Means, climb, file_name, preview
    from trainpace.ladder.entries import entry_of_trial
    from trainpace.ladder.foresee import Foreseen, Known
    from trainpace.ladder.inputs import SCRIPT_STEPS, read_ladder
    from trainpace.ladder.launchers import LauncherChoice
    from trainpace.ladder.rungs import Ladder, Rung, Script, Setup, words_of
    from trainpace.ladder.script import keep_files, prepare, started_by, try_script
    from trainpace.ladder.shards import make_shards
    from trainpace.ladder.sights import Sights, has_data
    from trainpace.ladder.sources import fingerprint

__getattr__, __all__ = exports(__name__, __file__)
