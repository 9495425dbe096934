"""Padding is measured from the attention masks of real steps."""

import sys

import pytest

from trainpace.watch import read_recording, watch

SCRIPT = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Embedding(10, 4)
    def forward(self, input_ids, attention_mask=None):
        return self.layer(input_ids)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(STEPS):
    mask = MASK
    net(input_ids=torch.zeros(2, 8, dtype=torch.long), attention_mask=mask).sum().backward()
    optimizer.step()
"""


PADDED = "torch.tensor([[1] * 2 + [0] * 6, [1] * 4 + [0] * 4])"


@pytest.mark.parametrize(
    ("mask", "tokens", "steps", "seen"),
    [
        (PADDED, (6, 8, 16), 3, 0),
        (PADDED, (6, 8, 16), 8, 5),
        (PADDED, (6, 8, 16), 40, 20),
        ("torch.tensor([[0] * 7 + [1], [1] * 8]).bool()", (9, 16, 16), 8, 5),  # left padding
        ("torch.ones(2, 1, 8, 8)", (0, 0, 0), 8, 5),  # masks of other kinds
        ("torch.ones(8, 8).tril().bool()", (0, 0, 0), 8, 5),
        ("torch.zeros(2, 8)", (0, 0, 0), 8, 5),
    ],
)
def test_masked_positions_count_as_padding(tmp_path, mask, tokens, steps, seen):
    (tmp_path / "train.py").write_text(SCRIPT.replace("MASK", mask).replace("STEPS", str(steps)))
    assert watch([sys.executable, str(tmp_path / "train.py")], tmp_path / "recording") == 0
    (rank,) = read_recording(tmp_path / "recording").ranks
    assert rank.tokens == tuple(n * seen for n in tokens)
