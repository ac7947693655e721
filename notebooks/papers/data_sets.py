# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
The papers' data: from a folder, else from their source, else scikit-learn's digits instead.

``load("mnist")`` looks for ``mnist.npz`` in the folder named by its argument, by the variable
``NUMPYRO_SGMCMC_DATA``, or else in ``~/.cache/numpyro_sgmcmc``. If it is not there, it is made from
the original files, which may lie beside it or are downloaded. Where they cannot be had,
scikit-learn's digits stand in, which are of the same kind, and a line says so. Whatever is read is
checked against the SHA-256 of its arrays.
"""

from collections.abc import Callable
from contextlib import suppress
import gzip
import hashlib
import io
import os
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from urllib.request import urlopen
import zipfile

from experiments import QUICK
import numpy as np
import pandas as pd
from sklearn.datasets import load_digits, load_svmlight_file

Arrays = dict[str, np.ndarray]
#: The contents of files, by name.
Files = dict[str, bytes]

_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/"
_LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/"


class Source(NamedTuple):
    """Where a data set is from, and how it is read."""

    #: as in titles
    title: str
    #: its file in the folder, without ``.npz``
    stored: str
    #: the folder of its files on the web; None if it has to be put there by hand
    url: str | None
    files: tuple[str, ...]
    #: arrays to keep, from the contents of the files
    parse: Callable[[Files], Arrays]
    #: what an experiment gets, from the arrays that are kept
    prepare: Callable[[Arrays], Arrays]
    #: of what an experiment gets; None if the original is not known to us
    sha256: str | None
    #: scikit-learn's digits in the same form
    stand_in: Callable[[], Arrays]


def load(name: str, folder: str | Path | None = None) -> SimpleNamespace:
    """
    A data set by name, with a line that says which it is.

    :param str name: ``"mnist"``, ``"connect4"``, ``"letter"``, ``"covtype"``, ``"acoustic"``,
        ``"movielens"`` or ``"kos"``.
    :param folder: with its ``.npz`` file or the original files, or where the former is to be.
    :return: arrays, ``name`` for titles and ``is_fallback``. For classification ``train_x`` of
        shape (rows, features), ``train_y`` from 0, ``test_x``, ``test_y`` and ``classes``; for
        MovieLens ``user``, ``item`` from 0 and ``rating``; for KOS ``document``, ``word``,
        ``count`` and ``vocabulary``.
    :raises ValueError: if the name is not known, or a file is not what it should be.
    """
    if name not in SOURCES:
        raise ValueError(f"There is no data set {name!r}; there are {', '.join(SOURCES)}.")
    source = SOURCES[name]
    chosen = folder or os.environ.get("NUMPYRO_SGMCMC_DATA") or "~/.cache/numpyro_sgmcmc"
    place = Path(chosen).expanduser()
    path = place / f"{source.stored}.npz"
    try:
        kept = _read(path) if path.exists() else source.parse(_originals(source, place))
    except OSError as problem:
        found = SimpleNamespace(**source.stand_in(), name="digits", is_fallback=True)
        print(
            f"{source.title} is not here and cannot be had ({problem}):"
            f" scikit-learn's digits stand in. {_shape(found)}"
        )
        return _with_classes(found)
    found = SimpleNamespace(**_checked(source, kept), name=source.title, is_fallback=False)
    if not path.exists():
        with suppress(OSError):  # where nothing can be written it is read anew each time
            place.mkdir(parents=True, exist_ok=True)
            np.savez_compressed(path, **kept)
    print(f"{source.title}: {_shape(found)}")
    return _with_classes(found)


def _read(path: Path) -> Arrays:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except (ValueError, EOFError, zipfile.BadZipFile) as problem:
        raise ValueError(f"{path.name} cannot be read ({problem}). Delete it.") from problem


def _originals(source: Source, place: Path) -> Files:
    """From the folder if they are there, and else from the web."""
    files = {}
    for file in source.files:
        if (place / file).exists():
            files[file] = (place / file).read_bytes()
        elif source.url is None:
            raise FileNotFoundError(f"no file {file}, which has to be put there by hand")
        elif QUICK:
            raise FileNotFoundError("the reduced mode downloads nothing")
        else:
            with urlopen(source.url + file, timeout=20) as response:
                files[file] = response.read()
    return files


def _checked(source: Source, kept: Arrays) -> Arrays:
    """
    What an experiment gets.

    :raises ValueError: if it is not what the experiments were made with.
    """
    try:
        arrays = source.prepare(kept)
    except KeyError as missing:
        raise ValueError(
            f"{source.stored}.npz has no array {missing}, but {', '.join(kept)}: it is not"
            f" {source.title} as this loader keeps it. Delete it, or name another folder."
        ) from missing
    if source.sha256 is not None and (digest := sha256(arrays)) != source.sha256:
        raise ValueError(
            f"{source.stored}.npz is not {source.title} as the experiments need it: the SHA-256 of"
            f" its arrays is {digest}, and should be {source.sha256}. Delete the file, to have it"
            " downloaded again, or name another folder."
        )
    return arrays


def sha256(arrays: Arrays) -> str:
    """Of names, types, shapes and values, so that it does not depend on the file's format."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _shape(data: SimpleNamespace) -> str:
    if hasattr(data, "train_x"):
        rows, features = data.train_x.shape
        return f"{rows:,} rows to learn from and {len(data.test_y):,} to test, {features} features."
    if hasattr(data, "rating"):
        users, items = data.user.max() + 1, data.item.max() + 1
        return f"{len(data.rating):,} ratings of {items:,} items by {users:,} users."
    return (
        f"{data.document.max() + 1:,} documents of {data.count.sum():,} words,"
        f" {len(data.vocabulary):,} different."
    )


def _with_classes(data: SimpleNamespace) -> SimpleNamespace:
    if hasattr(data, "train_y"):
        data.classes = int(data.train_y.max()) + 1
    return data


# ------------------------------------------------------------------ one data set after the other


def _split(x: np.ndarray, y: np.ndarray, train: np.ndarray, test: np.ndarray) -> Arrays:
    x, y = x.astype(np.float32), y.astype(np.int32)
    return {"train_x": x[train], "train_y": y[train], "test_x": x[test], "test_y": y[test]}


def _shuffled(x: np.ndarray, y: np.ndarray, train: int, test: int) -> Arrays:
    """So many rows to learn from and to test, of an order that is the same everywhere."""
    order = np.random.RandomState(2015).permutation(len(y))
    return _split(x, y, order[:train], order[train : train + test])


def _idx(content: bytes) -> np.ndarray:
    """The format of MNIST: two bytes of zero, the type, the number of axes, and their lengths."""
    plain = gzip.decompress(content)
    shape = np.frombuffer(plain, ">i4", plain[3], 4)
    return np.frombuffer(plain, np.uint8, offset=4 + 4 * plain[3]).reshape(shape)


def _parse_mnist(files: Files) -> Arrays:
    names = ("train_x", "train_y", "test_x", "test_y")
    return {k: _idx(content) for k, content in zip(names, files.values(), strict=True)}


def _prepare_mnist(kept: Arrays) -> Arrays:
    x = np.concatenate([kept["train_x"], kept["test_x"]]).reshape(70_000, 784)
    y = np.concatenate([kept["train_y"], kept["test_y"]])
    return _split(x, y, np.arange(60_000), np.arange(60_000, 70_000))


def _svmlight(content: bytes, features: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = load_svmlight_file(io.BytesIO(content), n_features=features)
    return x.toarray(), y


def _parse_connect4(files: Files) -> Arrays:
    x, y = _svmlight(files["connect-4"], 126)
    return {"x": x.astype(np.int8), "y": (y + 1).astype(np.int8)}


def _parse_letter(files: Files) -> Arrays:
    (x, y), (test_x, test_y) = (_svmlight(content, 16) for content in files.values())
    return {
        "x": np.rint(7.5 * np.concatenate([x, test_x]) + 7.5).astype(np.uint8),
        "y": np.concatenate([y, test_y]).astype(np.uint8) - 1,
        "libsvm_tr": np.arange(len(y)),
        "libsvm_test": np.arange(len(y), len(y) + len(test_y)),
    }


def _prepare_letter(kept: Arrays) -> Arrays:
    scaled = (kept["x"] - 7.5) / 7.5
    return _split(scaled, kept["y"], kept["libsvm_tr"], kept["libsvm_test"])


def _parse_covtype(files: Files) -> Arrays:
    table = pd.read_csv(io.BytesIO(gzip.decompress(files["covtype.data.gz"])), header=None)
    values = table.to_numpy(np.int16)
    return {"x": values[:, :54], "y": values[:, 54].astype(np.int8)}


def _parse_acoustic(files: Files) -> Arrays:
    (x, y), (test_x, test_y) = (_svmlight(content, 50) for content in files.values())
    return {"train_x": x, "train_y": y - 1, "test_x": test_x, "test_y": test_y - 1}


def _prepare_acoustic(kept: Arrays) -> Arrays:
    rows = len(kept["train_y"])
    x = np.concatenate([kept["train_x"], kept["test_x"]])
    y = np.concatenate([kept["train_y"], kept["test_y"]])
    return _split(x, y, np.arange(rows), np.arange(rows, len(y)))


def _parse_movielens(files: Files) -> Arrays:
    with zipfile.ZipFile(io.BytesIO(files["ml-1m.zip"])) as archive:
        text = archive.read("ml-1m/ratings.dat").decode()
    table = pd.read_csv(io.StringIO(text.replace("::", ",")), header=None).to_numpy()
    return {"user": table[:, 0], "item": table[:, 1], "rating": table[:, 2]}


def _prepare_movielens(kept: Arrays) -> Arrays:
    dense = {
        k: np.unique(kept[k], return_inverse=True)[1].astype(np.int32) for k in ("user", "item")
    }
    return {**dense, "rating": kept["rating"].astype(np.float32)}


def _parse_kos(files: Files) -> Arrays:
    text = gzip.decompress(files["docword.kos.txt.gz"]).decode()
    table = np.loadtxt(io.StringIO(text), int, skiprows=3)
    vocabulary = files["vocab.kos.txt"].decode().split()
    columns = {"doc": table[:, 0] - 1, "word": table[:, 1] - 1, "count": table[:, 2]}
    return {**columns, "vocab": np.array(vocabulary)}


def _prepare_kos(kept: Arrays) -> Arrays:
    names = {"document": "doc", "word": "word", "count": "count"}
    numbers = {name: kept[stored].astype(np.int32) for name, stored in names.items()}
    return {**numbers, "vocabulary": np.array(kept["vocab"].tolist())}


def _digits_in_classes(white: float) -> Callable[[], Arrays]:
    """1,797 images of 8 x 8 pixels, of values up to ``white``."""

    def stand_in() -> Arrays:
        digits = load_digits()
        return _shuffled(white / 16 * digits.data, digits.target, 1_437, 360)

    return stand_in


def _digits_as_ratings() -> Arrays:
    """An image is a user, and rates a pixel by its ink."""
    ink = load_digits().data
    user, item = (k.ravel().astype(np.int32) for k in np.indices(ink.shape))
    return {"user": user, "item": item, "rating": (1 + np.rint(ink.ravel() / 4)).astype(np.float32)}


def _digits_as_documents() -> Arrays:
    """An image is a document, and a pixel a word, as often as it has ink."""
    digits = load_digits()
    document, word = np.nonzero(digits.data)
    return {
        "document": document.astype(np.int32),
        "word": word.astype(np.int32),
        "count": digits.data[document, word].astype(np.int32),
        "vocabulary": np.array(digits.feature_names),
    }


SOURCES: dict[str, Source] = {
    "mnist": Source(
        "MNIST",
        "mnist",
        "https://ossci-datasets.s3.amazonaws.com/mnist/",  # yann.lecun.com serves it no longer
        (
            "train-images-idx3-ubyte.gz",
            "train-labels-idx1-ubyte.gz",
            "t10k-images-idx3-ubyte.gz",
            "t10k-labels-idx1-ubyte.gz",
        ),
        _parse_mnist,
        _prepare_mnist,
        "afa8f08d5487c06e4928286870347f921272615aa07ac8c2b7ce22a7599cc321",
        _digits_in_classes(white=255.0),
    ),
    "connect4": Source(
        "connect-4",
        "connect4",
        _LIBSVM,
        ("connect-4",),
        _parse_connect4,
        lambda kept: _shuffled(kept["x"], kept["y"], 54_046, 13_511),
        "65c155920b424c2f63ab01e4e30a83bb09e3a77bccba198448368d8e1079dfd0",
        _digits_in_classes(white=1.0),
    ),
    "letter": Source(
        "letter",
        "letter",
        _LIBSVM,
        ("letter.scale.tr", "letter.scale.t"),
        _parse_letter,
        _prepare_letter,
        "52f23c3cac3ccfc76f95d5a673b87ce5d187bf3e218415884b7c81d6899fedc4",
        _digits_in_classes(white=1.0),
    ),
    "covtype": Source(
        "covtype",
        "covtype",
        _UCI + "covtype/",
        ("covtype.data.gz",),
        _parse_covtype,
        lambda kept: _shuffled(kept["x"], kept["y"] - 1, 78_823, 19_705),
        "833846648db8f15fbd4c4aeb8ee358ad96124beb0575076e4f3da999fc6db049",
        _digits_in_classes(white=1.0),
    ),
    "acoustic": Source(
        "SensIT Vehicle (acoustic)",
        "acoustic",
        None,
        ("acoustic_scale", "acoustic_scale.t"),
        _parse_acoustic,
        _prepare_acoustic,
        None,
        _digits_in_classes(white=1.0),
    ),
    "movielens": Source(
        "MovieLens-1M",
        "movielens_1m",
        "https://files.grouplens.org/datasets/movielens/",
        ("ml-1m.zip",),
        _parse_movielens,
        _prepare_movielens,
        "6ad842f37a8e6c733af35cb306239e14089d310d0c34237be21a84e54d247ee1",
        _digits_as_ratings,
    ),
    "kos": Source(
        "KOS",
        "kos",
        _UCI + "bag-of-words/",
        ("docword.kos.txt.gz", "vocab.kos.txt"),
        _parse_kos,
        _prepare_kos,
        "baf8cbb54afa45011c94734b461cede63fe8ceba7b02dc35c365df075d497c3e",
        _digits_as_documents,
    ),
}
