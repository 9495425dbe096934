"""Why a model's code could not be traced, in a sentence."""

from torch import nn

from trainpace.errors import UserCodeError
from trainpace.process import explain


def explained(name: str, error: Exception, model: nn.Module) -> UserCodeError:
    """One sentence with the user's own line where it can be found, and the module that looks at values."""
    reason = str(error)
    if (
        "meta tensors" in reason
        or "Meta" in type(error).__name__
        or "data-dependent" in reason
        or "register_meta" in reason
    ):
        place, module = _innermost_module(error, model)
        where = f" in {place} ({type(module).__name__})" if place else ""
        is_eager = getattr(getattr(module, "config", None), "_experts_implementation", None) == "eager"
        return UserCodeError(
            f"{name} looks at the values of its tensors{where}, so it cannot be traced without them: {explain(error, 'it')}",
            'Give its experts as one product: experts_implementation="grouped_mm" in transformers.'
            if is_eager
            else "Measure it with `trainpace measure` instead. Experts can be traced where torch.nn.functional.grouped_mm makes"
            " their products, or where each gets a fixed number of tokens.",
        )
    return UserCodeError(explain(error, name))


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
