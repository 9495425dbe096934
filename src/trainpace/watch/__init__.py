"""Recorder for an unchanged training script, and reader for its recordings.

The recorder also runs in environments without the packages that the reader needs. Thus each name is
imported when it is first used.
"""

from typing import TYPE_CHECKING

from trainpace.core import exports

if TYPE_CHECKING:
    from trainpace.watch.command import (
        COMMAND_FILE,
        NOT_RESTORED,
        environment,
        notes_in,
        remove_trial_checkpoints,
        watch,
    )
    from trainpace.watch.event_logs import Line, Loader, Notes, header_of, records_of
    from trainpace.watch.inside.event_log import DATA, FEW, LOADER_START, PARTS, TRIALS, Step
    from trainpace.watch.inside.observers import DELAYED
    from trainpace.watch.inside.script import StatedLength, stated_length
    from trainpace.watch.inside.trials import LEAST_ROUNDS, PRECISE
    from trainpace.watch.ranks import (
        Block,
        FetchCost,
        Rank,
        batches_per_step,
        ms,
        steady_ms,
        steps_per_epoch,
        untraced_in_words,
    )
    from trainpace.watch.recording import STEP_IN_WORDS, Recording, read_recording
    from trainpace.watch.stragglers import (
        BEHIND,
        Clock,
        CollectiveShare,
        LinkRate,
        RankShare,
        SlowLink,
        Straggler,
        Together,
        half_width_ms,
    )
    from trainpace.watch.tasks import Task, is_one_of_unnumbered_nodes, meet, node_of, take, task_of
    from trainpace.watch.timeline import (
        Bar,
        Lane,
        Process,
        Timeline,
        charged,
        coarsened,
        read_processes,
        timeline_of,
        trace_events,
        write_trace,
    )

__getattr__, __all__ = exports(__name__, __file__)
