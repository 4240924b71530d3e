"""Settings: three sources and their order, and what a person is told who wrote something wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from atoll import Settings
from atoll.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_defaults_are_a_valid_run_and_cannot_be_changed_afterwards() -> None:
    settings = Settings.read(environ={})
    assert (settings.algorithm, settings.sync_every, settings.num_workers) == ("diloco", 500, 1)
    with pytest.raises(ValidationError):
        settings.rounds = 3  # type: ignore[misc]


@pytest.mark.covers("L12")
def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "rounds = 1\nsync_every = 1\nnum_workers = 1\nseed = 1\n")
    environ = {"ATOLL_ROUNDS": "2", "ATOLL_SYNC_EVERY": "2", "ATOLL_NUM_WORKERS": "2"}
    settings = Settings.read(path, {"rounds": 3, "sync_every": 3, "num_workers": None}, environ)
    assert (settings.rounds, settings.sync_every, settings.num_workers, settings.seed) == (3, 3, 2, 1)


@pytest.mark.covers("L12")
@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("name", "night run", "night run"),
        ("rounds", "3", 3),
        ("outer_lr", "0.5", 0.5),
        ("insecure", "yes", True),
        ("insecure", "false", False),
        ("durability", "power", "power"),
        ("state_dir", "runs/a", Path("runs/a")),
        ("port", "0", 0),
        ("buffers", "bn.*,ema.*", ("bn.*", "ema.*")),
        ("outer_options", "{weight_decay = 0.1, maximize = true}", {"weight_decay": 0.1, "maximize": True}),
    ],
)
def test_a_variable_is_read_as_what_the_setting_is(key: str, text: str, value: Any) -> None:
    assert getattr(Settings.read(environ={f"ATOLL_{key.upper()}": text}), key) == value


def test_paths_in_a_file_are_relative_to_it_and_others_to_the_process(tmp_path: Path) -> None:
    absolute = tmp_path / "elsewhere"
    text = (
        'state_dir = "state"\nsave_dir = "../out"\ntls_cert = "c.pem"\ntls_key = "k.pem"\n'
        f'token_file = "{absolute}"\nmodel = "init.safetensors"\n'
    )
    settings = Settings.read(write(tmp_path, text), environ={})
    assert settings.state_dir == tmp_path / "state"
    assert settings.save_dir == tmp_path / "../out"
    assert (settings.tls_cert, settings.tls_key) == (tmp_path / "c.pem", tmp_path / "k.pem")
    assert settings.token_file == absolute
    assert settings.model == str(tmp_path / "init.safetensors")

    settings = Settings.read(write(tmp_path, 'model = "my_models:build"\n'), {"state_dir": Path("s")}, {})
    assert (settings.model, settings.state_dir) == ("my_models:build", Path("s"))


def refusal(folder: Path, text: str, flags: dict[str, Any], environ: dict[str, str]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        Settings.read(write(folder, text), flags, environ)
    return caught.value


@pytest.mark.covers("X3")
@pytest.mark.parametrize(
    ("text", "flags", "environ", "source", "key"),
    [
        ("sync_evry = 5", {}, {}, "run.toml", "sync_evry"),
        ("sync-every = 5", {}, {}, "run.toml", "sync-every"),
        ("", {"sync_evry": 5}, {}, "flag --sync-evry", "sync_evry"),
        ("", {}, {"ATOLL_SYNC_EVRY": "5"}, "ATOLL_SYNC_EVRY", "sync_evry"),
    ],
)
def test_an_unknown_key_names_its_source_and_the_nearest(
    tmp_path: Path, text: str, flags: dict[str, Any], environ: dict[str, str], source: str, key: str
) -> None:
    error = refusal(tmp_path, text, flags, environ)
    assert error.message.endswith(f"{source}: there is no setting {key!r}.")
    assert error.remedy == "Did you mean 'sync_every'?"


def test_a_key_that_is_near_to_none_points_to_the_list(tmp_path: Path) -> None:
    assert refusal(tmp_path, "wandb = 1\n", {}, {}).remedy == "`atoll server --help` lists them all."


def test_a_section_of_a_run_file_is_told(tmp_path: Path) -> None:
    remedy = refusal(tmp_path, "[server]\nport = 1\n", {}, {}).remedy
    assert remedy == "A run file has no sections: put the keys at the top level."


def test_variables_of_a_worker_and_of_others_are_no_settings() -> None:
    from atoll.config import NOT_SETTINGS

    environ = dict.fromkeys(NOT_SETTINGS, "x") | {"PATH": "/bin", "ATOLLS": "3"}
    assert Settings.read(environ=environ) == Settings.read(environ={})


@pytest.mark.covers("X3")
@pytest.mark.parametrize(
    ("text", "flags", "environ", "message"),
    [
        ('rounds = "many"', {}, {}, "run.toml: rounds = 'many': input should be a valid integer"),
        ("", {"rounds": -1}, {}, "flag --rounds: rounds = -1: input should be greater than or equal to 0"),
        ("", {}, {"ATOLL_PORT": "http"}, "ATOLL_PORT: port = 'http': input should be a valid integer"),
        ("port = 70000", {}, {}, "port = 70000: input should be less than or equal to 65535"),
        ("outer_momentum = 1.0", {}, {}, "outer_momentum = 1.0: input should be less than 1"),
        ("idle_timeout_s = nan", {}, {}, "idle_timeout_s = nan: input should be greater than 0"),
        ('durability = "raid"', {}, {}, "durability = 'raid': input should be 'process' or 'power'"),
        ("", {}, {"ATOLL_MODEL_ARGS": "depth=3"}, "ATOLL_MODEL_ARGS is 'depth=3'."),
    ],
)
def test_a_wrong_value_names_its_source_and_itself(
    tmp_path: Path, text: str, flags: dict[str, Any], environ: dict[str, str], message: str
) -> None:
    error = refusal(tmp_path, text, flags, environ)
    assert message in str(error)
    assert error.remedy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("min_workers = 3\nnum_workers = 2", "min_workers is 3, but num_workers is 2"),
        (
            "num_workers = 3\nmin_workers = 2\nquorum = 1\nround_deadline_s = 9",
            "quorum is 1, below min_workers",
        ),
        ("num_workers = 3\nquorum = 2", "quorum is 2, but round_deadline_s is 0"),
        ("heartbeat_interval_s = 120", "heartbeat_interval_s is 120, not below heartbeat_timeout_s"),
        ("dylu = true", "dylu is True, but mode is 'sync': it has a meaning in async runs only. Leave dylu out, or"),
        ("max_staleness = 0", "max_staleness is 0, but mode is 'sync'"),
        ("sample_fraction = 0.5\nmode = 'async'", "sample_fraction is 0.5, but mode is 'async'"),
        (
            "mode = 'async'\nnum_workers = 2\nmin_workers = 2\nasync_buffer = 2\nnum_fragments = 2\nsync_every = 4",
            "mode is 'async', min_workers is 2, and num_fragments is 2",
        ),
        (
            "sync_every = 500\nnum_fragments = 3",
            "sync_every is 500, and num_fragments is 3: one fragment is due every sync_every/num_fragments steps, "
            "which has to be a whole number. Set sync_every to 501 or 498.",
        ),
        ("sync_every = 2\nnum_fragments = 3", "Set sync_every to 3."),
        ("sync_every = 30\nnum_fragments = 3\ntau = 11", "have to be merged within 10 steps. Set tau to at most 10"),
        ("num_fragments = 2\nmax_inflight = 3", "Set max_inflight to at most 2."),
        ("alpha = 1.5", "alpha = 1.5: input should be less than or equal to 1"),
        ('tls_cert = "c.pem"', "Only one of tls_cert and tls_key"),
        ('tls_key = "k.pem"', "Only one of tls_cert and tls_key"),
    ],
)
def test_values_that_contradict_each_other_are_refused(tmp_path: Path, text: str, message: str) -> None:
    error = refusal(tmp_path, text, {}, {})
    assert message in str(error)
    assert error.remedy


def test_no_timeout_goes_with_any_interval() -> None:
    settings = Settings.build({"heartbeat_timeout_s": 0, "heartbeat_interval_s": 500})
    assert settings.heartbeat_timeout_s == 0


@pytest.mark.covers("X3")
def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"There is no run file .*none.toml'\. `atoll new` writes one"):
        Settings.read(tmp_path / "none.toml", environ={})
    with pytest.raises(ConfigError, match="is a folder"):
        Settings.read(tmp_path, environ={})
    with pytest.raises(ConfigError, match=r"run\.toml: .*line 2.*A run file is TOML"):
        Settings.read(write(tmp_path, "rounds = 1\nrounds: 2\n"), environ={})
    (tmp_path / "run.toml").write_bytes(b"name = '\xff'")
    with pytest.raises(ConfigError, match="A run file is TOML"):
        Settings.read(tmp_path / "run.toml", environ={})
