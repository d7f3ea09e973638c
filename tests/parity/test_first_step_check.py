"""The one-step check in real runs without a network: it finds what is planted, alarms for nothing else, and changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from guava_nb.cluster.cluster import Cluster
from guava_nb.errors import ConfigError, TrainingError
from guava_nb.protocol.messages import CheckStep, Factory, Message, RunSpec, StepChecked
from guava_nb.replica.one_step_check import whole_against_cut
from guava_nb.sync.whole_replica_set import WholeReplicaSet
from guava_nb.training import first_step_check
from guava_nb.training.job import TrainingJob
from guava_nb.training.run import Run
from tests.support.direct import DirectWorker, make_cluster
from tests.support.session import direct_session, said
from tests.support.training import difference, loader, losses_of, plain, plan_for, replica, spec


class Planted(nn.Module):
    """One small network with a trait."""

    def __init__(self, trait: str = "") -> None:
        super().__init__()
        self.trait = trait
        self.first, self.last = nn.Linear(10, 16), nn.Linear(16, 4)
        self.norm = nn.BatchNorm1d(16) if trait == "batch norm" else nn.LayerNorm(16)
        self.drop = nn.Dropout(0.5 if trait == "dropout" else 0.0)
        self.scales = itertools.cycle([1.0, 2.0]) if trait == "cycle" else None
        self.register_buffer("seen", torch.zeros(() if trait == "calls" else 16))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.first(x)))
        if self.trait == "functional dropout":
            h = functional.dropout(h, 0.3, self.training)
        if self.trait == "noise":
            h = h + torch.randn_like(h)
        if self.trait == "numpy":
            h = h * float(np.random.rand())  # the same numbers for every share of a step
        if self.trait == "numpy, by rows":
            h = h * torch.from_numpy(np.random.rand(len(h), 1)).to(h)
        if self.trait == "counter":
            self.seen += h.detach().sum(0)
        if self.trait == "greatest":
            self.seen.copy_(torch.maximum(self.seen, h.detach().amax(0)))
        if self.trait == "columns":
            self.seen += x.shape[1] - 2
        if self.scales is not None and self.training:
            h = h * next(self.scales)
        if self.trait == "calls":  # two a forward, as of a layer that is used twice, or computed again in backward
            self.seen += 2
        return self.last(self.drop(h))


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.head = nn.Linear(36, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(functional.pad(x[:, None, :8], (0, 0))[..., None].expand(-1, 1, 8, 8)))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 4)
        self.recurrent = nn.LSTM(8, 8, 2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x[:, :, None].expand(-1, -1, 8))
        with torch.autocast("cpu", enabled=False):  # torch has no LSTM of bfloat16 on every processor
            return self.head(self.recurrent(h.to(self.head.weight))[0].mean(1))


def info_nce(model: nn.Module, batch: Any) -> Tensor:
    a, b = (functional.normalize(model(x), dim=1) for x in (batch[0], batch[0] * 0.9))
    return functional.cross_entropy(a @ b.T / 0.2, torch.arange(len(a)))


def dice(model: nn.Module, batch: Any) -> Tensor:
    p, t = torch.sigmoid(model(batch[0])), functional.one_hot(batch[1], 4)
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


def barlow_twins(model: nn.Module, batch: Any) -> Tensor:
    a, b = (model(x) for x in (batch[0], batch[0] * 0.9))
    a, b = ((z - z.mean(0)) / (z.std(0) + 0.1) for z in (a, b))
    return ((a.T @ b / len(a) - torch.eye(4, dtype=a.dtype)) ** 2).sum()


def mean_of_some(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], ignore_index=0)


def hard_coded(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum") / 32


def counted(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return functional.cross_entropy(model(batch[0]), batch[1], ignore_index=0, reduction="sum"), (batch[1] != 0).sum()


def in_place(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0].mul_(2.0)), batch[1])


def neighbours(model: nn.Module, batch: Any) -> Tensor:
    """Pairs of neighbours: a piece of odd size has one without another."""
    z = model(batch[0])
    a, b = z[0::2], z[1::2]
    return functional.cosine_embedding_loss(a, b, torch.ones(len(a), dtype=a.dtype))


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = make_cluster()
    yield made
    made.close()


class Session:
    def __init__(self, cluster: Cluster, workers: int = 2) -> None:
        self.cluster, self.asked, self.checks, self.number = cluster, 0, {}, 0  # type: ignore[var-annotated]
        self.loaders: dict[Any, Any] = {}
        self.workers = [DirectWorker(cluster, f"w{k}", self._hook).start() for k in range(workers)]
        cluster.wait_for(workers, 10)

    def _hook(self, worker: DirectWorker, message: Message) -> None:
        self.asked += isinstance(message, StepChecked)

    def run(self, run_spec: RunSpec, data: Any, epochs: int = 1, **changes: Any) -> Run:
        self.number += 1
        replicas = WholeReplicaSet(f"run-{self.number}", run_spec, (), replica(run_spec))
        replicas.checks = self.checks
        job = TrainingJob(replicas, plan_for(data, epochs, **changes), self.cluster, lambda: replicas.master.model)
        job.start()
        assert job.run.wait(60), job.run
        return job.run

    def check(
        self, step: str | None = None, model: Any = Planted, trait: str = "", rows: int = 8, **changes: Any
    ) -> Any:
        precision = changes.pop("precision", "fp64")
        args = {"trait": trait} if model is Planted else {}
        run_spec = spec(
            model=Factory(f"{model.__module__}:{model.__name__}", args), precision=precision,
            **({"step": Factory(f"{__name__}:{step}"), "criterion": None} if step else {}),
        )  # fmt: skip
        dtype = torch.float64 if precision == "fp64" else torch.float32
        data = self.loaders.setdefault((rows, dtype), loader(2 * rows, rows, dtype))
        run = self.run(run_spec, data, **changes)
        assert run.check is not None and (run.check["worker"], run.check["batch_samples"]) == ("w0", rows)
        return run


@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16"])
@pytest.mark.parametrize(
    ("model", "step"),
    [(Planted, None), (Planted, "counted"), (Planted, "in_place"), (Vision, None), (Language, None)],
)
def test_nothing_is_alarmed_where_samples_are_apart(
    cluster: Cluster, model: Any, step: str | None, precision: str
) -> None:
    found = Session(cluster).check(step, model, rows=9, precision=precision, check="strict").result().check
    assert (found["outcome"], found["causes"], found["buffers"]) == ("same", [], [])
    assert found["gradient_difference"] <= (1e-12 if precision == "fp64" else 1e-6)


@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("step", ["info_nce", "dice", "barlow_twins"])
def test_a_loss_that_couples_samples_is_found(cluster: Cluster, step: str, precision: str) -> None:
    session = Session(cluster)
    found = session.check(step, precision=precision).result().check
    assert (found["outcome"], found["causes"], found["precision"]) == ("differs", ["coupled"], "fp64")
    with pytest.raises(ConfigError, match=r"couples the samples.*gather_batch.*shares=\[1, 0\]"):
        session.check(step, precision=precision, check="strict").result()
    assert session.asked == 2, "pieces of two, then the shares; nothing has changed, so the second run knows"


@pytest.mark.parametrize(("step", "cause"), [("mean_of_some", "weights"), ("hard_coded", "sum")])
def test_a_wrong_denominator_is_told_from_a_coupled_loss(cluster: Cluster, step: str, cause: str) -> None:
    session = Session(cluster)
    assert session.check(step, rows=12).result().check["causes"] == [cause]
    with pytest.raises(ConfigError, match=r"return \(loss_sum, count\)"):
        session.check(step, rows=12, check="strict").result()


@pytest.mark.parametrize(
    ("trait", "step", "outcome", "causes", "drawn"),
    [
        ("batch norm", None, "differs", ["batch_statistics"], []),
        ("batch norm", "info_nce", "differs", ["batch_statistics", "coupled"], []),
        ("dropout", None, "same", [], ["dropout"]),
        ("functional dropout", None, "same", [], ["dropout"]),
        ("noise", None, "same", [], ["randn_like"]),
        ("dropout", "info_nce", "differs", ["coupled"], ["dropout"]),
        ("numpy", None, "same", [], ["NumPy's random"]),
        ("counter", None, "same", [], []),
        ("columns", None, "same", [], []),
        ("greatest", None, "differs", [], []),
        ("calls", None, "same", [], []),
        ("cycle", None, "same", [], []),
        ("calls", "dice", "differs", ["coupled"], []),
    ],
)
def test_what_a_difference_comes_from(
    cluster: Cluster, trait: str, step: str | None, outcome: str, causes: list[str], drawn: list[str]
) -> None:
    found = Session(cluster).check(step, trait=trait).result().check
    assert (found["outcome"], found["causes"], found["replaced_by_constants"]) == (outcome, causes, drawn)
    assert found["buffers"] == (["seen"] if trait == "greatest" else [])
    assert found["policies"] == {"counter": {"seen": "sum"}, "columns": {"seen": "first"}}.get(trait, {})


def test_other_randomness_is_no_coupled_loss(cluster: Cluster) -> None:
    found = Session(cluster).check(trait="numpy, by rows").result().check
    assert found["outcome"] == "not checked" and "random numbers" in found["reason"]


def test_pieces_that_cannot_be_computed_are_refused_before_any_step(cluster: Cluster) -> None:
    session = Session(cluster, 3)
    run = session.check("neighbours", rows=16)
    with pytest.raises(ConfigError, match="a piece cannot be computed without the rest of the batch"):
        run.result()
    assert run.history == []


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x[:, :8])


@pytest.mark.parametrize(("rows", "is_refused"), [(34, True), (36, False)])
def test_a_last_batch_that_leaves_a_worker_one_sample_is_refused_before_any_step(
    cluster: Cluster, rows: int, is_refused: bool
) -> None:
    normed = spec(model=Factory(f"{__name__}:Normed"), precision="fp64")
    run = Session(cluster).run(normed, loader(rows, 16))
    if is_refused:
        with pytest.raises(
            ConfigError, match="^The last batch of an epoch has only 2 samples.*'body.1'.*sync_batchnorm"
        ):
            run.result()
    assert len(run.history) == (0 if is_refused else 3)


def whitened(model: nn.Module, batch: Any) -> Tensor:
    """One sample has no standard deviation."""
    outputs = model(batch[0])
    return functional.cross_entropy(outputs / (outputs.std(0) + 0.1), batch[1])


def test_a_piece_that_has_no_loss_is_refused_before_any_step_with_its_cause(cluster: Cluster) -> None:
    run = Session(cluster).check("whitened", rows=2)
    with pytest.raises(ConfigError, match="whole and nan cut: some piece has too few samples"):
        run.result()
    assert run.history == []


class Boxes(torch.utils.data.Dataset[Any]):
    """Pictures with unlike numbers of boxes, joined as detection programs join them."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = torch.randn(10 + 4 * (index % 3), generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return drawn[:10], drawn[6:].reshape(-1, 4)

    @staticmethod
    def joined(samples: Any) -> Any:
        boxes = [boxes for _, boxes in samples]
        owner = torch.cat([torch.full((len(one),), index) for index, one in enumerate(boxes)])
        return {"image": torch.stack([image for image, _ in samples]), "boxes": torch.cat(boxes), "owner": owner}


def detect(model: nn.Module, batch: Any) -> Tensor:
    found = [
        model(image[None])[0] - batch["boxes"][batch["owner"] == k].mean(0) for k, image in enumerate(batch["image"])
    ]
    return (torch.stack(found) ** 2).mean()


def test_parts_that_travel_whole_are_named(cluster: Cluster) -> None:
    run_spec = spec(model=Factory(f"{__name__}:Planted"), step=Factory(f"{__name__}:detect"), criterion=None)
    with pytest.warns(
        UserWarning, match=r"Parts of shape \[15, 4\], \[15\] go to every worker whole.*split_fn.*Or the loss"
    ):
        run = Session(cluster).run(
            run_spec, DataLoader(Boxes(), 8, collate_fn=Boxes.joined), batch="whole: boxes, owner"
        )
    assert run.check is not None and run.check["causes"] == ["coupled"]


def listed(samples: list[Any]) -> Any:
    return torch.stack([image for image, _ in samples]), [{"boxes": one} for _, one in samples]


def detect_listed(model: nn.Module, batch: Any) -> Tensor:
    images, targets = batch
    found = [
        (model(image[None])[0] - target["boxes"]).square().sum() for image, target in zip(images, targets, strict=True)
    ]
    return torch.stack(found).sum() / sum(len(target["boxes"]) for target in targets)


def test_a_list_with_one_entry_for_each_sample_is_not_called_whole(cluster: Cluster) -> None:
    run_spec = spec(model=Factory(f"{__name__}:Planted"), step=Factory(f"{__name__}:detect_listed"), criterion=None)
    with pytest.warns(UserWarning, match="The loss couples|wrong weights") as told:
        Session(cluster).run(run_spec, DataLoader(Boxes(), 8, collate_fn=listed))
    assert not any("every worker whole" in str(one.message) for one in told)


def test_few_samples_are_sent_and_the_whole_batch_decides(cluster: Cluster) -> None:
    session = Session(cluster)
    found = session.check(rows=64).result().check
    assert (found["samples"], session.asked) == (64, 2)
    found = session.check("info_nce", rows=64).result().check
    assert (found["samples"], found["causes"], session.asked) == (64, ["coupled"], 4)


def test_a_batch_that_does_not_fit_is_halved(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = whole_against_cut.Trial.measure

    def narrow(self: Any, pieces: Any, seed: int = 0, **more: Any) -> Any:
        if max(rows for _, rows in pieces) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return measure(self, pieces, seed, **more)

    monkeypatch.setattr(whole_against_cut.Trial, "measure", narrow)
    session = Session(cluster)
    found = session.check("info_nce", rows=16).result().check
    assert (found["samples"], found["batch_samples"], found["causes"]) == (4, 16, ["coupled"])
    monkeypatch.setattr(whole_against_cut.Trial, "measure", lambda *_, **more: (_ for _ in ()).throw(MemoryError()))
    found = session.check("dice").result().check
    assert found["outcome"] == "not checked" and "do not fit the memory of w0" in found["reason"]


def test_a_large_batch_that_does_not_fit_is_told_by_its_few_samples(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = whole_against_cut.Trial.measure

    def narrow(self: Any, pieces: Any, seed: int = 0, **more: Any) -> Any:
        if max(rows for _, rows in pieces) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return measure(self, pieces, seed, **more)

    monkeypatch.setattr(whole_against_cut.Trial, "measure", narrow)
    found = Session(cluster).check("info_nce", rows=64).result().check
    assert (found["samples"], found["causes"]) == (8, ["coupled"])


def test_of_samples_with_many_bytes_as_many_are_told_as_were_looked_at(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_step_check, "_FEW_BYTES", 1)
    monkeypatch.setattr(first_step_check, "_MOST_BYTES", 1500)
    found = Session(cluster).check("info_nce", rows=64).result().check
    assert (found["samples"], found["causes"]) == (2, ["coupled"])


@pytest.mark.parametrize("site", ["workers", "orchestrator"])
@pytest.mark.parametrize("workers", [2, 3])
def test_a_checked_run_is_the_run_that_it_was(cluster: Cluster, workers: int, site: str) -> None:
    """Random state, buffers, gradients, flags and samples: all of it shows in the weights."""
    run_spec = spec(optimizer_site=site)
    session = Session(cluster, workers)
    run = session.run(run_spec, loader(), 2).result()
    model, losses = plain(run_spec, loader())
    # Step 1: few and all; 4, 8, a last batch. Of three workers one gets a single sample of its 5: that is tried before the run.
    assert session.asked == 5 + (workers == 3) and run.check is not None and run.check["outcome"] == "same"
    assert losses_of(run) == pytest.approx(losses, abs=1e-12)
    assert (run.lost_samples, run.duplicated_samples) == (0, 0)
    assert difference(run.model(), model) <= 1e-9


def test_dropout_and_statistics_are_those_of_an_unchecked_run(cluster: Cluster) -> None:
    run_spec = spec(model=Factory("tests.support.training:SmallNet", {"dropout": 0.5, "norm": True}))
    session = Session(cluster)
    checked = session.run(run_spec, loader(102), 1).result()
    unchecked = session.run(run_spec, loader(102), 1, check="off").result()
    assert checked.check is not None and unchecked.check is None
    assert losses_of(checked) == losses_of(unchecked)


def test_one_worker_is_asked_nothing_and_shares_that_cut_nothing_neither(cluster: Cluster) -> None:
    session = Session(cluster)
    run = session.run(spec(), loader(), shares=(1, 0)).result()
    assert (run.check, session.asked) == (None, 0)


def test_a_worker_that_dies_of_it_ends_the_check_and_not_the_run(cluster: Cluster) -> None:
    session = Session(cluster, 3)
    first = session.workers[0]
    send = first.session.send

    def dying(message: Message, channel: int, buffers: Any = ()) -> None:
        if isinstance(message, CheckStep):
            first.die()
            return
        send(message, channel, buffers)

    first.session.send = dying  # type: ignore[method-assign]
    run = session.run(spec(), loader()).result()
    assert run.check is not None and "w0 was lost" in run.check["reason"]
    assert (run.lost_samples, run.duplicated_samples, len(run.history)) == (0, 0, 4)


def test_the_check_of_a_stream_takes_no_sample_from_it(cluster: Cluster) -> None:
    drawn = iter(DataLoader(TensorDataset(*loader().dataset.tensors), batch_size=16))  # type: ignore[attr-defined]
    run = Session(cluster).run(spec(), drawn).result()
    assert sum(record["samples"] for record in run.history) == 101


class Later(nn.Module):
    """Has traits that show after some steps only."""

    def __init__(self, trait: str = "") -> None:
        super().__init__()
        self.trait, self.last, self.calls, self.mean = trait, nn.Linear(10, 4), 0, torch.zeros(4, dtype=torch.float64)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.aux = None

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
            self.calls += self.trait != "counts in training"
        out = self.last(x)
        self.aux = out.mean(0).square().sum()  # is written anew before it is read: nothing depends on it
        if self.trait == "mean in an attribute":
            out = out - self.mean
            self.mean = 0.5 * self.mean + 0.5 * out.mean(0).detach()
        return out / (1 + 0.01 * self.calls) if self.trait == "temperature" else out


def mining(model: Any, batch: Any) -> Tensor:
    out = model(batch[0])
    loss = functional.cross_entropy(out, batch[1])
    return loss + torch.cdist(out, out).amax(1).mean() if int(model.steps) > 4 else loss


def warming(model: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1]) + max(0, model.calls - 2) * model.aux


def ignoring(model: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch["x"]), batch["y"], ignore_index=7)


def weighing(model: Any, batch: Any) -> Tensor:
    each = functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return (each * batch["w"]).sum() / batch["w"].sum()


def balancing(model: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch["x"]), batch["y"]) + batch["coefficient"] * model.aux


def masking(model: Any, batch: Any) -> Tensor:
    known = ~batch["r"].isnan()
    return (model(batch["x"])[:, 0] - batch["r"])[known].square().mean()


def later_batches(change: str) -> list[dict[str, Any]]:
    g, made = torch.Generator().manual_seed(4), []
    for number in range(6):
        made.append({
            "x": torch.randn(8, 10, generator=g, dtype=torch.float64), "y": torch.randint(0, 4, (8,), generator=g),
            "w": torch.ones(8, dtype=torch.float64), "r": torch.rand(8, generator=g, dtype=torch.float64) + 0.1,
            "coefficient": 0.0,
        })  # fmt: skip
        if number >= 2:
            made[-1][change] = {"coefficient": 0.3 * number}.get(change, made[-1][change])
            if change in "ywr":
                made[-1][change][:3] = {"y": 7, "w": 0.25, "r": float("nan")}[change]
    return made


@pytest.mark.parametrize(
    ("step", "change", "found_at", "causes", "why"),
    [
        ("ignoring", "y", 3, ["weights"], "part y has entries that are 7"),
        ("weighing", "w", 3, ["weights"], "part w is not 1 everywhere any more"),
        ("masking", "r", 3, ["weights"], "part r has values that are no numbers"),
        ("balancing", "coefficient", 3, ["coupled"], "part coefficient is not 0 everywhere any more"),
        ("mining", "", 8, ["coupled"], "step 8"),
        ("warming", "", 4, ["coupled"], "step 4"),
    ],
)
def test_what_begins_later_is_found_and_halts_a_strict_run_with_its_steps_kept(
    cluster: Cluster, step: str, change: str, found_at: int, causes: list[str], why: str
) -> None:
    run_spec = spec(model=Factory(f"{__name__}:Later"), step=Factory(f"{__name__}:{step}"), criterion=None)
    data = later_batches(change) if change else loader(64, 8)
    with pytest.warns(UserWarning, match=why):
        run = Session(cluster).run(run_spec, data)
    assert run.check is not None and (run.check["step"], run.check["causes"]) == (found_at, causes)
    assert len(run.history) == len(data)
    strict = Session(cluster, 0).run(run_spec, data, check="strict")
    with pytest.raises(ConfigError, match=f"{why}.*The {found_at - 1} steps before it are kept"):
        strict.result()
    assert len(strict.history) == found_at - 1 and strict.model() is not None


@pytest.mark.parametrize(
    ("trait", "outcome", "kept", "unlike"),
    [
        ("temperature", "same", ["model.calls"], []),
        ("counts in training", "same", [], []),
        ("mean in an attribute", "differs", ["model.mean", "model.calls"], ["model.mean"]),
    ],
)
def test_what_is_kept_in_python_is_named_where_it_differs_and_put_back(
    cluster: Cluster, trait: str, outcome: str, kept: list[str], unlike: list[str]
) -> None:
    run_spec = spec(model=Factory(f"{__name__}:Later", {"trait": trait}))
    session = Session(cluster)
    run = session.run(run_spec, loader(96, 16)).result()
    found = run.check
    assert (found["outcome"], found["kept_in_python"], found["unlike_in_python"]) == (outcome, kept, unlike)
    if outcome == "same":  # counters of the user's own code do not count what is only looked at
        assert difference(run.model(), plain(run_spec, loader(96, 16), 1)[0]) <= 1e-9


def test_what_is_known_is_not_told_again(cluster: Cluster) -> None:
    run_spec = spec(model=Factory(f"{__name__}:Planted", {"trait": "batch norm"}))
    session, told = Session(cluster), list[str]()
    cluster.notice = told.append  # type: ignore[method-assign, assignment]
    run = session.run(run_spec, loader(128, 16)).result()
    assert run.check is not None and run.check["again"]["steps"] == [4, 8] and run.check["again"]["seconds"] > 0
    assert sum("Batch norms" in one for one in told) == 1 and session.asked == 3


@pytest.mark.parametrize("site", ["workers", "orchestrator"])
def test_what_begins_anew_in_a_second_run_is_named_and_a_strict_one_is_refused(site: str) -> None:
    options = {
        "precision": "fp64",
        "progress": False,
        "optimizer": "SGD",
        "optimizer_args": {"lr": 0.1},
        "optimizer_site": site,
    }
    with direct_session(2, precision="fp64") as orchestrator:
        orchestrator.register_model(Later, {"trait": "temperature"})
        data = loader(32, 16)
        orchestrator.start_training(data, **options)
        with pytest.raises(ConfigError, match=r"model\.calls.*: the last run changed this.*fresh=True"):
            orchestrator.start_training(data, check="strict", **options)
        orchestrator.start_training(data, check="strict", fresh=True, **options)
        orchestrator.start_training(data, **options)
        assert "model.calls" in said(orchestrator)


def test_a_run_that_never_validates_says_so_before() -> None:
    with direct_session(2) as orchestrator:
        orchestrator.register_model(Planted)
        data = loader(32, 16, torch.float32)
        orchestrator.start_training(data, data, val_interval=50, progress=False)
        assert "never validates: val_interval is 50 steps, and it has 2" in said(orchestrator)


class EachForward(nn.Module):
    """Counts its forwards in a buffer; `only` tells which."""

    def __init__(self, only: str = "all") -> None:
        super().__init__()
        self.net, self.only = nn.Linear(10, 4), only
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training or self.only == "all":
            self.n += 1
        return self.net(x) / (1 + 0.02 * self.n)


@pytest.mark.parametrize(
    ("only", "validates", "is_told"), [("all", True, True), ("all", False, False), ("training", True, False)]
)
def test_a_buffer_that_a_validation_moves_is_named(only: str, validates: bool, is_told: bool) -> None:
    with direct_session(2) as orchestrator:
        orchestrator.register_model(EachForward, {"only": only})
        val = loader() if validates else None
        orchestrator.start_training(loader(), val, precision="fp64", progress=False)
        assert ("Each forward changes n, in a validation too" in said(orchestrator)) is is_told


class Counting(nn.Module):
    """Keeps counts in buffers; each of two workers has 4 rows of 12 columns, so all of them may count samples."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(10, 4)
        for name in ("rows", "columns", "large", "classes"):
            self.register_buffer(name, torch.zeros(4 if name == "classes" else (), dtype=torch.long))
        self.register_buffer("total", torch.zeros(10))

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        if self.training:
            self.rows += len(x)
            self.columns += x.shape[1] - 2
            self.large += (x[:, 0] > 0).sum()
            self.classes += torch.bincount(out.argmax(1), minlength=4)
            self.total += x.detach().sum(0)
        return out / (1 + 0.01 * self.columns)


def counted_in_one_process(data: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Counting().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in data:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("site", ["workers", "orchestrator"])
def test_buffers_that_count_have_what_one_process_counts_also_in_a_run_that_checks_nothing_again(site: str) -> None:
    data = loader(32, 8)
    data = [(x, y) for x, y in data]
    expected = counted_in_one_process(data)
    options: dict[str, Any] = {
        "precision": "fp64",
        "progress": False,
        "optimizer": "SGD",
        "optimizer_args": {"lr": 0.1},
    }
    with direct_session(2) as orchestrator:
        orchestrator.register_model(Counting)
        kept = DataLoader(data, batch_size=None)
        for known in (False, True):
            run = orchestrator.start_training(kept, fresh=True, seed=0, optimizer_site=site, **options)
            assert run.check is not None and run.check["known"] is known
            assert run.check["policies"]["columns"] == "first" and run.check["outcome"] == "same"
            assert difference(run.model(), expected) < 1e-12
            assert known or "columns=first" in said(orchestrator)  # a run that knows it says nothing again


class Teacher(nn.Module):
    """A student and a frozen copy that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(10, 4), nn.Linear(10, 4).requires_grad_(False)


def follow(model: nn.Module, batch: Any) -> Tensor:
    """As mean teachers and BYOL do: the copy moves after the loss."""
    assert isinstance(model, Teacher)
    loss = functional.mse_loss(model.student(batch[0]), model.teacher(batch[0]))
    with torch.no_grad():
        for mine, its in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
            mine.lerp_(its, 0.1)
    return loss


def test_a_frozen_copy_that_the_step_moves_is_put_back_between_two_tries() -> None:
    with direct_session(2) as orchestrator:
        orchestrator.register_model(Teacher)
        run = orchestrator.start_training(loader(), step=follow, precision="fp64", progress=False)
        assert run.report()["check"]["outcome"] == "same" and "was not made" not in said(orchestrator)


class Narrow(Planted):
    """Computes eight samples at once at most, as a small device does."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(x)


def test_a_lone_worker_cuts_what_does_not_fit_unless_samples_are_coupled(cluster: Cluster) -> None:
    session, args = Session(cluster, 1), {"criterion": None, "model": Factory(f"{__name__}:Narrow")}
    apart = spec(**args, step=Factory(f"{__name__}:counted"))
    run = session.run(apart, loader(32, 32)).result()
    assert (run.check, len(run.history)) == (None, 1)
    assert session.workers[0].loop._steps._pieces == 4
    run = session.run(spec(**args, step=Factory(f"{__name__}:info_nce")), loader(32, 32))
    with pytest.raises(TrainingError, match="a batch of 32 samples does not fit the memory here.*gather_batch"):
        run.result()
    assert run.history == []


def test_what_globals_count_in_place_is_put_back_after_the_check() -> None:
    """Each worker goes on from what stood there before: iterators, tensors and an array that no `global` names."""
    cell = """
import itertools
import numpy
import torch
from torch import nn
ticks, clock, tally, stats = itertools.count(), torch.zeros(1), numpy.zeros(1), {"calls": torch.zeros(1)}
class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
memory = Memory()
def schedule():
    yield from (0, 0, 0, 100)
    while True:
        yield 0
extra = schedule()
def loss(outputs, targets):
    clock.add_(1)
    tally[0] += 1
    stats["calls"] += 1
    memory.calls += 1
    calls = next(ticks) + clock.item() + tally[0] + stats["calls"].item() + memory.calls.item() + next(extra)
    return nn.functional.cross_entropy(outputs, targets) * 0 + (calls if calls > 14 else 0)
"""
    with direct_session(2, precision="fp64") as orchestrator:
        orchestrator.share(cell)
        orchestrator.register_model(f"{__name__}:Planted")
        run = orchestrator.start_training(loader(48, 8), criterion="loss", max_steps=5, progress=False)
        assert run.wait(60)
        assert losses_of(run.result()) == [0, 0, 0, 119, 24]  # 4, 9 and 14 are not above 14
