"""Models, batches and training loops of the pipeline tests: the same in the pool's processes and in plain PyTorch."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from guava_nb.parallel.checkpointing import checkpoint_activations
from guava_nb.parallel.pipeline.microbatches import count_micro_batches, cut_rows, micro_batch_sizes
from guava_nb.parallel.pipeline.pipeline import PipelinePart
from guava_nb.parallel.pipeline.pipeline_setup import Hooks, PipelinePlace
from guava_nb.parallel.pipeline.stages import split_model
from guava_nb.protocol.messages import ParallelSpec
from guava_nb.wire_formats.registry import WIRE_FORMATS

CPU = torch.device("cpu")
ODD_ROWS = (65, 7, 1, 16, 65, 5, 7, 64, 3, 65, 16, 2, 9, 33, 1, 8, 65, 4, 12, 31)


@dataclass(frozen=True)
class Part:
    """The smallest thing that is a Loss."""

    value: Tensor
    weight: float
    count: float | Tensor | None
    scores: Tensor | None = None


@dataclass(frozen=True)
class Case:
    model: str
    batches: str
    criterion: str = "classes"
    rows: tuple[int, ...] = ODD_ROWS
    clip: float | None = None
    spec: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "adamw"
    recompute: tuple[str, ...] = ()
    wire: str = "fp32"


# -------------------------------------------------------------------------------------------------------------- models


class Head(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


class Fork(nn.Module):
    """Several tensors across a boundary: one with a gradient, whole numbers, a float without, nested."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 8)

    def forward(self, x: Any) -> Any:
        numbers, extra = x["numbers"], x["more"][0]
        hidden = self.line(numbers)
        return hidden, {"index": extra.argmax(1), "mask": extra > 0, "scale": extra.abs().mean(1)}, [hidden * 2]


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        hidden, plain, (double,) = x
        return torch.relu_(hidden) + self.line(double) * plain["scale"][:, None], plain


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 5)
        self.pick = nn.Embedding(3, 5)

    def forward(self, x: Any) -> Tensor:
        hidden, plain = x
        return self.line(hidden) * plain["mask"].any(1, keepdim=True) + self.pick(plain["index"])


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, 2, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if x.shape[0] < 0:
            raise ValueError("a branch on sizes inside a block is nobody's business")
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Writer(nn.Module):
    """A general language model: assertion, positions, a skip from start to end, a tied weight, something unused."""

    def __init__(self, width: int = 8, words: int = 11, blocks: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.positions = nn.Parameter(torch.randn(16, width) * 0.1)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.norm = nn.LayerNorm(width)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("steps", torch.arange(16))

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        batch, length = ids.size()
        assert length <= 16, "too long"
        x = self.words(ids) + self.positions[self.steps[:length]] + torch.zeros(length, 1, device=ids.device)
        first = x
        for block in self.blocks:
            x = block(x)
        if targets is not None:
            raise ValueError("no targets here")
        return functional.linear(self.norm(x + first), self.words.weight)


class TorchEncoder(nn.Module):
    """torch's own encoder as most write it: a causal mask, layers that nobody calls one by one, a norm at the end."""

    def __init__(self, width: int = 8, words: int = 11) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, norm=nn.LayerNorm(width))
        self.head = nn.Linear(width, words)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(16).double())

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.size(1)
        return self.head(self.encoder(self.words(ids), mask=self.mask[:length, :length], is_causal=True))


class TorchDecoder(nn.Module):
    """torch's decoder, which looks back at the embeddings."""

    def __init__(self, width: int = 8, words: int = 11) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        layer = nn.TransformerDecoderLayer(width, 2, 16, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 3)
        self.head = nn.Linear(width, words)

    def forward(self, ids: Tensor) -> Tensor:
        words = self.words(ids)
        return self.head(self.decoder(words, words))


class Padded(nn.Module):
    """An encoder whose evaluation packs rows, all layers at once."""

    def __init__(self, nested: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=nested)
        self.head = nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.words(ids), src_key_padding_mask=ids == 0))


def _layers(*sizes: int) -> list[nn.Module]:
    found: list[nn.Module] = []
    for wide, narrow in zip(sizes[:-1], sizes[1:], strict=True):
        found += [nn.Linear(wide, narrow), nn.Tanh()]
    return found[:-1]


def _frozen() -> nn.Module:
    model = nn.Sequential(*_layers(6, 8, 8, 8, 8, 5))
    for parameter in [*model[0].parameters(), *model[2].parameters(), *model[8].parameters()]:
        parameter.requires_grad_(False)
    return model


def _tied() -> nn.Module:
    embedding = nn.Embedding(11, 8)
    return nn.Sequential(
        embedding, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sequential(nn.Tanh(), Head(embedding))
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(*_layers(6, 8, 8, 8, 5)),
    "nested": lambda: nn.Sequential(nn.Sequential(*_layers(6, 8, 8)), nn.Tanh(), nn.Sequential(*_layers(8, 8, 5))),
    "inplace": lambda: nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 5)
    ),
    "frozen": _frozen,
    "tied": _tied,
    "tuples": lambda: nn.Sequential(Fork(), Middle(), Join()),
    "writer": Writer,
    "torch encoder": TorchEncoder,
    "torch decoder": TorchDecoder,
    "padded": lambda: Padded(nested=False),
    "batchnorm": lambda: nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)
    ),
    "dropout": lambda: nn.Sequential(
        nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 5)
    ),
    "bare": lambda: nn.Sequential(nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Tanh()),
}


def build_model(name: str) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(7)
        return MODELS[name]().double()


# ------------------------------------------------------------------------------------------------------------- batches


def _numbers(rows: int, step: int, make: torch.Generator) -> Any:
    return torch.randn(rows, 6, generator=make, dtype=torch.float64), torch.randint(0, 5, (rows,), generator=make)


def _ignoring(rows: int, step: int, make: torch.Generator) -> Any:
    inputs, targets = _numbers(rows, step, make)
    targets[: rows * 2 // 3] = -100  # nearly all of the first micro-batches
    return inputs, targets


def _nested(rows: int, step: int, make: torch.Generator) -> Any:
    inputs, targets = _numbers(rows, step, make)
    return {"numbers": inputs, "more": (torch.randn(rows, 3, generator=make, dtype=torch.float64), "text")}, {
        "y": [targets]
    }


@dataclass(frozen=True)
class Labels:
    """Targets in a dataclass, with a list of one name per sample."""

    y: list[Tensor]
    names: list[str]


def _unusual(rows: int, step: int, make: torch.Generator) -> Any:
    inputs, targets = _nested(rows, step, make)
    return UserDict(inputs), Labels(targets["y"], [f"sample {row}" for row in range(rows)])


def _words(rows: int, step: int, make: torch.Generator) -> Any:
    length = 3 + step % 5
    ids = torch.randint(0, 11, (rows, length), generator=make)
    targets = torch.randint(0, 11, (rows, length), generator=make)
    targets[: rows // 2, 1:] = -100
    return ids, targets


BATCHES: dict[str, Callable[[int, int, torch.Generator], Any]] = {
    "numbers": _numbers,
    "ignoring": _ignoring,
    "nested": _nested,
    "unusual": _unusual,
    "words": _words,
}


def batches_of(case: Case) -> list[tuple[Any, Any, int]]:
    make = torch.Generator().manual_seed(3)
    return [(*BATCHES[case.batches](rows, step, make), rows) for step, rows in enumerate(case.rows)]


# ------------------------------------------------------------------------------------------------------------ criteria


def _classes(outputs: Any, targets: Any, rows: int) -> Part:
    if isinstance(targets, dict):
        targets = targets["y"][0]
    if isinstance(targets, Labels):
        assert len(targets.names) == rows
        targets = targets.y[0]
    assert len(outputs) == len(targets) == rows
    outputs, targets = outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1)
    total = functional.cross_entropy(outputs, targets, reduction="sum")
    return Part(total, 1.0, (targets != -100).sum(), (outputs.argmax(1) == targets).sum()[None])


def _mean(outputs: Any, targets: Any, rows: int) -> Part:
    return Part((outputs.square().mean(1) - targets).square().mean(), float(rows), float(rows))


def _plain_sum(outputs: Any, targets: Any, rows: int) -> Part:
    return Part((outputs.sum(1) - targets).square().sum(), 1.0, None)


CRITERIA: dict[str, Callable[[Any, Any, int], Part]] = {"classes": _classes, "mean": _mean, "sum": _plain_sum}
OPTIMIZERS: dict[str, Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda named: torch.optim.AdamW(named.values(), lr=0.01, weight_decay=0.1),
    "sgd": lambda named: torch.optim.SGD(named.values(), lr=0.05, momentum=0.9),
    "last": lambda named: torch.optim.AdamW([p for n, p in named.items() if n.startswith("6.")], lr=0.01),
    "groups": lambda named: torch.optim.AdamW(
        [
            {"params": [p for n, p in named.items() if p.ndim > 1], "weight_decay": 0.2},
            {"params": [p for n, p in named.items() if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=0.01,
    ),
}


# ------------------------------------------------------------------------------------------------------------- training


def train_plain(case: Case, model: nn.Module | None = None) -> dict[str, Any]:
    model = model or build_model(case.model)
    optimizer = OPTIMIZERS[case.optimizer](dict(model.named_parameters()))
    losses, norms, without = [], [], []
    for inputs, targets, rows in batches_of(case):
        loss = CRITERIA[case.criterion](model(inputs), targets, rows)
        count = 1.0 if loss.count is None else max(1.0, float(loss.count))
        (loss.value * loss.weight / count).backward()
        square = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
        if case.clip is not None:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.mul_(min(1.0, case.clip / square**0.5))
        without.append([name for name, p in model.named_parameters() if p.grad is None])
        optimizer.step()
        model.zero_grad(set_to_none=True)  # also of what is not in the optimizer
        losses.append((float(loss.value.detach()) * loss.weight, None if loss.count is None else float(loss.count)))
        norms.append(square)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    return {"losses": losses, "norms": norms, "state": state, "optimizer": optimizer.state_dict(), "none": without}


class _Rounded(torch.autograd.Function):
    """What a message in a wire format does to a tensor, and to its gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, wire: str) -> Tensor:
        ctx.wire = wire
        return _Rounded.of(value, wire)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Rounded.of(gradient, ctx.wire), None

    @staticmethod
    def of(value: Tensor, wire: str) -> Tensor:
        one, flat = WIRE_FORMATS[wire], value.detach().reshape(-1)
        return one.decode(one.encode(flat), flat.numel(), flat.dtype).view_as(value).clone()


def train_rounded(case: Case, stages: int) -> dict[str, Any]:
    """Train in one process, micro-batch after micro-batch, with what passes between stages rounded as `case.wire` does."""
    model = build_model(case.model)
    modules = split_model(model, stages, case.spec.get("split", ())).modules
    optimizer, losses = OPTIMIZERS[case.optimizer](dict(model.named_parameters())), []

    def rounded(value: Any) -> Any:
        is_sent = isinstance(value, Tensor) and (value.requires_grad or case.model == "frozen")
        return _Rounded.apply(value, case.wire) if is_sent else value

    for inputs, targets, rows in batches_of(case):
        count = count_micro_batches(case.spec["schedule"], case.spec["micro_batches"], rows, stages)
        sizes = micro_batch_sizes(rows, count)
        total, counted = 0.0, 0.0
        for x, y, size in zip(cut_rows(inputs, rows, sizes), cut_rows(targets, rows, sizes), sizes, strict=True):
            values = (x,)
            for module in modules[:-1]:
                values = tree_map(rounded, module(*values))
            loss = CRITERIA[case.criterion](modules[-1](*values), y, size)
            (loss.value * loss.weight / rows).backward()
            total, counted = total + float(loss.value.detach()) * loss.weight, counted + float(loss.count or 0)
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(rows / max(1.0, counted))
        optimizer.step()
        model.zero_grad(set_to_none=True)
        losses.append((total, counted))
    return {"losses": losses, "state": {key: value.clone() for key, value in model.state_dict().items()}}


def build_part(group: dist.ProcessGroup, case: Case, **more: Any) -> PipelinePart:
    return PipelinePart(
        build_model(case.model),
        ParallelSpec(mode="pipeline", pp=dist.get_world_size(group), **case.spec),
        PipelinePlace(group, CPU),
        criterion=CRITERIA[case.criterion],
        make_optimizer=OPTIMIZERS[case.optimizer],
        **more,
    )


class _Recomputing(Hooks):
    def __init__(self, patterns: tuple[str, ...]) -> None:
        self._patterns = patterns

    def checkpoint(self, stage: nn.Module) -> None:
        checkpoint_activations(stage, self._patterns)


def train_pipeline(group: dist.ProcessGroup, case: Case) -> dict[str, Any]:
    _forbid_object_collectives()
    part = build_part(group, case, hooks=_Recomputing(case.recompute) if case.recompute else None, wire=case.wire)
    part.model.train()
    losses, norms, without = [], [], []
    for inputs, targets, rows in batches_of(case):
        batch = (inputs if part.takes_inputs else None, targets if part.takes_targets else None)
        found = part.train_batch(batch, rows, 1.0 / rows)
        part.finish_gradients()
        count, square = _agree(group, part, found)
        part.scale_gradients(rows / (1.0 if count is None else max(1.0, count)))
        square *= (rows / (1.0 if count is None else max(1.0, count))) ** 2
        if case.clip is not None:
            part.scale_gradients(min(1.0, case.clip / square**0.5))
        without.append([name for name, p in part.named.items() if p.grad is None])
        assert part.nonfinite() == ""
        part.apply()
        part.drop_gradients()
        losses.append((float(found.loss_sum), None if found.count is None else float(found.count)))
        norms.append(square)
    return {
        "losses": losses if part.reports else None,
        "norms": norms,
        "none": without,
        "named": list(part.named),
        "begins": part.begins,
        "pieces": _plain_pieces(part.model_pieces()),
        "optimizer": _plain_pieces(part.optimizer_pieces()),
    }


def _agree(group: dist.ProcessGroup, part: PipelinePart, found: Any) -> tuple[float | None, float]:
    """Count and squared norm of all ranks: in training the vote brings them."""
    count = -1.0 if found.count is None else float(found.count)
    shared = torch.tensor([count if part.reports else 0.0, part.gradient_square()], dtype=torch.float64)
    dist.all_reduce(shared, group=group)
    return (None if shared[0] < 0 else float(shared[0])), float(shared[1])


def _forbid_object_collectives() -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("an object collective pickles a peer's bytes")

    for name in ("send_object_list", "recv_object_list", "broadcast_object_list", "all_gather_object", "gather_object"):
        setattr(dist, name, refuse)
        setattr(dist.distributed_c10d, name, refuse)


def _plain_pieces(value: Any) -> Any:
    """Tensors as arrays: those pass between processes by value."""
    if isinstance(value, Tensor):
        return value.numpy().copy()
    if isinstance(value, dict):
        return {key: _plain_pieces(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_plain_pieces(child) for child in value]
    if hasattr(value, "offsets"):
        return replace(value, tensor=value.tensor.numpy().copy())
    return value


# --------------------------------------------------------------------------------------------------- other things to do


def _batch(part: PipelinePart, inputs: Any, targets: Any) -> tuple[Any, Any]:
    return (inputs if part.takes_inputs else None, targets if part.takes_targets else None)


def train_seeded(group: dist.ProcessGroup, case: Case) -> Any:
    torch.manual_seed(dist.get_rank(group))
    found = train_pipeline(group, case)
    return found["losses"], found["norms"]


def evaluate(group: dist.ProcessGroup, case: Case) -> Any:
    _forbid_object_collectives()
    part = build_part(group, case)
    part.model.train()
    results = []
    for inputs, targets, rows in batches_of(case):
        found = part.eval_batch(_batch(part, inputs, targets), rows)
        outputs = [o for o, _ in part.predict_batch(_batch(part, inputs, targets), rows, lambda model, batch: None)]
        if part.reports:
            correct = None if found.scores is None else int(found.scores[0])
            results.append((float(found.loss_sum), float(found.count), correct, torch.cat(outputs).numpy()))
    assert all(module.training for module in part.model.modules())
    assert all(parameter.grad is None for parameter in part.named.values())
    return results


def load_and_return(group: dist.ProcessGroup, case: Case, state: Any, optimizer: Any) -> Any:
    part = build_part(group, case)
    part.load(state, optimizer)
    return {"pieces": _plain_pieces(part.model_pieces()), "optimizer": _plain_pieces(part.optimizer_pieces())}


def stand_in(group: dist.ProcessGroup, case: Case) -> Any:
    part = build_part(group, case)
    found = part.train_batch((None, None), 9, 1.0, stand_in=True)
    part.finish_gradients()
    assert all(parameter.grad is None for parameter in part.named.values())
    return float(found.loss_sum), found.rows, part.gradient_square()


def begins_by_time(group: dist.ProcessGroup, case: Case) -> Any:
    example = batches_of(case)[0][0] if dist.get_rank() == 0 else None
    return build_part(group, case, example=example).begins


def dtypes_under_autocast(group: dist.ProcessGroup, case: Case) -> Any:
    case = replace(case, rows=(9,))
    part = build_part(group, case)
    part.model.float()
    seen = set()
    for module in part.model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda module, args, output: seen.add(str(output.dtype)))
    inputs, targets, rows = batches_of(case)[0]
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            part.train_batch(_batch(part, inputs.float(), targets), rows, 1.0)
    return seen


def fail_then_train(group: dist.ProcessGroup, case: Case) -> Any:
    part = build_part(group, case)
    inputs, targets, rows = batches_of(case)[0]
    errors = []

    def broken(*args: Any) -> None:
        raise ZeroDivisionError("broken on purpose")

    def attempt() -> None:
        try:
            part.train_batch((inputs, targets), rows, 1.0 / rows)
        except Exception as error:
            errors.append(type(error).__name__)
        part.drop_gradients()

    for stage in part.model:
        hook = stage.register_forward_pre_hook(broken)
        attempt()
        hook.remove()
    part.train_batch((inputs, targets), rows, 1.0 / rows)  # now the shape is known
    part.drop_gradients()
    hook = part.model[0].register_forward_pre_hook(broken)
    attempt()
    hook.remove()
    hook = part.model[0].register_forward_hook(lambda module, args, output: output[0].register_hook(broken) and None)
    attempt()
    hook.remove()
    found = part.train_batch((inputs, targets), rows, 1.0 / rows)
    return {"errors": errors, "loss": float(found.loss_sum)}
