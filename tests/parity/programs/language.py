"""Text: language models, masked tokens, translation, tagging, recurrent nets, bags, and models that bring their loss."""

from __future__ import annotations

import collections
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

from tests.parity.programs.program import COUPLED, POSITIONS, READ, Program, batches, labels

VOCAB, LENGTH, WIDTH = 11, 6, 8


class CharLm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x):
        return self.head(self.rnn(self.embed(x))[0])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(self.n1(x)).view(B, T, 3, 2, C // 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Gpt(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.tok.weight

    def forward(self, x):
        x = self.tok(x) + self.pos(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(x)))


def untied_gpt():
    return Gpt(tied=False)


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, padding_idx=0)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x):
        return self.head(self.encoder(self.embed(x), src_key_padding_mask=x == 0))


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.src, self.tgt = nn.Embedding(VOCAB, WIDTH, padding_idx=0), nn.Embedding(VOCAB, WIDTH, padding_idx=0)
        self.net = nn.Transformer(WIDTH, 2, 1, 1, 16, 0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, batch):
        src, tgt = batch["src"], batch["tgt"]
        ahead = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool, device=tgt.device).triu(1)
        out = self.net(
            self.src(src), self.tgt(tgt), tgt_mask=ahead, src_key_padding_mask=src == 0,
            tgt_key_padding_mask=tgt == 0, memory_key_padding_mask=src == 0,
        )  # fmt: skip
        return self.head(out)


def tokens(seed=0, n=22, length=LENGTH):
    return labels(VOCAB, n, length, seed=seed)


def next_tokens():
    text = tokens(length=LENGTH + 1)
    return batches(text[:, :-1].contiguous(), text[:, 1:].contiguous())


def ignoring_some():
    x, y = tokens(), tokens(seed=2)
    y[torch.rand(y.shape, generator=torch.Generator().manual_seed(3)) < 0.7] = -100
    y[0], y[:, 0] = -100, 4
    return batches(x, y)


class Texts(Dataset):
    """Sentences of 2 to 7 words, with a class."""

    def __len__(self):
        return 22

    def __getitem__(self, index):
        length = 2 + index * 5 % 6
        return labels(VOCAB - 1, length, seed=index) + 1, index % 3


def padded(samples):
    return pad_sequence([t for t, _ in samples], batch_first=True), torch.tensor([y for _, y in samples])


def with_lengths(samples):
    x, y = padded(samples)
    return (x, torch.tensor([len(t) for t, _ in samples])), y


def time_first(samples):
    return pad_sequence([t for t, _ in samples]), torch.tensor([y for _, y in samples])


def with_offsets(samples):
    """As the tutorial of torchtext: all words in one row, and where each sentence begins."""
    lengths = torch.tensor([0] + [len(t) for t, _ in samples[:-1]])
    return torch.tensor([y for _, y in samples]), torch.cat([t for t, _ in samples]), lengths.cumsum(0)


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(VOCAB, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, 3)

    def forward(self, batch):
        x, lengths = batch
        packed = pack_padded_sequence(self.embed(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.head(out.sum(1) / lengths[:, None])


class LastState(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(VOCAB, WIDTH), nn.LSTM(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.rnn(self.embed(x))[1][0][-1])


class BatchFirst(LastState):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(VOCAB, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, text, offsets):
        return self.head(self.bag(text, offsets))


def bag_step(model, batch):
    y, text, offsets = batch
    return F.cross_entropy(model(text, offsets), y)


class Tagger(nn.Module):
    """Convolutions over time: torch's axis order, [B, C, T]."""

    def __init__(self):
        super().__init__()
        self.embed, self.conv = nn.Embedding(VOCAB, WIDTH), nn.Conv1d(WIDTH, 4, 3, padding=1)

    def forward(self, x):
        return self.conv(self.embed(x).transpose(1, 2))


class SkipGram(nn.Module):
    def __init__(self):
        super().__init__()
        self.center, self.context = nn.Embedding(VOCAB, 4, sparse=True), nn.Embedding(VOCAB, 4, sparse=True)

    def forward(self, center, context, negative):
        c = self.center(center)
        positive = (c * self.context(context)).sum(-1)
        others = (self.context(negative) * c[:, None]).sum(-1)
        return -(F.logsigmoid(positive) + F.logsigmoid(-others).sum(-1)).mean()


def skipgram_step(model, batch):
    return model(*batch)


# ------------------------------------------------------------------------------- models that bring their own loss


@dataclass
class CausalOutput(collections.OrderedDict):
    """Works like transformers' ModelOutput: attributes and keys."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    def __post_init__(self):
        for name in ("loss", "logits"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)


class BatchEncoding(collections.UserDict):
    """Works like transformers' BatchEncoding: a UserDict."""

    def to(self, device):
        return BatchEncoding({name: value.to(device) for name, value in self.items()})


class CausalLm(nn.Module):
    """Works like an AutoModelForCausalLM."""

    def __init__(self):
        super().__init__()
        self.transformer = Gpt()

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.transformer(input_ids)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return CausalOutput(loss=loss, logits=logits)


def own_loss(model, batch):
    return model(**batch).loss


def own_loss_by_token(model, batch):
    """For padded batches: the model's mean is over the tokens that count."""
    tokens = (batch["labels"][:, 1:] != -100).sum()
    return model(**batch).loss * tokens, tokens


class Tokenised(Dataset):
    def __init__(self, equal=True):
        self.equal = equal

    def __len__(self):
        return 22

    def __getitem__(self, index):
        return labels(VOCAB - 1, LENGTH if self.equal else 2 + index % 5, seed=index) + 1


def language_collate(samples, container=dict):
    """As DataCollatorForLanguageModeling(mlm=False)."""
    ids = pad_sequence(samples, batch_first=True)
    return container({"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)})


def encoded(equal=True, container=BatchEncoding):
    return DataLoader(Tokenised(equal), 8, collate_fn=lambda samples: language_collate(samples, container))


def texts(collate, size=8):
    return DataLoader(Texts(), size, collate_fn=collate)


def translated():
    def collate(samples):
        src = pad_sequence([t for t, _ in samples], batch_first=True)
        tgt = pad_sequence([t.flip(0) for t, _ in samples], batch_first=True)
        return {"src": src, "tgt": tgt[:, :-1]}, tgt[:, 1:]

    return texts(collate)


def pad_mean_step(model, batch):
    """A mean over the words that are no padding: other sentences of the batch change its denominator."""
    x, y = batch
    losses = F.cross_entropy(model(x).transpose(1, 2), x, reduction="none")
    return (losses * (x != 0)).sum() / (x != 0).sum()


def block_penalty_step(model, batch):
    """A penalty on the weights of all blocks, in the loss."""
    x, y = batch
    penalty = sum(p.pow(2).sum() for p in model.blocks.parameters())
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten()) + 0.01 * penalty


class FunctionallyTied(Gpt):
    """The head is the embedding's weight, called as a function."""

    def __init__(self):
        super().__init__(tied=False)
        self.head = nn.Identity()

    def forward(self, x):
        return F.linear(super().forward(x), self.tok.weight)


CE = "CrossEntropyLoss"
PROGRAMS = [
    Program(name="gpt, penalty on the blocks", model=untied_gpt, data=next_tokens, step=block_penalty_step, refused=READ),
    Program(name="gpt, head as a function", model=FunctionallyTied, data=next_tokens, criterion=CE, refused=READ),

    Program(name="char lm", model=CharLm, data=next_tokens, criterion=CE),
    Program(name="gpt, tied embeddings", model=Gpt, data=next_tokens, criterion=CE),
    Program(name="gpt, AdamW and clipping", model=untied_gpt, data=next_tokens, criterion=CE, optimizer="AdamW",
            optimizer_args={"lr": 1e-3, "weight_decay": 0.1}, options={"max_grad_norm": 0.5}),
    Program(name="masked lm", model=Bert, data=ignoring_some, criterion=CE),
    Program(name="translation with padding", model=Translator, data=translated, criterion=CE,
            criterion_args={"ignore_index": 0, "label_smoothing": 0.1}),
    Program(name="texts with lengths, packed", model=Packed, data=lambda: texts(with_lengths), criterion=CE),
    Program(name="lstm, batch first", model=BatchFirst, data=lambda: texts(padded), criterion=CE),
    Program(name="lstm, time first", model=LastState, data=lambda: texts(time_first), criterion=CE, refused={"*": POSITIONS}),
    Program(name="text bags with offsets", model=Bag, data=lambda: texts(with_offsets), step=bag_step,
            refused={"*": POSITIONS}),
    Program(name="tagger in torch's order", model=Tagger, data=lambda: batches(tokens(), labels(4, 22, LENGTH)), criterion=CE),
    Program(name="skip-gram, sparse", model=SkipGram, step=skipgram_step, optimizer="SparseAdam", optimizer_args={"lr": 0.01},
            data=lambda: batches(labels(VOCAB, 22), labels(VOCAB, 22, seed=2), labels(VOCAB, 22, 3, seed=3)),
            refused={"*": "SparseAdam"}),
    Program(name="model with its own loss, dicts", model=CausalLm, step=own_loss,
            data=lambda: encoded(container=dict)),
    Program(name="model with its own loss, BatchEncoding", model=CausalLm, step=own_loss, data=encoded),
    Program(name="model with its own loss, padded", model=CausalLm, step=own_loss, data=lambda: encoded(False, dict),
            told={"*": COUPLED}),
    Program(name="model with its own loss, padded, by token", model=CausalLm, step=own_loss_by_token,
            data=lambda: encoded(False, dict)),
    Program(name="mean over words that are no padding", model=Bert, data=lambda: texts(padded), step=pad_mean_step,
            told={"*": COUPLED}),
]  # fmt: skip
