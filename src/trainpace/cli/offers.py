"""`trainpace offers`."""

from trainpace.cli.command import View, command, echo_json
from trainpace.verbs.offers import OffersRequest, run


@command(OffersRequest, View)
def offers(request: OffersRequest, view: View) -> int:
    """List servers on offer: GPUs, price, spot price, network, and where the price comes from.

    \b
    trainpace offers --gpu H100 --provider aws
    trainpace offers --refresh
    """
    import datetime

    from trainpace.report import TerminalProgress, print_offers

    answer = run(request, TerminalProgress())
    if view.json:
        echo_json({"record": "Offers", "schema_version": 1, "rows": answer.to_dicts()})
    else:
        print_offers(list(answer.offers), datetime.date.today())
    return 0
