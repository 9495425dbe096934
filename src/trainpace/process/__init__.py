"""Child processes: a command that ends with us, a worker that answers one request, and a pool of workers that answer many."""

from trainpace.process.child import Child, name_of_signal, usable_cores
from trainpace.process.isolation import DiskFull, run_isolated, run_ranks, started_isolated
from trainpace.process.pool import Pool
from trainpace.process.worker import explain, failure_of, is_out_of_memory, serve, serve_lines

__all__ = [
    "Child", "DiskFull", "Pool", "explain", "failure_of", "is_out_of_memory", "name_of_signal", "run_isolated",
    "run_ranks", "serve", "serve_lines", "started_isolated", "usable_cores",
]  # fmt: skip
