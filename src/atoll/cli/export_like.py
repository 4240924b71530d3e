"""`atoll export --like FOLDER`: a folder that `from_pretrained` of Transformers or PEFT opens.

The weights of the run take the place of those in FOLDER, in files with the same headers: the same names, dtypes, order
and shards. The other files of FOLDER are copied: the configuration, the tokenizer, code.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.cli.text import require_short, some
from atoll.errors import BadRequest, UsageError
from atoll.posix import (
    NAMED_FILE,
    file_error,
    folder_error,
    open_named,
    read_named,
    replace_file,
    require_writable_folder,
)
from atoll.tensors.layout import TIED
from atoll.tensors.safetensors_header import Header, read_header
from atoll.tensors.schema import FLOATS, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
MODEL, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".index.json")
"""Endings of files that are not copied: they have weights that are not the run's, or list such files."""
NOT_COPIED = (".", "checkpoint-")
"""Beginnings of names that are not copied: hidden files, and the checkpoints of Transformers' Trainer."""

ELSEWHERE = "Give a folder in a place where this user may write."
SAVED = "Save the model that the sites begin with there: model.save_pretrained(FOLDER)"


@dataclass(frozen=True)
class Shard:
    """A safetensors file of FOLDER: its name, its header as bytes, and what the header says."""

    name: str
    head: bytes
    header: Header


def export_like(out: Path, like: Path, write: Callable[[Path], int]) -> int:
    """Write a version into the new folder `out`, as files like those in `like`. Return the version's number.

    The folder `out` appears only when it is complete.

    Args:
        out: the folder to write; missing, or empty.
        like: a folder that `save_pretrained` of Transformers or PEFT has written.
        write: writes the version into the safetensors file that it is given, and returns the version's number.

    Raises:
        UsageError: `like` is no such folder; its tensors are not those of the run, or cannot hold their values; or
            `out` exists.
        StoreError: a folder or file cannot be read or written.
    """
    shards, index = shards_of(like)
    require_short(out)
    if out.suffix == ".safetensors" or out.is_file() or (out.is_dir() and any(out.iterdir())):
        what = "exists" if out.exists() else "is the name of a file"
        raise UsageError(f"{str(out)!r} {what}, but --like needs a new folder.", "Give another name.")
    require_writable_folder(out.parent, ELSEWHERE)
    new = out.with_name(f".{out.name}.new")
    try:
        shutil.rmtree(new, ignore_errors=True)  # a killed export has left it
        new.mkdir()
        model = new / f".{MODEL}"
        version = write(model)
        _copy(like, new, index)
        _convert(model, shards, new, like)
        model.unlink()
        os.replace(new, out)
    except OSError as error:
        raise folder_error(error, out.parent, ELSEWHERE) from error
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return version


def shards_of(like: Path) -> tuple[list[Shard], str]:
    """Return the files with the weights of a folder, and the name of the file that lists them; "" if it is one.

    Raises:
        UsageError: the folder does not have what `save_pretrained` writes.
    """
    if not like.is_dir():
        raise UsageError(f"--like is {str(like)!r}, which is not a folder here.", f"{SAVED}.")
    known = [(ADAPTER, ADAPTER_CONFIG), (MODEL, CONFIG), (INDEX, CONFIG)]
    weights, config = next((each for each in known if (like / each[0]).is_file()), ("", ""))
    if not weights or not (like / config).is_file():
        lacks = config or f"{MODEL}, {INDEX} or {ADAPTER}"
        raise UsageError(f"The folder {str(like)!r} has no {lacks}.", f"{SAVED}.")
    try:
        names = [weights]
        if weights == INDEX:
            names = sorted(set(json.loads(read_named(like / INDEX))["weight_map"].values()))
            if wrong := [name for name in names if name != os.path.basename(name) or not name.endswith(".safetensors")]:
                raise ValueError(f"it lists {wrong[0]!r}")
        return [_shard(like, name) for name in names], INDEX if weights == INDEX else ""
    except OSError as error:
        raise file_error(error, error.filename or like) from error
    except BadRequest as error:
        raise UsageError(f"The folder {str(like)!r} cannot be used: {error.message}", f"{SAVED}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{like / weights} is no list of weights: {error!s}.", f"{SAVED}.") from error


def _shard(like: Path, name: str) -> Shard:
    with open(open_named(like / name), "rb") as file:
        fd = file.fileno()
        header = read_header(lambda at, count: os.pread(fd, count, at), os.fstat(fd).st_size, name)
        return Shard(name, os.pread(fd, header.nbytes, 0), header)


def _copy(like: Path, new: Path, index: str) -> None:
    """Copy all files but those with weights; `index` is copied, too."""
    for folder, folders, names in os.walk(like):
        folders[:] = [name for name in folders if not name.startswith(NOT_COPIED)]
        to = new / Path(folder).relative_to(like)
        for name in names:
            if name.startswith(".") or (name.endswith(OTHER_WEIGHTS) and name != index):
                continue
            to.mkdir(parents=True, exist_ok=True)
            try:
                data = read_named(Path(folder) / name)
            except OSError as error:
                raise file_error(error, Path(folder) / name) from error
            replace_file(to / name, [data], mode=NAMED_FILE)


def _convert(model: Path, shards: Sequence[Shard], new: Path, like: Path) -> None:
    """Write the tensors of the file `model` into files with the headers of `shards`."""
    from safetensors import safe_open

    run = _shard(model.parent, model.name).header
    prefix = _require_same(run, [spec for shard in shards for spec, _ in shard.header.tensors], like)
    with safe_open(model, framework="pt") as file:
        for shard in shards:
            replace_file(new / shard.name, _content(shard, prefix, file.get_tensor), mode=NAMED_FILE)


def _require_same(run: Header, wanted: Sequence[TensorSpec], like: Path) -> str:
    """Check that a run has the tensors of a folder. Return what the run's names have before those of the folder.

    Of tied tensors, the folder may have any.

    Raises:
        UsageError: a tensor is missing in the run or the folder, or has another shape or kind of dtype.
    """
    ours, theirs = {spec.name: spec for spec, _ in run.tensors}, {spec.name: spec for spec in wanted}
    prefix = _prefix(ours, theirs)
    pairs = {name: (ours.get(prefix + name), spec) for name, spec in theirs.items()}
    tied = json.loads(run.metadata.get(TIED, "{}"))
    found = {tied.get(name, name) for name in (prefix + each for each in pairs) if name in ours}
    both = [(name, mine, spec) for name, (mine, spec) in pairs.items() if mine is not None]
    casts = [f"{name!r}: {mine.dtype} and {spec.dtype}" for name, mine, spec in both if not _castable(mine, spec)]
    faults = {
        f"The folder {str(like)!r} has tensors that the run lacks": [
            f"{name!r} {[*spec.shape]}" for name, (mine, spec) in pairs.items() if mine is None
        ],
        f"The run has tensors that the folder {str(like)!r} lacks": [
            f"{name!r} {[*spec.shape]}" for name, spec in ours.items() if tied.get(name, name) not in found
        ],
        f"Shapes differ in the run and in {str(like)!r}": [
            f"{name!r}: {[*mine.shape]} and {[*spec.shape]}" for name, mine, spec in both if mine.shape != spec.shape
        ],
        f"Dtypes in the run cannot be cast to those in {str(like)!r}": casts,
    }
    if said := [f"{fault}: {some(names)}." for fault, names in faults.items() if names]:
        remedy = f"{SAVED}, with the same configuration and the same release of Transformers or PEFT."
        raise UsageError(" ".join(said), remedy)
    return prefix


def _prefix(ours: Collection[str], theirs: Collection[str]) -> str:
    """Return what each of the run's names has before that of the folder, if the model is part of another module."""
    first = next(iter(theirs), "")
    found = sorted(name.removesuffix(first) for name in ours if name.endswith(f".{first}"))
    return next((each for each in ["", *found] if all(each + name in ours for name in theirs)), "")


def _castable(mine: TensorSpec, spec: TensorSpec) -> bool:
    return mine.dtype == spec.dtype or {mine.dtype, spec.dtype} <= FLOATS


def _content(shard: Shard, prefix: str, tensor: Callable[[str], Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file: a header, then the run's tensors in its order, cast to its dtypes."""
    import torch

    from atoll.tensors.chunks import CHUNK_ELEMENTS, bytes_of
    from atoll.tensors.dtypes import torch_dtype

    yield shard.head
    for spec, _ in shard.header.tensors:
        values: Any = tensor(prefix + spec.name).flatten()
        for start in range(0, spec.numel, CHUNK_ELEMENTS):
            chunk = values[start : start + CHUNK_ELEMENTS]
            cast = chunk.to(torch_dtype(spec.dtype))
            if cast.dtype != chunk.dtype and not torch.equal(cast.double().isfinite(), chunk.double().isfinite()):
                raise UsageError(
                    f"The tensor {spec.name!r} has values in the run that {spec.dtype} cannot hold, its dtype in "
                    f"{shard.name}.",
                    "Save the model in --like with another dtype: model.to(torch.bfloat16).save_pretrained(FOLDER).",
                )
            yield bytes_of(cast)
