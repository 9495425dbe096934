"""An unchanged training script, recorded: where its steps' time goes. The recorder itself is in this package too and runs
where packages that reading a recording needs may be missing, so nothing is imported before it is used.
"""

from typing import TYPE_CHECKING

from trainpace.core.lazy import exports

if TYPE_CHECKING:
    from trainpace.watch.clocks import Clock
    from trainpace.watch.command import COMMAND_FILE, environment, temporary_folder, watch
    from trainpace.watch.inside.crowding import DELAYED
    from trainpace.watch.inside.rounds import LEAST_ROUNDS, PRECISE
    from trainpace.watch.inside.trail import DATA, FEW, LOADER_START, PARTS, TRIALS, Step
    from trainpace.watch.links import LinkRate, SlowLink
    from trainpace.watch.meeting import meet
    from trainpace.watch.notes import Line, Loader, Notes, inputs_of
    from trainpace.watch.ranks import (
        Block,
        FetchCost,
        Rank,
        batches_per_step,
        half_width_ms,
        ms,
        steady_ms,
        untraced_in_words,
    )
    from trainpace.watch.recording import STEP_IN_WORDS, Recording, read_recording
    from trainpace.watch.restoring import NOT_RESTORED, notes_in, remove_trial_checkpoints
    from trainpace.watch.stated import StatedLength, stated_length
    from trainpace.watch.stragglers import BEHIND, CollectiveShare, RankShare, Straggler, Together
    from trainpace.watch.tasks import Task, is_one_of_unnumbered_nodes, node_of, take, task_of
    from trainpace.watch.timeline import (
        Bar,
        Lane,
        Timeline,
        charged,
        coarsened,
        timeline_of,
        trace_events,
        write_trace,
    )
    from trainpace.watch.trails import Process, header_of, read_processes, records_of

__getattr__, __all__ = exports(__name__, __file__)
