# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""The loader of the notebooks on the papers, on small files in the formats of the originals."""

import gzip
import io
from pathlib import Path
import zipfile

import data_sets
from data_sets import SOURCES, load
import numpy as np
import pytest

#: Two rows each, as the originals have them.
LETTER = {
    "letter.scale.tr": "20 1:-0.733333 2:0.0666667 16:1\n9 1:-1 3:0.2 16:0.466667\n",
    "letter.scale.t": "4 1:0.6 2:-0.0666667 16:-0.866667\n",
}
ACOUSTIC = {"acoustic_scale": "3 1:-0.5 50:0.25\n1 2:1\n", "acoustic_scale.t": "2 50:-1\n"}


def write(folder: Path, files: dict) -> None:
    for name, text in files.items():
        (folder / name).write_text(text)


@pytest.fixture
def nothing_to_be_had(tmp_path, monkeypatch):
    """An empty folder, and a source that is not there."""
    empty = tmp_path / "empty"
    monkeypatch.setenv("NUMPYRO_SGMCMC_DATA", str(empty))
    for name, source in SOURCES.items():
        missing = None if source.url is None else (tmp_path / "missing").as_uri() + "/"
        monkeypatch.setitem(SOURCES, name, source._replace(url=missing))
    return empty


@pytest.mark.parametrize("name", SOURCES)
def test_digits_stand_in(name, nothing_to_be_had, capsys):
    data = load(name)
    assert data.is_fallback and data.name == "digits"
    said = capsys.readouterr().out
    assert said.startswith(SOURCES[name].title) and "scikit-learn's digits stand in" in said
    assert not nothing_to_be_had.exists()


def test_from_the_source_and_then_from_the_folder(tmp_path, monkeypatch, capsys):
    web, folder = tmp_path / "web", tmp_path / "folder"
    web.mkdir()
    write(web, LETTER)
    source = SOURCES["letter"]._replace(url=web.as_uri() + "/", sha256=None)
    monkeypatch.setitem(SOURCES, "letter", source)
    first = load("letter", folder)
    for file in web.iterdir():
        file.unlink()
    again = load("letter", folder)
    for data in (first, again):
        assert data.train_x.shape == (2, 16) and data.test_x.shape == (1, 16)
        np.testing.assert_allclose(data.train_x[0, [0, 1, 15]], [-11 / 15, 1 / 15, 1], rtol=1e-6)
        assert data.train_y.tolist() == [19, 8] and data.test_y.tolist() == [3]
        assert data.classes == 20 and not data.is_fallback
    assert capsys.readouterr().out.count("letter: 2 rows to learn from and 1 to test") == 2


def test_originals_in_the_folder(tmp_path):
    write(tmp_path, ACOUSTIC)
    data = load("acoustic", tmp_path)
    assert data.train_x.shape == (2, 50) and data.train_x[0, 49] == 0.25
    assert data.train_y.tolist() == [2, 0] and data.test_y.tolist() == [1]


def test_another_data_set_is_refused(tmp_path):
    write(tmp_path, LETTER)
    with pytest.raises(ValueError, match="is not letter as the experiments need it: the SHA-256"):
        load("letter", tmp_path)
    assert not (tmp_path / "letter.npz").exists()


def test_files_that_are_no_data_sets(tmp_path):
    np.savez(tmp_path / "kos.npz", words=np.arange(3))
    with pytest.raises(ValueError, match="kos.npz has no array 'doc', but words"):
        load("kos", tmp_path)
    (tmp_path / "mnist.npz").write_bytes((tmp_path / "kos.npz").read_bytes()[:100])
    with pytest.raises(ValueError, match="mnist.npz cannot be read"):
        load("mnist", tmp_path)
    with pytest.raises(ValueError, match="no data set 'minst'; there are mnist, connect4"):
        load("minst", tmp_path)


def test_formats():
    shape = np.array([2, 2, 3], ">i4").tobytes()
    images = data_sets._idx(gzip.compress(b"\x00\x00\x08\x03" + shape + bytes(range(12))))
    assert images.tolist() == np.arange(12).reshape(2, 2, 3).tolist()

    moves = SOURCES["connect4"].parse({"connect-4": b"-1 1:1 126:1\n1 2:1\n0 3:1\n"})
    assert moves["x"].shape == (3, 126) and moves["y"].tolist() == [0, 2, 1]

    row = ",".join(map(str, range(54)))
    cover = SOURCES["covtype"].parse({"covtype.data.gz": gzip.compress(f"{row},7\n".encode())})
    assert cover["x"].tolist() == [list(range(54))] and cover["y"].tolist() == [7]

    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("ml-1m/ratings.dat", "1::1193::5::978300760\n2::661::3::978302109\n")
    source = SOURCES["movielens"]
    ratings = source.prepare(source.parse({"ml-1m.zip": archive.getvalue()}))
    assert {k: v.tolist() for k, v in ratings.items()} == {
        "user": [0, 1],
        "item": [1, 0],
        "rating": [5.0, 3.0],
    }

    source, words = SOURCES["kos"], b"1\n2\n2\n1 1 4\n1 2 6\n"
    files = {"docword.kos.txt.gz": gzip.compress(words), "vocab.kos.txt": b"abandon\nzone\n"}
    documents = source.prepare(source.parse(files))
    assert documents["word"].tolist() == [0, 1] and documents["count"].tolist() == [4, 6]
    assert documents["vocabulary"].tolist() == ["abandon", "zone"]
