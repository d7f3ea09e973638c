"""CSV files: what is read is what stands there, and what cannot be read is told by its line."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from guava_nb.datasets.columns import choose_columns
from guava_nb.datasets.open_dataset import CsvDataset
from guava_nb.errors import ConfigError


@pytest.fixture()
def write(tmp_path: Path):
    def made(text: str | bytes, name: str = "t.csv") -> Path:
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return made


NAMES = st.lists(st.text("abcdefg ä\"',;\n", min_size=1).filter(str.strip), min_size=1, max_size=4)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    rows=st.lists(st.tuples(FLOATS, st.integers(-(2**63), 2**63 - 1), st.sampled_from("xyz")), min_size=1, max_size=30)
)
def test_numbers_and_notes_with_quoted_newlines_come_back_exactly(tmp_path: Path, rows) -> None:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["f", "note", "k"])
    for f, k, note in rows:
        writer.writerow([repr(f), f'{note}, "quoted"\nover two lines', k])
    (tmp_path / "p.csv").write_bytes("\ufeff".encode() + text.getvalue().encode())
    dataset = CsvDataset(tmp_path / "p.csv", features=["f"], target="k")
    assert [(float(x), int(y)) for x, y in dataset] == [(f, k) for f, k, _ in rows]
    notes = CsvDataset(tmp_path / "p.csv", features="f", target="note")
    assert notes.classes == tuple(sorted({f'{note}, "quoted"\nover two lines' for *_, note in rows}))


def test_a_hundred_thousand_rows_with_three_bad_ones(write) -> None:
    lines = ["a,b,label"] + [f"{k},{k / 7:.5f},{'cat' if k % 3 else 'dog'}" for k in range(100_000)]
    lines[17], lines[5_000], lines[99_999] = "16,oops,cat", "4999,0.5", ",1.5,dog"
    path = write("\n".join(lines) + "\n")
    with pytest.raises(ConfigError) as told:
        CsvDataset(path, target="label")
    for words in (
        "3 of 100000 rows",
        "line 18, column 'b': 'oops' is no finite number",
        "line 5001: '4999,0.5' has 2 cells, the header has 3",
        "line 100000, column 'a': '' is a missing value",
        'on_bad_rows="skip"',
    ):
        assert words in str(told.value)
    with pytest.warns(UserWarning, match="3 of 100000 rows .*were left out"):
        dataset = CsvDataset(path, target="label", on_bad_rows="skip")
    assert (len(dataset), dataset.num_bad_rows, [bad.line for bad in dataset.bad_rows]) == (
        99_997,
        3,
        [18, 5001, 100_000],
    )
    assert dataset.classes == ("cat", "dog") and "'cat'=0, 'dog'=1; 3 bad rows skipped" in repr(dataset)
    features, target = dataset[99_996]
    assert features.tolist() == [99_999.0, np.float32(round(99_999 / 7, 5))] and target.item() == 1


def test_more_than_fits_the_memory_goes_to_a_file_and_is_the_same(write) -> None:
    path = write("a,y\n" + "".join(f"{k},{k % 5}\n" for k in range(300_000)))
    small, large = CsvDataset(path, target="y", memory_mb=1), CsvDataset(path, target="y")
    assert isinstance(small._values, np.memmap) and not isinstance(large._values, np.memmap)
    assert np.array_equal(small._values, large._values) and np.array_equal(small._targets, large._targets)
    assert small[-1][0].item() == 299_999


def test_types_are_checked_and_kept(write) -> None:
    path = write("age,size,y\n7,1.5,0.25\n300,2.5,1\n8,2,2\n")
    with pytest.raises(ConfigError, match=r"line 3, column 'age': '300' does not fit uint8 \(0 to 255\)"):
        CsvDataset(path, target="y", dtypes={"age": "uint8"})
    dataset = CsvDataset(path, ["age"], "y", dtypes={"age": "int16"})
    assert dataset[1][0].dtype == torch.int16 and dataset[1][1].dtype == torch.float32
    assert CsvDataset(path, dtype="float64")[0].dtype == torch.float64
    assert CsvDataset(path, ["age"], "size", dtypes={"size": "class"}).classes == ("1.5", "2", "2.5")
    whole = CsvDataset(write("x,y\n1,0\n2,3\n"), target="y")
    assert whole[1][1].dtype == torch.int64 and whole.classes == ()


def test_a_bad_cell_does_not_turn_numbers_into_classes_nor_add_a_class(write) -> None:
    path = write("x,y\n1,0\n2,n/a\n3,1\n4,2.5\n")
    with pytest.raises(ConfigError, match=r"line 3, column 'y': 'n/a' is a missing value"):
        CsvDataset(path, target="y")
    path = write("x,y\n1,cat\noops,unicorn\n3,dog\n")
    with pytest.warns(UserWarning):
        assert CsvDataset(path, target="y", on_bad_rows="skip").classes == ("cat", "dog")


def test_missing_values(write) -> None:
    path = write("x,y\n1,2\n,3\nNaN,4\n")
    assert CsvDataset(path, ["x"], missing=-1.0)[1].tolist() == [-1.0]
    assert torch.isnan(CsvDataset(path, ["x"], missing=float("nan"))[2]).all()
    with pytest.raises(ConfigError, match="missing=0.5 does not fit int64"):
        CsvDataset(path, ["x"], dtype="int64", missing=0.5)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ('"3,4\n' + "5,6\n" * 1000, r"lines 3 to 1003 \(1001 lines\): .*opened and not closed"),
        ('"3,4\n' + "5,6\n" * 1000 + '7,"8"\n9,9\n', r"lines 3 to 1004 \(1002 lines\): .*cannot be split"),
        ('"3,4\n' + "5,6\n" * 1000 + '7",8\n9,9\n', r"lines 3 to 1004 \(1002 lines\), column 'a': "),
        ('"3,4\n5,6\n7"\n9,9\n', r"lines 3 to 5 \(3 lines\): .*has 1 cells"),
    ],
)
def test_a_quotation_mark_that_swallows_rows_is_never_skipped(write, rows, words) -> None:
    path = write("a,b\n1,2\n" + rows)
    with pytest.raises(ConfigError, match=words):
        CsvDataset(path)
    with pytest.raises(ConfigError, match=words + r".* in line 3$"):
        CsvDataset(path, on_bad_rows="skip")


def test_a_row_with_a_note_over_two_lines_and_another_bad_cell_is_skipped(write) -> None:
    path = write('a,note\n1,x\noops,"two\nlines"\n3,"y\nz"\n')
    with pytest.warns(UserWarning, match=r"lines 3 to 4 \(2 lines\), column 'a': 'oops'"):
        dataset = CsvDataset(path, ["a"], on_bad_rows="skip")
    assert [sample.item() for sample in dataset] == [1.0, 3.0]


def test_a_long_cell_is_read_and_the_limit_of_others_stays(write) -> None:
    path = write('a,text\n1,"' + "x" * 200_000 + '"\n2,y\n')
    before = csv.field_size_limit()
    assert len(CsvDataset(path, ["a"])) == 2
    assert csv.field_size_limit() == before


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16-le"])
def test_a_byte_order_mark_is_left_out_in_every_encoding(write, encoding) -> None:
    path = write('\ufeff"a",b\n1,2\n'.encode(encoding))
    assert CsvDataset(path, ["a"], encoding=encoding)[0].tolist() == [1.0]


@pytest.mark.parametrize("delimiter", ["||", "\n", '"', 3])
def test_a_delimiter_is_one_character(write, delimiter) -> None:
    with pytest.raises(ConfigError, match="delimiter is .*give the one character"):
        CsvDataset(write("a||b\n1||2\n"), delimiter=delimiter)


@pytest.mark.parametrize(("missing", "dtype"), [(300, "uint8"), (-1, "uint8"), (1e300, "float32"), (2**70, "int64")])
def test_a_number_for_missing_values_fits_the_type(write, missing, dtype) -> None:
    with pytest.raises(
        ConfigError, match=rf"line 2, column 'b': .*missing={re.escape(str(missing))} does not fit {dtype}"
    ):
        CsvDataset(write("a,b\n1,\n"), missing=missing, dtype=dtype)


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("", {}, "is empty"),
        ('"a,b\n1,2\n', {}, r"header cannot be read: lines 1 to 2 "),
        ("a,b\n", {}, "no row that can be read"),
        ("a,b,a\n1,2,3\n", {}, "names 'a' more than once"),
        ("age,size\n1,2\n", {"features": ["aeg"]}, r"no column 'aeg' \(did you mean 'age'\?\); there are: age, size"),
        ("a;b\n1;2\n", {}, "say delimiter=';'"),
        ("a,b\n1,2\n", {"target": "a", "features": ["a"]}, "both a feature and the target"),
        ("a\n1\n", {"target": "a"}, "nothing to learn from"),
        ("a,b\n1,2\n", {"dtypes": {"a": "str"}}, "'str' is no type of numbers"),
        ("a,b\n1,2\n", {"on_bad_rows": "ignore"}, "one of: error, skip"),
        ('a,b\n1,2\n3,"4\n5,6\n', {}, r"lines 3 to 4 .*opened and not closed"),
        ('a,b\n1,2\n"3"x,4\n', {}, r"line 3: .*cannot be split"),
        ("a,b\n1_000,2\n", {}, "line 2, column 'a': '1_000' is no finite number"),
        ("a,b\ninf,2\n", {}, "'inf' is no finite number"),
        (b"a,b\n1,\xe9\n", {}, "0xe9; say encoding="),
        ("a,b\n1,2\n".encode("utf-16"), {}, 'byte order mark of utf-16: say encoding="utf-16"'),
        ("a,b\n1,2\n".encode("utf-32"), {}, 'byte order mark of utf-32: say encoding="utf-32"'),
        ("a,b\n1,2\n", {"encoding": "utf-16"}, "is not written in utf-16"),
        (
            "a;b\n1,5;2\n2,5;3\n",
            {"delimiter": ";"},
            "'1,5' has a comma: if it stands before the fraction, say decimal=",
        ),
        ("a,b\nx,2\ny,3\n", {}, "column 'a' has no number in any of them: name the columns wanted in features="),
        ("a,b\nx,2\n4,3\n", {}, "mend them, or leave them out"),
        ("a,b\n1,2\n", {"decimal": ";"}, "decimal is ';'"),
        ("a;b\n1.5;2\n", {"delimiter": ";", "decimal": ","}, "'1.5' is no finite number"),
        ('a,b\n"x\ny",1\n\noops,2\n', {"features": ["a"]}, r"lines 2 to 3 .*\n.*line 5, "),
    ],
)
def test_what_is_wrong_is_told(write, text, options, words) -> None:
    with pytest.raises(ConfigError, match=words):
        CsvDataset(write(text), **options)


def test_decimal_commas_and_utf_16(write) -> None:
    table = CsvDataset(
        write("a;b;y\n1,5;2;0,25\n-2,5e1;3;1\n".encode("utf-16")),
        target="y",
        delimiter=";",
        decimal=",",
        encoding="utf-16",
    )
    features, target = table[1]
    assert features.tolist() == [-25.0, 3.0] and target.item() == 1.0
    assert table[0][1].item() == 0.25


class _ReadOnce(list[str]):
    """A header in which a name is not looked for column by column: sixteen thousand columns took seven seconds."""

    def index(self, *args: Any) -> int:
        raise AssertionError("looked for from the beginning")

    count = __contains__ = index  # type: ignore[assignment]


def test_a_wide_header_is_read_once() -> None:
    header = _ReadOnce([f"c{number}" for number in range(50)])
    found = choose_columns(Path("wide.csv"), header, None, "c7", "float32", {"c3": "int64"}, ",")
    assert found.target_at == 7 and found.at == (*range(7), *range(8, 50)) and found.types[3] == "int64"
