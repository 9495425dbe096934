"""A workload under the software of a target: every rewrite that the software asks for, in each number format that was traced."""

from __future__ import annotations

from msgspec.structs import replace

from trainpace.execution import FORMS
from trainpace.forecast.eager_attention import eager
from trainpace.forecast.updates import can_be, updated
from trainpace.software import Rewrites
from trainpace.workload import TracedForm, Workload


def as_run(workload: Workload, rewrites: Rewrites) -> Workload:
    """The workload with the operators that such software runs; itself where nothing differs from the trace."""
    forms: dict[str, TracedForm] = {}
    optimizer = rewrites.optimizer if rewrites.optimizer and can_be(workload, rewrites.optimizer) else None
    for name in FORMS:
        form = workload.forms.get(name)
        if form is None:
            continue
        if rewrites.eager_attention:
            form = eager(form, name, workload.checkpointed)
        if optimizer:
            form = updated(workload, form, optimizer)
        forms[name] = form
    same = all(forms[name] is form for name, form in workload.forms.items())
    return workload if same else replace(workload, forms=forms)
