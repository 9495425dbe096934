"""`trainpace verify`."""

from trainpace.cli.command import View, command, echo_json
from trainpace.verbs.verify import VerifyRequest, run


@command(VerifyRequest, View)
def verify(request: VerifyRequest, view: View) -> int:
    """Train MODEL for some steps as one big batch, by accumulation and on ranks, and say whether the weights come out the same.

    All trainings begin with the same weights and take the same samples, on the CPU. Where weights differ by more than
    rounding, one thing after another is changed on both sides until they agree: that is the cause. MODEL is named as in
    trainpace measure. Exit code 1: they differ.

    \b
    trainpace verify train.py:task
    trainpace verify resnet18 --image-size 64 --batch 16 --accumulate 4
    trainpace verify train.py:task --batch 10 --accumulate 4 --way accumulate
    """
    from trainpace.report import TerminalProgress, equivalence_json, print_equivalence

    equivalence = run(request, TerminalProgress())
    if view.json:
        echo_json(equivalence_json(equivalence))
    else:
        print_equivalence(equivalence)
    return 0 if equivalence.equal else 1
