"""Speech, graphs and tables."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from tests.parity.programs.program import COUPLED, POSITIONS, READ, Program, batches, draw, labels


class Utterances(Dataset):
    def __len__(self):
        return 18

    def __getitem__(self, index):
        return draw(8 + index % 5, 6, seed=index), labels(4, 2 + index % 3, seed=index) + 1


def speech_collate(samples):
    frames, texts = zip(*samples, strict=True)
    return (
        pad_sequence(frames, batch_first=True), pad_sequence(texts, batch_first=True),
        torch.tensor([len(f) for f in frames]), torch.tensor([len(t) for t in texts]),
    )  # fmt: skip


def joined_texts(samples):
    """CTC also takes all targets in one row."""
    frames, texts = zip(*samples, strict=True)
    return (
        pad_sequence(frames, batch_first=True), torch.cat(texts),
        torch.tensor([len(f) for f in frames]), torch.tensor([len(t) for t in texts]),
    )  # fmt: skip


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(6, 8, batch_first=True), nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.rnn(x)[0]).log_softmax(-1)


def ctc_step(model, batch):
    frames, texts, lengths, text_lengths = batch
    return F.ctc_loss(model(frames).transpose(0, 1), texts, lengths, text_lengths)


class ComplexFilter(nn.Module):
    """Weights of a spectrum."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 9, dtype=torch.complex64))
        self.register_buffer("shift", torch.randn(9, dtype=torch.complex64))
        self.head = nn.Linear(27, 4)

    def forward(self, x):
        spectrum = torch.fft.rfft(x)[:, None] * self.weight + self.shift
        return self.head(spectrum.abs().flatten(1))


class Spectrogram(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(8))
        self.head = nn.Linear(5, 4)

    def forward(self, x):
        power = torch.stft(x, 8, 4, window=self.window, return_complex=True).abs() ** 2
        return self.head(power.add(1e-6).log().mean(-1))


# ------------------------------------------------------------------------------------------------------------ graphs


class DenseGcn(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, batch):
        x, adjacency = batch
        adjacency = adjacency / adjacency.sum(-1, keepdim=True).clamp(min=1)
        return self.second((adjacency @ F.relu(self.first(adjacency @ x))).mean(1))


def dense_graphs():
    class Graphs(Dataset):
        def __len__(self):
            return 22

        def __getitem__(self, index):
            links = labels(2, 5, 5, seed=index).double()
            return (draw(5, 4, seed=index), (links + links.T + torch.eye(5)).clamp(max=1)), index % 3

    return batches(Graphs())


class EdgeGcn(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x, edges, batch, graphs):
        x = F.relu(self.first(x))
        x = x + torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
        pooled = x.new_zeros(graphs, x.shape[1]).index_add(0, batch, x)
        return self.second(pooled)


class EdgeGraphs(Dataset):
    def __len__(self):
        return 18

    def __getitem__(self, index):
        nodes = 3 + index % 4
        return {"x": draw(nodes, 4, seed=index), "edge_index": labels(nodes, 2, 6, seed=index), "y": index % 3}


def pyg_collate(samples):
    starts = torch.tensor([0] + [len(s["x"]) for s in samples[:-1]]).cumsum(0)
    return {
        "x": torch.cat([s["x"] for s in samples]),
        "edge_index": torch.cat([s["edge_index"] + k for s, k in zip(samples, starts, strict=True)], 1),
        "batch": torch.cat([torch.full((len(s["x"]),), k) for k, s in enumerate(samples)]),
        "y": torch.tensor([s["y"] for s in samples]),
    }


def pyg_step(model, batch):
    return F.cross_entropy(model(batch["x"], batch["edge_index"], batch["batch"], len(batch["y"])), batch["y"])


def graph_list_step(model, graphs):
    """A list of graphs for each batch: no index refers to another graph."""
    losses = [
        F.cross_entropy(
            model(g["x"], g["edge_index"], torch.zeros(len(g["x"]), dtype=torch.long), 1), torch.tensor([g["y"]])
        )
        for g in graphs
    ]
    return torch.stack(losses).mean()


def one_graph():
    """Node classification: the whole data set is one graph."""
    links = labels(2, 12, 12, seed=4).double()
    graph = {"x": draw(12, 4), "adjacency": (links + links.T + torch.eye(12)).clamp(max=1), "y": labels(3, 12)}
    return DataLoader([graph], batch_size=None)


def node_step(model, graph):
    hidden = F.relu(model.first(graph["adjacency"] @ graph["x"]))
    return F.cross_entropy(model.second(graph["adjacency"] @ hidden), graph["y"])


# ------------------------------------------------------------------------------------------------------------ tables


class WideAndDeep(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(9, 4), nn.Embedding(7, 4)
        self.deep = nn.Sequential(nn.Linear(11, 8), nn.ReLU(), nn.Linear(8, 1))
        self.wide = nn.Linear(3, 1)

    def forward(self, row):
        deep = torch.cat([self.user(row["user"]), self.item(row["item"]), row["dense"]], 1)
        return (self.deep(deep) + self.wide(row["dense"])).squeeze(1)


class Rows(Dataset):
    def __len__(self):
        return 22

    def __getitem__(self, index):
        row = {"user": index * 4 % 9, "item": index % 7, "dense": draw(3, seed=index)}
        return row, float(index % 2)


class Factors(nn.Module):
    def __init__(self, sparse=True):
        super().__init__()
        self.user, self.item = nn.Embedding(9, 4, sparse=sparse), nn.Embedding(7, 4, sparse=sparse)

    def forward(self, pair):
        return (self.user(pair[:, 0]) * self.item(pair[:, 1])).sum(1)


def dense_factors():
    return Factors(sparse=False)


def ratings():
    return batches(torch.stack([labels(9, 22), labels(7, 22, seed=2)], 1), draw(22, seed=3))


def bpr_step(model, batch):
    user, liked, other = batch
    u = model.user(user)
    return -F.logsigmoid((u * model.item(liked)).sum(1) - (u * model.item(other)).sum(1)).mean()


def in_batch_negatives(model, batch):
    user, item, _ = batch
    scores = model.user(user) @ model.item(item).T
    return F.cross_entropy(scores, torch.arange(len(scores)))


def triples():
    return batches(labels(9, 22), labels(7, 22, seed=2), labels(7, 22, seed=3))


class Mlp(nn.Module):
    def __init__(self, outputs=1):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, outputs))

    def forward(self, x):
        return self.net(x).squeeze(-1)


def mlp3():
    return Mlp(3)


def pinball(outputs, targets):
    q = torch.tensor([0.1, 0.5, 0.9], dtype=outputs.dtype)
    error = targets[:, None] - outputs
    return torch.maximum(q * error, (q - 1) * error).mean()


def cox(outputs, targets):
    """Partial likelihood: every sample's risk set is the rest of the batch."""
    order = targets.argsort(descending=True)
    risk = outputs[order]
    return -(risk - risk.logcumsumexp(0)).mean()


def table(targets=None):
    return batches(draw(22, 5), draw(22, seed=2) if targets is None else targets)


PROGRAMS = [
    Program(name="ctc, padded texts", model=Recogniser, step=ctc_step,
            data=lambda: DataLoader(Utterances(), 6, collate_fn=speech_collate)),
    Program(name="ctc, joined texts", model=Recogniser, step=ctc_step, refused={"*": POSITIONS},
            data=lambda: DataLoader(Utterances(), 6, collate_fn=joined_texts)),
    Program(name="complex filter", model=ComplexFilter, data=lambda: batches(draw(22, 16), labels(4, 22)),
            criterion="CrossEntropyLoss", optimizer_args={"lr": 0.01}, refused={"zero 3": "one dtype per layer"}),
    Program(name="spectrogram", model=Spectrogram, data=lambda: batches(draw(22, 32), labels(4, 22)),
            criterion="CrossEntropyLoss"),
    Program(name="graphs, dense", model=DenseGcn, data=dense_graphs, criterion="CrossEntropyLoss"),
    Program(name="graphs, edge_index and batch vector", model=EdgeGcn, step=pyg_step, refused={"*": POSITIONS},
            data=lambda: DataLoader(EdgeGraphs(), 6, collate_fn=pyg_collate)),
    Program(name="graphs, a list of them", model=EdgeGcn, step=graph_list_step,
            data=lambda: DataLoader(EdgeGraphs(), 6, collate_fn=list)),
    Program(name="graphs, one for all", model=EdgeGcn, step=node_step, data=one_graph,
            refused={"*": "cannot be computed without the rest of the batch"}),
    Program(name="wide and deep", model=WideAndDeep, data=lambda: batches(Rows()), criterion="BCEWithLogitsLoss"),
    Program(name="matrix factors, sparse", model=Factors, data=ratings, criterion="MSELoss"),
    Program(name="matrix factors, dense", model=dense_factors, data=ratings, criterion="MSELoss", optimizer="Adagrad"),
    Program(name="bpr", model=dense_factors, data=triples, step=bpr_step, refused=READ),
    Program(name="two towers, in-batch negatives", model=dense_factors, data=triples, step=in_batch_negatives, refused=READ,
            told={"*": COUPLED}),
    Program(name="regression, huber", model=Mlp, data=table, criterion="HuberLoss", criterion_args={"delta": 0.5}),
    Program(name="regression, sum", model=Mlp, data=table, criterion="MSELoss", criterion_args={"reduction": "sum"},
            optimizer_args={"lr": 0.01}),
    Program(name="quantiles", model=mlp3, data=table, criterion=pinball),
    Program(name="counts, poisson", model=Mlp, data=lambda: table(labels(5, 22).double()), criterion="PoissonNLLLoss"),
    Program(name="many labels, bce", model=mlp3, data=lambda: table(labels(2, 22, 3).double()), criterion="BCEWithLogitsLoss",
            criterion_args={"pos_weight": [1.0, 2.0, 3.0]}),
    Program(name="survival, cox", model=Mlp, data=table, criterion=cox, told={"*": COUPLED}),
]  # fmt: skip
