"""Arrays as data sets: nothing copied that need not be, no dtype changed, every mistake named."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch.utils.data import DataLoader, TensorDataset

from guava_nb.datasets.open_dataset import ArrayDataset, open_dataset
from guava_nb.errors import ConfigError

DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "float16", "float32", "float64", "complex64"]
DTYPES += [">i4", ">f8"]


@given(
    st.sampled_from(DTYPES).flatmap(
        lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=4))
    )
)
def test_every_row_arrives_as_it_is(array: np.ndarray) -> None:
    dataset = ArrayDataset(array)
    assert len(dataset) == len(array)
    for index in range(-len(array), len(array)):
        row = dataset[index]
        assert isinstance(row, torch.Tensor)
        np.testing.assert_array_equal(row.numpy(), array[index])
        assert row.numpy().dtype == array.dtype.newbyteorder("=")


def test_a_writable_array_is_not_copied_and_others_are_not_touched() -> None:
    x = np.zeros((3, 2), np.float32)
    dataset = open_dataset((x, np.arange(3)))
    x[1] = 7
    assert dataset[1][0].tolist() == [7, 7] and dataset[1][1].item() == 1
    x.flags.writeable = False
    dataset[1][0][:] = 9
    assert x[1].tolist() == [7, 7]
    assert ArrayDataset(x[::-1, ::-1])[0].tolist() == [0, 0]
    with pytest.raises(IndexError):
        dataset[3]


def test_a_file_is_mapped_read_lazily_and_mapped_again_in_another_process(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(40, dtype=np.uint8).reshape(10, 2, 2))
    np.save(tmp_path / "y.npy", np.arange(10, dtype=np.int64))
    dataset = open_dataset(tmp_path / "x.npy", targets=tmp_path / "y.npy")
    assert isinstance(dataset._arrays[0], np.memmap) and "10 rows: x.npy (2, 2) uint8, y.npy () int64" in repr(dataset)
    dataset[3][0][:] = 0  # a user's mistake stays in this process
    assert np.load(tmp_path / "x.npy")[3].any()
    packed = pickle.dumps(dataset)
    assert len(packed) < 1000
    assert pickle.loads(packed)[9][0].tolist() == [[36, 37], [38, 39]]
    loader = DataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context="fork")
    assert torch.cat([y for _, y in loader]).tolist() == list(range(10))


def test_archives(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=np.zeros((4, 2), np.uint8), labels=np.arange(4), extra=np.zeros(4))
    with pytest.raises(ConfigError, match="holds images, labels, extra: say which"):
        open_dataset(tmp_path / "a.npz")
    with pytest.raises(ConfigError, match="no array 'label'; there are: images, labels"):
        open_dataset(tmp_path / "a.npz", keys=("images", "label"))
    image, label = open_dataset(tmp_path / "a.npz", keys=("images", "labels"))[2]
    assert image.dtype == torch.uint8 and label.item() == 2


def test_what_is_no_data_set_is_refused_with_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("a,b\n1,2\n")
    (tmp_path / "broken.npy").write_bytes(b"not numpy")
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    for source, options, words in (
        (tmp_path / "trian.csv", {}, "train.csv"),
        (tmp_path / "nowhere" / "x.npy", {}, "no folder"),
        (tmp_path / "broken.npy", {}, "broken.npy cannot be read"),
        (tmp_path / "objects.npy", {}, "objects.npy cannot be read"),
        (tmp_path / "train.csv", {"targets": "b"}, "CsvDataset: .*unexpected keyword argument 'targets'"),
        ((np.zeros((3, 1)), np.zeros(2)), {}, "array 0 has 3, array 1 has 2"),
        (np.zeros((0, 3)), {}, "no rows"),
        (np.array(["cat", "dog"]), {}, "class ids"),
        (np.array(["2020-01-01"], "datetime64[s]"), {}, "datetime64"),
        (np.float32(1), {}, "no data set comes from a float32"),
        (iter([1]), {}, "no data set comes from"),
        (TensorDataset(torch.zeros(2)), {"resize": 3}, "resize= goes with files"),
    ):
        with pytest.raises(ConfigError, match=words):
            open_dataset(source, **options)


@pytest.mark.parametrize("inputs", [[[1, 2], [3, 4], [5, 6]], np.zeros((3, 2))])
def test_lists_of_inputs_and_targets_are_refused_with_advice(inputs) -> None:
    with pytest.raises(ConfigError, match=r"would be a data set of 2 samples: .*numpy\.array\(X\)"):
        open_dataset((inputs, [0, 1, 0]))
    samples = [([1, 2], 0), ([3, 4], 1)]
    assert open_dataset(samples) is samples


def test_a_masked_array_is_refused() -> None:
    masked = np.ma.masked_array(np.arange(4.0), mask=[0, 1, 0, 0])
    with pytest.raises(ConfigError, match=r"array 0 is a masked array \(1 of 4 values masked\).*filled"):
        open_dataset((masked, np.arange(4)))
