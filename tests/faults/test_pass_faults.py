"""Validation and prediction over worker loops without a network: exact places of loss, no clocks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.job import Job
from guava_nb.data.loader_feed import LoaderFeed
from guava_nb.errors import ClusterError, ConfigError, RemoteError
from guava_nb.evaluation.between_runs import ask
from guava_nb.evaluation.metric_specs import merges_for, metric_specs
from guava_nb.evaluation.predict import predict
from guava_nb.evaluation.predictions import Predictions, wanted_of
from guava_nb.evaluation.validation import Validation
from guava_nb.protocol.messages import Evaluated, Factory, Message, Predicted, Wanted
from guava_nb.sync.replica_set import ReplicaSet
from guava_nb.sync.whole_replica_set import WholeReplicaSet
from tests.support.direct import DirectWorker, make_cluster, once_after
from tests.support.training import dataset, replica, spec

Hook = Callable[[DirectWorker, Message], None]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = make_cluster()
    yield made
    made.close()


def start(cluster: Cluster, *hooks: Hook | None) -> ReplicaSet:
    """Workers with these hooks; returns a replica set that no job has yet."""
    for k, hook in enumerate(hooks):
        DirectWorker(cluster, f"w{k}", *([hook] if hook else [])).start()
    if hooks:
        cluster.wait_for(len(hooks), 10)
    return WholeReplicaSet("run-1", spec(), (), replica(spec()))


def hit_rate(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == targets).double().mean()


def mean_top(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    return outputs.max(1).values.sum(), len(outputs)


HERE = f"{__name__}"


def validate(cluster: Cluster, replica_set: ReplicaSet, loader: Any, metrics: Any = None) -> dict[str, Any]:
    specs = metric_specs(metrics, None)
    question = Validation(specs, merges_for(specs, None))
    ask(cluster, replica_set, LoaderFeed(loader), question)
    return question.result().record()


def plain_validation(replica_set: ReplicaSet, loader: Any) -> dict[str, Any]:
    """Batch by batch in one process, sums in the loader's order: nothing of ours but the weights."""
    model = replica_set.master.model.eval()
    loss_sum, correct, rows, top = 0.0, 0, 0, 0.0
    with torch.no_grad():
        for x, y in loader:
            outputs = model(x)
            loss_sum += float(torch.nn.functional.cross_entropy(outputs, y, reduction="sum"))
            correct += int((outputs.argmax(1) == y).sum())
            top += float(outputs.max(1).values.sum())
            rows += len(y)
    return {"loss": loss_sum / rows, "accuracy": correct / rows, "samples": rows, "mean_top": top / rows}


def plain_outputs(replica_set: ReplicaSet, loader: Any) -> torch.Tensor:
    model = replica_set.master.model.eval()
    with torch.no_grad():
        return torch.cat([model(batch if isinstance(batch, torch.Tensor) else batch[0]) for batch in loader])


def assert_right(found: Predictions, outputs: torch.Tensor, top_k: int = 1) -> None:
    """Equal to the last bit."""
    best = outputs.topk(top_k, dim=1).indices
    probabilities = torch.softmax(outputs, dim=1).float()
    shape = (len(outputs),) if top_k == 1 else (len(outputs), top_k)
    assert found["total_samples"] == len(outputs)
    assert np.array_equal(found["predictions"], best.numpy().reshape(shape))
    assert np.array_equal(found["confidences"], probabilities.gather(1, best).numpy().reshape(shape))


CASES = [(1, 101, 32), (3, 101, 32), (3, 101, 7), (4, 21, 8), (3, 5, 8), (2, 3, 1), (4, 1, 1)]


@pytest.mark.parametrize(("workers", "rows", "batch"), CASES)
def test_validation_and_prediction_equal_plain_pytorch_bit_by_bit(
    cluster: Cluster, workers: int, rows: int, batch: int
) -> None:
    replica_set = start(cluster, *[None] * workers)
    loader = DataLoader(dataset(rows), batch)
    truth = plain_validation(replica_set, loader)
    found = validate(cluster, replica_set, loader, {"hits": hit_rate, "mean_top": mean_top})
    assert found.pop("hits") == pytest.approx(truth["accuracy"], abs=1e-12)
    assert found == truth
    outputs = plain_outputs(replica_set, loader)
    for top_k in (1, 3):
        assert_right(predict(cluster, replica_set, loader, wanted_of(top_k, None, False, False)), outputs, top_k)
    both = predict(cluster, replica_set, loader, wanted_of(1, 0.4, True, False))
    assert np.array_equal(both["probabilities"], torch.softmax(outputs, 1).float().numpy())
    assert np.array_equal(both["kept"], both["probabilities"].max(1) >= np.float32(0.4))
    raw = predict(cluster, replica_set, loader, Wanted(raw=True))["outputs"]
    assert raw.dtype == np.float64 and np.array_equal(raw, outputs.numpy())


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("kind", ["die", "cut"])
def test_a_worker_lost_in_the_middle_changes_nothing(cluster: Cluster, kind: str, count: int) -> None:
    """Lost before an answer goes out, twice: once in validation, once in prediction."""

    def lose(worker: DirectWorker) -> None:
        if kind == "die":
            worker.die()
        else:
            worker.go_away()
            threading.Timer(0.1, worker.come_back).start()

    hooks = [once_after(count, record, lose) for record in (Evaluated, Predicted)]
    replica_set = start(cluster, hooks[0], hooks[1], None)
    loader = DataLoader(dataset(), 5)
    truth = plain_validation(replica_set, loader)
    assert validate(cluster, replica_set, loader, {"mean_top": mean_top}) == truth
    assert_right(predict(cluster, replica_set, loader, Wanted(2)), plain_outputs(replica_set, loader), 2)
    assert hooks[0].fired and hooks[1].fired  # type: ignore[attr-defined]


def test_all_workers_lost_is_told_and_the_folder_is_gone_on_with(cluster: Cluster, tmp_path: Path) -> None:
    hook = once_after(4, Predicted, lambda worker: worker.die())
    replica_set = start(cluster, hook)
    loader = DataLoader(dataset(), 5)
    with pytest.raises(ClusterError, match="no worker is here"):
        predict(cluster, replica_set, loader, Wanted(), path=tmp_path)
    asked: list[int] = []

    def note(worker: DirectWorker, message: Message) -> None:
        asked.extend([message.rows] if isinstance(message, Predicted) else [])

    DirectWorker(cluster, "spare", note).start()
    cluster.wait_for(1, 10)
    found = predict(cluster, replica_set, loader, Wanted(), path=tmp_path, resume=True)
    assert_right(found, plain_outputs(replica_set, loader))
    assert sum(asked) == 101 - 3 * 5  # what was on the disk was not done again
    again = predict(cluster, replica_set, loader, Wanted(), path=tmp_path, resume=True)
    assert sum(asked) == 101 - 3 * 5 and again["total_samples"] == 101


def test_another_model_or_other_options_do_not_go_on(cluster: Cluster, tmp_path: Path) -> None:
    replica_set = start(cluster, None)
    loader = DataLoader(dataset(), 20)
    predict(cluster, replica_set, loader, Wanted(), path=tmp_path)
    with pytest.raises(ConfigError, match=r"top_k was 1 and is 2 now"):
        predict(cluster, replica_set, loader, Wanted(2), path=tmp_path, resume=True)
    with pytest.raises(ConfigError, match=r"number of samples was 101 and is 100 now"):
        predict(cluster, replica_set, DataLoader(dataset(100), 20), Wanted(), path=tmp_path, resume=True)
    with pytest.raises(ConfigError, match=r"batch size was 20 and is 10 now"):
        predict(cluster, replica_set, DataLoader(dataset(), 10), Wanted(), path=tmp_path, resume=True)
    other = WholeReplicaSet("run-2", spec(seed=7), (), replica(spec(seed=7)))
    with pytest.raises(ConfigError, match=r"model and shared cells was"):
        predict(cluster, other, loader, Wanted(), path=tmp_path, resume=True)


# ------------------------------------------------------------------------------------------------------------ loaders


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(dataset(23))


def test_order_means_the_data_set_s_for_every_loader(cluster: Cluster, tmp_path: Path) -> None:
    replica_set = start(cluster, None, None)
    x = dataset().tensors[0]
    outputs = plain_outputs(replica_set, [x])
    shuffled = DataLoader(dataset(), 8, shuffle=True, generator=torch.Generator().manual_seed(3))
    found = predict(cluster, replica_set, shuffled, Wanted())
    assert np.array_equal(found["predictions"], outputs.float().argmax(1).numpy())
    assert np.array_equal(found["sample_ids"], np.arange(101))
    few = predict(cluster, replica_set, DataLoader(Subset(dataset(), [5, 3, 40]), 2), Wanted(raw=True))
    assert few["sample_ids"].tolist() == [0, 1, 2]  # places in the subset: that is the data set here
    assert few["outputs"] == pytest.approx(outputs[[5, 3, 40]].numpy())
    stream = predict(cluster, replica_set, DataLoader(Stream(), 4), Wanted())
    assert stream["total_samples"] == 23 and stream["estimated_memory_mb"] is None
    assert_right(stream, plain_outputs(replica_set, DataLoader(Stream(), 4)))
    listed = [x[:4], [x[4:9]], (x[9:12], None)]
    assert_right(predict(cluster, replica_set, listed, Wanted()), plain_outputs(replica_set, listed))
    with pytest.raises(ConfigError, match=r"in the order of the data set.*shuffle=False"):
        predict(cluster, replica_set, shuffled, Wanted(), path=tmp_path / "never")


def drop_negative(samples: list[Any]) -> Any:
    kept = [sample for sample in samples if sample[0][0] > 0]
    return torch.stack([s[0] for s in kept]) if kept else torch.zeros(0, 10), torch.tensor([s[1] for s in kept])


def test_rows_that_the_collate_function_drops_are_not_predicted(cluster: Cluster) -> None:
    replica_set = start(cluster, None, None, None)
    loader = DataLoader(dataset(), 3, collate_fn=drop_negative)
    outputs = plain_outputs(replica_set, [batch for batch in loader if len(batch[0])])
    assert 0 < len(outputs) < 101
    found = predict(cluster, replica_set, loader, Wanted())
    assert_right(found, outputs)
    assert (found["sample_ids"] == -1).any()
    assert validate(cluster, replica_set, loader)["samples"] == len(outputs)


def test_an_empty_loader_is_an_error_and_not_a_hang(cluster: Cluster) -> None:
    replica_set = start(cluster, None)
    for loader in (DataLoader(TensorDataset(torch.zeros(0, 10)), 4), [], iter([])):
        with pytest.raises(ConfigError, match="no batches"):
            predict(cluster, replica_set, loader, Wanted())
        with pytest.raises(ConfigError, match="no batches"):
            validate(cluster, replica_set, loader)


# ------------------------------------------------------------------------------------------------------------- errors


class Cursed(torch.nn.Module):
    """Raises for rows whose first value is above 90."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.Linear(10, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x[:, 0] > 90).any()):
            raise ValueError("this row is cursed")
        return self.last(x)


def sum_step(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["a"] + batch["b"])


def test_an_error_of_the_model_names_worker_batch_and_samples_and_hurts_nobody(cluster: Cluster) -> None:
    start(cluster, None, None)
    cursed = spec(model=Factory(f"{HERE}:Cursed"))
    replica_set = WholeReplicaSet("run-1", cursed, (), replica(cursed))
    data = dataset()
    for row in (13, 20, 27, 33):  # batches 3 and on fail on both workers: only the first of them is told
        data.tensors[0][row, 0] = 99
    for call in (lambda: predict(cluster, replica_set, DataLoader(data, 4), Wanted()),
                 lambda: validate(cluster, replica_set, DataLoader(data, 4))):  # fmt: skip
        with pytest.raises(
            RemoteError, match=r"worker w[01] raised ValueError: this row is cursed \(while \w+ batch \d of"
        ) as caught:
            call()
        assert any(f"(samples {first} to {first + 3})" in str(caught.value) for first in (12, 20, 24, 32))
    assert predict(cluster, replica_set, DataLoader(dataset(), 4), Wanted())["total_samples"] == 101


class Unlucky(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 17:
            raise RuntimeError("no such picture")
        return torch.zeros(10, dtype=torch.float64)


def test_errors_of_data_and_options_reach_the_caller(cluster: Cluster) -> None:
    replica_set = start(cluster, None, None)
    with pytest.raises(Exception, match=r"sample 17 .*no such picture"):
        predict(cluster, replica_set, DataLoader(Unlucky(), 8), Wanted())
    x = torch.zeros(6, 10, dtype=torch.float64)
    with pytest.raises(ConfigError, match=r"worker w\d while predicting batch 0.*a batch is a dict.*predict_step"):
        predict(cluster, replica_set, [{"a": x, "b": x}], Wanted())
    step = Wanted(step=Factory(f"{HERE}:sum_step"))
    assert_right(predict(cluster, replica_set, [{"a": x, "b": x}], step), plain_outputs(replica_set, [x]))
    with pytest.raises(ConfigError, match=r"top_k is 5 and the model has 4 classes"):
        predict(cluster, replica_set, [x], Wanted(5))
    with pytest.raises(ConfigError, match=r"resume=True goes on with what a folder holds"):
        predict(cluster, replica_set, [x], Wanted(), resume=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("psutil.virtual_memory", lambda: type("M", (), {"available": 1000}))
        with pytest.raises(
            ConfigError, match=r"take 101 rows x \(.*probabilities 4 x 4.*1.0 kB are free in memory.*path="
        ):
            predict(cluster, replica_set, DataLoader(dataset(), 8), wanted_of(1, None, True, False))
    assert predict(cluster, replica_set, [x], Wanted())["total_samples"] == 6


def test_an_interrupt_ends_the_pass_and_the_next_one_works(cluster: Cluster) -> None:
    replica_set = start(cluster, None, None)
    jobs: list[Job] = []
    attach = ReplicaSet.attach

    def remember(self: ReplicaSet, job: Job) -> None:
        jobs.append(job)
        attach(self, job)

    def stop(done: int, total: int | None) -> None:
        from guava_nb.cluster.job_events import Interrupted

        jobs[-1].post(Interrupted())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReplicaSet, "attach", remember)
        with pytest.raises(KeyboardInterrupt):
            predict(cluster, replica_set, DataLoader(dataset(), 1), Wanted(), progress=stop)
    loader = DataLoader(dataset(), 9)
    assert_right(predict(cluster, replica_set, loader, Wanted()), plain_outputs(replica_set, loader))


def test_progress_counts_samples(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("guava_nb.evaluation.passes.PROGRESS_S", 0.0)
    replica_set = start(cluster, None, None)
    seen: list[tuple[int, int | None]] = []
    predict(cluster, replica_set, DataLoader(dataset(), 9), Wanted(), progress=lambda *now: seen.append(now))
    assert seen == sorted(seen) and seen[-1] == (101, 101)  # type: ignore[type-var]


class Wide(torch.nn.Linear):
    """A thousand classes."""

    def __init__(self) -> None:
        super().__init__(10, 1000)


@pytest.mark.parametrize(
    ("wanted", "row_bytes"),
    [
        (Wanted(), 2 + 4),
        (Wanted(3), 3 * (2 + 4)),
        (Wanted(3, 1.0), 1),  # no row reaches it: a mask is all that comes
        (Wanted(full=True), 2 + 4 + 4000),
        (Wanted(raw=True), 8000),
    ],
)
def test_only_what_was_asked_for_comes_back_over_the_wire(cluster: Cluster, wanted: Wanted, row_bytes: int) -> None:
    came: list[int] = []

    def note(worker: DirectWorker, message: Message) -> None:
        if isinstance(message, Predicted):
            came.append(sum(tensor.nbytes for tensor in message.columns.tensors))

    start(cluster, note)
    wide = spec(model=Factory(f"{HERE}:Wide"))
    predict(cluster, WholeReplicaSet("run-1", wide, (), replica(wide)), DataLoader(dataset(48), 16), wanted)
    assert came == [16 * row_bytes] * 3
