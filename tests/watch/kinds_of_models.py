"""Training scripts with many kinds of models, such as RNNs, graphs and dict inputs.

Each script defines `step()`, one update, and ends with `TAIL`, which runs four updates. Their FLOPs
are counted if `FLOPS` names a file.
"""

HEAD = """
import os
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
device = torch.device("cpu")
"""

TAIL = """
for number in range(4):
    if number == 1 and "FLOPS" in os.environ:
        from torch.utils.flop_counter import FlopCounterMode
        with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter:
            step()
        with open(os.environ["FLOPS"], "w") as file:
            file.write(str(counter.get_total_flops()))
    else:
        step()
"""

LANGUAGE_RNN = """
class RNNModel(nn.Module):
    def __init__(self, words=50, width=16, layers=2):
        super().__init__()
        self.layers, self.width = layers, width
        self.encoder = nn.Embedding(words, width)
        self.rnn = nn.LSTM(width, width, layers)
        self.decoder = nn.Linear(width, words)
    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return weight.new_zeros(self.layers, bsz, self.width), weight.new_zeros(self.layers, bsz, self.width)
    def forward(self, words, hidden):
        out, hidden = self.rnn(self.encoder(words), hidden)
        decoded = self.decoder(out).view(-1, self.decoder.out_features)
        return F.log_softmax(decoded, dim=1), hidden

def repackage(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage(v) for v in h)

model = RNNModel()
criterion = nn.NLLLoss()
hidden = model.init_hidden(6)
def step():
    global hidden
    data, targets = torch.randint(0, 50, (7, 6)), torch.randint(0, 50, (42,))
    model.zero_grad()
    hidden = repackage(hidden)
    output, hidden = model(data, hidden)
    loss = criterion(output, targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-1.0)
    return loss
"""

LANGUAGE_RNN_ADAM = LANGUAGE_RNN.replace(
    "criterion = nn.NLLLoss()",
    "criterion, optimizer = nn.NLLLoss(), torch.optim.Adam(model.parameters())",
).replace(
    "    for p in model.parameters():\n        p.data.add_(p.grad, alpha=-1.0)\n",
    "    optimizer.step()\n",
)

CHARACTERS_RNN = """
class CharRNN(nn.Module):
    def __init__(self, inputs=20, width=24, outputs=5):
        super().__init__()
        self.width = width
        self.rnn = nn.GRU(inputs, width)
        self.out = nn.Linear(width, outputs)
    def forward(self, line):
        hidden = torch.zeros(1, 1, self.width).to(device)
        out, hidden = self.rnn(line, hidden)
        return F.log_softmax(self.out(hidden[0]), dim=1)

model = CharRNN()
criterion = nn.NLLLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def step():
    output = model(torch.randn(9, 1, 20))
    loss = criterion(output, torch.tensor([2]))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

CELL_CALLED_BY_THE_SCRIPT = """
class Cell(nn.Module):
    def __init__(self, inputs=20, width=24, outputs=5):
        super().__init__()
        self.width = width
        self.i2h, self.h2h, self.h2o = nn.Linear(inputs, width), nn.Linear(width, width), nn.Linear(width, outputs)
    def forward(self, letter, hidden):
        hidden = torch.tanh(self.i2h(letter) + self.h2h(hidden))
        return F.log_softmax(self.h2o(hidden), dim=1), hidden

model = Cell()
criterion = nn.NLLLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def step():
    hidden = torch.zeros(1, 24)
    for letter in torch.randn(9, 1, 20):
        output, hidden = model(letter, hidden)
    loss = criterion(output, torch.tensor([2]))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

MANY_CALLS = CELL_CALLED_BY_THE_SCRIPT.replace("torch.randn(9, 1, 20)", "torch.randn(250, 1, 20)")

TWO_LOSSES = """
model = nn.Linear(12, 4)
optimizer = torch.optim.Adam(model.parameters())
def step():
    optimizer.zero_grad()
    out = model(torch.randn(6, 12))
    out[:, 0].mean().backward(retain_graph=True)
    out[:, 1].square().mean().backward()
    optimizer.step()
"""

TCN = """
from torch.nn.utils import weight_norm
import warnings
warnings.simplefilter("ignore")

class Chomp(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = size
    def forward(self, x):
        return x[:, :, :-self.size].contiguous()

class Block(nn.Module):
    def __init__(self, c_in, c_out, dilation):
        super().__init__()
        pad = 2 * dilation
        self.conv = weight_norm(nn.Conv1d(c_in, c_out, 3, padding=pad, dilation=dilation))
        self.net = nn.Sequential(self.conv, Chomp(pad), nn.ReLU(), nn.Dropout(0.1))
        self.down = nn.Conv1d(c_in, c_out, 1) if c_in != c_out else None
    def forward(self, x):
        return F.relu(self.net(x) + (x if self.down is None else self.down(x)))

class TCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.tcn = nn.Sequential(Block(1, 8, 1), Block(8, 8, 2))
        self.linear = nn.Linear(8, 10)
    def forward(self, x):
        return F.log_softmax(self.linear(self.tcn(x)[:, :, -1]), dim=1)

model = TCN()
optimizer = torch.optim.Adam(model.parameters())
def step():
    optimizer.zero_grad()
    loss = F.nll_loss(model(torch.randn(6, 1, 40)), torch.randint(0, 10, (6,)))
    loss.backward()
    optimizer.step()
"""

SPARSE_GRAPH = """
class Convolution(nn.Module):
    def __init__(self, c_in, c_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(c_in, c_out) * 0.1)
        self.bias = nn.Parameter(torch.zeros(c_out))
    def forward(self, x, adj):
        return torch.spmm(adj, torch.mm(x, self.weight)) + self.bias

class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = Convolution(12, 16), Convolution(16, 4)
    def forward(self, x, adj):
        x = F.dropout(F.relu(self.one(x, adj)), 0.5, training=self.training)
        return F.log_softmax(self.two(x, adj), dim=1)

at = torch.randint(0, 60, (2, 200))
adj = torch.sparse_coo_tensor(at, torch.rand(200), (60, 60)).coalesce()
features, labels, train = torch.randn(60, 12), torch.randint(0, 4, (60,)), torch.arange(20)
model = GCN()
optimizer = torch.optim.Adam(model.parameters())
def step():
    model.train()
    optimizer.zero_grad()
    output = model(features, adj)
    loss = F.nll_loss(output[train], labels[train])
    loss.backward()
    optimizer.step()
"""

EDGES_GRAPH = """
class Layer(nn.Module):
    def __init__(self, c_in, c_out):
        super().__init__()
        self.lin = nn.Linear(c_in, c_out, bias=False)
    def forward(self, x, edges):
        x = self.lin(x)
        degree = torch.zeros(x.size(0), device=x.device).scatter_add_(0, edges[1], torch.ones_like(edges[1], dtype=x.dtype))
        norm = degree.clamp(min=1).pow(-0.5)
        message = x[edges[0]] * (norm[edges[0]] * norm[edges[1]]).unsqueeze(-1)
        return torch.zeros_like(x).index_add_(0, edges[1], message)

class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = Layer(12, 16), Layer(16, 4)
    def forward(self, x, edge_index):
        return self.two(F.relu(self.one(x, edge_index)), edge_index)

model = GCN()
x, edges, y = torch.randn(60, 12), torch.randint(0, 60, (2, 200)), torch.randint(0, 4, (60,))
mask = torch.rand(60) < 0.5
optimizer = torch.optim.Adam(model.parameters())
def step():
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x, edges)[mask], y[mask])
    loss.backward()
    optimizer.step()
"""

DENSE_GRAPH = """
class GAT(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.a, self.b, self.out = nn.Linear(12, 16), nn.Linear(16, 1), nn.Linear(16, 1), nn.Linear(16, 4)
    def forward(self, x, adj):
        h = self.lin(x)
        e = F.leaky_relu(self.a(h) + self.b(h).T)
        attention = F.softmax(torch.where(adj > 0, e, -9e15 * torch.ones_like(e)), dim=1)
        return F.log_softmax(self.out(F.elu(torch.matmul(attention, h))), dim=1)

model = GAT()
x, adj, y = torch.randn(60, 12), (torch.rand(60, 60) < 0.1).float(), torch.randint(0, 4, (60,))
optimizer = torch.optim.Adam(model.parameters())
def step():
    optimizer.zero_grad()
    loss = F.nll_loss(model(x, adj)[:20], y[:20])
    loss.backward()
    optimizer.step()
"""

VIT = """
class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 8, 8)
        self.position = nn.Embedding(17, 16)
        self.cls = nn.Parameter(torch.zeros(1, 1, 16))
        self.block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 10)
    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.size(0), -1, -1).to(device), x], dim=1)
        ids = torch.arange(x.size(1), device=device).unsqueeze(0)
        scale = torch.ones(x.size(0), 1, 1).to(device)
        return self.head(self.block(x + self.position(ids) * scale)[:, 0])

model = ViT().to(device)
optimizer = torch.optim.AdamW(model.parameters())
criterion = nn.CrossEntropyLoss()
def step():
    loss = criterion(model(torch.randn(6, 3, 32, 32)), torch.randint(0, 10, (6,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

LAMBDAS = """
import threading
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()
        self.module = F
        self.first, self.second = nn.Linear(12, 16), nn.Linear(16, 4)
        self.act = lambda x: F.relu(self.first(x))
        self.steps = (layer for layer in [self.first])
        self.scale = torch.ones(16)
    def forward(self, x):
        with self.lock:
            return self.second(self.act(x) * self.scale)

model = Net()
optimizer = torch.optim.Adam(model.parameters())
def step():
    loss = F.cross_entropy(model(torch.randn(6, 12)), torch.randint(0, 4, (6,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

ODE = """
class Derivative(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))
    def forward(self, t, y):
        return self.net(y ** 3)

class Solver(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = Derivative()
    def forward(self, y, times):
        ys = [y]
        for before, after in zip(times[:-1], times[1:]):
            k1 = self.f(before, y)
            k2 = self.f(before + (after - before) / 2, y + k1 * (after - before) / 2)
            y = y + (after - before) * k2
            ys.append(y)
        return torch.stack(ys)

model = Solver()
optimizer = torch.optim.RMSprop(model.parameters())
def step():
    optimizer.zero_grad()
    loss = torch.mean(torch.abs(model(torch.randn(6, 4), torch.linspace(0, 1, 5)) - 1.0))
    loss.backward()
    optimizer.step()
"""

ODE_OF_FUNCTION = (
    ODE.replace("model = Solver()", "model = Derivative()").replace(
        "model(torch.randn(6, 4), torch.linspace(0, 1, 5))",
        "solve(torch.randn(6, 4), torch.linspace(0, 1, 5))",
    )
    + """
def solve(y, times):
    for before, after in zip(times[:-1], times[1:]):
        y = y + (after - before) * model(before, y)
    return y
"""
)

DQN = """
class DQN(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(4, 32), nn.Linear(32, 32), nn.Linear(32, 2)
    def forward(self, x):
        return self.three(F.relu(self.two(F.relu(self.one(x)))))

policy, target = DQN(), DQN()
target.load_state_dict(policy.state_dict())
optimizer = torch.optim.AdamW(policy.parameters(), amsgrad=True)
def step():
    with torch.no_grad():
        policy(torch.randn(1, 4)).max(1)
    states, actions, rewards = torch.randn(16, 4), torch.randint(0, 2, (16, 1)), torch.randn(16)
    values = policy(states).gather(1, actions)
    with torch.no_grad():
        after = target(torch.randn(16, 4)).max(1).values
    loss = nn.SmoothL1Loss()(values, (after * 0.99 + rewards).unsqueeze(1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_value_(policy.parameters(), 100)
    optimizer.step()
"""

REINFORCE = """
policy = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2), nn.Softmax(-1))
optimizer = torch.optim.Adam(policy.parameters())
def step():
    logs = []
    for _ in range(5):
        choice = torch.distributions.Categorical(policy(torch.randn(1, 4)))
        logs.append(choice.log_prob(choice.sample()))
    optimizer.zero_grad()
    loss = -torch.cat(logs).sum()
    loss.backward()
    optimizer.step()
"""

PPO = """
class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(4, 32), nn.Linear(32, 2), nn.Linear(32, 1)
    def forward(self, x):
        x = torch.tanh(self.body(x))
        return torch.distributions.Categorical(logits=self.actor(x)), self.critic(x)

model = ActorCritic()
optimizer = torch.optim.Adam(model.parameters())
def step():
    states, actions, old = torch.randn(16, 4), torch.randint(0, 2, (16,)), torch.randn(16)
    advantages, returns = torch.randn(16), torch.randn(16)
    choice, values = model(states)
    ratio = (choice.log_prob(actions) - old).exp()
    loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    loss = loss + 0.5 * F.mse_loss(values.squeeze(-1), returns) - 0.01 * choice.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

SIAMESE = """
class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 36, 16))
        self.head = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())
    def forward(self, one, two):
        return self.head(torch.cat((self.body(one), self.body(two)), 1))

model = Siamese()
optimizer = torch.optim.Adadelta(model.parameters())
criterion = nn.BCELoss()
def step():
    output = model(torch.randn(6, 1, 14, 14), torch.randn(6, 1, 14, 14)).squeeze()
    loss = criterion(output, torch.randint(0, 2, (6,)).float())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

SIAMESE_CALLED_TWICE = """
net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8))
optimizer = torch.optim.Adam(net.parameters())
criterion = nn.TripletMarginLoss()
def step():
    a, p, n = torch.randn(3, 6, 12)
    loss = criterion(net(a), net(p), net(n))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

DCGAN = """
G = nn.Sequential(nn.ConvTranspose2d(10, 8, 4, 1, 0, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
                  nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False), nn.Tanh())
D = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1, bias=False), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 4, 1, 0, bias=False), nn.Sigmoid())
criterion = nn.BCELoss()
of_g, of_d = torch.optim.Adam(G.parameters()), torch.optim.Adam(D.parameters())
def step():
    D.zero_grad()
    real = torch.randn(6, 1, 8, 8)
    label = torch.ones(6)
    criterion(D(real).view(-1), label).backward()
    fake = G(torch.randn(6, 10, 1, 1))
    criterion(D(fake.detach()).view(-1), label * 0).backward()
    of_d.step()
    G.zero_grad()
    criterion(D(fake).view(-1), label).backward()
    of_g.step()
"""

SEQ2SEQ = """
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.gru = nn.Embedding(30, 16), nn.GRU(16, 16)
    def forward(self, word, hidden):
        return self.gru(self.embedding(word).view(1, 1, -1), hidden)

class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.gru, self.out = nn.Embedding(30, 16), nn.GRU(16, 16), nn.Linear(16, 30)
    def forward(self, word, hidden):
        out, hidden = self.gru(F.relu(self.embedding(word).view(1, 1, -1)), hidden)
        return F.log_softmax(self.out(out[0]), dim=1), hidden

encoder, decoder = Encoder(), Decoder()
of_e, of_d = torch.optim.SGD(encoder.parameters(), 0.01), torch.optim.SGD(decoder.parameters(), 0.01)
criterion = nn.NLLLoss()
def step():
    source, target = torch.randint(0, 30, (5, 1)), torch.randint(0, 30, (4, 1))
    hidden = torch.zeros(1, 1, 16, device=device)
    of_e.zero_grad(); of_d.zero_grad()
    for i in range(5):
        _, hidden = encoder(source[i], hidden)
    word, loss = torch.tensor([[0]]), 0
    for i in range(4):
        output, hidden = decoder(word, hidden)
        loss = loss + criterion(output, target[i])
        word = target[i]
    loss.backward()
    of_e.step(); of_d.step()
"""

SEQ2SEQ_IN_ONE = """
class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.encoder, self.decoder = nn.Embedding(30, 16), nn.GRU(16, 16), nn.GRU(16, 16)
        self.out = nn.Linear(16, 30)
    def forward(self, source, target):
        _, hidden = self.encoder(self.embedding(source), torch.zeros(1, source.shape[1], 16, device=device))
        word, outputs = torch.zeros(1, source.shape[1], dtype=torch.long, device=device), []
        for i in range(target.shape[0]):
            out, hidden = self.decoder(self.embedding(word), hidden)
            outputs.append(self.out(out[0]))
            word = target[i : i + 1]
        return torch.stack(outputs)

model = Seq2Seq()
optimizer = torch.optim.Adam(model.parameters())
def step():
    source, target = torch.randint(0, 30, (5, 1)), torch.randint(0, 30, (4, 1))
    loss = F.cross_entropy(model(source, target).view(-1, 30), target.view(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

DICTS = """
class Output(dict):
    pass

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(30, 16), nn.Linear(16, 3)
    def forward(self, input_ids, attention_mask=None, labels=None):
        x = self.embedding(input_ids) * attention_mask.unsqueeze(-1)
        logits = self.head(x.sum(1) / attention_mask.sum(1, keepdim=True))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}

model = Classifier()
optimizer = torch.optim.AdamW(model.parameters())
def step():
    batch = {"input_ids": torch.randint(0, 30, (6, 9)), "attention_mask": torch.ones(6, 9), "labels": torch.randint(0, 3, (6,))}
    loss = model(**batch)["loss"]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

GRAPH_OBJECT = """
class Graph:
    def __init__(self, x, edge_index):
        self.x, self.edge_index = x, edge_index

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(12, 16), nn.Linear(16, 4)
    def forward(self, graph):
        x, (source, target) = F.relu(self.one(graph.x)), graph.edge_index
        graph.x = torch.zeros_like(x).scatter_reduce(0, target.unsqueeze(-1).expand(-1, 16), x[source], "sum")
        return self.two(graph.x)

model = Net()
x, edges, y = torch.randn(600, 12), torch.randint(0, 600, (2, 2000)), torch.randint(0, 4, (600,))
optimizer = torch.optim.Adam(model.parameters())
def step():
    optimizer.zero_grad()
    loss = F.cross_entropy(model(Graph(x, edges)), y)
    loss.backward()
    optimizer.step()
"""

ADVERSARIAL = """
model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters())
def step():
    x, y = torch.randn(6, 12, requires_grad=True), torch.randint(0, 4, (6,))
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

GRADIENT_PENALTY = """
model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters())
def step():
    x = torch.randn(6, 12, requires_grad=True)
    out = model(x)
    slope = torch.autograd.grad(out.sum(), x, create_graph=True)[0]
    loss = (slope - 1).square().mean() + out.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

ACCUMULATES = """
model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters())
def step():
    for _ in range(3):
        (F.cross_entropy(model(torch.randn(6, 12)), torch.randint(0, 4, (6,))) / 3).backward()
    optimizer.step()
    optimizer.zero_grad()
"""

DISTILLED = """
model, teacher = nn.Linear(12, 4), nn.Sequential(nn.Linear(12, 32), nn.Linear(32, 4)).requires_grad_(False)
optimizer = torch.optim.Adam(model.parameters())
def step():
    x, y = torch.randn(6, 12), torch.randint(0, 4, (6,))
    out, wanted = model(x), teacher(x)
    loss = F.cross_entropy(out, y) + F.kl_div(F.log_softmax(out, -1), F.softmax(wanted, -1), reduction="batchmean")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

VALUES_DECIDE = """
class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.one, self.two = nn.Linear(12, 1), nn.Linear(12, 4), nn.Linear(12, 4)
    def forward(self, x):
        if self.gate(x).mean() > 0:
            return self.one(x)
        return self.two(x)

model = Routed()
optimizer = torch.optim.Adam(model.parameters())
def step():
    loss = F.cross_entropy(model(torch.randn(6, 12)), torch.randint(0, 4, (6,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

KINDS = {
    name: text
    for name, text in list(globals().items())
    if name.isupper() and name not in ("HEAD", "TAIL")
}


def script_of(kind: str) -> str:
    return HEAD + KINDS[kind] + TAIL
