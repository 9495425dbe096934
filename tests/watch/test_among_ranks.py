"""Tests of what the recorder notes if several ranks train together."""

import socket
import subprocess
import sys
import textwrap
from functools import partial

import pytest
import torch

from made_logs import read_log
from trainpace.watch import watch
from trainpace.watch.inside import ranks
from trainpace.watch.inside.event_log import BACKWARD, COMMUNICATION, EventLogWriter, Span
from trainpace.watch.inside.recorder import Recorder
from trainpace.watch.recording import read_recording

SLOW = """
    import gc, os, sys, time
    import torch
    import torch.distributed as dist
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 4)
        def forward(self, x):
            time.sleep(0.02 * dist.get_rank())
            return self.layer(x)

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.utils.data.TensorDataset(torch.randn(4 * STEPS, 64))
    losses = []
    for i, (x,) in enumerate(torch.utils.data.DataLoader(data, batch_size=4)):
        loss = model(x).square().mean()
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        work = dist.all_reduce(total.clone(), async_op=True)
        work.wait()
        losses.append(total.item())
        optimizer.step()
        optimizer.zero_grad()
    with open(sys.argv[1] + os.environ["RANK"], "w") as file:
        file.write(repr(losses))
    dist.barrier()
    del model, optimizer, loss, work  # else gloo's threads outlive the group, and may abort a process that ends
    gc.collect()
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_slow_rank_shows_as_waiting_in_gradient_communication(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(SLOW).replace("STEPS", "40"))
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    subprocess.run(
        [*torchrun, str(tmp_path / "train.py"), str(tmp_path / "alone")], check=False, timeout=120
    )
    watch(
        [*torchrun, str(tmp_path / "train.py"), str(tmp_path / "watched")], tmp_path / "recording"
    )
    for rank in "01":
        assert (tmp_path / f"alone{rank}").read_text() == (tmp_path / f"watched{rank}").read_text()
    found = read_recording(tmp_path / "recording").together
    (straggler,) = found.stragglers
    assert (straggler.rank, straggler.cause) == (1, "compute")
    assert straggler.ms == pytest.approx(20.0, rel=0.2)
    assert found.clocks == found.links == ()
    collectives = {c.name: c for c in found.collectives}
    assert {"gradients", "all_reduce", "all_reduce started", "wait"} <= set(collectives)
    assert collectives["gradients"].waiting_ms == pytest.approx(
        10.0, rel=0.25
    )  # the mean of both ranks
    assert collectives["all_reduce"].per_step == 1.0
    assert collectives["wait"].waiting_ms is None
    assert {r.input_elements for r in found.ranks} == {256.0}


def test_elements_counts_the_largest_input_and_ignores_tensor_subclasses():
    class Other(torch.Tensor):
        def numel(self):
            raise AssertionError

    small, large = torch.zeros(2), torch.zeros(3, 4)
    assert ranks.elements((small, large), {}) == 12
    assert ranks.elements((), {"batch": {"tokens": [small, large]}, "n": 5}) == 12
    assert ranks.elements((torch.zeros(3).as_subclass(Other), small), {}) == 2
    assert ranks.elements((), {}) == 0


def recorded(tmp_path, synchronizes, backward):
    log = EventLogWriter(str(tmp_path / "a.trail"), {})
    recorder = Recorder(log)
    recorder.synchronizes = lambda: synchronizes
    call = recorder.wraps(partial(ranks.Gradients(recorder).reduce, backward), BACKWARD, "backward")
    weight = torch.ones(3, requires_grad=True)
    call((weight * 2).sum())
    log.flush()
    return weight, [
        r.part for r in read_log((tmp_path / "a.trail").read_bytes())[1] if isinstance(r, Span)
    ]


@pytest.mark.parametrize(
    ("synchronizes", "parts"), [(True, [COMMUNICATION, BACKWARD]), (False, [BACKWARD])]
)
def test_gradient_synchronization_counts_as_communication(tmp_path, synchronizes, parts):
    weight, found = recorded(tmp_path, synchronizes, torch.Tensor.backward)
    assert weight.grad.tolist() == [2.0] * 3
    assert found == parts


def test_failing_backward_raises_its_own_error(tmp_path):
    def fails(loss):
        loss.backward()
        raise RuntimeError("as the script's own")

    with pytest.raises(RuntimeError, match="own"):
        recorded(tmp_path, True, fails)


def test_loopback_connections_are_not_links():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as peer,
    ):
        at = server.accept()[0]
        peer.sendall(b"x" * 1000)
        assert at.recv(1000)
        assert [link for link in ranks.links() if link[0].startswith("127.")] == []
        at.close()


def test_links_are_not_read_with_a_default_socket_timeout(monkeypatch):
    monkeypatch.setattr(socket, "getdefaulttimeout", lambda: 5.0)
    monkeypatch.setattr(ranks.os, "listdir", lambda path: pytest.fail("looked"))
    assert list(ranks.links()) == []
