"""A misspelt ATOLL_ variable is refused: ignored, it would let a site's script train alone, without a word."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness.processes import Nursery
from torch import nn

import atoll
from atoll.errors import ConfigError, UsageError

TRAINED = "trained alone"


def by_join(**options: bool) -> None:
    model = nn.Linear(2, 2)
    with atoll.join(**options) as worker:
        for fl_round in worker:
            fl_round.submit(model)


def by_functions(**options: bool) -> None:
    atoll.functional.init(**options)
    while atoll.functional.is_running():
        atoll.functional.receive(into=nn.Linear(2, 2))
        atoll.functional.send(nn.Linear(2, 2))


def by_diloco(**options: bool) -> None:
    model = nn.Linear(2, 2)
    with atoll.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), **options):
        pass


def by_tasks() -> None:
    with pytest.raises(UsageError), atoll.tasks(site="a"):
        pass


ALONE = [by_join, by_functions, by_diloco]


@pytest.mark.covers("X3")
@pytest.mark.parametrize("take_part", [*ALONE, by_tasks])
@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [("ATOLL_SERVR", "ATOLL_SERVER"), ("ATOLL_SITENAME", "ATOLL_SITE"), ("ATOLL_TOKENFILE", "ATOLL_TOKEN_FILE")],
)
def test_refuses_a_misspelt_variable_and_names_the_nearest(
    monkeypatch: pytest.MonkeyPatch, take_part: Callable[[], None], misspelt: str, meant: str
) -> None:
    monkeypatch.setenv(misspelt, "http://127.0.0.1:9")
    with pytest.raises(ConfigError) as refused:
        take_part()
    assert misspelt in refused.value.message
    assert f"{meant}?" in refused.value.remedy


@pytest.mark.parametrize("take_part", ALONE)
def test_trains_alone_where_the_variables_are_known(
    monkeypatch: pytest.MonkeyPatch, take_part: Callable[[], None]
) -> None:
    """Also settings of the server, and variables that only look alike."""
    for name in ("ATOLL_SITE", "ATOLL_DILOCO__SYNC_EVERY", "ATOLL_DISK__IN_FILES", "ATOLLS", "MY_ATOLL_SERVR"):
        monkeypatch.setenv(name, "1")
    take_part()


@pytest.mark.covers("X3")
@pytest.mark.parametrize("take_part", ALONE)
def test_a_script_that_requires_a_server_does_not_train_alone(take_part: Callable[..., None]) -> None:
    with pytest.raises(ConfigError) as refused:
        take_part(require_server=True)
    assert "ATOLL_SERVER" in refused.value.remedy


@pytest.mark.covers("X3")
def test_a_script_ends_with_the_exit_code_of_a_wrong_setting(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import atoll\nwith atoll.join() as worker:\n    print({TRAINED!r})\n")
    environment = os.environ | {"ATOLL_SERVR": "http://127.0.0.1:9"}
    ended = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == ConfigError.exit_code
    assert TRAINED not in ended.stdout


@pytest.mark.covers("X3")
def test_the_worker_command_refuses_before_it_starts_the_script(nursery: Nursery, tmp_path: Path) -> None:
    begun, log = tmp_path / "begun", tmp_path / "log"
    argv = ("atoll", "worker", "--server", "http://127.0.0.1:9", "--", "touch", str(begun))
    site = nursery.start(*argv, cwd=tmp_path, env={"ATOLL_SITENAME": "a"}, log=log)
    assert site.wait() == ConfigError.exit_code
    assert "ATOLL_SITENAME" in log.read_text()
    assert "ATOLL_SITE?" in log.read_text()
    assert not begun.exists()


@pytest.mark.covers("X3")
@pytest.mark.parametrize(
    "argv",
    [("status",), ("export", "out.safetensors"), ("evaluate", "--server", "http://127.0.0.1:9")],
    ids=lambda argv: argv[0],
)
def test_commands_that_ask_a_server_refuse_a_misspelt_variable(
    nursery: Nursery, tmp_path: Path, argv: tuple[str, ...]
) -> None:
    log = tmp_path / "log"
    command = nursery.start("atoll", *argv, cwd=tmp_path, env={"ATOLL_TOKENFILE": "token"}, log=log)
    assert command.wait() == ConfigError.exit_code
    assert "ATOLL_TOKENFILE" in log.read_text()
    assert "ATOLL_TOKEN_FILE?" in log.read_text()


@pytest.mark.covers("X3")
def test_a_trainer_of_transformers_refuses_a_misspelt_variable_before_it_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("transformers")
    from atoll.integrations.transformers import AtollCallback

    monkeypatch.setenv("ATOLL_SERVR", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="ATOLL_SERVR"):
        AtollCallback()


@pytest.mark.covers("X3")
def test_a_lightning_trainer_that_requires_a_server_does_not_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    trainer = lightning.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    with pytest.raises(ConfigError):
        atoll.integrations.lightning.patch(trainer, require_server=True)
    monkeypatch.setenv("ATOLL_SERVR", "http://127.0.0.1:9")
    with pytest.raises(ConfigError):
        atoll.integrations.lightning.patch(trainer)
