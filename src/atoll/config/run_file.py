"""Read settings from the run file, the environment and the command line, and write settings as a run file.

A key is `group.key`; the key of an option in a table is longer: `aggregation.upload_codec.density`. A `Layer` has the
settings of one source: key → (value, name of the source).
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from atoll import registry
from atoll.errors import ConfigError
from atoll.posix import read_named

COMMAND_LINE = "command line"
ENV_PREFIX = "ATOLL_"

Fields = Mapping[str, FieldInfo]
"""All settings: `group.key` → pydantic's description of the field."""
Layer = dict[str, tuple[Any, str]]
"""Settings of one source: key → (value, the source: a file, a variable or the command line)."""

NOT_SETTINGS = frozenset(
    {
        "ATOLL_SERVER",
        "ATOLL_SITE",
        "ATOLL_SITES",
        "ATOLL_SITE_NUMBER",
        "ATOLL_TOKEN",
        "ATOLL_DIR",
        "ATOLL_MAX_SYNC_RETRIES",
        "ATOLL_GIVE_UP_S",
        "ATOLL_FLARE_PARAMS",
        "ATOLL_TLS_CA",
        "ATOLL_CREDENTIAL",
        "ATOLL_INVITATION",
        "ATOLL_NEW_STATE",
        "ATOLL_SWARM",
        "ATOLL_PEER_HOST",
        "ATOLL_PEER_PORT",
        "ATOLL_PEER_NAME",
        "ATOLL_PEER_TLS_CERT",
        "ATOLL_PEER_TLS_KEY",
        "ATOLL_PEER_INSECURE",
        "ATOLL_POLICY",
        "ATOLL_DRY_RUN",
        "ATOLL_LEASES",
        "ATOLL_LOG_JSON",
        "ATOLL_LOG_LEVEL",
        "ATOLL_FAILPOINTS",
    }
)
"""ATOLL_* variables that are not settings of a run. They configure a worker, contain a secret, are for tests, or Atoll
itself sets them."""

OTHER_NAMES = {"ATOLL_TOKEN_FILE": "network.token_file"}
"""Further environment variables for settings, with names that are not ATOLL_<GROUP>__<KEY>: name → `group.key`."""

OTHER_KEYS = {
    other: key
    for key, others in {
        "rounds.total": "num_rounds server_rounds num_server_rounds n_rounds max_rounds comm_round outer_steps "
        "global_rounds communication_rounds",
        "rounds.sites": "clients num_clients n_clients workers num_workers num_sites num_supernodes "
        "min_available_clients min_available_nodes expected_clients num_nodes min_nodes",
        "rounds.min_sites": "min_clients min_workers min_fit_clients min_train_nodes min_responses min_replica_size "
        "min_responses_required min_completion_clients accept_failures",
        "rounds.deadline_s": "round_timeout train_timeout round_deadline wait_time_after_min_received task_timeout "
        "wait_time_after_min_resps_received learn_task_timeout",
        "rounds.sample_fraction": "fraction_fit fraction_train client_fraction sample_rate",
        "rounds.best_metric": "key_metric",
        "rounds.config": "fit_config train_config round_config",
        "rounds.config_function": "on_fit_config_fn fit_config_fn configure_fit configure_train on_evaluate_config_fn",
        "rounds.early_stop_after": "early_stop_rounds patience stop_patience stop_cond early_stopping",
        "model.source": "model initial_model initial_parameters initial_arrays source_ckpt_file_full_name "
        "initial_ckpt initial_state_dict",
        "run.script": "client train_script client_app clientapp task_script_path",
        "run.name": "job_name job_id",
        "algorithm.name": "strategy aggregation_strategy federated_optimizer",
        "algorithm.outer_optimizer": "outer_lr outer_momentum outer_options server_optimizer server_lr "
        "server_learning_rate server_momentum eta beta_1 beta_2 optimizer_args lr_scheduler_args",
        "algorithm.mu": "proximal_mu fedprox_mu fedproxloss_mu",
        "aggregation.aggregator": "aggregator_id",
        "aggregation.upload_codec": "codec compression quantization should_quantize quantization_type",
        "aggregation.download_codec": "downlink_codec",
        "diloco.sync_every": "h local_steps inner_steps sync_interval min_sync_every",
        "diloco.fragment_sync_delay": "tau",
        "diloco.fragment_update_alpha": "alpha",
        "diloco.dynamic_local_steps": "dylu",
        "async.max_staleness": "staleness staleness_limit max_model_age",
        "async.buffer_size": "async_buffer fedbuff_buffer_size num_updates_to_aggregate num_updates_for_model",
        "async.momentum_every": "dn_buffer_size",
        "swarm.enabled": "placement",
        "network.host": "server server_address superlink fleet_api_address sp_end_point",
        "network.port": "fed_learn_port",
        "network.idle_timeout_s": "streaming_per_request_timeout per_request_timeout tensor_send_timeout read_timeout "
        "streaming_read_timeout streaming_idle_timeout",
        "network.heartbeat_interval_s": "heartbeat_interval",
        "network.heartbeat_timeout_s": "heartbeat_timeout heart_beat_timeout client_timeout",
        "network.part_bytes": "chunk_size streaming_chunk_size grpc_max_message_length",
        "network.tls_cert": "certificates ssl_cert ssl_certfile server_cert root_certificates ssl_ca_certfile "
        "ssl_root_cert",
        "network.tls_key": "ssl_key ssl_keyfile server_key",
        "workflow.tensor_part_bytes": "tensor_download_chunk_size",
        "workflow.array_part_bytes": "np_download_chunk_size",
        "workflow.payload_filters": "task_data_filters",
        "workflow.result_filters": "task_result_filters noise_multiplier",
        "workflow.streamed_tasks": "stream_tasks",
        "disk.state_dir": "workspace job_dir work_dir",
        "disk.export_dir": "save_dir output_dir checkpoint_dir",
        "disk.export_every": "save_every checkpoint_every save_interval persist_every_n_rounds snapshot_every_n_rounds",
        "disk.in_files": "download_to_disk tensor_disk_offload",
        "rounds.best_mode": "negate_key_metric",
        "model.persistor": "persistor_id model_persistor model_locator",
        "model.buffers": "exclude_vars include_vars",
        "aggregation.reducer": "aggregation_fn weighted_by_key aggregation_weights",
        "aggregation.max_update_norm": "clipping_norm max_norm",
        "workflow.steps": "workflows controllers",
        "network.token_file": "auth_token",
        "server.evaluate": "evaluate_fn",
        "server.trackers": "tracking_uri report_to experiment_tracking analytics_receivers",
        "server.webhook": "webhook_url",
    }.items()
    for other in others.split()
}
"""Names of a setting in earlier releases and in other frameworks → `group.key`."""

WITHOUT_SETTING = {
    other: advice
    for advice, others in {
        "It belongs to the training script of the sites.": "lr learning_rate client_lr eta_l local_lr local_epochs "
        "epochs batch_size",
        "It belongs to the training script, in which atoll.data divides data over sites.": "num_partitions",
        "Atoll averages each metric over the sites that report it, by weight.": "fit_metrics_aggregation_fn "
        "evaluate_metrics_aggregation_fn train_metrics_aggr_fn evaluate_metrics_aggr_fn",
        "Atoll evaluates at all sites: each reports its metrics with its update, or in `atoll evaluate`.": ""
        "fraction_evaluate min_evaluate_clients min_evaluate_nodes",
        "It is an option of `atoll evaluate`, and of the step in workflow.steps: evaluation_timeout_s.": ""
        "submit_model_timeout validation_timeout",
        "It is an option of `atoll evaluate`, and of the step in workflow.steps: sites.": "participating_clients",
        "`atoll simulate --processes N` says how many sites train at the same time.": "client_resources num_cpus "
        "num_gpus",
        "A server that is started again goes on with the round that was open.": "start_round",
        "A run always begins with a model: model.source names it.": "allow_empty_global_weights",
        "Sites wait at the server until there is work, so they have no period to ask in.": "task_check_period",
        "Atoll needs none: sites send the difference to the version that they have pulled.": "shareable_generator_id",
        "Sites hold no quorum among each other: the server decides when a round closes.": "use_async_quorum",
    }.items()
    for other in others.split()
}
"""Names of settings in other frameworks that have no counterpart → what there is instead, as a sentence."""

TRUTHS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
"""Spellings of a boolean in a variable or after `--set`, in any case. A run file has only `true` and `false`."""

FOLDERS = (
    "network.tls_cert",
    "network.tls_key",
    "network.token_file",
    "trust.authority",
    "disk.state_dir",
    "disk.export_dir",
)
CODE = (
    *("algorithm", "algorithm.outer_optimizer", "aggregation.reducer", "aggregation.aggregator", "model.persistor"),
    *("aggregation.upload_codec", "aggregation.download_codec"),
)
FUNCTIONS = (
    *("algorithm.path", "workflow.function", "run.script", "model.source"),
    *("async.staleness_weight", "rounds.config_function", "server.evaluate"),
)
FILTERS = ("workflow.result_filters", "workflow.payload_filters")
TABLES = (*FILTERS, "workflow.steps", "workflow.components")
"""Settings with paths. FOLDERS: paths of files and folders. CODE: tables with a `path` of code. FUNCTIONS: paths of
code. FILTERS, TABLES: lists of tables with a `path`."""


# -- keys and values


def merged(values: Mapping[str, Any], onto: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Merge values, given by `group.key`, into nested tables, and return the result.

    Tables are merged key by key, with two exceptions. A new value that is itself a table with `name` or `path` replaces
    the whole earlier table. A single new key `group.key.name` removes the earlier `group.key.path`, and vice versa,
    unless `values` sets both.

    Args:
        values: `group.key` → value, or `group` → a table or object with settings of that group.
        onto: nested tables of earlier values, which `values` override; None: there are none.
    """
    tree = dict(onto or {})
    chosen = {tuple(key.split(".")): value for key, value in flat(values).items()}
    for (group, *names), value in chosen.items():
        displaced = _INSTEAD.get(names[-1], "") if names else ""
        both = (group, *names[:-1], displaced) in chosen  # keep both: validation refuses them
        _set(tree, ["async" if group == "async_" else group, *names], value, "" if both else displaced)
    return tree


_INSTEAD = {"name": "path", "path": "name"}


def _set(table: dict[str, Any], path: list[str], value: Any, displaced: str = "") -> None:
    (name, *rest), inner = path, value
    if isinstance(value, BaseModel):
        value = inner = value.model_dump(exclude_unset=True)
    if rest or (isinstance(value, Mapping) and value.keys().isdisjoint(_INSTEAD)):
        old = table.get(name)
        inner = dict(old) if isinstance(old, Mapping) else {}
        for key, each in [(rest, value)] if rest else [([key], each) for key, each in value.items()]:
            _set(inner, key, each, displaced)
    else:
        table.pop(displaced, None)
    table[name] = inner


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return all values by `group.key`. A value for a whole group is divided into one value for each of its keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        table = value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
        whole = "." not in key and isinstance(table, Mapping)
        found |= {f"{key}.{name}": each for name, each in table.items()} if whole else {str(key): value}
    return found


def source_of(key: str, source: Mapping[str, str]) -> str:
    """Return where a key was set: the name of a file or variable, or COMMAND_LINE. Empty if the key was not set.

    A key that is not in `source` itself may have been set as part of a table, so look for the tables around the key,
    innermost first. If none of them is in `source` either, `key` may be a table, so look for a key inside it.

    Args:
        key: `group.key`.
        source: key → where the key was set.
    """
    parts = key.split(".")
    around = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    within = [each for each in source if each.startswith(f"{key}.")]
    return next((source[each] for each in [*around, *within] if each in source), "")


def nearest_key(key: str, fields: Fields, value: Any = None) -> str:
    """Return advice for an unknown key or group: the most similar known one, and how to list all settings.

    Args:
        key: `group.key`, or a name without a group.
        fields: all settings.
        value: the value that was given. If it is a table, `key` may be the misspelt name of a group.
    """
    meant = f"Did you mean {found}? " if (found := meant_key(key, fields, value)) else ""
    if advice := WITHOUT_SETTING.get(_leaf(key)):
        meant = f"{advice} "
    return f"{meant}`atoll config schema` lists all settings."


def _leaf(key: str) -> str:
    return key.rpartition(".")[2].replace("-", "_").lower()


def meant_key(key: str, fields: Fields, value: Any = None) -> str:
    """Return the setting or group that an unknown name probably means; empty if there is none. See `nearest_key`."""
    groups = [each.partition(".")[0] for each in fields] if isinstance(value, Mapping) and "." not in key else []
    group = difflib.get_close_matches(key.lower(), groups, n=1, cutoff=0.7)
    inside = [f"{each}.{name}" for each in group for name in value if f"{each}.{name}" in fields]
    leaf = _leaf(key)
    if leaf in WITHOUT_SETTING:
        return ""
    own = [each for each in fields if each.startswith(f"{key}.")] if "." not in key else []
    same = [each for each in fields if each.rpartition(".")[2] == leaf]
    same += [OTHER_KEYS[leaf]] if leaf in OTHER_KEYS else []
    alike = difflib.get_close_matches(key, list(fields), n=1, cutoff=0.7)
    leaves = {each.rpartition(".")[2]: each for each in fields}
    like = [leaves[each] for each in difflib.get_close_matches(leaf, list(leaves), n=1, cutoff=0.7)]
    return next(iter((*inside, *group, *own[:1], *same, *alike, *like)), "")


def value_of(key: str, text: str, fields: Fields) -> Any:
    """Parse the text of an environment variable or of `--set` as the value of a setting.

    Text for tables, options and unknown keys is parsed as TOML. Text for a list may also be items separated by commas.
    Numbers are written as in TOML: `3`, `0.5`, `1e-3`, `inf`. For the spellings of booleans, see `TRUTHS`. Any other
    text is returned unchanged, for pydantic to accept or refuse.

    Raises:
        ValueError: the setting is known and needs TOML, but the text is not TOML.
    """
    field = fields.get(key)
    if field and not text.lstrip().startswith(("[", "{", '"', "'")):
        kind = str(field.annotation)
        if "tuple" in kind or key == "server.trackers":
            return tuple(filter(None, (each.strip() for each in text.split(","))))
        is_name = "Choice" in kind and "=" not in text  # validation says how to write it as a table
        is_text = any(each in kind for each in ("str", "Path", "Literal")) and "dict" not in kind
        if is_name or is_text:
            return text
        if "bool" in kind:
            return TRUTHS.get(text.lower(), text)
        if "dict" not in kind and "Choice" not in kind:
            return _number(text)
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        if field:
            raise ValueError("the text is not TOML") from None
        return text


def _number(text: str) -> Any:
    """Return the number that a text is in TOML; the text itself if it is none."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
    return value if type(value) in (int, float) else text


# -- the command line


def set_values(texts: Iterable[str], fields: Fields) -> dict[str, Any]:
    """Return the values of all options `--set group.key=value`, by key.

    Raises:
        ConfigError: a text does not have the form group.key=value, or its value must be TOML but is not.
    """
    values = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or "." not in key:
            form = "Use the form --set group.key=value, for example --set rounds.total=3."
            raise ConfigError(
                f"--set {text!r} is not valid.", f"{form} {nearest_key(key.strip(), fields)}" if equals else form
            )
        try:
            values[key.strip()] = value_of(key.strip(), value.strip(), fields)
        except ValueError:
            raise ConfigError(
                f"The value in --set {text!r} is not valid TOML.", f"Write {key}={{key = 1}}, as in a run file."
            ) from None
    return values


# -- the environment


def require_known_variables(environ: Mapping[str, str], fields: Fields) -> None:
    """Refuse unknown ATOLL_* variables, because with a misspelt ATOLL_SERVER a script would train without the server.

    Raises:
        ConfigError: a variable is unknown. The message suggests the nearest name.
    """
    known = NOT_SETTINGS | OTHER_NAMES.keys() | {variable_of(key) for key in fields}
    for variable in sorted(environ):
        if variable.startswith(ENV_PREFIX) and variable not in known and not _key_of(variable, fields):
            word = variable.removeprefix(ENV_PREFIX)
            close = difflib.get_close_matches(word, [name.removeprefix(ENV_PREFIX) for name in sorted(known)], n=1)
            key = OTHER_KEYS.get(word.lower()) or ("" if close else meant_key(word.lower(), fields))
            name = variable_of(key) if key else "".join(f"{ENV_PREFIX}{each}" for each in close)
            meant = f"Did you mean {name}? Otherwise, rename" if name else "Rename"
            raise ConfigError(
                f"The environment variable {variable} is unknown to Atoll.",
                f"{meant} your variable so that it does not begin with {ENV_PREFIX}, or remove it.",
            )


def variable_of(key: str) -> str:
    """Return the name of the environment variable for `group.key`."""
    return ENV_PREFIX + key.upper().replace(".", "__")


def _key_of(variable: str, fields: Fields) -> str:
    """Return the key of the setting or table option that an environment variable sets; "" if it sets none."""
    if variable in OTHER_NAMES:
        return OTHER_NAMES[variable]
    parts = variable.removeprefix(ENV_PREFIX).lower().split("__")
    field = fields.get(".".join(parts[:2]))
    takes_options = "dict[" in str(field and field.annotation) or "Choice" in str(field and field.annotation)
    known = field is not None and (len(parts) == 2 or takes_options)
    return ".".join(parts) if known or (parts[0] == "algorithm" and len(parts) > 1) else ""


def environment_layer(environ: Mapping[str, str], fields: Fields) -> Layer:
    """Return the settings that environment variables set.

    Raises:
        ConfigError: an ATOLL_* variable is unknown, or the value of a table is not TOML.
    """
    require_known_variables(environ, fields)
    layer: Layer = {}
    for variable in sorted(environ):
        if variable.startswith(ENV_PREFIX) and (key := _key_of(variable, fields)):
            try:
                layer[key] = (value_of(key, environ[variable], fields), variable)
            except ValueError:
                raise ConfigError(
                    f"{variable} is {environ[variable]!r}, not a TOML table.", "Write it as a table: {key = value}."
                ) from None
    return layer


# -- the run file


def file_layer(path: Path, fields: Fields) -> Layer:
    """Return the settings in a run file. A relative path in the file is relative to the file's folder.

    If the file does not set `disk.state_dir`, the state directory is in the file's folder, too.

    Raises:
        ConfigError: the file cannot be read, or is not TOML.
    """
    try:
        tables = tomllib.loads(read_named(path).decode("utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"The run file {str(path)!r} does not exist.", "`atoll new` writes one.") from None
    except IsADirectoryError:
        raise ConfigError(f"{str(path)!r} is a folder.", f"Give the run file: {path / 'run.toml'}.") from None
    except OSError as error:
        wrong = f"The run file {str(path)!r} cannot be read ({error.strerror})."
        raise ConfigError(wrong, "Give a file that this user may read.") from error
    except (ValueError, RecursionError) as error:  # no TOML or UTF-8, a number of 5,000 digits, 3,000 brackets
        # tomllib names the table ('a', 'b') that the file writes as [a.b]
        reason = re.sub(r"\('(.+?)',?\)", lambda found: f"[{found[1]}]".replace("', '", "."), str(error))
        raise ConfigError(f"{path}: {reason}.", "A run file is TOML: tables, and one key = value per line.") from None
    values: dict[str, Any] = {}
    for group, table in tables.items():
        values |= (
            {f"{group}.{key}": value for key, value in table.items()} if isinstance(table, dict) else {group: table}
        )
    layer = {key: (moved(key, value, lambda file: path.parent / file), str(path)) for key, value in values.items()}
    return {"disk.state_dir": (path.parent / fields["disk.state_dir"].default, "default"), **layer}


Relocate = Callable[[str], str | Path]
"""A function that takes a path relative to one folder, and returns it relative to another folder."""


def moved(key: str, value: Any, move: Relocate) -> Any:
    """Return the value of the setting `key`, with every path in the value replaced by `move(path)`."""
    if key in FOLDERS:
        return Path(move(str(value))) if isinstance(value, str | Path) else value
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_defaults=True)
    if key in CODE and isinstance(value, Mapping) and "path" in value:
        return {**value, "path": _code(value["path"], move)}
    if key in TABLES and isinstance(value, list | tuple):
        return [_moved_table(key, each, move) for each in value]
    if isinstance(value, str) and (
        (key == "run.script" and value.endswith(".py"))
        or (key == "model.source" and (value.endswith(".safetensors") or Path(move(value)).is_dir()))
    ):
        return str(move(value))
    return _code(value, move) if key in FUNCTIONS else value


def _code(target: Any, move: Relocate) -> Any:
    if not isinstance(target, str) or not registry.is_file(target):
        return target
    file, _, name = target.rpartition(":")
    return f"{move(file)}:{name}"


def _moved_table(key: str, table: Any, move: Relocate) -> Any:
    """Return a table of the setting `key`, with every path in the table replaced by `move(path)`.

    A workflow step without a name gets the path before the move as its name, so that a move does not rename the step.
    """
    if not isinstance(table, Mapping):
        return table
    target, versions, app = table.get("path"), table.get("versions"), table.get("app")
    if isinstance(target, str) and registry.is_file(target):
        name = {"name": target} if key == "workflow.steps" else {}
        table = {**name, **table, "path": _code(target, move)}
    if isinstance(versions, list):
        files = [str(move(each)) if str(each).endswith(".safetensors") else each for each in versions]
        table = {**table, "versions": files}
    return {**table, "app": str(move(app))} if isinstance(app, str) else table


BARE = re.compile(r"[A-Za-z0-9_-]+")
"""Matches keys that TOML allows without quotes."""


def to_toml(value: Any) -> str:
    """Return a setting's value as TOML text.

    Raises:
        ConfigError: TOML cannot express the value.
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_defaults=True)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {to_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(to_toml, value)) + "]"
    if isinstance(value, str | Path | SecretStr):  # the text of a secret is stars
        # TOML has the same escapes as JSON, and also forbids DEL
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    raise ConfigError(
        f"A run file cannot contain {value!r}, which is of type {type(value).__name__}.",
        "Use only numbers, strings, true, false, lists and tables.",
    )


def _key(key: Any) -> str:
    return key if isinstance(key, str) and BARE.fullmatch(key) else to_toml(str(key))


def toml_lines(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a run file with these values.

    Args:
        values: `group.key` → value. The settings of one group must follow one another.
    """
    last = ""
    for key, value in values.items():
        group, _, name = key.partition(".")
        if group != last:
            yield from ["", f"[{group}]"] if last else [f"[{group}]"]
            last = group
        yield f"{name} = {to_toml(value)}"
