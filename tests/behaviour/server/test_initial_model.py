"""Where a run begins: a module, code by name, a class with its arguments, a file, a folder of files; never a pickle."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.requests import get
from kit.servers import plain_server
from kit.sites import federated
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from atoll import Settings
from atoll.errors import ConfigError


class Scaled(nn.Module):
    """w = size ones times `by`."""

    def __init__(self, size: int, by: float = 1.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((size,), by))


Begun = tuple[dict[str, list[float]], dict[str, Any]]


@pytest.fixture
def begun(tmp_path: Path) -> Callable[..., Begun]:
    """Begin a run from a source: the values of version 0, and the schema as sites are told it."""

    def begin(source: Path | str, **model: Any) -> Begun:
        settings = {"model.source": str(source)} | {f"model.{key}": value for key, value in model.items()}
        with plain_server(tmp_path / f"run-{len(list(tmp_path.glob('run-*')))}", **settings) as server:
            state = load_file(server.save_state(tmp_path / "version-0.safetensors"))
            return {name: tensor.tolist() for name, tensor in state.items()}, get(server.url, "/v1/schema")[1]

    return begin


def groups(schema: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["group"] for entry in schema["tensors"]}


@pytest.mark.covers("P7", "P17")
def test_calls_code_by_name_with_its_arguments(begun: Callable[..., Begun]) -> None:
    assert begun(f"{__name__}:Scaled", args={"size": 2, "by": 3.0})[0] == {"w": [3.0, 3.0]}


def test_names_code_with_wrong_arguments(begun: Callable[..., Begun]) -> None:
    with pytest.raises(ConfigError, match=r"Scaled' cannot be called.*model\.args"):
        begun(f"{__name__}:Scaled", args={"length": 2})


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """A model in two files, as large ones are saved."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": torch.full((3,), 2.0)}, folder / "model-00002-of-00002.safetensors")
    return folder


@pytest.mark.covers("P7")
def test_a_run_begins_with_all_files_of_a_folder_beside_the_run_file(parts: Path, begun: Callable[..., Begun]) -> None:
    assert begun(parts)[0] == {"a": [1.0, 1.0], "b": [2.0, 2.0, 2.0]}
    run_file = parts.parent / "run.toml"
    run_file.write_text('algorithm.name = "fedavg"\nmodel.source = "model"\n')
    assert Settings.read(run_file, environ={}).model.source == str(parts)


def test_a_folder_without_a_model_and_one_with_two_are_refused(
    parts: Path, tmp_path: Path, begun: Callable[..., Begun]
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no \.safetensors file.*save_file"):
        begun(tmp_path / "empty")
    save_file({"b": torch.zeros(1)}, parts / "other.safetensors")
    with pytest.raises(ConfigError, match=r"other\.safetensors.*contains the tensor 'b'"):
        begun(parts)


@pytest.mark.covers("P17", "X2")
@pytest.mark.parametrize("name", ["model.pt", "model.pth", "pytorch_model.bin", "last.ckpt"])
def test_a_pickle_is_refused_with_what_converts_it(name: str, begun: Callable[..., Begun]) -> None:
    with pytest.raises(ConfigError, match=r"is a pickle.*save_file\(model\.state_dict\(\), 'model\.safetensors'\)"):
        begun(name)


def begins(model: nn.Module | str, folder: Path, build: Callable[[], nn.Module]) -> Any:
    """A run of one round from a model, whose worker has it as a module and changes nothing."""
    with plain_server(folder, model, **{"rounds.total": 1}) as server:
        trained = federated(server, folder, lambda module: None, build)
        assert server.wait(30)
    return trained


class Tied(nn.Module):
    """Two names of one weight, as language models have them; the further name comes first in the alphabet."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 2)
        self.head = nn.Linear(2, 5, bias=False)
        self.head.weight = self.table.weight


@pytest.mark.covers("P7")
def test_a_run_begins_with_the_export_of_a_tied_model(tmp_path: Path, begun: Callable[..., Begun]) -> None:
    """Guards against two tensors where there was one: every worker was refused as another model."""
    begins(Tied(), tmp_path / "one", Tied)
    export = tmp_path / "one" / "state" / "exports" / "model.safetensors"
    model = begins(str(export), tmp_path / "two", Tied)
    assert torch.equal(model.head.weight, load_file(export)["head.weight"])
    assert begun(export)[1]["aliases"] == [{"name": "head.weight", "owner": "table.weight"}]


@pytest.mark.parametrize("told", ['{"head.weight": "table.weight"}', '{"head.weight": "gone"}', "[1]", "not JSON"])
def test_names_that_no_longer_are_one_tensor_stay_two(tmp_path: Path, begun: Callable[..., Begun], told: str) -> None:
    file = tmp_path / "changed.safetensors"
    save_file({"table.weight": torch.zeros(5, 2), "head.weight": torch.ones(5, 2)}, file, {"atoll.tied": told})
    assert begun(file)[0]["head.weight"][0] == [1.0, 1.0]


class Scaling(nn.Module):
    """A buffer whose name says nothing, a tied one, and a parameter that has the name of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.running_mean = nn.Parameter(torch.ones(2))
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.again = nn.Module()
        self.again.register_buffer("scale", self.scale)


@pytest.mark.covers("P8")
def test_an_export_says_which_tensors_are_buffers_and_a_run_that_begins_with_it_knows(
    tmp_path: Path, begun: Callable[..., Begun]
) -> None:
    """Guards against groups guessed by names: every worker with the module was refused."""
    begins(Scaling(), tmp_path / "one", Scaling)
    export = tmp_path / "one" / "state" / "exports" / "model.safetensors"
    with safe_open(export, framework="pt") as file:
        metadata = file.metadata()
    assert json.loads(metadata["atoll.buffers"]) == ["scale", "again.scale"]
    assert metadata["format"] == "pt"  # as `from_pretrained` asks for
    begins(str(export), tmp_path / "two", Scaling)
    assert groups(begun(export)[1]) == {"running_mean": "params", "scale": "buffers"}


def test_the_buffers_setting_adds_to_what_a_file_says(tmp_path: Path, begun: Callable[..., Begun]) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1), "b": torch.ones(1), "c": torch.ones(1)}, file, {"atoll.buffers": '["a"]'})
    assert groups(begun(file, buffers=["b"])[1]) == {"a": "buffers", "b": "buffers", "c": "params"}


@pytest.mark.parametrize("told", ["[]", '["gone", "own"]', "{}", "not JSON", '[["x"]]'])
def test_a_list_of_buffers_that_is_no_longer_the_files_leaves_the_names_of_batch_normalisation(
    tmp_path: Path, begun: Callable[..., Begun], told: str
) -> None:
    file = tmp_path / "model.safetensors"
    save_file({name: torch.ones(1) for name in ("bn.running_mean", "own", "w")}, file, {"atoll.buffers": told})
    found = groups(begun(file)[1])
    assert found["w"] == "params"
    assert found["own"] == ("buffers" if "own" in told else "params")
    assert found["bn.running_mean"] == ("params" if told == "[]" else "buffers")
