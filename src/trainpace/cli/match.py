"""`trainpace match`."""

from typing import Annotated

from msgspec.structs import replace

from trainpace.cli.command import PicturedView, check_pictures, command, echo_json, save_pictures
from trainpace.verbs.match import MatchRequest, run
from trainpace.verbs.request import Field
from trainpace.verbs.units import COUNT


class MatchView(PicturedView):
    """How a ranking is shown, and where the trace is kept."""

    top: Annotated[int, Field("Rows to print, besides the Pareto front.", COUNT)] = 12
    save_workload: Annotated[str | None, Field("Keep the trace, for answers in a moment.", metavar="FILE.json")] = None


@command(MatchRequest, MatchView)
def match(request: MatchRequest, view: MatchView) -> int:
    """Rank servers by what the whole training of MODEL costs, or how long it takes.

    Every server on offer, alone and joined by its network, at the same global batch: seconds and dollars per step, hours and
    dollars of the job with start-up, checkpoints and failures. Exit code 1: none meets the deadline or the budget.

    \b
    trainpace match resnet50 --samples 1281167 --epochs 90
    trainpace match resnet50 --samples 1.28M --epochs 90 --deadline 12h --spot --provider aws
    trainpace match WORKLOAD.json --samples 1.28M --epochs 90 --by hours --budget 100 --json

    \b
    A file for --machines; price is dollars an hour for one machine, network_gb_per_s joins several:
      [[machine]]
      name = "lab"
      device = "RTX 4090"
      count = 4
      nodes = 2
      network_gb_per_s = 1.25
      price = 1.20
    """
    import datetime

    from trainpace.report import TerminalProgress

    check_pictures(view)
    answer = run(replace(request, save_workload=view.save_workload), TerminalProgress())
    workload, ranking, job, close = answer.workload, answer.ranking, answer.job, answer.nearest
    today = datetime.date.today()
    if view.json:
        from trainpace.report import ranking_json

        echo_json(ranking_json(workload, ranking, job, close, today))
    else:
        from trainpace.report import print_ranking

        print_ranking(workload, ranking, job, close, request.by, view.top, today, request.model_name)
    if view.html or view.figure:
        from trainpace.report import match_page, match_pictures, ranking_json

        why = "" if close is None else f"{close[1][:1].upper()}{close[1][1:]}."
        data = ranking_json(workload, ranking, job, close, today)
        page = (workload, ranking, job, request.by, why, data, today)
        save_pictures(view, lambda: match_page(*page), lambda: match_pictures(ranking))
    return 0 if ranking.matches else 1
