"""Flags of `atoll server`: made from the settings, one for each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atoll import Settings
from atoll.cli import main as cli
from atoll.cli import server
from atoll.errors import ConfigError
from atoll.protocol import status_messages


@pytest.fixture
def read(monkeypatch):
    """Parse a command line of `atoll server` as far as the settings."""
    seen: list[Settings] = []

    def stop(settings: Settings) -> None:
        seen.append(settings)

    monkeypatch.setattr(server, "run_until_finished", stop)

    def parse(*arguments: str) -> Settings:
        outcome = CliRunner().invoke(cli.app, ["server", *arguments], catch_exceptions=False)
        assert outcome.exit_code == 0, outcome.output
        return seen[-1]

    return parse


@pytest.mark.covers("L12")
def test_set_and_flags_become_settings(read) -> None:
    settings = read("--set", "diloco.sync_every=30", "--set", "network.insecure=yes", "--dir", "here", "--rounds", "3")
    assert (settings.diloco.sync_every, settings.network.insecure, settings.rounds.total) == (30, True, 3)
    assert settings.disk.state_dir == Path("here")
    settings = read("--host", "::1", "--port", "0", "--token-file", "token", "--set", "model.buffers=*mean, *var")
    assert (settings.network.host, settings.network.port) == ("::1", 0)
    assert settings.network.token_file == Path("token")
    assert settings.model.buffers == ("*mean", "*var")


@pytest.mark.covers("L23")
def test_sets_what_low_communication_runs_choose(read) -> None:
    chosen = [
        "async.enabled=true",
        "aggregation.upload_codec.name=none",
        "algorithm.outer_optimizer={lr = 0.5, betas = [0.9, 0.95]}",
        "diloco.num_fragments=2",
        "diloco.sync_every=20",
        "diloco.fragment_update_alpha=0.5",
        "diloco.dynamic_local_steps=true",
        "async.max_staleness=3",
        "disk.export_dir=out",
    ]
    settings = read(*(each for text in chosen for each in ("--set", text)))
    assert (settings.async_.enabled, settings.async_.max_staleness) == (True, 3)
    assert settings.aggregation.upload_codec.name == "none"
    assert settings.algorithm.outer_optimizer.options == {"lr": 0.5, "betas": [0.9, 0.95]}
    assert (settings.diloco.num_fragments, settings.diloco.sync_every) == (2, 20)
    assert (settings.diloco.fragment_update_alpha, settings.diloco.dynamic_local_steps) == (0.5, True)
    assert settings.disk.export_dir == Path("out")


def test_a_flag_wins_over_the_run_file(read, tmp_path) -> None:
    (tmp_path / "run.toml").write_text('algorithm.name = "fedavg"\nrounds.total = 7\ndisk.state_dir = "state"\n')
    settings = read(str(tmp_path / "run.toml"), "--rounds", "9")
    assert (settings.algorithm.target, settings.rounds.total) == ("fedavg", 9)
    assert settings.disk.state_dir == tmp_path / "state"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "rounds.total=many"], ["command line: rounds.total", "'many'"]),
        (["--set", "algorithm.outer_optimizer=lr=1"], ["--set", "algorithm.outer_optimizer={key = 1}"]),
        (["missing.toml"], ["missing.toml", "atoll new"]),
        (["--set", "rounds.min_sites=5"], ["rounds.min_sites is 5", "rounds.sites is 1"]),
    ],
)
def test_a_wrong_value_names_the_flag_and_the_remedy(arguments: list[str], words: list[str]) -> None:
    outcome = CliRunner().invoke(cli.app, ["server", *arguments])
    assert isinstance(outcome.exception, ConfigError)
    assert [word for word in words if word not in str(outcome.exception)] == []


def test_modules_beside_the_run_file_and_in_the_current_folder_can_be_imported(read, tmp_path, monkeypatch) -> None:
    import sys

    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "run.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    read("there/run.toml")
    assert {str(tmp_path), str(tmp_path / "there")} <= set(sys.path)


@pytest.mark.parametrize("present", [True, False])
def test_a_run_file_that_was_not_named_is_offered(tmp_path, monkeypatch, present: bool) -> None:
    if present:
        (tmp_path / "run.toml").write_text('model.source = "model:build"\n')
    monkeypatch.chdir(tmp_path)
    outcome = CliRunner().invoke(cli.app, ["server", "--port", "0"])
    assert isinstance(outcome.exception, ConfigError)
    assert ("Did you mean: atoll server run.toml?" in str(outcome.exception)) is present


def fragment(
    reason: str = "", *, number: int = 0, phase: str = "open", **awaited_s: float
) -> status_messages.FragmentStatus:
    missing = [status_messages.Missing(site=site, for_s=seconds) for site, seconds in awaited_s.items()]
    return status_messages.FragmentStatus(fragment=number, version=1, phase=phase, waiting_for=missing, reason=reason)


def test_names_late_sites_only() -> None:
    reminder = server.Reminder(0.0)
    assert reminder.line([fragment("waits for a and b", a=14.0, b=2.0)], 100.0) == ""
    assert reminder.line([fragment("waits for a and b", a=15.0, b=2.0)], 101.0) == "waiting for a (15 s)"
    assert server.Reminder(0.0).line([fragment("waits for 2 sites to join")], 20.0) == "waits for 2 sites to join"


def test_what_all_fragments_wait_for_is_said_once_and_those_that_are_finished_wait_for_nothing() -> None:
    joins = [fragment("waits for 2 sites to join"), fragment("waits for 2 sites to join", number=1)]
    assert server.Reminder(0.0).line(joins, 20.0) == "waits for 2 sites to join"
    one = [fragment("waits for a", a=20.0), fragment("waits for b", number=1, b=2.0)]
    assert server.Reminder(0.0).line(one, 20.0) == "fragment 0 waiting for a (20 s)"
    last = [fragment("is finished", phase="finished"), fragment("waits for a", number=1, a=20.0)]
    assert server.Reminder(0.0).line(last, 20.0) == "fragment 1 waiting for a (20 s)"


def test_the_same_is_said_again_after_twice_the_pause_up_to_ten_minutes() -> None:
    reminder = server.Reminder(0.0)
    said = [second for second in range(3000) if reminder.line([fragment(a=float(second))], float(second))]
    # pauses of 15, 30, 60, 120, 240, 480, then 600 s, not 960
    assert said == [15, 45, 105, 225, 465, 945, 1545, 2145, 2745]
    assert reminder.line([fragment(a=3000.0, b=20.0)], 3000.0) == "waiting for a (50 min 0 s), b (20 s)"


def test_config_show_refuses_unknown_names_and_says_where_a_value_comes_from(atoll_command, tmp_path) -> None:
    (tmp_path / "run.toml").write_text('[algorithm]\nname = "fedavgg"\n')
    outcome = atoll_command("config", "show", "run.toml")
    assert outcome.returncode == 2
    assert "Did you mean 'fedavg'?" in outcome.stderr
    outcome = atoll_command("config", "show", "run.toml", "--set", "algorithm.name=fedavg")
    assert re.search(r"^state_dir = .*  # default$", outcome.stdout, re.MULTILINE)
