"""Why a model's code could not be traced, in a sentence."""

import re

from torch import nn

from trainpace.core.errors import UserCodeError
from trainpace.core.worker import explain, place_in_code

LONGEST_REASON = 200
"""Characters of torch's own reason that are kept."""
_EXPERTS = re.compile(r"[Ee]xpert|MoE|Moe|MOE|\bmoe\b|(\b|_)moe_")
"""In the names of the modules of a mixture of experts, or of their classes."""


def explained(name: str, error: Exception, model: nn.Module) -> UserCodeError:
    """One sentence with the user's own line where it can be found, and the module that looks at values."""
    if not asks_for_values(error):
        return UserCodeError(explain(error, name))
    place, module = _innermost_module(error, model)
    where = f" in {place} ({type(module).__name__})" if place else ""
    hint = "Measure it with `trainpace measure` instead."
    if getattr(getattr(module, "config", None), "_experts_implementation", None) == "eager":
        hint = (
            'Give its experts as one product: experts_implementation="grouped_mm" in transformers.'
        )
    elif any(
        _EXPERTS.search(f"{part} {type(inner).__name__}") for part, inner in model.named_modules()
    ):
        hint += (
            " Experts can be traced where torch.nn.functional.grouped_mm makes their products, or"
            " where each gets a fixed number of tokens."
        )
    return UserCodeError(
        f"{name} looks at the values of its tensors{where}, so it cannot be traced without them:"
        f" {explain(error, 'it')}",
        hint,
    )


def in_short(error: Exception) -> str:
    """The same for a script that was only watched, of whose code nothing was asked: what tracing lacks, to follow a colon."""
    place = place_in_code(error)
    where = f" at {place}" if place else ""
    if asks_for_values(error):
        return f"its code asks for values of tensors{where}, and a trace has their sizes alone"
    reason = next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )
    if "TensorOptions(" in reason:
        reason = "it gives one to a constructor of CPU tensors, such as torch.LongTensor"
    elif len(reason) > LONGEST_REASON:
        reason = reason[:LONGEST_REASON].rpartition(" ")[0]
    return f"its code does not run on tensors without values{where} ({reason.rstrip('.')})"


def asks_for_values(error: Exception) -> bool:
    reason = str(error)
    return (
        "meta tensors" in reason
        or "Meta" in type(error).__name__
        or "data-dependent" in reason
        or "register_meta" in reason
    )


def _innermost_module(error: Exception, model: nn.Module) -> tuple[str, nn.Module | None]:
    """(name, module) of the last of a model's modules whose code an error came through; nothing where it came through none."""
    names = {id(module): name for name, module in model.named_modules() if name}
    found: tuple[str, nn.Module | None] = "", None
    trace_back = error.__traceback__
    while trace_back is not None:
        module = trace_back.tb_frame.f_locals.get("self")
        if id(module) in names:
            found = names[id(module)], module
        trace_back = trace_back.tb_next
    return found
