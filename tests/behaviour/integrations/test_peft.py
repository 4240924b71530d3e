"""Adapters alone travel, and the run's result opens with PeftModel.from_pretrained."""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from kit import together
from kit.servers import new_server
from safetensors import safe_open
from torch import nn

import atoll
from atoll.errors import SchemaMismatch, UsageError
from atoll.integrations.peft import AdapterFolder, adapter, export
from atoll.integrations.transformers import AtollCallback

HALF_RANK = 2


class Base(nn.Module):
    """Two layers; the first gets an adapter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> Any:
        out = self.last(torch.relu(self.first(x)))
        return out if target is None else {"loss": ((out - target) ** 2).mean(), "logits": out}


def with_adapter(seed: int = 1, **options: Any) -> Any:
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=HALF_RANK, target_modules=["first"], **options)
    return peft.get_peft_model(Base(), config)


NAMES = {"base_model.model.first.lora_A.weight", "base_model.model.first.lora_B.weight"}


def both(server: atoll.Server, work: Any) -> None:
    """Two sites at once."""
    together(*(partial(work, server.url, site) for site in ("a", "b")), timeout_s=100)
    assert server.wait(30)


@pytest.mark.covers("S17")
def test_what_the_server_saves_opens_with_peft(tmp_path: Path) -> None:
    """One site, which adds 1 in each of three rounds and says that the second version is the best."""
    with_adapter().peft_config["default"].save_pretrained(str(tmp_path))
    options: dict[str, Any] = {
        "algorithm.name": "fedavg",
        "rounds.total": 3,
        "disk.export_every": 1,
        "rounds.best_metric": "score",
        "model.persistor.path": "atoll.integrations.peft:AdapterFolder",
        "model.persistor.config": str(tmp_path / "adapter_config.json"),
        "model.persistor.folder": str(tmp_path / "opens"),
    }
    start, travels = adapter(with_adapter()), adapter(with_adapter(seed=5))
    before = {name: value.clone() for name, value in start.state_dict().items()}
    with new_server(start, **{"network.port": 0, "disk.state_dir": tmp_path / "state"}, **options) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "a") as worker:
            for fl_round in worker:
                fl_round.load_into(travels)
                with torch.no_grad():
                    for parameter in travels.parameters():
                        parameter += 1.0
                measured = {1: 0.1, 2: 0.3, 3: 0.2}[fl_round.number]  # of the version that the round began with
                fl_round.submit(travels, metrics={"score": measured})
        server.run()
    for folder, rounds in (("opens", 3.0), ("opens/best", 1.0)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            opened = peft.PeftModel.from_pretrained(Base(), tmp_path / folder)
        found = adapter(opened).state_dict()
        assert found.keys() == before.keys()
        assert all(torch.allclose(found[name], value + rounds) for name, value in before.items())
        beside = (tmp_path / "adapter_config.json").stat().st_mode  # whoever may read that may read this
        assert {path.name: path.stat().st_mode for path in (tmp_path / folder).iterdir() if path.is_file()} == {
            "adapter_config.json": beside,
            "adapter_model.safetensors": beside,
        }
    assert not (tmp_path / "opens" / ".new").exists()


def test_an_adapter_is_whole_for_readers_while_it_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what a save has left that was killed is no hindrance."""
    with_adapter().peft_config["default"].save_pretrained(str(tmp_path))
    state = adapter(with_adapter()).state_dict()
    folder = AdapterFolder(str(tmp_path / "adapter_config.json"), str(tmp_path / "opens"))
    folder.save(state, {})
    really, killed = os.replace, []

    def replace(source: Path, target: Path) -> None:
        peft.PeftModel.from_pretrained(Base(), tmp_path / "opens")
        if not killed:
            killed.append(source)
            raise KeyboardInterrupt
        really(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        folder.save(state, {})
    folder.save({name: value + 1 for name, value in state.items()}, {})
    opened = adapter(peft.PeftModel.from_pretrained(Base(), tmp_path / "opens")).state_dict()
    assert all(torch.equal(opened[name], value + 1) for name, value in state.items())
    assert sorted(path.name for path in (tmp_path / "opens").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_a_persistor_of_adapters_wants_its_config(tmp_path: Path) -> None:
    options = {"config": str(tmp_path / "nowhere.json"), "folder": str(tmp_path / "opens")}
    with pytest.raises(UsageError, match=r"adapter_config\.json does not exist at '.*nowhere\.json'.*save_pretrained"):
        atoll.Server(
            adapter(with_adapter()),
            settings={
                "rounds.total": 0,
                "algorithm.name": "fedavg",
                "network.port": 0,
                "disk.state_dir": tmp_path / "state",
                "model.persistor.path": "atoll.integrations.peft:AdapterFolder",
                "model.persistor": options,
            },
        ).start()


@pytest.mark.covers("S17")
def test_two_workers_move_the_adapter_and_the_result_opens_with_peft(tmp_path: Path) -> None:
    """One adds 1 to every adapter weight, the other 3: each round adds 2."""
    start = adapter(with_adapter())
    before = {name: value.clone() for name, value in start.state_dict().items()}
    models = {"a": with_adapter(seed=7), "b": with_adapter(seed=8)}
    options: dict[str, Any] = {
        "algorithm.name": "fedavg",
        "rounds.sites": 2,
        "rounds.total": 2,
        "disk.min_free_bytes": 0,
    }

    def site(url: str, name: str) -> None:
        travels = adapter(models[name])
        with atoll.join(url, site=name, folder=tmp_path / name) as worker:
            for fl_round in worker:
                fl_round.load_into(travels)
                with torch.no_grad():
                    for parameter in models[name].parameters():
                        if parameter.requires_grad:
                            parameter += {"a": 1.0, "b": 3.0}[name]
                fl_round.submit(travels)
            worker.load_into(travels)

    with new_server(start, **{"network.port": 0, "disk.state_dir": tmp_path / "state"}, **options) as server:
        both(server, site)
        assert server.status().model_bytes == 4 * (HALF_RANK * 4 + 6 * HALF_RANK)  # fp32: A is r × 4, B is 6 × r
    with safe_open(server.exports / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == NAMES
    folder = export(server.exports / "model.safetensors", models["a"].peft_config["default"], tmp_path / "adapter")
    written = json.loads((folder / "adapter_config.json").read_text())
    assert (written["r"], written["inference_mode"]) == (HALF_RANK, True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PEFT only warns of tensors that are missing
        opened = peft.PeftModel.from_pretrained(Base(), folder)
    found = adapter(opened).state_dict()
    for name, value in before.items():
        assert torch.allclose(found[name], value + 4.0)
    x = torch.randn(5, 4)
    for model in models.values():
        assert torch.equal(opened(x), model.eval()(x))
        assert torch.equal(model.base_model.model.last.weight, Base().last.weight)
    assert not models["a"].peft_config["default"].inference_mode  # export changed a copy


def test_the_adapter_shares_the_models_parameters() -> None:
    model = with_adapter(modules_to_save=["last"])
    travels = adapter(model)
    assert set(dict(travels.named_parameters())) == NAMES | {
        "base_model.model.last.weight",
        "base_model.model.last.bias",
    }
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert {id(parameter) for parameter in travels.parameters()} == trained


def test_an_adapter_is_chosen_by_name() -> None:
    model = with_adapter()
    model.add_adapter("other", peft.LoraConfig(r=3, target_modules=["last"]))
    assert set(adapter(model).state_dict()) == NAMES
    assert set(adapter(model, "other").state_dict()) == {name.replace("first", "last") for name in NAMES}
    with pytest.raises(UsageError, match=r"no adapter 'third'. It has 'default', 'other'"):
        adapter(model, "third")


def test_what_has_no_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="got a Base"):
        adapter(Base())
    with pytest.raises(UsageError, match="does not exist"):
        export(tmp_path / "none.safetensors", peft.LoraConfig(), tmp_path / "out")


def test_a_whole_model_is_refused_by_a_run_of_adapters(tmp_path: Path) -> None:
    with atoll.Server(
        adapter(with_adapter()),
        settings={
            "rounds.total": 0,
            "network.port": 0,
            "disk.state_dir": tmp_path / "state",
            "algorithm.name": "fedavg",
        },
    ) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "a") as worker:
            fl_round = next(iter(worker))
            with pytest.raises(SchemaMismatch):
                fl_round.load_into(with_adapter())


def test_a_merged_adapter_neither_receives_nor_is_sent() -> None:
    """Guards against a round in which the base model computed without the adapter, and zeros were sent."""
    model = with_adapter()
    travels = adapter(model)
    model.merge_adapter()
    for use in (travels.state_dict, lambda: adapter(model)):
        with pytest.raises(UsageError, match=r"'default' is merged.*unmerge_adapter"):
            use()
    model.unmerge_adapter()
    assert set(travels.state_dict()) == NAMES
    model.add_adapter("other", peft.LoraConfig(r=3, target_modules=["first"]))
    model.set_adapter("other")
    model.merge_adapter(["other"])  # part of the base model from now on, which is no matter of the run
    assert set(travels.state_dict()) == NAMES


@pytest.mark.parametrize("how", ["created again", "moved"])
def test_an_adapter_that_the_model_no_longer_has_is_refused(how: str) -> None:
    """A tensor that the model has replaced would be pulled into and sent, and have no part in training."""
    model = with_adapter(modules_to_save=["last"])
    travels = adapter(model)
    if how == "created again":
        model.add_adapter("other", peft.LoraConfig(r=3, target_modules=["first"]))
        model.set_adapter("other")
        model.delete_adapter("default")
        model.add_adapter("default", peft.LoraConfig(r=HALF_RANK, target_modules=["first"]))
    else:
        model.base_model.model.last.modules_to_save["default"].weight = nn.Parameter(torch.zeros(3, 6))
    with pytest.raises(UsageError, match=r"'base_model.* was replaced after.*Call adapter\(model\) again"):
        travels.state_dict()


@pytest.mark.slow
@pytest.mark.covers("S17")
@pytest.mark.parametrize("algorithm", ["scaffold", "diloco"])
def test_the_trainer_callback_sends_the_adapter_alone(tmp_path: Path, algorithm: str) -> None:
    models = {"a": with_adapter(seed=7), "b": with_adapter(seed=8)}
    records = [{"x": torch.randn(4), "target": torch.ones(3)} for _ in range(8)]

    def trainer(url: str, name: str) -> transformers.Trainer:
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path / "out" / name),
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            max_steps=100,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        callback = AtollCallback(url, name, sync_every=2, module=adapter(models[name]), folder=tmp_path / name)
        return transformers.Trainer(model=models[name], args=args, train_dataset=records, callbacks=[callback])

    options: dict[str, Any] = {
        "algorithm.name": algorithm,
        "rounds.sites": 2,
        "rounds.total": 3,
        "diloco.sync_every": 2,
    }
    start = adapter(with_adapter())
    with new_server(
        start, **{"network.port": 0, "disk.state_dir": tmp_path / "state", "disk.min_free_bytes": 0}, **options
    ) as server:
        # both are built before one trains: TrainingArguments clears the state that all Accelerators of a process share
        trainers = {name: trainer(server.url, name) for name in models}
        both(server, lambda _, name: trainers[name].train())
    ends = [adapter(model).state_dict() for model in models.values()]
    with safe_open(server.exports / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == NAMES
        for name in NAMES:
            assert torch.equal(ends[0][name], file.get_tensor(name))
            assert torch.equal(ends[1][name], file.get_tensor(name))
            assert not torch.equal(start.state_dict()[name], file.get_tensor(name))


@pytest.mark.parametrize("package", ["peft", "transformers"])
def test_a_package_that_is_missing_is_named_with_its_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[f"atoll.integrations.{package}"]
    monkeypatch.setitem(sys.modules, package, None)  # importing it fails
    with pytest.raises(UsageError, match=rf"pip install 'atoll\[{package}\]'"):
        importlib.reload(module)
