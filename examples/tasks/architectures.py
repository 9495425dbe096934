"""Architectures that no package of ours brings, written small: a detector, an LSTM, a recommender,
a graph network, a GAN.

trainpace forecast examples/tasks/architectures.py:yolo --gpu A100 --batch 16
trainpace forecast examples/tasks/architectures.py:dcgan --gpu A100 --batch 128
"""

import itertools

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import TensorDataset

CLASSES = 80


def _convolution(before, after, kernel=3, stride=1):
    return nn.Sequential(
        nn.Conv2d(before, after, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(after),
        nn.SiLU(),
    )


class _Stage(nn.Module):
    """A cross-stage partial block (Wang et al.

    2019, arXiv:1911.11929) as YOLOv8 has it: every bottleneck's result is kept.
    """

    def __init__(self, before, after, bottlenecks, adds):
        super().__init__()
        half = after // 2
        self.split = _convolution(before, after, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(_convolution(half, half), _convolution(half, half))
            for _ in range(bottlenecks)
        )
        self.merge = _convolution((2 + bottlenecks) * half, after, 1)
        self.adds = adds

    def forward(self, x):
        parts = list(self.split(x).chunk(2, 1))
        for block in self.blocks:
            y = block(parts[-1])
            parts.append(parts[-1] + y if self.adds else y)
        return self.merge(torch.cat(parts, 1))


class Yolo(nn.Module):
    """An anchor-free detector after YOLOv8:

    a backbone of five strides, a path down and up again, heads on three of them.
    """

    def __init__(self, width, depth):
        super().__init__()
        w = [width * 2**i for i in range(5)]
        self.stem = _convolution(3, w[0], 3, 2)
        self.stages = nn.ModuleList(
            nn.Sequential(
                _convolution(w[i], w[i + 1], 3, 2),
                _Stage(w[i + 1], w[i + 1], depth * (1 + (i in (1, 2))), True),
            )
            for i in range(4)
        )
        self.down4, self.down3 = (
            _Stage(w[4] + w[3], w[3], depth, False),
            _Stage(w[3] + w[2], w[2], depth, False),
        )
        self.to4, self.up4 = _convolution(w[2], w[2], 3, 2), _Stage(w[2] + w[3], w[3], depth, False)
        self.to5, self.up5 = _convolution(w[3], w[3], 3, 2), _Stage(w[3] + w[4], w[4], depth, False)
        self.heads = nn.ModuleList(
            nn.Sequential(_convolution(c, c), _convolution(c, c), nn.Conv2d(c, 4 + CLASSES, 1))
            for c in w[2:]
        )

    def forward(self, x):
        found, x = [], self.stem(x)
        for stage in self.stages:
            x = stage(x)
            found.append(x)
        c3, c4, c5 = found[1:]
        p4 = self.down4(torch.cat([F.interpolate(c5, scale_factor=2), c4], 1))
        p3 = self.down3(torch.cat([F.interpolate(p4, scale_factor=2), c3], 1))
        p4 = self.up4(torch.cat([self.to4(p3), p4], 1))
        p5 = self.up5(torch.cat([self.to5(p4), c5], 1))
        maps = [head(p).flatten(2) for head, p in zip(self.heads, (p3, p4, p5), strict=True)]
        return torch.cat(maps, 2).transpose(1, 2)


def _cells_loss(out, wanted):
    """Of every cell:

    its box and its classes. Which cell answers for which object is data, and is given.
    """
    boxes, classes = wanted.split([4, CLASSES], 2)
    return F.l1_loss(out[..., :4], boxes) + F.binary_cross_entropy_with_logits(
        out[..., 4:], classes
    )


def yolo(width=48, depth=2, side=640):
    model = Yolo(width, depth)
    cells = sum((side // stride) ** 2 for stride in (8, 16, 32))
    data = TensorDataset(torch.empty(8, 3, side, side), torch.empty(8, cells, 4 + CLASSES))
    return model, _cells_loss, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), data


def tiny_yolo():
    return yolo(8, 1, 64)


class Words(nn.Module):
    """An LSTM that predicts the next word (Zaremba et al. 2014, arXiv:1409.2329, the large one)."""

    def __init__(self, vocabulary, width):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.rnn = nn.LSTM(width, width, num_layers=2, dropout=0.65, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, words):
        return self.head(self.rnn(self.embedding(words))[0]).transpose(1, 2)


def lstm(vocabulary=10_000, width=1500, length=35):
    model = Words(vocabulary, width)
    data = TensorDataset(*(torch.zeros(8, length, dtype=torch.int64) for _ in range(2)))
    return model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=1.0), data


def tiny_lstm():
    return lstm(100, 16, 12)


class Dlrm(nn.Module):
    """Naumov et al.

    2019, arXiv:1906.00091, with the layers of MLPerf's benchmark and smaller tables.
    """

    def __init__(self, tables, rows, width, bottom, top):
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, width, mode="sum", sparse=True) for _ in range(tables)
        )
        self.bottom = self._layers(13, *bottom, width)
        self.top = self._layers(width + (tables + 1) * tables // 2, *top, 1)
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))

    @staticmethod
    def _layers(*widths):
        pairs = itertools.pairwise(widths)
        return nn.Sequential(*(layer for a, b in pairs for layer in (nn.Linear(a, b), nn.ReLU())))[
            :-1
        ]

    def forward(self, dense, categories):
        x = self.bottom(dense)
        found = (table(ids) for table, ids in zip(self.tables, categories.unbind(1), strict=True))
        vectors = torch.stack([x, *found], 1)
        products = vectors @ vectors.transpose(1, 2)
        return self.top(torch.cat([x, products[:, self.pairs[0], self.pairs[1]]], 1)).squeeze(1)


def dlrm(tables=26, rows=40_000, width=128, bottom=(512, 256), top=(1024, 1024, 512, 256)):
    model = Dlrm(tables, rows, width, bottom, top)
    data = TensorDataset(
        torch.empty(8, 13), torch.zeros(8, tables, 1, dtype=torch.int64), torch.zeros(8)
    )
    return model, nn.BCEWithLogitsLoss(), torch.optim.SGD(model.parameters(), lr=0.1), data


def tiny_dlrm():
    return dlrm(4, 50, 8, (16,), (16,))


def graph_sage(features=602, width=256, classes=41, nodes=275, edges=275):
    """Hamilton et al.

    2017, arXiv:1706.02216, on Reddit's posts: neighbourhoods of 1 + 25 + 250 nodes.
    """
    from torch_geometric.data import Data
    from torch_geometric.nn import SAGEConv

    class GraphSage(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([SAGEConv(features, width), SAGEConv(width, classes)])

        def forward(self, graph):
            x = self.layers[0](graph.x, graph.edge_index).relu()
            x = self.layers[1](x, graph.edge_index)
            return x.view(-1, nodes, classes)[:, 0]

    def neighbourhood():
        return Data(
            x=torch.zeros(nodes, features),
            edge_index=torch.zeros(2, edges, dtype=torch.int64),
            y=torch.zeros(1, dtype=torch.int64),
        )

    model = GraphSage()
    return (
        model,
        nn.CrossEntropyLoss(),
        torch.optim.Adam(model.parameters()),
        [neighbourhood() for _ in range(8)],
    )


def tiny_graph_sage():
    return graph_sage(8, 16, 4, 10, 20)


def dcgan(width=64, latent=100):
    """Radford et al.

    2015, arXiv:1511.06434, on pictures of 64 x 64 pixels: a step of both models.
    """
    up = [latent, *(width * 2**i for i in (3, 2, 1, 0)), 3]
    layers = []
    for i, (a, b) in enumerate(itertools.pairwise(up)):
        layers.append(nn.ConvTranspose2d(a, b, 4, 2 if i else 1, 1 if i else 0, bias=False))
        layers += [nn.BatchNorm2d(b), nn.ReLU()] if i < 4 else [nn.Tanh()]
    generator = nn.Sequential(*layers)
    down = [3, *(width * 2**i for i in range(4)), 1]
    layers = []
    for i, (a, b) in enumerate(itertools.pairwise(down)):
        layers.append(nn.Conv2d(a, b, 4, 1 if i == 4 else 2, 0 if i == 4 else 1, bias=False))
        layers += [nn.BatchNorm2d(b)] * (0 < i < 4) + [nn.LeakyReLU(0.2)] * (i < 4)
    discriminator = nn.Sequential(*layers, nn.Flatten())
    of_generator, of_discriminator = (
        torch.optim.Adam(m.parameters(), lr=2e-4, betas=(0.5, 0.999))
        for m in (generator, discriminator)
    )

    def step(batch):
        (real,) = batch
        fake = generator(torch.randn(len(real), latent, 1, 1, device=real.device))
        of_discriminator.zero_grad()
        loss = (
            F.softplus(-discriminator(real)).mean()
            + F.softplus(discriminator(fake.detach())).mean()
        )
        loss.backward()
        of_discriminator.step()
        of_generator.zero_grad()
        F.softplus(-discriminator(fake)).mean().backward()
        of_generator.step()
        return loss

    return {
        "model": {"generator": generator, "discriminator": discriminator},
        "optimizer": [of_generator, of_discriminator],
        "step": step,
        "dataset": TensorDataset(torch.empty(8, 3, 64, 64)),
    }


def tiny_dcgan():
    return dcgan(8, 10)
