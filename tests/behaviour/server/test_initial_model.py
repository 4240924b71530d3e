"""Where a run begins: a module, code by name, a class with its arguments, a file, a folder of files; never a pickle."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from kit import SITES, DiLoCoSites, FederatedSites, Threads, build_model, exported, local_step, serve, tensors_digest
from kit.models import TiedHead
from kit.requests import get
from kit.servers import PLAIN_DILOCO, plain_server
from kit.sites import federated
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import atoll
from atoll import Settings
from atoll.errors import AtollError, ConfigError, SchemaMismatch


class Scaled(nn.Module):
    """w = size ones times `by`."""

    def __init__(self, size: int, by: float = 1.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((size,), by))


def masked(by: float = -torch.inf) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.full((2, 2), by).triu(1))
    return model


def weights(of: str) -> object:
    """Arrays as a program without torch has them."""
    first, second = np.ones(2), np.arange(3, dtype=np.float32)
    return {"list": [first, second], "mapping": {"b": first, "a": second}, "text": "w", "numbers": [1, 2]}[of]


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
def test_a_model_may_be_a_class_with_arguments(begun: Callable[..., Begun]) -> None:
    """If `model.source` names a class or function, the server calls it with `model.args`. Wrong arguments and other
    objects are refused.
    """
    assert begun(f"{__name__}:Scaled", args={"size": 2, "by": 3.0})[0] == {"w": [3.0, 3.0]}
    with pytest.raises(ConfigError, match=r"Scaled' cannot be called.*model\.args"):
        begun(f"{__name__}:Scaled", args={"length": 2})
    with pytest.raises(ConfigError, match=r":torch' is of type module\. Name a function that returns an nn\.Module"):
        begun(f"{__name__}:torch")


class Drawn(nn.Module):
    """Weights from each global generator."""

    def __init__(self) -> None:
        super().__init__()
        self.torch = nn.Parameter(torch.randn(3))
        self.numpy = nn.Parameter(torch.tensor(np.random.rand(3)))
        self.python = nn.Parameter(torch.tensor([random.random() for _ in range(3)]))


@pytest.mark.parametrize(("of", "names"), [("list", ["0", "1"]), ("mapping", ["b", "a"])])
def test_a_model_may_be_arrays(begun: Callable[..., Begun], of: str, names: list[str]) -> None:
    """A function may return arrays, by name or as a list, which get their places as names; dtypes are kept."""
    state, schema = begun(f"{__name__}:weights", args={"of": of})
    assert {name: state[name] for name in names} == dict(zip(names, ([1.0, 1.0], [0.0, 1.0, 2.0]), strict=True))
    assert {each["name"]: each["dtype"] for each in schema["tensors"]} == dict(zip(names, ("F64", "F32"), strict=True))


@pytest.mark.parametrize(
    ("of", "said"),
    [("text", "returned an object of type str. Return an nn.Module; or arrays"), ("numbers", "'0' is of type int")],
)
def test_refuses_what_is_no_model(begun: Callable[..., Begun], of: str, said: str) -> None:
    """A function that returns neither a module nor arrays is refused with what it may return."""
    with pytest.raises(AtollError, match=said):
        begun(f"{__name__}:weights", args={"of": of})


def test_building_a_model_keeps_random_generators(tmp_path: Path) -> None:
    """A start of the server leaves the program's random number generators as they were; the initial model depends on
    `run.seed` alone.
    """
    models, settings = [], {"model.source": f"{__name__}:Drawn", "run.seed": 7}
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        before = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()
        for _ in range(2):
            with plain_server(tmp_path / str(seed), **settings) as server:
                models.append(tensors_digest(load_file(server.save_state(tmp_path / "now.safetensors"))))
        assert (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()) == before
    assert len(set(models)) == 1


@pytest.mark.covers("P7")
def test_an_initial_mask_may_contain_inf_but_not_nan(begun: Callable[..., Begun]) -> None:
    """An initial model may have a mask of -Inf, which is only copied. NaN is refused."""
    assert begun(f"{__name__}:masked")[0]["mask"] == [[0.0, -torch.inf], [0.0, 0.0]]
    with pytest.raises(ConfigError, match=r"'mask' contains NaN or Inf\. Check how it is initialised"):
        begun(f"{__name__}:masked", args={"by": torch.nan})


@pytest.mark.covers("P7")
def test_a_run_starts_from_a_folder_of_files(tmp_path: Path, begun: Callable[..., Begun]) -> None:
    """A run can start from a folder of .safetensors files, which is how large models are saved.

    A folder without such a file is refused, and so is one with the same tensor in two files.
    """
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"no \.safetensors file.*save_file"):
        begun(folder)
    save_file({"a": torch.ones(2)}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": torch.full((3,), 2.0)}, folder / "model-00002-of-00002.safetensors")
    assert begun(folder)[0] == {"a": [1.0, 1.0], "b": [2.0, 2.0, 2.0]}
    (tmp_path / "run.toml").write_text('algorithm.name = "fedavg"\nmodel.source = "model"\n')
    assert Settings.read(tmp_path / "run.toml", environ={}).model.source == str(folder)
    save_file({"b": torch.zeros(1)}, folder / "other.safetensors")
    with pytest.raises(ConfigError, match=r"tensor 'b' is in .*other\.safetensors"):
        begun(folder)


@pytest.mark.covers("P17", "X2")
@pytest.mark.parametrize("name", ["model.pt", "model.pth", "pytorch_model.bin", "last.ckpt"])
def test_refuses_a_pickled_model_and_names_a_converter(name: str, begun: Callable[..., Begun]) -> None:
    with pytest.raises(ConfigError, match=r"is a pickle.*save_file\(model\.state_dict\(\), 'model\.safetensors'\)"):
        begun(name)


def run_one_round(model: nn.Module | str, folder: Path, build: Callable[[], nn.Module]) -> Any:
    """A run of one round from a model, whose worker has it as a module and changes nothing."""
    with plain_server(folder, model, rounds=1) as server:
        trained = federated(server, folder, lambda module: None, build)
        assert server.wait(30)
    return trained


@pytest.mark.covers("P7")
def test_a_run_starts_from_exported_tied_tensors(tmp_path: Path, begun: Callable[..., Begun]) -> None:
    """A new run can start from the export of a model with tied tensors, and the tensors stay tied."""
    # It keeps one tensor with an alias. Guards against two tensors in place of one, for which every worker was refused
    # as having another model.
    run_one_round(TiedHead(), tmp_path / "one", TiedHead)
    export = tmp_path / "one" / "state" / "exports" / "model.safetensors"
    model = run_one_round(str(export), tmp_path / "two", TiedHead)
    assert torch.equal(model.head.weight, load_file(export)["head.weight"])
    assert begun(export)[1]["aliases"] == [{"name": "head.weight", "owner": "table.weight"}]


class OnlyTied(TiedHead):
    """Without a buffer, of which a plain file does not say that it is one."""

    def __init__(self) -> None:
        super().__init__()
        del self.scale


@pytest.mark.covers("P7")
@pytest.mark.parametrize("loop", ["federated", "diloco"])
def test_a_file_may_lack_names_of_tied_tensors(tmp_path: Path, loop: str) -> None:
    """If the model file has a tied tensor under only one of its names, training and the export still work.

    Hugging Face writes such files, and they do not say that the tensor has another name.
    """
    file, initial = tmp_path / "model.safetensors", OnlyTied()
    save_file({name: tensor for name, tensor in initial.state_dict().items() if name != "head.weight"}, file)
    expected = initial.table.weight.detach() + 1
    model = OnlyTied()
    if loop == "federated":
        with plain_server(tmp_path, str(file), rounds=1) as server:
            with atoll.join(server.url, site="a", folder=tmp_path / "w") as worker:
                fl_round = next(iter(worker))
                fl_round.load_into(model)
                with torch.no_grad():
                    model.table.weight.add_(1)
                fl_round.submit(model)
                assert server.wait(30)
                worker.load_into(model)
    else:
        with plain_server(tmp_path, str(file), rounds=1, H=1, **PLAIN_DILOCO) as server:
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            with atoll.DiLoCo(model, optimizer, server=server.url, site="a", folder=tmp_path / "w"):
                model.table.weight.grad = -torch.ones(5, 2)
                optimizer.step()
            assert server.wait(30)
    assert model.head.weight is model.table.weight
    assert torch.allclose(model.head.weight, expected, rtol=0, atol=1e-6)
    exported = load_file(tmp_path / "state" / "exports" / "model.safetensors")
    assert exported.keys() == {"table.weight"}
    assert torch.allclose(exported["table.weight"], expected, rtol=0, atol=1e-6)


@pytest.mark.covers("P7", "X3")
@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("table.weight", "head.weight"), r"a ties head\.weight to table\.weight, but the run has two tensors"),
        (("head.weight",), r"a ties head\.weight to table\.weight, but the run has only head\.weight"),
    ],
    ids=str,
)
def test_a_site_with_other_tied_tensors_is_refused(tmp_path: Path, names: tuple[str, ...], told: str) -> None:
    """A site with a model that ties two tensors is refused if the run's file does not tie them in the same way.

    The file has the tensor under both names without a tie, or under its second name alone.
    """
    save_file({name: torch.zeros(5, 2) for name in names} | {"scale": torch.ones(1)}, tmp_path / "m.safetensors")
    with plain_server(tmp_path, str(tmp_path / "m.safetensors"), rounds=1) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "w") as worker:
            with pytest.raises(SchemaMismatch, match=rf'{told}.*model\.source = "module:function"'):
                next(iter(worker)).load_into(TiedHead())


@pytest.mark.parametrize("told", ['{"head.weight": "table.weight"}', '{"head.weight": "gone"}', "[1]", "not JSON"])
def test_a_wrong_list_of_ties_is_ignored(tmp_path: Path, begun: Callable[..., Begun], told: str) -> None:
    """If a file's metadata lists wrong tied tensors or is not JSON, the server keeps two tensors and their values."""
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
def test_an_export_lists_its_buffers(tmp_path: Path, begun: Callable[..., Begun]) -> None:
    """A new run that starts from an export has the same buffers, because the export lists them."""
    # Guards against groups guessed from names, for which every worker with the module was refused.
    run_one_round(Scaling(), tmp_path / "one", Scaling)
    export = tmp_path / "one" / "state" / "exports" / "model.safetensors"
    with safe_open(export, framework="pt") as file:
        metadata = file.metadata()
    assert json.loads(metadata["atoll.buffers"]) == ["scale", "again.scale"]
    assert metadata["format"] == "pt"  # as `from_pretrained` asks for
    run_one_round(str(export), tmp_path / "two", Scaling)
    assert groups(begun(export)[1]) == {"running_mean": "params", "scale": "buffers"}


def test_the_buffers_setting_extends_a_files_list(tmp_path: Path, begun: Callable[..., Begun]) -> None:
    """The setting `model.buffers` adds buffers to those that a file's metadata lists."""
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1), "b": torch.ones(1), "c": torch.ones(1)}, file, {"atoll.buffers": '["a"]'})
    assert groups(begun(file, buffers={"b": "mean"})[1]) == {"a": "buffers", "b": "buffers", "c": "params"}


@pytest.mark.parametrize("told", ["[]", '["gone", "own"]', "{}", "not JSON", '[["x"]]'])
def test_ignores_an_outdated_list_of_buffers(tmp_path: Path, begun: Callable[..., Begun], told: str) -> None:
    """If a file's list of buffers is malformed or has a name without a tensor, `running_mean` of batch normalisation
    still becomes a buffer.

    Only a valid list without that name makes it a parameter.
    """
    file = tmp_path / "model.safetensors"
    save_file({name: torch.ones(1) for name in ("bn.running_mean", "own", "w")}, file, {"atoll.buffers": told})
    found = groups(begun(file)[1])
    assert found["w"] == "params"
    assert found["own"] == ("buffers" if "own" in told else "params")
    assert found["bn.running_mean"] == ("params" if told == "[]" else "buffers")


def scaffold(url: str, folder: Path, site: str) -> None:
    model = build_model()
    with atoll.join(url, site=site, folder=folder / "workers") as worker:
        for fl_round in worker:
            fl_round.load_into(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            with fl_round.correct(model, optimizer):
                for step in range(3):
                    local_step(model, optimizer, site, step)
            fl_round.submit(model)


DILOCO = {"algorithm.name": "diloco", "diloco.sync_every": 4}
STREAMING = {"diloco.num_fragments": 2, "diloco.fragment_update_alpha": 0.5, "diloco.fragment_sync_delay": 1}
SCAFFOLD = {"algorithm.name": "scaffold", "algorithm.outer_optimizer.momentum": 0.0}
RUNS: dict[str, tuple[dict[str, Any], Callable[[str, Path], Any]]] = {
    "fedavg": ({}, FederatedSites),
    "scaffold": (SCAFFOLD, lambda url, folder: Threads(*(partial(scaffold, url, folder, site) for site in SITES))),
    "diloco": (DILOCO, lambda url, folder: DiLoCoSites(url, folder, 12)),
    "streaming": (DILOCO | STREAMING, lambda url, folder: DiLoCoSites(url, folder, 12)),
}


def saved(folder: Path) -> str:
    """The model as safetensors saves it: by size of the elements and then by name, biases before weights."""
    save_file(build_model().state_dict(), folder / "initial.safetensors")
    return str(folder / "initial.safetensors")


def run(folder: Path, model: str | None, name: str) -> str:
    settings, sites = RUNS[name]
    with serve(folder, model, **settings) as server:
        taking_part = sites(server.url, folder)
        server.run()
        taking_part.join()
    return tensors_digest(exported(folder))


@pytest.mark.parametrize("name", RUNS)
def test_a_model_file_gives_the_modules_result(name: str, tmp_path: Path) -> None:
    """A run that starts from a model file gives the same result as one that starts from the module."""
    # The sites bring the module. When streaming, the fragments have other tensors, so the bits may differ.
    by_file = run(tmp_path / "file", saved(tmp_path), name)
    assert name == "streaming" or by_file == run(tmp_path / "module", None, name)


def test_a_run_from_a_file_may_continue_with_its_module(tmp_path: Path) -> None:
    """A run that started from a model file continues if the program then gives the module of that file."""
    with serve(tmp_path, saved(tmp_path), sites=1) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "workers") as worker:
            fl_round = next(iter(worker))
            fl_round.submit(fl_round.load_into(build_model()))
    with serve(tmp_path, build_model(), sites=1) as server:
        FederatedSites(server.url, tmp_path, ["a"]).join()
        server.run()


built: list[str] = []
wide = 3


def build(counts: bool = False) -> nn.Module:
    """A tied model; with `counts`, one that looks at its own values."""
    embed, head = nn.Embedding(5, wide), nn.Linear(wide, 5, bias=False)
    head.weight = embed.weight
    if counts:
        head.weight.sum().item()
    built.append(head.weight.device.type)
    return nn.Sequential(embed, nn.BatchNorm1d(wide), head)


@pytest.mark.covers("F30")
@pytest.mark.parametrize(("counts", "devices"), [(False, ["meta"]), (True, ["cpu"])])
def test_a_restart_builds_the_model_without_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: bool, devices: list[str]
) -> None:
    """A restart compares the model with that of the run without allocating its weights, and refuses another model."""
    # A module that reads its own values while it is built is built on the CPU.

    def start() -> atoll.Server:
        return plain_server(tmp_path, f"{__name__}:build", **{"model.args": {"counts": counts}}).start()

    start().stop()
    built.clear()
    start().stop()
    assert built == devices
    monkeypatch.setattr(sys.modules[__name__], "wide", 4)
    with pytest.raises(SchemaMismatch, match=r"0\.weight F32\[5, 4\].*0\.weight F32\[5, 3\]"):
        start()


def test_a_restart_reads_only_the_model_files_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart reads only the header of the model file to compare it with the run's model. A file of another model is
    refused.
    """
    file = tmp_path / "model.safetensors"
    save_file(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).state_dict(), file)
    plain_server(tmp_path, str(file)).start().stop()
    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "load_file", lambda path: pytest.fail(f"{path} is read"))
        plain_server(tmp_path, str(file)).start().stop()
    save_file(nn.Linear(2, 3).state_dict(), file)
    with pytest.raises(SchemaMismatch, match="this start"):
        plain_server(tmp_path, str(file)).start()


@pytest.mark.parametrize("source", ["gone.safetensors", "no_such_module:build", f"{__name__}:no_such_function"])
def test_continues_without_the_initial_model(tmp_path: Path, caplog: pytest.LogCaptureFixture, source: str) -> None:
    """If `model.source` cannot be read any more, the run continues with its own model, and the log says so once. A new
    run is refused.
    """
    with pytest.raises(ConfigError, match=source) as refused:
        plain_server(tmp_path / "other", source).start()
    plain_server(tmp_path, TiedHead()).start().stop()
    with plain_server(tmp_path, source, rounds=1) as server:
        assert [record.getMessage() for record in caplog.records if source in record.getMessage()] == [
            f"the run continues with its own model, although model.source cannot be read: {refused.value}"
        ]
        federated(server, tmp_path, lambda module: None, TiedHead)
        assert server.wait(30)
