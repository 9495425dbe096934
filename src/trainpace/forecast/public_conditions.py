"""Under which conditions a packaged run was measured, in what a forecast needs: no torch, no file of the source."""

from __future__ import annotations

from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, find_device, find_host
from trainpace.core.records import Record
from trainpace.core.software import Software
from trainpace.forecast.cases import Case
from trainpace.forecast.measured_runs import MeasuredRun
from trainpace.workload import Variant, form_of


class Conditions(Record):
    """Of one run: its workload's key among the packaged traces, its execution, its cluster and its software.

    network_gb_per_s: a GPU's share of its node's network in one direction. host: the CPU, where the source tells it. host_copy:
    whether each step copies its samples from pageable memory.
    """

    trace: str
    execution: Execution
    device: str
    network_gb_per_s: float | None
    host: str | None
    software: Software
    host_copy: bool

    def case(self) -> Case:
        """What `trainpace.forecast` forecasts."""
        e = self.execution
        cluster = Cluster(
            device=find_device(self.device),
            devices_per_node=e.nproc_per_node,
            nodes=e.nnodes,
            network_gb_per_s_per_device=self.network_gb_per_s,
            host=None if self.host is None else find_host(self.host),
        )
        return Case(
            run=MeasuredRun(index=0, host_copy="yes" if self.host_copy else ""),
            spec=self.trace,
            form=form_of(e.precision),
            variant=Variant(),
            execution=e,
            cluster=cluster,
            measured_ms=None,
            software=self.software,
        )


def conditions_of(case: Case, trace: str) -> Conditions:
    """The conditions of a case, whose workload is packaged by the key `trace`."""
    return Conditions(
        trace=trace,
        execution=case.execution,
        device=case.cluster.device.name,
        network_gb_per_s=case.cluster.network_gb_per_s_per_device,
        host=None if case.cluster.host is None else case.cluster.host.name,
        software=case.software,
        host_copy=case.run.host_copy == "yes",
    )
