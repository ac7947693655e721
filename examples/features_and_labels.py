# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Features and labels from a user's file: a table as text, or an .npz of arrays."""

from collections import Counter
import csv
from decimal import Decimal
import io
import math
from pathlib import Path
import re
from typing import NamedTuple
import zipfile

import numpy as np

#: A fifth of the rows is held out.
FEWEST_ROWS, MOST_CLASSES = 10, 100

#: So many numbers in their order are those of columns, and not a row that happens to have them.
MANY_NUMBERS = 6

LABELS = ("label", "labels", "target", "class", "y")
PAIRS = [("x", "y"), ("X", "y"), ("X", "Y"), ("features", "labels"), ("data", "target")]
PAIRS += [("x_train", "y_train"), ("X_train", "y_train"), ("images", "labels")]

MISSING = {"", "?", "-", "na", "n/a", "nan", "null", "none"}
#: Names of a column that counts the rows, as tools write it.
INDEX = {"unnamed: 0", "index", "id", "rownames", "row.names", "row", "x", "rn"}

WORDS = {"true": 1.0, "false": 0.0}

#: What else a file may be, by its first bytes.
NOT_TEXT = {b"PK": "an Excel or zip file", b"\x1f\x8b": "a gzip file", b"PAR1": "a Parquet file"}
NOT_TEXT |= {b"\x93NUMPY": "a single array", b"\x89HDF": "an HDF5 file", b"%PDF": "a PDF"}


class UnusableFile(ValueError):
    """A sentence or two for the user: the cause, the place and the remedy."""


class Data(NamedTuple):
    """
    - **x** - features, shape (rows, columns).
    - **y** - labels as 0, 1, ..., shape (rows,).
    - **names** - of the features.
    - **classes** - the labels as they are in the file.
    - **seen** - what the reader took the file for, in words.
    """

    x: np.ndarray
    y: np.ndarray
    names: list[str]
    classes: list[str]
    seen: str


def read(path: str | Path, label: str | None = None) -> Data:
    """
    Reads a file, and refuses one that would be read wrongly.

    :param path: an .npz with two arrays, or text with a row in each line, its cells divided by
        commas, semicolons, tabs or spaces, with or without a header.
    :param label: name of the column of labels; None is one with a usual name, or the last one.
    :raises UnusableFile: with the cause, the place and the remedy.
    """
    path = Path(path)
    if path.is_dir():
        inside = sorted(p.name for p in path.iterdir() if p.suffix in (".csv", ".npz"))
        raise UnusableFile(
            f"{path} is a folder: name a file in it, {', '.join(inside[:3]) or 'a .csv or .npz'}."
        )
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UnusableFile(f"There is no file {path} (looked in {Path.cwd()}).") from None
    except OSError as error:
        raise UnusableFile(f"{path} cannot be read: {error.strerror}.") from None
    if not content.strip():
        raise UnusableFile(f"{path} is empty: it needs a row of numbers and a label in each line.")
    if path.suffix == ".npz":
        data = _from_arrays(path, content, label)
    else:
        data = _from_text(path, _decoded(path, content), label)
    return _checked(path, data)


def _checked(path: Path, data: Data) -> Data:
    rows, counts = len(data.y), Counter(data.y.tolist())
    if rows < FEWEST_ROWS:
        raise UnusableFile(
            f"{path} has {rows} row{'s' if rows != 1 else ''} of data; at least {FEWEST_ROWS} are"
            " needed, of which a fifth is held out."
        )
    if len(counts) == 1:
        raise UnusableFile(
            f"All {rows} rows of {path} have the label {data.classes[0]!r}: there is nothing to"
            " tell apart. Name another column with --label."
        )
    if len(counts) > MOST_CLASSES:
        raise UnusableFile(
            f"The label of {path} has {len(counts)} different values: that is a regression. Name a"
            " column of classes with --label."
        )
    return data


# --- text ---------------------------------------------------------------------------------


def _decoded(path: Path, content: bytes) -> str:
    for start, kind in NOT_TEXT.items():
        if content.startswith(start):
            raise UnusableFile(
                f"{path} is {kind} and not text: save it as CSV, or as an .npz by"
                " `numpy.savez(path, x=features, y=labels)`."
            )
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return content.decode("utf-16", errors="replace")
    if b"\0" in content:
        raise UnusableFile(
            f"{path} is not text (byte {content.index(0) + 1} is zero): save it as CSV or .npz."
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("latin-1")  # numbers are the same


def _from_text(path: Path, text: str, label: str | None) -> Data:
    delimiter = _delimiter(text)
    lines, rows = _rows(path, text, delimiter)
    commas = delimiter != ","  # of decimal fractions
    has_header = _is_numbering(path, rows, commas) or _is_header(rows, commas)
    names = [f"x{k}" for k in range(len(rows[0]))]
    if has_header:
        names = [name.strip().lstrip("#").strip() for name in rows[0]]
        lines, rows = lines[1:], rows[1:]
        if not rows:
            raise UnusableFile(f"{path} has a header and no rows.")
        for name, count in Counter(names).items():
            if count > 1:
                places = [str(k + 1) for k, other in enumerate(names) if other == name]
                raise UnusableFile(
                    f"Columns {' and '.join(places)} in the header of {path} have the same name"
                    f" {name!r}: rename one, or leave it out."
                )
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    without_index = _drop_index(path, columns, names[0], has_header)
    if label is not None and label not in columns:
        raise UnusableFile(f"{path} has no column {label!r}; it has {', '.join(columns)}.")
    label = label or next((k for k in columns if k.lower() in LABELS), list(columns)[-1])
    words = columns.pop(label)
    if not columns:
        raise UnusableFile(
            f"{path} has a single column, {label!r}: it needs columns of features beside the label."
            " Cells may be divided by commas, semicolons, tabs or spaces."
        )
    places = [f"line {line}" for line in lines]
    x = np.array([[_number(cell, commas) for cell in cells] for cells in columns.values()]).T
    _check_words(path, columns, x, places, commas)
    labels = [0.0 if _is_word(cell, commas) else _number(cell, commas) for cell in words]
    _check_cells(path, np.column_stack([x, labels]), [*columns, label], places)
    classes, y = _classes(words, commas)
    kind = {",": "commas", ";": "semicolons", "\t": "tabs"}.get(delimiter, "spaces")
    header = "a header" if has_header else "no header"
    seen = f"{kind}, {header}, the label in column {names.index(label) + 1}"
    seen += f", {label!r}" if has_header else ""
    return Data(x, y, list(columns), classes, seen + without_index)


def _drop_index(path: Path, columns: dict[str, tuple], name: str, has_header: bool) -> str:
    """
    Takes the numbers of the rows that pandas and R write from the columns, and says so.

    :raises UnusableFile: if the first column has no name, and is no such index.
    """
    cells = [cell.strip() for cell in columns[name]]
    counts = any(cells == [str(k + start) for k in range(len(cells))] for start in (0, 1))
    # rows that were shuffled or left out keep their numbers
    is_numbered = len(set(cells)) == len(cells) and all(cell.isdecimal() for cell in cells)
    if has_header and not name and not is_numbered:
        raise UnusableFile(
            f"The first column of {path} has no name: give it one, or leave it out if it is an"
            " index."
        )
    is_index = counts and (not has_header or name.lower() in INDEX)
    if len(columns) < 3 or not (is_index or (has_header and not name)):
        return ""
    del columns[name]
    return ", without the row numbers of column 1"


def _delimiter(text: str) -> str:
    """The first that divides the first lines into as many cells each."""
    first = [line for line in text.splitlines() if line.strip()][:20]
    for delimiter in "\t;,":
        counts = {len(row) for row in csv.reader(first, delimiter=delimiter)}
        if len(counts) == 1 and counts != {1}:
            return delimiter
    # that of the first line, if the lines differ
    return next((d for d in "\t;," if d in first[0]), " ")


def _rows(path: Path, text: str, delimiter: str) -> tuple[list[int], list[list[str]]]:
    """The lines that are not blank, by their numbers, as cells."""
    stripped = [line.strip(" ") for line in text.splitlines()]
    reader = csv.reader(stripped, delimiter=delimiter, skipinitialspace=True, strict=True)
    lines, rows = [], []
    try:
        for row in reader:
            if any(cell.strip() for cell in row):
                lines.append(reader.line_num)
                rows.append(row)
    except csv.Error as error:
        begin = lines[-1] + 1 if lines else 1
        raise UnusableFile(
            f"{path} cannot be read from line {begin} on ({error}): close the quotation marks, or"
            " leave them out."
        ) from None
    for line, row in zip(lines, rows, strict=True):
        if len(row) != len(rows[0]):
            raise UnusableFile(
                f"Line {line} of {path} has {len(row)} cells where line {lines[0]} has"
                f" {len(rows[0])}: mend it, or put cells with {delimiter!r} in quotation marks."
            )
    return lines, rows


def _number(cell: str, commas: bool = False) -> float:
    """A cell as a number: nan where it is missing or a word."""
    cell = cell.strip().lower()
    if commas and cell.count(",") == 1:
        cell = cell.replace(",", ".")
    try:
        return WORDS[cell] if cell in WORDS else float(cell.replace("_", "x"))
    except ValueError:
        return math.nan


def _is_word(cell: str, commas: bool) -> bool:
    return math.isnan(_number(cell, commas)) and cell.strip().lower() not in MISSING


def _is_header(rows: list[list[str]], commas: bool) -> bool:
    """Whether the first line has words above numbers, or nothing but words of its own."""
    first, columns = rows[0], list(zip(*rows[1:], strict=True))
    words = [_is_word(cell, commas) for cell in first]
    above_numbers = any(
        word and not any(_is_word(cell, commas) for cell in column)
        for word, column in zip(words, columns, strict=False)
    )
    # a word among numbers is rather a mistake
    mostly_words = sum(words) > sum(cell.strip() != "" for cell in first) / 2
    new = not any(cell in rest for cell, rest in zip(first, columns, strict=False))
    return mostly_words and (above_numbers or (all(words) and new))


def _is_numbering(path: Path, rows: list[list[str]], commas: bool) -> bool:
    """
    Whether the first line has the numbers of the columns, as pandas writes them.

    :raises UnusableFile: if it may as well be a row.
    """
    first = [cell.strip() for cell in rows[0]]
    places = [k for k, cell in enumerate(first) if cell and not _is_word(cell, commas)]
    numbers = [first[k] for k in places]
    if len(places) < 2 or not any(
        numbers == [str(k + start) for k in range(len(numbers))] for start in (0, 1)
    ):
        return False
    others = [row[k].strip() for row in rows[1:] for k in places]
    is_alike = len(places) == len(first) and all(cell.isdecimal() for cell in others)
    if is_alike and others and len(places) < MANY_NUMBERS:
        raise UnusableFile(
            f"The first line of {path}, {', '.join(first)}, may be the numbers of its columns or a"
            " row: put a line of names before it, or in its place."
        )
    return True


def _check_words(path: Path, columns: dict, x: np.ndarray, places: list, commas: bool) -> None:
    words = {}
    for name, cells in columns.items():
        for place, cell in zip(places, cells, strict=True):
            if _is_word(cell, commas):
                words.setdefault(name, (place, cell))
    if words:
        name, (place, cell) = next(iter(words.items()))
        others = [repr(other) for other in words if other != name]
        besides = f" So are {', '.join(others)}." if others else ""
        raise UnusableFile(
            f"Column {name!r} of {path} is not of numbers: {cell!r} in {place}.{besides} Encode"
            " words as numbers, leave the column out, or make it the label with --label."
        )


def _classes(words: tuple[str, ...], commas: bool = False) -> tuple[list[str], np.ndarray]:
    """
    Labels as they are named, and as 0, 1, ...: numbers in their order, words in theirs. Numbers
    with zeros before them are codes, and those of other digits are others, however long.
    """
    words = tuple(word.strip() for word in words)
    truths = {word.lower() in WORDS for word in words}
    is_code = any(re.fullmatch(r"[+-]?0[0-9]+", word) for word in words)
    is_word = any(math.isnan(_number(word, commas)) for word in words)
    if is_word or is_code or len(truths) > 1:
        names, y = np.unique(words, return_inverse=True)
        return names.tolist(), y
    if truths == {True}:
        words = tuple(f"{WORDS[word.lower()]:g}" for word in words)
    values = [Decimal(word.replace(",", ".") if commas else word) for word in words]
    order = {value: k for k, value in enumerate(sorted(set(values)))}
    names = [f"{value.normalize():f}" if abs(value) < 1e20 else f"{value:g}" for value in order]
    return names, np.array([order[value] for value in values])


# --- arrays -------------------------------------------------------------------------------


def _from_arrays(path: Path, content: bytes, label: str | None) -> Data:
    remedy = "save it by `numpy.savez(path, x=features, y=labels)`"
    if label is not None:
        raise UnusableFile(f"--label={label} is for columns of text; {path} has arrays: {remedy}.")
    if not content.startswith(b"PK"):
        raise UnusableFile(f"{path} is not an .npz, whatever its name: {remedy}.")
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            arrays = dict(file)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        cause = str(error).splitlines()[0].rstrip(".")
        raise UnusableFile(f"{path} cannot be read as .npz ({cause}): {remedy}.") from None
    pair = next((pair for pair in PAIRS if set(pair) <= set(arrays)), None)
    if pair is None:
        found = ", ".join(f"{k} of shape {v.shape}" for k, v in arrays.items()) or "no arrays"
        raise UnusableFile(f"{path} has {found}; it needs x and y: {remedy}.")
    x, y = (arrays[name] for name in pair)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1:
        raise UnusableFile(
            f"Array {pair[1]!r} of {path} has shape {y.shape} and not one label a row: of"
            " indicators of the classes take `y.argmax(axis=1)`."
        )
    if x.ndim < 1 or len(x) != len(y):
        rows = len(x) if x.ndim else "no"
        raise UnusableFile(
            f"{path} has {rows} rows of features but {len(y)} labels: it needs one for each row."
        )
    if x.dtype.kind not in "biuf" or y.dtype.kind not in "biufSU":
        raise UnusableFile(
            f"The arrays of {path} have the types {x.dtype} and {y.dtype}; features must be real"
            " numbers, and labels numbers or words."
        )
    x = np.reshape(x, (len(x), -1)).astype(float)
    names = [f"x{k}" for k in range(x.shape[1])]
    if not names:
        raise UnusableFile(f"Array {pair[0]!r} of {path} has no columns: {remedy}.")
    places = [f"row {k} (from 0)" for k in range(len(x))]
    _check_cells(path, x, names, places)
    if y.dtype.kind == "f":
        _check_cells(path, y[:, None], [pair[1]], places)
    classes, y = _classes(tuple(map(str, y.tolist())))
    return Data(x, y, names, classes, f"the arrays {pair[0]!r} and {pair[1]!r}")


def _check_cells(path: Path, x: np.ndarray, names: list[str], places: list[str]) -> None:
    too_large = np.abs(x) > 1e100  # their squares are infinite
    for wrong, what in ((np.isnan(x), "missing"), (np.isinf(x), "infinite"), (too_large, "huge")):
        if count := int(wrong.sum()):
            row, column = np.argwhere(wrong)[0]
            raise UnusableFile(
                f"{count} of {x.size:,} cells of {path} {'is' if count == 1 else 'are'} {what}, the"
                f" first in {places[row]}, column {names[column]!r}: fill in numbers, or leave the"
                " rows or columns out."
            )
