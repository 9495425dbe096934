"""Records for the terminal, as JSON rows, as one-file HTML and as figures. This room computes nothing.

Other rooms import from here; a name is loaded when it is first used, since some need rich, numpy or a whole verb's records.
"""

from typing import TYPE_CHECKING

from trainpace.core.lazy import exports

if TYPE_CHECKING:
    from trainpace.report.charts import Axis, BarChart, Chart, Mark, Picture, Series, series
    from trainpace.report.diagnosis import diagnosis_page, diagnosis_pictures, print_diagnosis
    from trainpace.report.doctor import examination_json, examination_page, print_examination
    from trainpace.report.evidence import print_evidence
    from trainpace.report.figures import check_suffix, save_figures
    from trainpace.report.forecast import forecast_page, forecast_pictures, print_forecasts
    from trainpace.report.journal import (
        print_comparison,
        print_entries,
        print_entry,
        print_imported,
        print_scores,
        print_sweeps,
        print_validation,
    )
    from trainpace.report.ladder import (
        ahead_json,
        ladder_json,
        ladder_page,
        ladder_pictures,
        markdown,
        print_ahead,
        print_ladder,
        table_of,
    )
    from trainpace.report.leaving import shared_page
    from trainpace.report.loader import (
        comparison_verdict,
        loader_json,
        print_damage,
        print_estimate,
        print_loader,
        print_loader_comparison,
        print_precomputed,
    )
    from trainpace.report.look import look_json, print_looked
    from trainpace.report.machine import (
        print_catalogue,
        print_device,
        print_host_links,
        print_machine,
        print_profile,
    )
    from trainpace.report.match import match_page, match_pictures, print_ranking, ranking_json
    from trainpace.report.measurement import (
        print_sweep,
        sweep_json,
        sweep_page,
        sweep_pictures,
        sweep_verdict,
    )
    from trainpace.report.notebook import html_of
    from trainpace.report.offers import print_offers
    from trainpace.report.pages import SCRIPTS, STYLES, asset, environment, figure
    from trainpace.report.phrases import stated
    from trainpace.report.plan import (
        plan_page,
        plan_pictures,
        print_code,
        print_plan,
        print_plan_next,
        print_script_changes,
    )
    from trainpace.report.profiled import print_profiled, profiled_page, profiled_pictures
    from trainpace.report.public import (
        accuracy_chart,
        print_public_run,
        print_public_runs,
        print_public_score,
        public_facts,
        score_meaning,
    )
    from trainpace.report.restored import restored_notes
    from trainpace.report.schedule import print_answer
    from trainpace.report.sharing import print_lessons, print_shared
    from trainpace.report.step_charts import Timed, memory_at_peak, step_breakdown
    from trainpace.report.streams import (
        Bar,
        TerminalProgress,
        never_fail_to_encode,
        open_closed_streams,
        tell,
        visible,
    )
    from trainpace.report.sweep_charts import BATCH, FEWEST, measured_sweep
    from trainpace.report.terminal import (
        one_screen,
        print_lines,
        print_named,
        print_table,
        print_verdict,
    )
    from trainpace.report.verify import WAY_IN_WORDS, equivalence_json, print_equivalence
    from trainpace.report.watch import (
        print_guarded,
        print_recording,
        print_timeline,
        timeline_page,
        timeline_svg,
    )

__getattr__, __all__ = exports(__name__, __file__)
