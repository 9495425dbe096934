"""From a model's code to a Workload. This module itself imports no torch: the tracing runs in a child process."""

from trainpace.trace.workloads import load_workload, trace_isolated, trace_many

__all__ = ["load_workload", "trace_isolated", "trace_many"]
