"""Rendering of answers: records become sections; sections become text, pages and figures.

This package computes nothing. Other packages import from here. Names are loaded on first use,
because some need rich, numpy or a whole verb.
"""

from typing import TYPE_CHECKING

from trainpace.core import exports

if TYPE_CHECKING:
    from trainpace.report.answers import html_of, shared_page
    from trainpace.report.charts import (
        Axis,
        BarChart,
        Chart,
        Mark,
        Picture,
        Series,
        check_suffix,
        save_figures,
        series,
    )
    from trainpace.report.diagnosis import diagnosis_sections, profiled_sections, profiled_title
    from trainpace.report.forecast import forecast_sections, forecast_title
    from trainpace.report.journal import (
        accuracy_chart,
        comparison_sections,
        entries_sections,
        entry_sections,
        imported_sections,
        public_facts,
        public_run_sections,
        public_runs_sections,
        public_score_sections,
        score_meaning,
        scores_sections,
        shared_notes,
        shared_sections,
        sweeps_sections,
        validation_sections,
    )
    from trainpace.report.machine import (
        catalogue_sections,
        device_sections,
        examination_json,
        examination_sections,
        host_links_sections,
        machine_sections,
        profile_sections,
    )
    from trainpace.report.match import (
        PAGE_ROWS,
        match_page_json,
        match_sections,
        match_title,
        offers_sections,
        schedule_sections,
        settings_sections,
    )
    from trainpace.report.measurement import (
        comparison_verdict,
        damage_sections,
        estimate_sections,
        loader_comparison_sections,
        loader_json,
        loader_sections,
        precomputed_sections,
        sweep_json,
        sweep_sections,
        sweep_title,
        sweep_verdict,
    )
    from trainpace.report.pages import SCRIPTS, STYLES, asset, environment, figure, page
    from trainpace.report.phrases import stated
    from trainpace.report.plan import plan_next, plan_sections, plan_title
    from trainpace.report.run import (
        WAY_IN_WORDS,
        ahead_json,
        ahead_sections,
        equivalence_json,
        equivalence_sections,
        ladder_json,
        ladder_sections,
        markdown,
        table_of,
    )
    from trainpace.report.sections import Headline, Lines, Section, Verbatim, named, pictures_of
    from trainpace.report.steps import (
        BATCH,
        FEWEST,
        Timed,
        forecast_sweep,
        measured_sweep,
        memory_at_peak,
        step_breakdown,
    )
    from trainpace.report.streams import (
        Bar,
        TerminalProgress,
        never_fail_to_encode,
        open_closed_streams,
        tell,
        visible,
    )
    from trainpace.report.terminal import show, wrapped
    from trainpace.report.watch import (
        guarded_sections,
        look_sections,
        recording_sections,
        restored_notes,
        timeline_sections,
        timeline_svg,
    )

__getattr__, __all__ = exports(__name__, __file__)
