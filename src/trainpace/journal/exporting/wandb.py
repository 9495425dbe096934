"""Runs exported to Weights & Biases, or with WANDB_MODE=offline to a folder for `wandb sync`."""

from collections.abc import Iterable
from typing import Any

from trainpace.errors import TrainpaceError, UnreadableInput
from trainpace.journal.entry import Entry
from trainpace.journal.exporting.columns import numbers_of, series_of, settings_of, words_of


def export_wandb(project: str, entries: Iterable[Entry]) -> int:
    """Add runs to a project, NAME or ENTITY/NAME; returns their number. A run keeps its id, so exporting twice makes no
    second one."""
    try:
        import wandb
    except ImportError:
        raise TrainpaceError("an export to Weights & Biases needs wandb.", "pip install 'trainpace[wandb]'.") from None
    entity, _, name = project.rpartition("/")
    try:
        return sum(_add(wandb, name, entity or None, entry) for entry in entries)
    except (wandb.Error, OSError) as error:
        raise UnreadableInput(
            f"Weights & Biases refuses: {str(error).splitlines()[0]}", "wandb login, or WANDB_MODE=offline."
        ) from None


def _add(wandb: Any, project: str, entity: str | None, entry: Entry) -> int:
    run = wandb.init(
        project=project, entity=entity, id=entry.id, name=f"{entry.model} {entry.id[:8]}", config=settings_of(entry),
        tags=[entry.kind, entry.outcome], notes=entry.notes or None, resume="allow", reinit="create_new",
        settings=wandb.Settings(console="off", silent=True, disable_git=True, x_disable_stats=True, x_disable_meta=True),
    )  # fmt: skip
    run.config.update({"trainpace": words_of(entry)}, allow_val_change=True)
    rows: dict[int, dict[str, float]] = {}
    for name, points in series_of(entry).items():
        for step, value in points:
            rows.setdefault(step, {})[name] = value
    for step in sorted(rows):
        run.log(rows[step], step=step)
    run.summary.update({**numbers_of(entry), "created_at": entry.created_at})
    run.finish(exit_code=0 if entry.outcome == "ok" else 1)
    return 1
