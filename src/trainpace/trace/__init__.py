"""From a model's code to a Workload. This module itself imports no torch: the tracing runs in a child process."""

from trainpace.trace.packaged import packaged_models, packaged_workload
from trainpace.trace.workloads import is_saved, load_workload, trace_many, workload_on_its_way

__all__ = ["is_saved", "load_workload", "packaged_models", "packaged_workload", "trace_many", "workload_on_its_way"]
