"""Graphs, sequences and tables: a GraphSAGE on sampled neighbourhoods, an LSTM, and a recommender
with large embeddings.

trainpace forecast examples/tasks/graphs_sequences_tables.py:graphs --gpu A100 --batch 64
trainpace forecast examples/tasks/graphs_sequences_tables.py:sequences --gpu A100 --batch 64
trainpace forecast examples/tasks/graphs_sequences_tables.py:recommender --gpu A100 --batch 4096
"""

import torch
from torch import nn

FEATURES, CLASSES, NODES, EDGES = 64, 8, 40, 160


def graphs():
    """Each sample is one sampled neighbourhood of a fixed number of nodes and edges; torch_geometric joins them in a batch."""
    from torch_geometric.data import Data
    from torch_geometric.nn import SAGEConv, global_mean_pool

    class GraphSage(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([SAGEConv(FEATURES, 128), SAGEConv(128, 128)])
            self.head = nn.Linear(128, CLASSES)

        def forward(self, graph):
            x = graph.x
            for layer in self.layers:
                x = layer(x, graph.edge_index).relu()
            return self.head(global_mean_pool(x, graph.batch, size=len(graph.y)))

    def neighbourhood():
        return Data(
            x=torch.randn(NODES, FEATURES),
            edge_index=torch.randint(0, NODES, (2, EDGES)),
            y=torch.randint(0, CLASSES, (1,)),
        )

    model = GraphSage()
    return (
        model,
        nn.CrossEntropyLoss(),
        torch.optim.Adam(model.parameters()),
        [neighbourhood() for _ in range(64)],
    )


class Tagger(nn.Module):
    def __init__(self, vocabulary=1000, width=128):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.rnn = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens):
        return self.head(self.rnn(self.embedding(tokens))[0]).transpose(1, 2)


def sequences():
    model = Tagger()
    data = [(torch.randint(0, 1000, (96,)), torch.randint(0, CLASSES, (96,))) for _ in range(64)]
    return model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters()), data


class Recommender(nn.Module):
    """As DLRM (Naumov et al.

    2019, arXiv:1906.00091): tables of embeddings and dense features, and the products of all pairs.
    """

    def __init__(self, tables=8, rows=50_000, width=32, dense=13):
        super().__init__()
        self.tables = nn.ModuleList(
            [nn.EmbeddingBag(rows, width, mode="sum", sparse=True) for _ in range(tables)]
        )
        self.bottom = nn.Sequential(nn.Linear(dense, 64), nn.ReLU(), nn.Linear(64, width))
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 64), nn.ReLU(), nn.Linear(64, 1))
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))

    def forward(self, dense, categories):
        x = self.bottom(dense)
        vectors = torch.stack(
            [
                x,
                *(table(ids) for table, ids in zip(self.tables, categories.unbind(1), strict=True)),
            ],
            1,
        )
        products = vectors @ vectors.transpose(1, 2)
        return self.top(torch.cat([x, products[:, self.pairs[0], self.pairs[1]]], 1)).squeeze(1)


def recommender(tables=8, rows=50_000, hot=4):
    """`hot` ids a table and sample.

    The gradients of the tables are sparse, and SGD writes the rows that were looked up.
    """
    model = Recommender(tables, rows)
    data = [
        (torch.randn(13), torch.randint(0, rows, (tables, hot)), torch.rand(()).round())
        for _ in range(64)
    ]
    return model, nn.BCEWithLogitsLoss(), torch.optim.SGD(model.parameters(), lr=0.1), data
