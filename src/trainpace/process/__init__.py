"""Child processes: a command that ends with us, a worker that answers one request, and a pool of workers that answer many."""

from trainpace.process.child import Child, allowed_cores, ending_of, no_command, usable_cores
from trainpace.process.worker import (
    DiskFull,
    Pool,
    end,
    explain,
    failure_of,
    is_out_of_memory,
    place_in_code,
    run_isolated,
    run_ranks,
    serve,
    serve_lines,
    started_isolated,
)

__all__ = [
    "Child",
    "DiskFull",
    "Pool",
    "allowed_cores",
    "end",
    "ending_of",
    "explain",
    "failure_of",
    "is_out_of_memory",
    "no_command",
    "place_in_code",
    "run_isolated",
    "run_ranks",
    "serve",
    "serve_lines",
    "started_isolated",
    "usable_cores",
]
