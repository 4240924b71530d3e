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

import pytest
import torch
from kit import tensors_digest, together
from kit.servers import plain_server
from safetensors.torch import load_file
from torch import nn
from transformers_world import arguments

import atoll
from atoll.errors import SchemaMismatch, UsageError

HALF_RANK = 2
NAMES = {"base_model.model.first.lora_A.weight", "base_model.model.first.lora_B.weight"}
FILES = ["adapter_config.json", "adapter_model.safetensors"]


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


# PEFT takes a second to import: these functions do it, so that only processes that run these tests wait for it.


def lora(layer: str = "first", rank: int = HALF_RANK, **options: Any) -> Any:
    import peft

    return peft.LoraConfig(r=rank, target_modules=[layer], **options)


def with_adapter(seed: int = 1, **options: Any) -> Any:
    import peft

    torch.manual_seed(seed)
    return peft.get_peft_model(Base(), lora(**options))


def adapter(model: Any, *name: str) -> Any:
    """`atoll.integrations.peft.adapter`."""
    from atoll.integrations import peft

    return peft.adapter(model, *name)


def opened(folder: Path) -> Any:
    """The base model with an adapter that was saved; PEFT only warns of tensors that are missing."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return peft.PeftModel.from_pretrained(Base(), folder)


def test_a_peft_model_given_whole_says_what_travels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The base has 51 floats, the adapter 20: the base travels in vain, which is said once, with the remedy."""
    with plain_server(tmp_path, with_adapter(), rounds=2, sites=1) as server:
        model = with_adapter()
        with atoll.join(server.url, "a", folder=tmp_path / "w") as worker:
            for fl_round in worker:
                fl_round.load_into(model)
                fl_round.submit(model)
    said = [line for line in caplog.messages if "204 B of the 284 B that travel each way in a round" in line]
    assert [line.partition("204 B")[0] for line in said] == ["a: ", "a reports: "]
    assert "as atoll.integrations.peft does with adapters" in said[0]


@pytest.mark.covers("S17")
def test_two_sites_train_an_adapter(tmp_path: Path) -> None:
    """Two sites train only an adapter, and PEFT can open what the server saves."""
    # Site `a` adds 1 to every adapter weight and site `b` adds 3, so that each round adds 2. Both report that version 1
    # is best.
    from atoll.integrations.peft import export

    with_adapter().peft_config["default"].save_pretrained(str(tmp_path))
    start, models = adapter(with_adapter()), {"a": with_adapter(seed=7), "b": with_adapter(seed=8)}
    before = {name: value.clone() for name, value in start.state_dict().items()}
    options = {
        "disk.export_every": 1,
        "rounds.best_metric": "score",
        "model.persistor.path": "atoll.integrations.peft:AdapterFolder",
        "model.persistor.config": str(tmp_path / "adapter_config.json"),
        "model.persistor.folder": str(tmp_path / "opens"),
    }

    def site(name: str) -> None:
        travels = adapter(models[name])
        with atoll.join(server.url, site=name, folder=tmp_path / name) as worker:
            for fl_round in worker:
                fl_round.load_into(travels)
                with torch.no_grad():
                    for parameter in models[name].parameters():
                        if parameter.requires_grad:
                            parameter += {"a": 1.0, "b": 3.0}[name]
                measured = {1: 0.1, 2: 0.3, 3: 0.2}[fl_round.number]  # of the version that the round began with
                fl_round.submit(travels, metrics={"score": measured})
            worker.load_into(travels)

    with plain_server(tmp_path, start, rounds=3, sites=2, **options) as server:
        together(*(partial(site, name) for name in models))
        assert server.status().model_bytes == 4 * (HALF_RANK * 4 + 6 * HALF_RANK)  # fp32: A is r × 4, B is 6 × r
        server.run()
    assert load_file(server.exports / "model.safetensors").keys() == NAMES
    exported = export(server.exports / "model.safetensors", models["a"].peft_config["default"], tmp_path / "adapter")
    for folder, rounds in ((tmp_path / "opens", 3), (tmp_path / "opens" / "best", 1), (exported, 3)):
        found = adapter(opened(folder)).state_dict()
        assert found.keys() == before.keys()
        assert all(torch.allclose(found[name], value + 2.0 * rounds) for name, value in before.items())
    beside = (tmp_path / "adapter_config.json").stat().st_mode  # users that may read it may read what is saved
    for folder in (tmp_path / "opens", tmp_path / "opens" / "best"):
        modes = {path.name: path.stat().st_mode for path in folder.iterdir() if path.is_file()}
        assert modes == dict.fromkeys(FILES, beside)
    assert not (tmp_path / "opens" / ".new").exists()
    written = json.loads((exported / "adapter_config.json").read_text())
    assert (written["r"], written["inference_mode"]) == (HALF_RANK, True)
    x = torch.randn(5, 4)
    for model in models.values():
        assert torch.equal(opened(exported)(x), model.eval()(x))
        assert torch.equal(model.base_model.model.last.weight, Base().last.weight)
    assert not models["a"].peft_config["default"].inference_mode  # export changed a copy


def test_readers_always_see_a_complete_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While an adapter is saved, readers see a complete one at any moment, and leftovers of a killed
    save do no harm.
    """
    from atoll.integrations.peft import AdapterFolder

    with_adapter().peft_config["default"].save_pretrained(str(tmp_path))
    state = adapter(with_adapter()).state_dict()
    folder = AdapterFolder(str(tmp_path / "adapter_config.json"), str(tmp_path / "opens"))
    folder.save(state, {})
    really, killed = os.replace, []

    def replace(source: Path, target: Path) -> None:
        opened(tmp_path / "opens")
        if not killed:
            killed.append(source)
            raise KeyboardInterrupt
        really(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        folder.save(state, {})
    folder.save({name: value + 1 for name, value in state.items()}, {})
    found = adapter(opened(tmp_path / "opens")).state_dict()
    assert all(torch.equal(found[name], value + 1) for name, value in state.items())
    assert sorted(path.name for path in (tmp_path / "opens").iterdir()) == FILES


@pytest.mark.covers("X9")
def test_an_adapter_is_not_saved_through_a_link(tmp_path: Path) -> None:
    """If a link stands in place of the folder `.new`, saving an adapter replaces the link and changes nothing behind
    it.

    The adapter's files are first written into `.new`.
    """
    from atoll.integrations.peft import AdapterFolder

    with_adapter().peft_config["default"].save_pretrained(str(tmp_path))
    folder, other = AdapterFolder(str(tmp_path / "adapter_config.json"), str(tmp_path / "opens")), tmp_path / "other"
    other.mkdir()
    (other / "adapter_config.json").write_text("of another program")
    (tmp_path / "opens").mkdir()
    (tmp_path / "opens" / ".new").symlink_to(other)
    folder.save(adapter(with_adapter()).state_dict(), {})
    assert [path.read_text() for path in other.iterdir()] == ["of another program"]
    assert sorted(path.name for path in (tmp_path / "opens").iterdir()) == FILES


def test_an_adapter_persistor_needs_its_config_file(tmp_path: Path) -> None:
    options = {
        "model.persistor.path": "atoll.integrations.peft:AdapterFolder",
        "model.persistor": {"config": str(tmp_path / "nowhere.json"), "folder": str(tmp_path / "opens")},
    }
    with pytest.raises(UsageError, match=r"adapter_config\.json does not exist at '.*nowhere\.json'.*save_pretrained"):
        plain_server(tmp_path, adapter(with_adapter()), **options).start()


def test_the_adapter_shares_the_models_parameters() -> None:
    """The adapter that a site sends has the model's own trainable parameters, not copies."""
    model = with_adapter(modules_to_save=["last"])
    travels = adapter(model)
    assert set(dict(travels.named_parameters())) == NAMES | {
        "base_model.model.last.weight",
        "base_model.model.last.bias",
    }
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert {id(parameter) for parameter in travels.parameters()} == trained


def test_an_adapter_is_chosen_by_name() -> None:
    """If a model has several adapters, the user can choose by name which one takes part."""
    model = with_adapter()
    model.add_adapter("other", lora("last", 3))
    assert set(adapter(model).state_dict()) == NAMES
    assert set(adapter(model, "other").state_dict()) == {name.replace("first", "last") for name in NAMES}
    with pytest.raises(UsageError, match=r"no adapter 'third'. It has 'default', 'other'"):
        adapter(model, "third")


def test_refuses_a_model_without_an_adapter(tmp_path: Path) -> None:
    """`adapter` refuses a model without an adapter, and `export` refuses a file that does not exist."""
    from atoll.integrations.peft import export

    with pytest.raises(UsageError, match="got an object of type Base"):
        adapter(Base())
    with pytest.raises(UsageError, match="does not exist"):
        export(tmp_path / "none.safetensors", lora(), tmp_path / "out")


def test_an_adapter_run_refuses_the_whole_model(tmp_path: Path) -> None:
    """If a run trains only an adapter, a site cannot load a version into the whole model."""
    with plain_server(tmp_path, adapter(with_adapter())) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "a") as worker:
            fl_round = next(iter(worker))
            with pytest.raises(SchemaMismatch):
                fl_round.load_into(with_adapter())


def test_a_merged_adapter_neither_receives_nor_is_sent() -> None:
    """An adapter that is merged into its base model can be neither loaded nor sent; one that is not merged can."""
    # Otherwise the base model would train without the received adapter, and zeros would be sent.
    model = with_adapter()
    travels = adapter(model)
    model.merge_adapter()
    for use in (travels.state_dict, lambda: adapter(model)):
        with pytest.raises(UsageError, match=r"'default' is merged.*unmerge_adapter"):
            use()
    model.unmerge_adapter()
    assert set(travels.state_dict()) == NAMES
    model.add_adapter("other", lora(rank=3))
    model.set_adapter("other")
    model.merge_adapter(["other"])  # part of the base model from now on, which is no matter of the run
    assert set(travels.state_dict()) == NAMES


@pytest.mark.parametrize("how", ["created again", "moved"])
def test_a_replaced_adapter_is_refused(how: str) -> None:
    """An adapter whose tensors the model has replaced is refused."""
    # Otherwise the old tensors would be pulled and sent, though they take no part in training.
    model = with_adapter(modules_to_save=["last"])
    travels = adapter(model)
    if how == "created again":
        model.add_adapter("other", lora(rank=3))
        model.set_adapter("other")
        model.delete_adapter("default")
        model.add_adapter("default", lora())
    else:
        model.base_model.model.last.modules_to_save["default"].weight = nn.Parameter(torch.zeros(3, 6))
    with pytest.raises(UsageError, match=r"'base_model.* was replaced after.*Call adapter\(model\) again"):
        travels.state_dict()


@pytest.mark.slow
@pytest.mark.covers("S17")
@pytest.mark.parametrize("algorithm", ["scaffold", "diloco"])
def test_the_trainer_callback_sends_only_the_adapter(tmp_path: Path, algorithm: str) -> None:
    import transformers

    from atoll.integrations.transformers import AtollCallback

    models = {"a": with_adapter(seed=7), "b": with_adapter(seed=8)}
    records = [{"x": torch.randn(4), "target": torch.ones(3)} for _ in range(8)]
    start = adapter(with_adapter())
    with plain_server(tmp_path, start, algorithm=algorithm, sites=2, rounds=3, H=2) as server:
        # both are built before one trains: TrainingArguments clears the state that all Accelerators of a process share
        trainers = [
            transformers.Trainer(
                model=model,
                args=arguments(tmp_path, learning_rate=1e-2),
                train_dataset=records,
                callbacks=[
                    AtollCallback(server.url, name, sync_every=2, module=adapter(model), folder=tmp_path / name)
                ],
            )
            for name, model in models.items()
        ]
        together(*(trainer.train for trainer in trainers), timeout_s=100)
        assert server.wait(30)
    result = load_file(server.exports / "model.safetensors")
    assert result.keys() == NAMES
    for model in models.values():
        assert tensors_digest(adapter(model).state_dict()) == tensors_digest(result)
    assert not any(torch.equal(value, result[name]) for name, value in start.state_dict().items())


@pytest.mark.parametrize("package", ["peft", "transformers"])
def test_a_missing_package_is_reported_with_its_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the package of an integration is missing, the error says which extra to install."""
    module = importlib.import_module(f"atoll.integrations.{package}")
    monkeypatch.setitem(sys.modules, package, None)  # importing it fails
    with pytest.raises(UsageError, match=rf"pip install 'atoll\[{package}\]'"):
        importlib.reload(module)
