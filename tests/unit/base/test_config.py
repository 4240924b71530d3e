"""Settings: three sources and their order, and what is said of a wrong one."""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from atoll import Settings
from atoll.config import FIELDS, NOT_SETTINGS, set_values, variable_of
from atoll.config.run_file import OTHER_KEYS, WITHOUT_SETTING
from atoll.config.settings import Async, Rounds
from atoll.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def codec(**table: Any) -> Any:
    """The table of a codec, as settings hold it."""
    return Settings.build({"aggregation.upload_codec": table}).aggregation.upload_codec


def test_defaults_are_valid_and_constant() -> None:
    """The default settings are valid. A settings object cannot be changed afterwards."""
    settings = Settings.read(environ={})
    assert (settings.algorithm.target, settings.diloco.sync_every, settings.rounds.sites) == (None, 500, 1)
    with pytest.raises(ValidationError):
        settings.rounds.total = 3


@pytest.mark.covers("L12")
def test_flags_override_variables_and_files(tmp_path: Path) -> None:
    """A flag overrides an environment variable, and an environment variable overrides the run file."""
    path = write(tmp_path, "rounds.total = 1\ndiloco.sync_every = 1\nrounds.sites = 1\nrun.seed = 1\n")
    environ = {"ATOLL_ROUNDS__TOTAL": "2", "ATOLL_DILOCO__SYNC_EVERY": "2", "ATOLL_ROUNDS__SITES": "2"}
    settings = Settings.read(path, {"rounds.total": 3, "diloco.sync_every": 3, "rounds.sites": None}, environ)
    assert (settings.rounds.total, settings.diloco.sync_every, settings.rounds.sites, settings.run.seed) == (3, 3, 2, 1)


@pytest.mark.covers("L12")
@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("run.name", "night run", "night run"),
        ("rounds.total", "3", 3),
        ("network.insecure", "yes", True),
        ("network.insecure", "false", False),
        ("network.insecure", "On", True),
        ("network.idle_timeout_s", "inf", math.inf),
        ("rounds.sample_fraction", "1", 1.0),
        ("rounds.min_sites", "1", 1),
        ("disk.durability", "power", "power"),
        ("disk.state_dir", "runs/a", Path("runs/a")),
        ("network.port", "0", 0),
        ("model.buffers", '{"bn.*" = "keep", n = "sum"}', {"bn.*": "keep", "n": "sum"}),
        ("model.args", "{depth = 3}", {"depth": 3}),
        ("aggregation.upload_codec", '{name = "topk", density = 0.1}', codec(name="topk", density=0.1)),
    ],
)
def test_variables_are_read_as_the_settings_type(key: str, text: str, value: Any) -> None:
    """The text of an environment variable or of `--set` is read as the type of the setting."""
    assert Settings.read(environ={variable_of(key): text}).at(key) == value
    assert Settings.read(None, set_values([f"{key}={text}"], FIELDS), {}).at(key) == value


def test_single_options_of_a_table_can_be_set(tmp_path: Path) -> None:
    """An environment variable may set a single option of a table. A `--set` with a whole table replaces the table."""
    path = write(tmp_path, '[aggregation]\nupload_codec = {name = "topk", density = 0.1}\n')
    environ = {"ATOLL_AGGREGATION__UPLOAD_CODEC__DENSITY": "0.2", "ATOLL_ALGORITHM__MU": "0.5"}
    settings = Settings.read(path, None, environ)
    assert settings.aggregation.upload_codec == codec(name="topk", density=0.2)
    assert settings.algorithm.options == {"mu": 0.5}
    given = set_values(['aggregation.upload_codec={name = "int8"}'], FIELDS)
    assert Settings.read(path, given, {}).aggregation.upload_codec == codec(name="int8")


def test_a_path_replaces_a_name(tmp_path: Path) -> None:
    """If a flag sets the path of an algorithm, the path replaces the name in the run file. The other options of the
    algorithm stay.
    """
    path = write(tmp_path, '[algorithm]\nname = "fedavg"\nouter_optimizer = {name = "sgd", lr = 0.5}\n')
    algorithm = Settings.read(path, {"algorithm.path": "mine.py:rule"}, {}).algorithm
    assert (algorithm.name, algorithm.path) == (None, "mine.py:rule")
    assert (algorithm.outer_optimizer.name, algorithm.outer_optimizer.options) == ("sgd", {"lr": 0.5})


@pytest.mark.covers("X3")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "algorithm.name is not set. Set it to one of "),
        ({"algorithm.name": "fedavg"}, "rounds.total is not set, but the federated algorithm fedavg"),
    ],
)
def test_federated_runs_need_an_algorithm_and_rounds(settings: dict[str, Any], message: str) -> None:
    """A server or a simulation needs an algorithm, and a federated algorithm needs `rounds.total`."""
    # A DiLoCo run goes on until it is stopped. A run with a workflow function needs neither.
    nn = pytest.importorskip("torch.nn")  # the rest of this file runs without torch, too
    from atoll import Server, Simulation

    for run in (Server, Simulation):
        with pytest.raises(ConfigError, match=message):
            run(nn.Linear(1, 1), settings, **({"script": "train.py:train"} if run is Simulation else {}))
    Server(nn.Linear(1, 1), {"algorithm.name": "diloco"})  # goes on until it is stopped
    Server(nn.Linear(1, 1), {"algorithm.name": "fedavg", "rounds.total": 0})
    Server(workflow=print)


@pytest.mark.parametrize(
    ("text", "meant"),
    [("port=9", "network.port"), ("algorithm=fedavg", "algorithm.name"), ("rounds=3", "rounds.total")],
)
def test_a_set_flag_without_group_is_refused(text: str, meant: str) -> None:
    """If a `--set` lacks the group of a setting, the error suggests the setting with its group."""
    with pytest.raises(ConfigError, match=rf"Did you mean {meant}\?"):
        set_values([text], FIELDS)


@pytest.mark.parametrize("text", ["rounds.total", "rounds=3", "model.args={depth"])
def test_a_set_flag_without_value_is_refused(text: str) -> None:
    """A `--set` without a value, without the name of a setting, or with a broken table is refused."""
    with pytest.raises(ConfigError, match="--set"):
        set_values([text], FIELDS)


def test_a_run_file_may_begin_with_a_bom(tmp_path: Path) -> None:
    """A run file may begin with the byte order mark that editors of Windows write."""
    path = tmp_path / "run.toml"
    path.write_text("rounds.total = 3\n", encoding="utf-8-sig")
    assert Settings.read(path, environ={}).rounds.total == 3


def test_groups_may_be_objects_tables_or_keys() -> None:
    """A group of settings may be given as an object, as a table or as single keys. The settings are equal."""
    nested = Settings.build({"rounds": {"total": 3, "sites": 2}, "async": {"enabled": True}})
    objects = Settings(rounds=Rounds(total=3, sites=2), async_=Async(enabled=True))
    assert nested == objects == Settings.build({"rounds.total": 3, "rounds.sites": 2, "async.enabled": True})
    assert Settings.build({"rounds": Rounds(total=3), "rounds.sites": 2}).rounds == Rounds(total=3, sites=2)
    assert nested.changed({"rounds.total": 4}) == Settings.build(
        {"rounds": Rounds(total=4, sites=2), "async_.enabled": True}
    )


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"name": "mean", "path": "a.py:b"}, "Set only one of them"),
        ({"name": "a.py:b"}, "Write path = 'a.py:b'"),
        ("mean", "aggregation.reducer = 'mean'"),
    ],
)
def test_an_invalid_choice_table_is_refused(table: Any, words: str) -> None:
    """The table of a choice is refused if it has both a name and a path, or a path as its name. Text in place of the
    table is refused too.
    """
    with pytest.raises(ConfigError, match=words):
        Settings.build({"aggregation.reducer": table})


def test_paths_are_relative_to_their_run_file(tmp_path: Path) -> None:
    """Paths in a run file are relative to the folder of this file. Paths in flags are relative to the folder of the
    process.
    """
    absolute = tmp_path / "elsewhere"
    text = (
        'disk.state_dir = "state"\ndisk.export_dir = "../out"\nnetwork.tls_cert = "c.pem"\nnetwork.tls_key = "k.pem"\n'
        f'network.token_file = "{absolute}"\nmodel.source = "init.safetensors"\n'
    )
    settings = Settings.read(write(tmp_path, text), environ={})
    assert settings.disk.state_dir == tmp_path / "state"
    assert settings.disk.export_dir == tmp_path / "../out"
    assert (settings.network.tls_cert, settings.network.tls_key) == (tmp_path / "c.pem", tmp_path / "k.pem")
    assert settings.network.token_file == absolute
    assert settings.model.source == str(tmp_path / "init.safetensors")

    settings = Settings.read(write(tmp_path, 'model.source = "my_models:build"\n'), {"disk.state_dir": Path("s")}, {})
    assert (settings.model.source, settings.disk.state_dir) == ("my_models:build", Path("s"))


def refusal(folder: Path, text: str = "", flags: dict[str, Any] | None = None, **environ: str) -> ConfigError:
    """The refusal of a run file, flags and variables; one that is refused says what to do."""
    with pytest.raises(ConfigError) as caught:
        Settings.read(write(folder, text), flags, environ)
    assert caught.value.remedy
    return caught.value


@pytest.mark.covers("X3")
@pytest.mark.parametrize(
    ("text", "flags", "said"),
    [
        ("[diloco]\nsync_evry = 5", {}, "run.toml: the setting 'diloco.sync_evry'"),
        ("diloco.sync-every = 5", {}, "run.toml: the setting 'diloco.sync-every'"),
        ("sync_every = 5", {}, "run.toml: the setting 'sync_every'"),
        ("", {"diloco.sync_evry": 5}, "command line: the setting 'diloco.sync_evry'"),
    ],
)
def test_an_unknown_key_suggests_the_nearest_key(tmp_path: Path, text: str, flags: dict[str, Any], said: str) -> None:
    """If a setting does not exist, the error names its source and suggests the nearest setting."""
    error = refusal(tmp_path, text, flags)
    assert error.message.endswith(f"{said} does not exist.")
    assert error.remedy == "Did you mean diloco.sync_every? `atoll config schema` lists all settings."


@pytest.mark.covers("X3")
@pytest.mark.parametrize(
    ("text", "flags", "meant"),
    [
        ("[Rounds]\ntotal = 3", {}, "rounds.total"),
        ('[agregation]\nreducer = {name = "mean"}', {}, "aggregation.reducer"),
        ("[round]\nwandb = 3", {}, "rounds"),
        ("", {"round.sites": 3}, "rounds.sites"),
    ],
)
def test_unknown_groups_suggest_the_nearest_group(tmp_path: Path, text: str, flags: dict[str, Any], meant: str) -> None:
    """If a group of settings does not exist, the error suggests the nearest group, with the setting in it."""
    error = refusal(tmp_path, text, flags)
    assert error.remedy == f"Did you mean {meant}? `atoll config schema` lists all settings."


def test_an_empty_model_source_is_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path, "", set_values(["model.source="], FIELDS))
    assert "model.source = ''" in error.message


@pytest.mark.parametrize("key", ["model.source", "run.script", "algorithm.path", "workflow.function"])
def test_code_paths_are_relative_to_run_files(tmp_path: Path, key: str) -> None:
    """A path to code in a run file is relative to the folder of the run file. In a flag, it is relative to the working
    folder.
    """
    (tmp_path / "run").mkdir()
    group, _, name = key.partition(".")
    path = write(tmp_path / "run", f'[{group}]\n{name} = "mine.py:it"\n')
    assert Settings.read(path, None, {}).at(key) == f"{tmp_path / 'run' / 'mine.py'}:it"
    assert Settings.read(None, {key: "mine.py:it"}, {}).at(key) == "mine.py:it"  # a flag: in the working directory
    path.write_text('[async]\nenabled = true\nstaleness_weight = "mine.py:weight"\n')
    assert Settings.read(path, None, {}).async_.staleness_weight == f"{path.parent / 'mine.py'}:weight"


@pytest.mark.covers("X3")
@pytest.mark.parametrize(("value", "part"), [("int8", "name"), ("own.py:Mine", "path")])
def test_a_name_instead_of_a_table_is_refused(tmp_path: Path, value: str, part: str) -> None:
    """If a setting that is a table gets a name or a path, the error shows how to write it in the file or after
    `--set`.
    """
    key = "aggregation.upload_codec"
    in_a_file, option = f"{key} = {{{part} = '{value}'}}", f"{key}.{part}={value}"
    for text, given, environ, remedy in (
        (f'[aggregation]\nupload_codec = "{value}"', [], {}, in_a_file),
        ("", [f"{key}={value}"], {}, f"--set {option}"),
        ("", [], {variable_of(key): value}, in_a_file),
    ):
        error = refusal(tmp_path, text, set_values(given, FIELDS), **environ)
        assert f"{key} = '{value}': this setting is a table: write {remedy}." in error.message
    assert getattr(Settings.read(None, set_values([option], FIELDS), {}).at(key), part) == value


def test_an_unknown_variable_suggests_the_nearest_variable() -> None:
    """If an environment variable of Atoll is unknown, the error suggests the nearest variable."""
    with pytest.raises(
        ConfigError, match=r"ATOLL_DILOCO__SYNC_EVRY is unknown.*Did you mean ATOLL_DILOCO__SYNC_EVERY\?"
    ):
        Settings.read(environ={"ATOLL_DILOCO__SYNC_EVRY": "5"})


def test_a_setting_outside_its_group_is_refused(tmp_path: Path) -> None:
    """A setting outside its group, and a value for a whole group, are refused."""
    # The error suggests the setting that is probably meant. For `rounds = 3` it suggests `rounds.total`, and for `sites
    # = 2` it suggests `rounds.sites`.
    assert str(refusal(tmp_path, "rounds = 3\n")) == (
        f"{tmp_path}/run.toml: rounds = 3, but rounds is a group of settings, not a setting. "
        "Did you mean rounds.total? `atoll config schema` lists all settings."
    )
    assert refusal(tmp_path, "wandb = 1\n").remedy == "`atoll config schema` lists all settings."
    assert str(refusal(tmp_path, "sites = 2\nwandb = 1\n[model]\nranks = 1\n")) == (
        f"{tmp_path}/run.toml: the setting 'sites' does not exist. "
        "Did you mean rounds.sites? `atoll config schema` lists all settings."
    )
    assert "Did you mean rounds.min_sites?" in refusal(tmp_path, "min_clients = 1\n").remedy
    assert "Did you mean network.port?" in refusal(tmp_path, "[server]\nport = 1\n").remedy


@pytest.mark.covers("X3")
@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("ATOLL_NUM_ROUNDS", "ATOLL_ROUNDS__TOTAL"),
        ("ATOLL_NUM_WORKERS", "ATOLL_ROUNDS__SITES"),
        ("ATOLL_STREAMING_PER_REQUEST_TIMEOUT", "ATOLL_NETWORK__IDLE_TIMEOUT_S"),
        ("ATOLL_SYNC_EVERY", "ATOLL_DILOCO__SYNC_EVERY"),
        ("ATOLL_SERVR", "ATOLL_SERVER"),
    ],
)
def test_old_variable_names_suggest_the_current_variable(tmp_path: Path, variable: str, meant: str) -> None:
    """If an environment variable has the name of an earlier release or of another framework, the error suggests the
    variable that Atoll reads.
    """
    assert f"Did you mean {meant}?" in refusal(tmp_path, **{variable: "3"}).remedy


def test_every_foreign_name_maps_to_a_setting() -> None:
    """Each name of another framework in `OTHER_KEYS` maps to an existing setting or to an option of a table. None of
    these names is a setting.
    """
    options = {"algorithm.mu"}
    assert set(OTHER_KEYS.values()) - options <= FIELDS.keys()
    assert not OTHER_KEYS.keys() & FIELDS.keys()


FOREIGN = {
    "FedAvgRecipe": "num_rounds=rounds.total min_clients=rounds.min_sites initial_ckpt=model.source "
    "train_script=run.script key_metric=rounds.best_metric stop_cond=rounds.early_stop_after "
    "exclude_vars=model.buffers model_persistor=model.persistor aggregation_weights=aggregation.reducer",
    "config_fed_server": "wait_time_after_min_resps_received=rounds.deadline_s persistor_id=model.persistor "
    "task_result_filters=workflow.result_filters workflows=workflow.steps snapshot_every_n_rounds=disk.export_every "
    "heart_beat_timeout=network.heartbeat_timeout_s",
    "FedAdam": "fraction-train=rounds.sample_fraction min-train-nodes=rounds.min_sites server_address=network.host "
    "min-available-nodes=rounds.sites initial_parameters=model.source eta=algorithm.outer_optimizer "
    "proximal_mu=algorithm.mu clipping_norm=aggregation.max_update_norm",
    "FedAvg of Flower": "on_evaluate_config_fn=rounds.config_function on_fit_config_fn=rounds.config_function "
    "accept_failures=rounds.min_sites evaluate_fn=server.evaluate",
    "ScatterAndGather": "quantization_type=aggregation.upload_codec early_stopping=rounds.early_stop_after "
    "learn_task_timeout=rounds.deadline_s train_timeout=rounds.deadline_s",
    "flwr run": "num-server-rounds=rounds.total num-supernodes=rounds.sites root-certificates=network.tls_cert",
    "trackers": "report_to=server.trackers tracking_uri=server.trackers webhook_url=server.webhook",
}
"""Where a name stands in FLARE, Flower and elsewhere → the names there, and ours."""


@pytest.mark.parametrize("where", FOREIGN)
def test_other_frameworks_settings_suggest_atolls(tmp_path: Path, where: str) -> None:
    """If a setting has the name that another framework uses, the error suggests Atoll's setting."""
    for pair in FOREIGN[where].split():
        name, meant = pair.split("=")
        assert f"Did you mean {meant}?" in refusal(tmp_path, f"{name} = 1\n").remedy, name


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("evaluate_metrics_aggregation_fn", "Atoll averages each metric"),
        ("fit_metrics_aggregation_fn", "Atoll averages each metric"),
        ("fraction_evaluate", "Atoll evaluates at all sites"),
        ("min-evaluate-clients", "Atoll evaluates at all sites"),
        ("client_resources", "atoll simulate --processes N"),
        ("num_cpus", "atoll simulate --processes N"),
        ("num_gpus", "atoll simulate --processes N"),
        ("num_partitions", "atoll.data divides data"),
        ("start_round", "goes on with the round that was open"),
        ("allow_empty_global_weights", "model.source names it"),
        ("task_check_period", "no period to ask in"),
        ("submit_model_timeout", "evaluation_timeout_s"),
        ("participating_clients", "workflow.steps: sites"),
        ("shareable_generator_id", "sites send the difference"),
        ("use_async_quorum", "the server decides when a round closes"),
    ],
)
def test_settings_without_counterpart_get_a_sentence(tmp_path: Path, name: str, advice: str) -> None:
    """For a setting of FLARE, Flower or torchft without a counterpart, the error says what Atoll does in its place."""
    for text in (f"{name} = 1\n", f"{name} = {{a = 1}}\n", f"[rounds]\n{name} = 1\n"):
        remedy = refusal(tmp_path, text).remedy
        assert advice in remedy
        assert "Did you mean" not in remedy


def test_a_name_is_a_setting_or_has_a_sentence() -> None:
    """No foreign name leads to both, and none of those with a sentence is a setting."""
    assert not WITHOUT_SETTING.keys() & (OTHER_KEYS.keys() | FIELDS.keys())


@pytest.mark.parametrize("name", ["lr", "learning-rate", "local_epochs", "batch_size"])
def test_local_training_leads_to_the_script(tmp_path: Path, name: str) -> None:
    """Atoll has no settings of the training at sites: no similar name is suggested for them."""
    for text in (f"{name} = 1\n", f"[rounds]\n{name} = 1\n"):
        remedy = refusal(tmp_path, text).remedy
        assert remedy.startswith("It belongs to the training script of the sites.")


def test_other_variables_change_no_setting() -> None:
    """Environment variables of a worker and of other programs do not change the settings."""
    environ = dict.fromkeys(NOT_SETTINGS, "x") | {"PATH": "/bin", "ATOLLS": "3"}
    assert Settings.read(environ=environ) == Settings.read(environ={})


@pytest.mark.covers("X3")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('rounds.total = "many"', "run.toml: rounds.total = 'many', but it must be a whole number"),
        ("rounds.total = 9223372036854775807", "rounds.total = 9223372036854775807: input should be less than"),
        ("run.seed = 18446744073709551616", "run.seed = 18446744073709551616: input should be less than"),
        ('disk.state_dir = "a\\u0000b"', "a\\x00b'. Use a path without a null character"),
        ("network.port = 70000", "network.port = 70000: input should be less than or equal to 65535"),
        ("network.idle_timeout_s = nan", "network.idle_timeout_s = nan: input should be greater than 0"),
        ('disk.durability = "raid"', "disk.durability = 'raid': input should be 'process' or 'power'"),
        (
            'algorithm.outer_optimizer = "adam"',
            "this setting is a table: write algorithm.outer_optimizer = {name = 'adam'}",
        ),
        ("rounds.total = true", "rounds.total = true, but it must be a whole number. Write rounds.total = 20"),
        *(
            (f'{key} = "a,b"', f'{key} = \'a,b\', but it must be a list. Write {key} = ["a", "b"]')
            for key in ("swarm.aggregators", "workflow.streamed_tasks")
        ),
        *(
            (f'{key} = "a"', f"{key} = 'a', but it must be a list of tables. Write {key} = [{{…}}]")
            for key in ("workflow.steps", "workflow.components", "workflow.payload_filters")
        ),
        ('workflow.steps = ["train"]', r"workflow.steps.0 = 'train', but it must be a table. Write a table"),
        ('model.args = "a"', "model.args = 'a', but it must be a table"),
        ("disk.state_dir = 5", "disk.state_dir = 5, but it must be text or a Path"),
        ("model.persistor = 5", "write model.persistor = {name = '…'}"),
        ('model.buffers = ["bn*"]', "run.toml: model.buffers: ['bn*'] are patterns without their rules"),
        (
            'aggregation.reducer = {name = "a", path = "b:c"}',
            "run.toml: aggregation.reducer: both name ('a') and path ('b:c') are set",
        ),
    ],
)
def test_a_wrong_value_is_reported(tmp_path: Path, text: str, message: str) -> None:
    """If a value in a run file is wrong, the error has the setting and the value, and says which values are allowed."""
    assert message in str(refusal(tmp_path, text))


@pytest.mark.covers("X3")
def test_a_wrong_flag_or_variable_is_reported(tmp_path: Path) -> None:
    """If a flag or an environment variable has a wrong value, the error shows the value and its source."""
    flag = refusal(tmp_path, flags={"rounds.total": -1})
    assert "command line: rounds.total = -1: input should be greater than or equal to 0" in str(flag)
    variable = refusal(tmp_path, ATOLL_NETWORK__PORT="http")
    assert "ATOLL_NETWORK__PORT: network.port = 'http', but it must be a whole number" in str(variable)
    table = refusal(tmp_path, ATOLL_MODEL__ARGS="depth=3")
    assert "ATOLL_MODEL__ARGS is 'depth=3', not a TOML table." in str(table)


@pytest.mark.covers("X3")
@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("rounds.total", "true", "whole number"),
        ("rounds.total", '"1"', "whole number"),
        ("rounds.total", "1.0", "whole number"),
        ("rounds.min_sites", "true", "whole number"),
        ("run.seed", '"7"', "whole number"),
        ("rounds.sample_fraction", "true", "number"),
        ("network.idle_timeout_s", '"60"', "number"),
        ("network.insecure", '"yes"', "true or false"),
        ("network.insecure", "1", "true or false"),
        ("swarm.enabled", "0.0", "true or false"),
        ("run.name", "3", "text"),
        ("algorithm.outer_lr_of", '{"head.*" = "0.3"}', "number"),
        ("algorithm.outer_lr_of", '{"head.*" = true}', "number"),
        ("aggregation.reducer", "{name = 3}", "text"),
        ("disk.state_dir", "5", "Path"),
    ],
)
def test_a_wrong_type_is_refused_everywhere(tmp_path: Path, key: str, value: str, kind: str) -> None:
    """A value of a wrong type is refused in a run file, in new settings and in changed settings."""
    in_python = {key: tomllib.loads(f"value = {value}")["value"]}
    group, _, name = key.partition(".")
    for read in (
        lambda: Settings.read(write(tmp_path, f"[{group}]\n{name} = {value}\n"), environ={}),
        lambda: Settings.build(in_python),
        lambda: Settings.build().changed(in_python),
    ):
        with pytest.raises(ConfigError, match=rf"{re.escape(key)}.*{kind}"):
            read()


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("rounds.total", "true"),
        ("rounds.total", "3.0"),
        ("rounds.total", '"3"'),
        ("rounds.total", ""),
        ("rounds.sample_fraction", "half"),
        ("network.insecure", "ja"),
        ("network.insecure", "2"),
        ("network.insecure", ""),
    ],
)
def test_text_of_a_wrong_type_is_refused(key: str, text: str) -> None:
    """If the text of an environment variable or of `--set` does not fit the setting's type, the error names the
    setting.
    """
    for read in (
        lambda: Settings.read(environ={variable_of(key): text}),
        lambda: Settings.read(None, set_values([f"{key}={text}"], FIELDS), {}),
    ):
        with pytest.raises(ConfigError, match=re.escape(key)):
            read()


def test_integers_are_accepted_as_numbers(tmp_path: Path) -> None:
    """A setting that is a floating-point number accepts an integer."""
    settings = Settings.read(write(tmp_path, "network.idle_timeout_s = 60\n"), {"rounds.deadline_s": 0}, {})
    assert (settings.network.idle_timeout_s, settings.rounds.deadline_s) == (60.0, 0.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rounds.min_sites = 3\nrounds.sites = 2", "rounds.min_sites is 3, but rounds.sites is 2"),
        (
            "rounds.sites = 3\nrounds.min_sites = 2\nrounds.quorum = 1\nrounds.deadline_s = 9",
            "rounds.quorum is 1, below rounds.min_sites",
        ),
        ("rounds.sites = 3\nrounds.quorum = 2", "quorum is 2, but rounds.deadline_s is 0"),
        ("rounds.deadline_s = 5", "rounds.deadline_s is 5, but rounds.quorum is 0, so the deadline has no effect"),
        (
            'rounds.total = 3\n[[workflow.steps]]\nkind = "train"\n[[workflow.steps]]\n'
            'kind = "cross_site_evaluation"\nversions = ["best"]',
            "evaluates the version 'best', but rounds.best_metric is not set",
        ),
        (
            "network.heartbeat_interval_s = 120",
            "network.heartbeat_interval_s is 120, but network.heartbeat_timeout_s is only",
        ),
        (
            "diloco.dynamic_local_steps = true",
            "diloco.dynamic_local_steps is True, but async.enabled is false: the setting applies to asynchronous runs "
            "only. Leave "
            "diloco.dynamic_local_steps out, or",
        ),
        ("async.max_staleness = 0", "async.max_staleness is 0, but async.enabled is false"),
        (
            "rounds.sample_fraction = 0.5\nasync.enabled = true",
            "rounds.sample_fraction is 0.5, but async.enabled is true",
        ),
        (
            "async.enabled = true\nrounds.sites = 2\nrounds.min_sites = 2\nasync.buffer_size = "
            "2\ndiloco.num_fragments = 2\ndiloco.sync_every = 4",
            "async.enabled is true, rounds.min_sites is 2 and diloco.num_fragments is 2",
        ),
        (
            "diloco.sync_every = 500\ndiloco.num_fragments = 3",
            "diloco.sync_every is 500 and diloco.num_fragments is 3: sync_every must be a multiple of num_fragments, "
            "because one fragment is due every sync_every/num_fragments steps. Set diloco.sync_every to 501 or 498.",
        ),
        ("diloco.sync_every = 2\ndiloco.num_fragments = 3", "Set diloco.sync_every to 3."),
        (
            "diloco.sync_every = 30\ndiloco.num_fragments = 3\ndiloco.fragment_sync_delay = 11",
            "a result must be merged within 10 steps. Set diloco.fragment_sync_delay to at most 10",
        ),
        ("diloco.num_fragments = 2\ndiloco.max_inflight = 3", "Set diloco.max_inflight to at most 2."),
        (
            "diloco.fragment_update_alpha = 1.5",
            "diloco.fragment_update_alpha = 1.5: input should be less than or equal to 1",
        ),
        ('disk.export_dir = "atoll-run/objects"', "where the server keeps its own files and removes all others"),
        (
            'swarm.enabled = true\nrounds.sites = 2\ntrust.authority = "ca.pem"',
            "/ca.pem', but swarm.enabled is true: workers know each other by "
            "certificates that the run itself issues, by invitation. Leave trust.authority out, or set swarm.enabled "
            "= false.",
        ),
        ('network.tls_cert = "c.pem"', "Only one of network.tls_cert and network.tls_key"),
        ('network.tls_key = "k.pem"', "Only one of network.tls_cert and network.tls_key"),
    ],
)
def test_values_that_contradict_each_other_are_refused(tmp_path: Path, text: str, message: str) -> None:
    assert message in str(refusal(tmp_path, text))


def test_a_zero_timeout_allows_any_interval() -> None:
    """A heartbeat timeout of 0 means that there is no timeout, so any heartbeat interval is accepted."""
    settings = Settings.build({"network.heartbeat_timeout_s": 0, "network.heartbeat_interval_s": 500})
    assert settings.network.heartbeat_timeout_s == 0


@pytest.mark.covers("X3")
def test_an_unreadable_run_file_is_reported(tmp_path: Path) -> None:
    """If a run file does not exist, is a folder or is not valid TOML, the error says so."""
    with pytest.raises(ConfigError, match=r"The run file .*none.toml' does not exist\. `atoll new` writes one"):
        Settings.read(tmp_path / "none.toml", environ={})
    with pytest.raises(ConfigError, match="is a folder"):
        Settings.read(tmp_path, environ={})
    with pytest.raises(ConfigError, match=r"run\.toml: .*line 2.*A run file is TOML"):
        Settings.read(write(tmp_path, "rounds.total = 1\nrounds: 2\n"), environ={})
    for table in ("rounds", "algorithm.outer_optimizer"):
        with pytest.raises(ConfigError, match=rf"run\.toml: Cannot declare \[{re.escape(table)}\] twice \(at line 3, "):
            Settings.read(write(tmp_path, f"[{table}]\nx = 1\n[{table}]\n"), environ={})
    (tmp_path / "run.toml").write_bytes(b"run.name = '\xff'")
    with pytest.raises(ConfigError, match="A run file is TOML"):
        Settings.read(tmp_path / "run.toml", environ={})
