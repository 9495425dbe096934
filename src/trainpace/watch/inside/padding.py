"""How much of what a model is given is padding, by the mask that comes with it."""

from typing import Any

import trainpace.measure as accelerator
from trainpace.watch.inside.recorder import Recorder
from trainpace.watch.inside.trail import Step

NOTED_AFTER = (4, 19)
"""Steps after which the sums are read, which on a device waits for it."""


class Padding:
    """Adds up the attention masks of the first steps' inputs: (samples, positions), not 0 for tokens that count."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.sums: list[Any] = []
        """Of each input: its tokens, those with each sample padded to its longest, and all positions."""
        recorder.after_kept_step.append(self.at_step)

    def sees(self, inputs: dict[str, Any]) -> None:
        """Take the keyword arguments of a model's call into account."""
        mask, recorder = inputs.get("attention_mask"), self.recorder
        if mask is None or recorder.steps > NOTED_AFTER[-1] or recorder.active_trial:
            return
        given = next(
            (
                inputs[name]
                for name in ("input_ids", "inputs_embeds")
                if inputs.get(name) is not None
            ),
            None,
        )
        # else it says something else, as which positions see which, or what is added to their scores
        if (
            given is None
            or mask.ndim != 2
            or mask.shape != given.shape[:2]
            or mask.is_floating_point()
        ):
            return
        if accelerator.is_capturing(mask.device.type):
            return
        lengths = (mask.detach() != 0).sum(1)
        self.sums.append((lengths.sum(), lengths.max() * mask.shape[0], mask.numel()))

    def at_step(self, step: Step) -> None:
        if (
            step.number in NOTED_AFTER
            and self.sums
            and not accelerator.is_capturing(self.sums[0][0].device.type)
        ):
            tokens, to_longest, positions = (
                sum(int(sums[i]) for sums in self.sums) for i in range(3)
            )
            self.recorder.trail.note({"tokens": [tokens, to_longest, positions]})
        if step.number >= NOTED_AFTER[-1]:
            self.recorder.after_kept_step.remove(self.at_step)
