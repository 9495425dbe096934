"""Records for the terminal, as JSON rows, as one-file HTML and as figures. This room computes nothing.

Other rooms import from here; a name is loaded when it is first used, since some need rich, numpy or a whole verb's records.
"""

from typing import TYPE_CHECKING

from trainpace.lazy import exports

if TYPE_CHECKING:
    from trainpace.report.charts.breakdown import Held, Timed, memory_at_peak, step_breakdown
    from trainpace.report.charts.chart import Axis, BarChart, Chart, Mark, Picture, Series
    from trainpace.report.charts.step_time import BATCH, FEWEST, best_of, measured_sweep
    from trainpace.report.diagnosis import print_diagnosis
    from trainpace.report.encoding import never_fail_to_encode
    from trainpace.report.figures import check_suffix, save_figures
    from trainpace.report.forecast import print_forecasts
    from trainpace.report.hardware import print_catalogue, print_device
    from trainpace.report.journal import (
        print_comparison,
        print_entries,
        print_entry,
        print_imported,
        print_scores,
        print_sweeps,
    )
    from trainpace.report.ladder import ahead_json, ladder_json, markdown, print_ahead, print_ladder, table_of
    from trainpace.report.loader import loader_json, print_loader
    from trainpace.report.machine import print_host_links, print_machine, print_profile
    from trainpace.report.match import print_ranking
    from trainpace.report.match_json import ranking_json
    from trainpace.report.measurement import print_sweep, sweep_json
    from trainpace.report.offers import print_offers
    from trainpace.report.pages.assets import SCRIPTS, STYLES, asset
    from trainpace.report.pages.diagnosis import diagnosis_page, diagnosis_pictures
    from trainpace.report.pages.forecast import forecast_page, forecast_pictures
    from trainpace.report.pages.ladder import ladder_page, ladder_pictures
    from trainpace.report.pages.match import match_page, match_pictures
    from trainpace.report.pages.plan import plan_page, plan_pictures
    from trainpace.report.pages.render import NONE, environment, figure
    from trainpace.report.pages.side_by_side import HEAD, Pair, cells_of_pairs, side_by_side_page
    from trainpace.report.pages.sweep import sweep_page, sweep_pictures
    from trainpace.report.pages.timeline import timeline_page, timeline_svg
    from trainpace.report.plan import print_plan, print_plan_next, print_script_changes
    from trainpace.report.precompute import print_damage, print_estimate, print_precomputed
    from trainpace.report.progress import Bar, TerminalProgress
    from trainpace.report.schedule import print_answer
    from trainpace.report.terminal import print_head, print_lines, print_named, print_next, print_table, print_verdict
    from trainpace.report.timeline import print_timeline
    from trainpace.report.validation import print_validation
    from trainpace.report.verify import WAY_IN_WORDS, equivalence_json, print_equivalence
    from trainpace.report.watch import print_guarded, print_recording

__getattr__, __all__ = exports(__name__, __file__)
