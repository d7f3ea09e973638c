"""Rows of a prediction in memory and on disk: in order, of one shape, and gone on with after any cut."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from guava_nb.data.loader_feed import LoaderFeed
from guava_nb.errors import ConfigError
from guava_nb.evaluation.predictions import Prediction, Predictions, in_id_order, least_row_bytes, wanted_of
from guava_nb.evaluation.result_files import HEADER_BYTES, RECORD, DiskResults, MemoryResults, npy_header
from guava_nb.protocol.messages import Wanted

ASKED = {"model": "abc", "number of samples": None}


def rows(first: int, count: int) -> dict[str, np.ndarray]:
    ids = np.arange(first, first + count, dtype=np.int64)
    return {"sample_ids": ids, "confidences": (ids[:, None] * [1, 2]).astype(np.float32)}


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.one_of(st.none(), st.integers(0, 30)))
def test_memory_holds_all_rows_whatever_was_expected(sizes: list[int], expected: int | None) -> None:
    results, first = MemoryResults(expected), 0
    for batch, size in enumerate(sizes):
        results.append(rows(first, size), batch + 1, None)
        first += size
    for name, array in results.arrays().items():
        assert np.array_equal(array, rows(0, first)[name]) and array.dtype == rows(0, 1)[name].dtype


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    cut=st.integers(0, 5),
    junk=st.integers(0, 40),
    data=st.data(),
)
def test_a_folder_is_gone_on_with_from_the_last_record(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], cut: int, junk: int, data: st.DataObject
) -> None:
    """Killed after any batch, with any bytes behind what the record counts, and any header."""
    folder, cut = tmp_path_factory.mktemp("results"), min(cut, len(sizes) - 1)
    first = DiskResults(folder, ASKED, False)
    done = 0
    for batch, size in enumerate(sizes[:cut]):
        first.append(rows(done, size), batch + 1, done + size - 1)
        first._flush()
        done += size
    for file in first._files.values():  # as a dying process leaves them
        file.flush()
    if cut:
        for path in folder.glob("*.npy"):
            with path.open("ab") as file:
                file.write(b"x" * junk)
            if data.draw(st.booleans()):
                with path.open("r+b") as file:
                    file.write(npy_header(999, np.dtype("<i8"), ()))
    for file in first._files.values():
        file.close()
    again = DiskResults(folder, ASKED, True)
    assert (again.rows, again.batches, again.complete) == (done, cut, False)
    for batch, size in enumerate(sizes[cut:], cut):
        again.append(rows(done, size), batch + 1, done + size - 1)
        done += size
    again.close(True)
    for name, array in again.arrays().items():
        assert isinstance(array, np.memmap) and np.array_equal(array, rows(0, done)[name])
    assert DiskResults(folder, ASKED, True).complete


def test_a_cut_off_folder_can_be_read_as_it_is(tmp_path: Path) -> None:
    results = DiskResults(tmp_path, ASKED, False)
    results.append(rows(0, 3), 1, 2)
    found = np.load(tmp_path / "confidences.npy", mmap_mode="r")
    assert np.array_equal(found, rows(0, 3)["confidences"])
    results.close(False)


def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    results = DiskResults(tmp_path, ASKED, False)
    results.append(rows(0, 3), 1, 2)
    results.close(False)
    with pytest.raises(ConfigError, match=r"holds 3 rows of an earlier prediction: resume=True"):
        DiskResults(tmp_path, ASKED, False)
    with pytest.raises(ConfigError, match=r"number of samples was None and is 7 now"):
        DiskResults(tmp_path, {**ASKED, "number of samples": 7}, True)
    with pytest.raises(ConfigError, match=r"confidences: a row of batch 1 of the loader has shape \(3,\)"):
        DiskResults(tmp_path, ASKED, True).append({**rows(3, 2), "confidences": np.zeros((2, 3), np.float32)}, 2, None)
    with (tmp_path / "confidences.npy").open("r+b") as file:
        file.truncate(HEADER_BYTES + 5)
    with pytest.raises(ConfigError, match=r"confidences.npy is shorter than progress.json says"):
        DiskResults(tmp_path, ASKED, True)
    (tmp_path / RECORD).write_text("{")
    with pytest.raises(ConfigError, match=r"progress.json cannot be read"):
        DiskResults(tmp_path, ASKED, True)


def test_the_record_says_what_it_counts(tmp_path: Path) -> None:
    results = DiskResults(tmp_path, ASKED, True)  # nothing to go on with: a first call may say resume as well
    results.append(rows(0, 3), 1, 2)
    results.close(False)
    record = json.loads((tmp_path / RECORD).read_text())
    assert (record["rows"], record["batches"], record["last_id"], record["asked"]) == (3, 1, 2, ASKED)


@pytest.mark.parametrize("sizes", [[10] * 5, [5] * 10, [20, 20, 10], [50]])
def test_batches_of_other_sizes_are_not_gone_on_with(tmp_path: Path, sizes: list[int]) -> None:
    """Neither where rows would be lost or doubled, nor where no batch is left."""

    def walk(sizes: list[int]) -> None:
        results = DiskResults(tmp_path, ASKED, True)
        feed = LoaderFeed([(torch.zeros(size, 1), None) for size in sizes])
        question = Prediction(Wanted(raw=True), results, None, lambda: feed.skipped_samples)
        try:
            for batch in feed.epoch(results.batches):
                question.check_skipped()
                results.append(rows(batch.sample_ids[0], batch.rows), batch.index + 1, batch.sample_ids[-1])
            question.check_skipped()
        finally:
            results.close(False)

    walk([8] * 3)
    skipped = sum(sizes[:3])
    with pytest.raises(
        ConfigError, match=rf"holds the first 24 samples .* this loader have {skipped}: .*the same sizes only"
    ):
        walk(sizes)
    walk([8] * 3)
    walk([8] * 6 + [2])
    assert np.load(tmp_path / "sample_ids.npy").tolist() == list(range(50))


@pytest.mark.parametrize(("one", "other"), [("outputs.a/b", "outputs.a_b"), ("outputs.A", "outputs.a")])
def test_two_outputs_are_not_written_to_one_file(tmp_path: Path, one: str, other: str) -> None:
    arrays = {one: np.zeros((2, 1)), other: np.ones((2, 1))}
    with pytest.raises(ConfigError, match=rf"'{one}' and '{other}' would both be written to .*{other}.npy"):
        DiskResults(tmp_path, ASKED, False).append(arrays, 1, 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("below", ["file", "file/folder"])
def test_a_path_that_can_be_no_folder_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=rf"needs a folder that can be written to, and .*{below} cannot be one"):
        DiskResults(tmp_path / below, ASKED, False)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_full_disk_is_told_with_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = DiskResults(tmp_path, ASKED, False)
    results.append(rows(0, 3), 1, 2)  # the first rows are recorded at once
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", lambda number: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(
            ConfigError, match=r"cannot take more results \(No space.*\); 3 rows in it are kept: .*resume=True"
        ):
            results.append(rows(3, 2), 2, 4)
            results.close(False)
    assert DiskResults(tmp_path, ASKED, True).rows == 3


@given(st.integers(0, 10**18), st.lists(st.integers(0, 10**6), max_size=6))
def test_a_header_is_always_of_the_same_length(count: int, shape: list[int]) -> None:
    header = npy_header(count, np.dtype(np.float32), tuple(shape))
    assert len(header) == HEADER_BYTES and header.endswith(b"\n")


# -------------------------------------------------------------------------------------------------- order, estimates


@given(st.lists(st.integers(0, 30), min_size=1, max_size=30))
def test_rows_stand_in_the_order_of_their_ids_and_equal_ids_as_they_came(ids: list[int]) -> None:
    arrays = {"sample_ids": np.array(ids), "predictions": np.arange(len(ids))}
    found = in_id_order(arrays)
    pairs = list(zip(found["sample_ids"].tolist(), found["predictions"].tolist(), strict=True))
    assert pairs == sorted(zip(ids, range(len(ids)), strict=True))


def test_rows_without_ids_stay_as_they_came() -> None:
    arrays = {"sample_ids": np.array([5, -1, 3]), "predictions": np.array([0, 1, 2])}
    assert in_id_order(arrays)["predictions"].tolist() == [0, 1, 2]


def test_what_cannot_fit_is_refused_with_the_arithmetic_before_anything_is_asked(tmp_path: Path) -> None:
    rows_of_all = 10**15
    assert least_row_bytes(Wanted(3, 0.5)) == 8 + 36 + 1 and least_row_bytes(Wanted(full=True)) is None
    with pytest.raises(ConfigError, match=r"1,000,000,000,000,000 rows x 20 bytes = 20.0 PB, and .*give path="):
        Prediction(Wanted(), MemoryResults(None), rows_of_all)
    with pytest.raises(ConfigError, match=r"B are free in the disk of"):
        Prediction(Wanted(), DiskResults(tmp_path, ASKED, False), rows_of_all)
    assert Prediction(Wanted(), MemoryResults(None), None).estimated_bytes is None
    assert Prediction(Wanted(), MemoryResults(None), 10).estimated_bytes == 200


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ((0, None, False, False), "top_k is 0"),
        ((True, None, False, False), "top_k is True"),
        ((1, 80, False, False), "confidence_threshold is 80"),
        ((2, None, False, True), "raw=True gives the outputs as they are"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options: tuple[int, float, bool, bool], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        wanted_of(*options)


def test_results_are_a_mapping_that_says_what_it_holds() -> None:
    found = Predictions({"predictions": np.zeros(4, np.int64), "sample_ids": np.arange(4)}, 80)
    assert (
        found["total_samples"] == 4 and found["estimated_memory_mb"] == 80e-6 and found["measured_memory_mb"] == 64e-6
    )
    assert set(found) == {"predictions", "sample_ids", "total_samples", "estimated_memory_mb", "measured_memory_mb"}
    assert repr(found) == "Predictions(4 samples: predictions (4,) int64, sample_ids (4,) int64; 64 B in memory)"
    with pytest.raises(KeyError, match="'kept' was not asked for; there are: predictions"):
        found["kept"]
    one = Predictions({"outputs": np.zeros((4, 2))}, None)["outputs"]
    two = Predictions({"outputs.a": np.zeros((4, 2)), "outputs.b": np.zeros(4)}, None)["outputs"]
    assert one.shape == (4, 2) and list(two) == ["a", "b"]
