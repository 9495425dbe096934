"""`trainpace serve`."""

from trainpace.cli.command import command
from trainpace.errors import TrainpaceError
from trainpace.verbs.request import Request
from trainpace.verbs.serve import ServeRequest


@command(ServeRequest, Request)
def serve(request: ServeRequest, view: Request) -> int:
    """Show the journal, and what-if, in the browser.

    Listens on loopback, so that only this machine reaches it. It only reads the journal; of models it knows the built-in ones
    and the workloads that `trainpace forecast --save-workload` left in the data folder's workloads/.

    \b
    trainpace serve
    trainpace serve --port 9000 --journal team.db
    """
    import runpy

    try:  # a program of its own, as by `python -m trainpace.web`: a face starts another, and imports nothing of it
        runpy.run_module("trainpace.web", {"REQUEST": request}, run_name="__main__")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("trainpace"):
            raise
        raise TrainpaceError(f"the dashboard needs {error.name}.", "pip install 'trainpace[serve]'") from None
    return 0
