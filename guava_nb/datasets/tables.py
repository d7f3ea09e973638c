"""CSV files: named columns, checked numbers, and every bad row told by its line.

Read once, row by row, into one block of numbers: memory for `memory_mb`, from there on a temporary file that is mapped. The
csv module of Python reads 100,000 rows in under a second; faster readers were left out because they do not say in which
line a cell stands.
"""

from __future__ import annotations

import codecs
import csv
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from guava_nb.datasets.columns import BadCell, Block, Columns, RowParser, choose_columns, target_kind
from guava_nb.errors import ConfigError

__all__ = ["BadRow", "CsvDataset"]

_SHOWN = 10
#: Bad rows beyond this many are counted and not kept.
_KEPT = 1000
#: Rows that decide what a target column holds.
_LOOKED_AT = 100
#: Characters of one cell; more are taken for a quotation mark that is not closed.
_CELL_CHARACTERS = 1 << 26


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that was not read.

    Attributes:
        line: of the file, from 1; a row over several lines is named by its first.
        lines: that the row takes; more than one when a quoted cell goes on over the end of a line.
        column: "" when the row as a whole is wrong.
        text: what stands there.
        reason: why that is no value.
    """

    line: int
    column: str
    text: str
    reason: str
    lines: int = 1

    def __str__(self) -> str:
        last = self.line + self.lines - 1
        where = f"line {self.line}" if self.lines == 1 else f"lines {self.line} to {last} ({self.lines} lines)"
        where += f", column {self.column!r}" if self.column else ""
        text = self.text if len(self.text) <= 40 else self.text[:37] + "..."
        return f"{where}: {text!r} {self.reason}"


class CsvDataset(Dataset[Any]):
    """Rows of a CSV file. A sample is `(features, target)`, or the features alone without a target.

    Args:
        path: the file, with a header line.
        features: names of the input columns, in the order wanted; None takes all but the target.
        target: name of the column to learn; None has none.
        delimiter: between cells, one character; None is a tab for .tsv and a comma for all others.
        dtype: of the features, all of which are numbers.
        dtypes: other types by column, to which each cell is checked ("uint8": 300 is a bad cell); features of several types
            become the smallest type that holds them all. For the target also "class": each text is a class.
        missing: value of an empty cell; None makes it a bad row.
        on_bad_rows: "error" reads to the end and raises with all of them, "skip" leaves them out and warns with their lines.
            A quotation mark that swallows further lines is an error in any case: good rows would go with it.
        decimal: the mark before the fraction of a number, "." or ",".
        encoding: of the file; a byte-order mark is left out.
        memory_mb: of numbers kept in memory; more go to a temporary file.

    Attributes:
        features, target: the columns' names.
        classes: texts of a class target by id, in alphabetical order; () for a numeric target. Without `dtypes` a target is
            numeric when most of its first cells are: whole ones are int64, others have `dtype`.
        bad_rows: the first thousand rows that were skipped; `num_bad_rows` counts all.

    Raises:
        ConfigError: the file, the header or a row is wrong; the message says where and what is there.
    """

    def __init__(
        self,
        path: str | Path,
        features: Sequence[str] | None = None,
        target: str | None = None,
        *,
        delimiter: str | None = None,
        dtype: str = "float32",
        dtypes: Mapping[str, str] | None = None,
        missing: float | None = None,
        on_bad_rows: str = "error",
        decimal: str = ".",
        encoding: str = "utf-8-sig",
        memory_mb: int = 1024,
    ) -> None:
        if on_bad_rows not in ("error", "skip"):
            raise ConfigError(f"on_bad_rows is {on_bad_rows!r}; it is one of: error, skip")
        if decimal not in (".", ","):
            raise ConfigError(f'decimal is {decimal!r}; it is "." or ","')
        self._decimal = decimal
        self._path = Path(path).expanduser()
        self._delimiter = delimiter or ("\t" if self._path.suffix.lower() == ".tsv" else ",")
        self._encoding, self._missing, self._skip = encoding, missing, on_bad_rows == "skip"
        self.bad_rows: list[BadRow] = []
        self.num_bad_rows = 0
        _check_delimiter(self._delimiter)
        with _long_cells():
            header, rows = self._open()
            columns = choose_columns(self._path, header, features, target, dtype, dtypes or {}, self._delimiter)
            self.features, self.target = columns.features, columns.target
            self._read(columns, rows, memory_mb << 20)
        self._tell_bad_rows()

    # ------------------------------------------------------------------------------------------------------- samples

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: int) -> Any:
        """Return sample `index`; negative ones count from the end.

        Raises:
            IndexError: there is no such row.
        """
        features = torch.from_numpy(self._values[index])
        return features if self._targets is None else (features, torch.from_numpy(self._targets[index, ...]))

    def __repr__(self) -> str:
        text = f"CsvDataset({self._path.name}: {len(self)} rows, {len(self.features)} features {self._values.dtype}"
        if self.classes:
            named = ", ".join(f"{name!r}={number}" for number, name in enumerate(self.classes[:_SHOWN]))
            text += f", target {self.target!r} of {len(self.classes)} classes: {named}"
            text += ", ..." if len(self.classes) > _SHOWN else ""
        elif self._targets is not None:
            text += f", target {self.target!r} {self._targets.dtype}"
        return text + (f"; {self.num_bad_rows} bad rows skipped)" if self.num_bad_rows else ")")

    # ------------------------------------------------------------------------------------------------------- reading

    def _open(self) -> tuple[list[str], Iterator[tuple[int, int, list[str]]]]:
        rows = self._rows()
        first = next(rows, None)
        if self.bad_rows:
            raise ConfigError(f"{self._path}: the header cannot be read: {self.bad_rows[0]}")
        if first is None:
            raise ConfigError(f"{self._path} is empty: its first line must name the columns")
        return [name.strip() for name in first[2]], rows

    def _rows(self) -> Iterator[tuple[int, int, list[str]]]:
        """Yield (first line, number of lines, cells) of every row that is not blank; a row that cannot be split is a bad row."""
        line = 1
        try:
            with self._path.open(encoding=self._encoding, newline="") as file:
                unmarked = itertools.chain([file.readline().removeprefix("\ufeff")], file)
                reader = csv.reader(unmarked, delimiter=self._delimiter, strict=True)
                while True:
                    try:
                        cells = next(reader)
                    except StopIteration:
                        return
                    except csv.Error as error:
                        reason = f"cannot be split into cells: {_quoting(error)}"
                        self._bad(BadRow(line, "", "the row", reason, reader.line_num - line + 1), swallows=True)
                        cells = []
                    if cells:
                        yield line, reader.line_num - line + 1, cells
                    line = reader.line_num + 1
        except UnicodeDecodeError as error:
            marked = _marked_encoding(self._path)
            if marked:
                raise ConfigError(
                    f'{self._path} begins with the byte order mark of {marked}: say encoding="{marked}"'
                ) from error
            raise ConfigError(
                f"{self._path} is not written in {self._encoding}: after line {line - 1} stands the byte "
                f'{error.object[error.start]:#04x}; say encoding="latin-1", or which it is'
            ) from error
        except UnicodeError as error:  # utf-16 without its mark
            raise ConfigError(f"{self._path} is not written in {self._encoding}: {error}") from error
        except (OSError, LookupError) as error:
            raise ConfigError(f"{self._path} cannot be read: {error}") from error

    def _read(self, columns: Columns, rows: Iterator[tuple[int, int, list[str]]], memory_bytes: int) -> None:
        ahead = list(itertools.islice(rows, _LOOKED_AT))
        kind = target_kind(columns, [cells for *_, cells in ahead], self._decimal)
        parser = RowParser(columns, kind, self._missing, self._decimal)
        values = Block(columns.dtype, len(columns.features), memory_bytes)
        targets = None if kind is None else Block(np.dtype("int64" if kind == "class" else kind), 0, memory_bytes)
        for line, lines, cells in itertools.chain(ahead, rows):
            if len(cells) != columns.width:
                reason = f"has {len(cells)} cells, the header has {columns.width}"
                self._bad(BadRow(line, "", self._delimiter.join(cells), reason, lines), swallows=True)
                continue
            try:
                numbers, goal = parser.parse(cells)
            except BadCell as bad:
                text = cells[bad.at]
                swallows = "\n" in text or "\r" in text
                self._bad(BadRow(line, columns.header[bad.at], text, bad.reason, lines), swallows)
                continue
            values.add(numbers)
            if targets is not None:
                targets.add([goal])
        self._values, self._targets = values.finish(), None if targets is None else targets.finish()
        self.classes = parser.finish_classes(self._targets)

    # ------------------------------------------------------------------------------------------------------ bad rows

    def _bad(self, row: BadRow, swallows: bool) -> None:
        """Count a bad row. One that swallows lines because of a quotation mark is not left out: these may be good rows."""
        if self._skip and swallows and row.lines > 1:
            raise ConfigError(
                f"{self._path}: {row}. A quotation mark joins these {row.lines} lines to one bad row, and "
                f'on_bad_rows="skip" would lose them all: close or remove the mark (") in line {row.line}'
            )
        self.num_bad_rows += 1
        if len(self.bad_rows) < _KEPT:
            self.bad_rows.append(row)

    def _tell_bad_rows(self) -> None:
        if self.num_bad_rows:
            shown = "\n".join(f"  {row}" for row in self.bad_rows[:_SHOWN])
            more = f"\n  and {self.num_bad_rows - _SHOWN} more" if self.num_bad_rows > _SHOWN else ""
            total = self.num_bad_rows + len(self)
            text = f"{self.num_bad_rows} of {total} rows of {self._path} cannot be read"
            if not self._skip:
                raise ConfigError(f"{text}; {self._advice()}:\n{shown}{more}")
            warnings.warn(f"{text} and were left out:\n{shown}{more}", stacklevel=3)
        if not len(self):
            raise ConfigError(f"{self._path} has no row that can be read below its header")

    def _advice(self) -> str:
        """What helps against the bad rows: leaving all rows out would leave nothing."""
        columns = {row.column for row in self.bad_rows}
        if len(self) or len(columns) > 1 or not all(columns):
            return 'mend them, or leave them out with on_bad_rows="skip"'
        (name,) = columns
        if any("comma" in row.reason for row in self.bad_rows):
            return f"column {name!r} is of another spelling in all of them"
        return (
            f"column {name!r} has no number in any of them: name the columns wanted in features=, or write a number for each "
            "text first"
        )


def _check_delimiter(delimiter: Any) -> None:
    if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '\r\n"':
        raise ConfigError(
            f"delimiter is {delimiter!r}; give the one character that stands between cells, like ',', ';' or '\\t' "
            "(a file with a longer one: replace it by one of these first)"
        )


@contextmanager
def _long_cells() -> Iterator[None]:
    """Allow cells beyond the 131,072 characters that the csv module takes; its limit is one for the whole process."""
    before = csv.field_size_limit(_CELL_CHARACTERS)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _quoting(error: csv.Error) -> str:
    text = str(error)
    if "unexpected end" in text:
        return 'a quotation mark (") is opened and not closed'
    if "field larger" in text:
        return f'a cell is longer than {_CELL_CHARACTERS} characters, or a quotation mark (") is opened and not closed'
    return text


def _marked_encoding(path: Path) -> str:
    """Return the encoding that a file's byte order mark tells; "" where it has none."""
    with path.open("rb") as file:
        start = file.read(4)
    marks = ((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"), (codecs.BOM_UTF16_LE, "utf-16"),
             (codecs.BOM_UTF16_BE, "utf-16"))  # fmt: skip
    return next((name for mark, name in marks if start.startswith(mark)), "")
