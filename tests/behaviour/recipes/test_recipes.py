"""What a recipe stands for: settings and a run file, and what it says where it is given something wrong."""

from __future__ import annotations

import copy
import inspect
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import wait_until
from kit.requests import get
from kit.wire import WireSite
from recipe_world import module, recipe
from safetensors.torch import load_file, save_file

import atoll
from atoll import Settings
from atoll.errors import AtollError, ConfigError, SchemaMismatch, UsageError
from atoll.recipes import (
    DiLoCoRecipe,
    FedAvgRecipe,
    FedOptRecipe,
    FedProxRecipe,
    LocalEnv,
    Recipe,
    ScaffoldRecipe,
    ServerEnv,
    SimEnv,
    SwarmRecipe,
)

pytestmark = pytest.mark.covers("P11")
STARTING: Any = (SimEnv, LocalEnv)
"""Environments that start the sites."""
KINDS: dict[str, tuple[type[Recipe], dict[str, object], dict[str, object]]] = {
    "fedavg": (FedAvgRecipe, {}, {}),
    "fedprox": (FedProxRecipe, {"mu": 0.5}, {"algorithm.mu": 0.5}),
    "fedadam": (FedOptRecipe, {}, {}),
    "fedyogi": (FedOptRecipe, {"server_optimizer": "yogi", "server_lr": 0.1}, {"algorithm.outer_optimizer.lr": 0.1}),
    "fedavgm": (FedOptRecipe, {"server_optimizer": "sgd"}, {}),
    "fedadagrad": (FedOptRecipe, {"server_optimizer": "adagrad"}, {}),
    "scaffold": (ScaffoldRecipe, {"server_lr": 0.5}, {"algorithm.outer_optimizer.lr": 0.5}),
    "fednova": (
        SwarmRecipe,
        {"algorithm": "fednova", "aggregators": ("site-2",)},
        {"swarm.enabled": True, "swarm.aggregators": ("site-2",)},
    ),
    "diloco": (
        DiLoCoRecipe,
        {"sync_every": 7, "outer_momentum": 0.8},
        {"diloco.sync_every": 7, "algorithm.outer_optimizer.momentum": 0.8},
    ),
}


@pytest.mark.parametrize("algorithm", KINDS)
def test_a_recipes_run_file_has_exactly_its_settings(algorithm: str, tmp_path: Path) -> None:
    """The run file of a recipe has the settings that the recipe was given, and no other."""
    kind, given, chosen = KINDS[algorithm]
    made = recipe(kind, **given).add_server_config(
        {"aggregation.upload_codec.name": "int8", "network.heartbeat_timeout_s": 300}
    )
    path = made.write("run.toml")
    expected = {
        "run.name": "small",
        "model.source": "my_model:build",
        "algorithm.name": algorithm,
        "rounds.total": 2,
        "rounds.sites": 2,
        "rounds.min_sites": 2,
        "run.script": "train.py",
        "aggregation.upload_codec.name": "int8",
        "network.heartbeat_timeout_s": 300.0,
    }
    assert Settings.read(path, environ={}) == Settings.build(expected | chosen) == made.settings()
    written = {f"{group}.{key}" for group, table in tomllib.loads(path.read_text()).items() for key in table}
    assert written == {".".join(key.split(".")[:2]) for key in expected | chosen}  # and no other line
    assert not (tmp_path / "initial.safetensors").exists()


NEEDED = "The required arguments are name, model, min_sites, num_rounds, train_script"
REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (recipe, {"num_round": 3}, r"FedAvgRecipe has no argument 'num_round'\. Did you mean 'num_rounds'\?"),
    (
        recipe,
        {"kind": ScaffoldRecipe, "server_learn": 3},
        r"ScaffoldRecipe has no argument 'server_learn'\. Did you mean 'server_lr'\?",
    ),
    (recipe, {"min_clients": 3}, r"FedAvgRecipe has no argument 'min_clients'\. Did you mean 'min_sites'\?"),
    (recipe, {"num_clients": 3}, r"FedAvgRecipe has no argument 'num_clients'\. Did you mean 'min_sites'\?"),
    (SimEnv, {"num_clients": 3}, r"SimEnv has no argument 'num_clients'\. Did you mean 'sites'\?"),
    (recipe, {"mu": 3}, "FedAvgRecipe has no argument 'mu'"),
    (recipe, {"settings": {"rounds.quorum": 2}}, r"no argument 'settings'\. .*: recipe\.add_server_config\("),
    (SimEnv, {"config": {"rounds.quorum": 2}}, r"no argument 'config'; it is the setting rounds\.config of"),
    (recipe, {"quorum": 2}, r"'quorum'; it is the setting .*recipe\.add_server_config\(\{'rounds\.quorum': 2\}\)"),
    (
        recipe,
        {"kind": FedOptRecipe, "server_optimizer": "adams"},
        r"server_optimizer is 'adams'\. Did you mean 'adam'\?",
    ),
    (
        recipe,
        {"kind": FedProxRecipe, "mu": -1},
        r"FedProxRecipe: algorithm.mu is -1\. Use a number of at least 0",
    ),
    (FedAvgRecipe, {"name": "small"}, rf"FedAvgRecipe: missing a required argument: 'model'\. {NEEDED}\."),
    (partial(FedAvgRecipe, *range(8)), {}, rf"FedAvgRecipe: too many positional arguments\. {NEEDED}\."),
    (recipe, {"num_rounds": "two"}, r"FedAvgRecipe: num_rounds is 'two'\. Give a whole number"),
    (
        recipe,
        {"min_sites": 0},
        r"FedAvgRecipe: min_sites is 0\. Give a whole number, at least 1",
    ),
    (recipe, {"name": 3}, "FedAvgRecipe, name: run.name = 3, but it must be text"),
    (recipe, {"num_rounds": 0}, r"num_rounds is 0\. Use at least 1: a recipe must end"),
    (recipe, {"num_rounds": -3}, r"num_rounds is -3\. Use at least 1: a recipe must end"),
    (recipe, {"train_script": "trian.py"}, r"the train_script 'trian.py' does not exist"),
    (recipe, {"model": None}, "no initial model"),
    (recipe, {"model": torch.nn.Linear}, r"model is the class Linear, not a model\. Pass Linear\(\)"),
    (recipe, {"model": 3}, r"model is of type int\. Give an nn.Module"),
    (recipe, {"model": {"class": "x"}}, r"model = \{'class': 'x'\} does not have a valid form"),
    (recipe, {"model": "__main__:Net"}, "the server's __main__ is another program"),
    (recipe, {"num_rounds": "3"}, r"FedAvgRecipe: num_rounds is '3'\. Give a whole number"),
    (recipe, {"num_rounds": True}, r"FedAvgRecipe: num_rounds is True\. Give a whole number"),
    (recipe, {"min_sites": "2"}, r"FedAvgRecipe: min_sites is '2'\. Give a whole number, at least 1"),
    (recipe, {"min_sites": True}, "FedAvgRecipe: min_sites is True"),
    (recipe, {"train_script": None}, r"FedAvgRecipe: train_script is None\. Give a path"),
    (recipe, {"train_script": 3}, r"FedAvgRecipe: train_script is 3\. Give a path"),
    (recipe, {"train_args": 5}, r"FedAvgRecipe: train_args is 5\. Use one string, .* or a list"),
    (recipe, {"train_args": None}, r"FedAvgRecipe: train_args is None\. Use one string"),
    (recipe, {"train_args": b"--x"}, r"FedAvgRecipe: train_args is b'--x'\. Use one string"),
    (recipe, {"train_args": "--x 'a"}, r"""train_args is "--x 'a": no closing quotation\. Quote it as for a shell"""),
    (recipe, {"initial_ckpt": 3}, r"FedAvgRecipe: initial_ckpt is 3\. Give a path"),
    (recipe, {"model": "a.safetensors", "initial_ckpt": "b.safetensors"}, "Use one of them"),
    *((kind, {"sties": 2}, rf"{kind.__name__} has no argument 'sties'\. Did you mean 'sites'\?") for kind in STARTING),
    *((kind, {}, rf"{kind.__name__}: missing .*'sites'\. The required arguments are sites\.") for kind in STARTING),
    (SimEnv, {"sites": "2"}, r"SimEnv: sites is '2'\. Give a whole number, at least 1"),
    (SimEnv, {"sites": 2.0}, r"SimEnv: sites is 2\.0"),
    (SimEnv, {"sites": 2, "processes": "2"}, r"processes is '2'\. Give a number of at least 1"),
    (SimEnv, {"sites": 2, "processes": 0}, r"processes is 0\. Give a number of at least 1"),
    (SimEnv, {"sites": 2, "engine": 3}, r"engine is 3\. Use one of local, ray"),
    (SimEnv, {"sites": 2, "engine": "slurm"}, r"engine is 'slurm'\. Use one of local, ray"),
    (SimEnv, {"sites": 2, "engine": "rai"}, r"engine is 'rai'\. Did you mean 'ray'\?"),
    (SimEnv, {"sites": 2, "address": "head:6379"}, "address is 'head:6379', but the engine is 'local'"),
    (SimEnv, {"sites": 2, "folder": 3}, r"SimEnv: folder is 3\. Give a path"),
    (LocalEnv, {"sites": "2"}, "LocalEnv: sites is '2'"),
    (LocalEnv, {"sites": 2, "threads": "x"}, r"LocalEnv: threads is 'x'\. Give a whole number, at least 0"),
    (LocalEnv, {"sites": 2, "threads": -1}, "LocalEnv: threads is -1"),
    (LocalEnv, {"sites": 2, "folder": 3}, r"LocalEnv: folder is 3\. Give a path"),
    (ServerEnv, {"url": "http://h:1", "sties": 2}, r"ServerEnv has no argument 'sties'\. Did you mean 'site'"),
    (ServerEnv, {"url": 8512}, r"ServerEnv: url is 8512\. Use the form http://host:8512"),
    (
        ServerEnv,
        {"url": "http://h:1", "site": "a b/c"},
        r"ServerEnv: the site 'a b/c' is not a site name\. Use 1 to 64",
    ),
    (ServerEnv, {"url": "http://h:1", "site": 3}, "ServerEnv: the site 3 is not a site name"),
    (ServerEnv, {"url": "http://h:1", "threads": -1}, "ServerEnv: threads is -1"),
]


@pytest.mark.covers("V5", "X3")
@pytest.mark.parametrize(("make", "given", "said"), REFUSED)
def test_a_wrong_argument_of_a_recipe_is_refused_at_once(
    make: Callable[..., Any], given: dict[str, Any], said: str
) -> None:
    """Recipes and environments refuse a wrong argument when they are made, with a hint at the right one."""
    with pytest.raises(AtollError, match=said) as refused:
        make(**given)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("given", "env", "said"),
    [
        *(({}, wrong, r"is not an environment\. Use LocalEnv\(sites=2\)") for wrong in (LocalEnv, "local", None)),
        *(({}, kind(1), "sites is 1, but min_sites of small is 2, so no round could close") for kind in STARTING),
        *(
            (
                {"kind": SwarmRecipe, "aggregators": ["site-1", "site-3"]},
                kind(2),
                "aggregators of small contains 'site-3', but none of the run's 2 sites.*Did you mean 'site-",
            )
            for kind in STARTING
        ),
        ({}, ServerEnv("host:8512"), "is not a valid server address"),
    ],
)
def test_a_recipe_refuses_an_unsuitable_environment(given: dict[str, Any], env: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        recipe(**given).execute(env)


def test_a_single_aggregator_may_be_a_plain_string() -> None:
    """`SwarmRecipe` takes a plain string as the name of one aggregator, not as a list of one-letter names."""
    assert recipe(SwarmRecipe, aggregators="site-2").settings().swarm.aggregators == ("site-2",)  # not its letters


@pytest.mark.parametrize("kind", [SimEnv, LocalEnv])
def test_a_recipe_refuses_an_unusable_folder(kind: Any, tmp_path: Path) -> None:
    (tmp_path / "here" / "run.toml").mkdir(parents=True)
    for folder in ("train.py/below", "train.py/below/it", "here"):
        with pytest.raises(UsageError, match=rf"folder '{folder}' cannot be used: .*Use another folder"):
            recipe().execute(kind(sites=2, folder=folder))
    (tmp_path / "atoll-recipes").touch()
    with pytest.raises(UsageError, match=r"folder 'atoll-recipes/.*' cannot be used: .*Use another folder"):
        recipe().execute(kind(sites=2))


AS_ONE = (
    r"one mapping, but got {}\.\s.*recipe\.add_server_config\(\{{'aggregation.upload_codec': \{{'name': 'int8'\}}\}}\)"
)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([{"quorm": 2}], r"add_server_config: the setting 'quorm' does not exist\. Did you mean rounds\.quorum\?"),
        (
            [{"algorithm.outer_optimizer.name": "adam"}],
            r"DiLoCoRecipe: algorithm.outer_optimizer.momentum is 0\.8, but adam has no momentum\. Leave momentum out",
        ),
        ([{"network.port": "http"}], "add_server_config: network.port = 'http', but it must be a whole number"),
        ([{"rounds.quorum": 2}], "rounds.deadline_s is 0, so the quorum never takes effect"),
        ([{"diloco.num_fragments": 4}], "diloco.sync_every is 6 and diloco.num_fragments is 4"),
        (
            [{"rounds.total": 4}],
            r"got 'rounds.total', but DiLoCoRecipe sets this key itself\. Use the argument 'num_rounds'",
        ),
        ([{"diloco.sync_every": 4}], "'diloco.sync_every', but DiLoCoRecipe sets this key"),
        (
            [{"algorithm.name": "fedavg"}],
            r"'algorithm.name', but DiLoCoRecipe sets this key itself\. .* use another recipe",
        ),
        ([{3: "int8"}], "add_server_config got the key 3, which is not a string"),
        (["int8"], AS_ONE.format("'int8'")),
        ([], AS_ONE.format("nothing")),
    ],
)
def test_a_wrong_server_config_changes_nothing(given: list[Any], said: str) -> None:
    """`add_server_config` refuses a wrong setting with a reason, and the recipe's settings stay as they were."""
    made = recipe(DiLoCoRecipe, sync_every=6, outer_momentum=0.8)
    before = made.settings()
    with pytest.raises(AtollError, match=said):
        made.add_server_config(*given)
    assert made.settings() == before


def test_repeated_server_configs_add_up() -> None:
    """Each call of `add_server_config` adds to the earlier ones. Keyword arguments are refused."""
    made = recipe(DiLoCoRecipe)
    with pytest.raises(
        UsageError,
        match=r"one mapping, but got aggregation.upload_codec.name=…\.\s"
        r".*recipe\.add_server_config\(\{'aggregation.upload_codec.name': 'int8'\}\)",
    ):
        made.add_server_config(**{"aggregation.upload_codec.name": "int8"})
    made.add_server_config({"rounds.quorum": 2, "rounds.deadline_s": 5}).add_server_config({"rounds.quorum": 3})
    assert (made.settings().rounds.quorum, made.settings().rounds.deadline_s) == (3, 5.0)


@pytest.mark.covers("P13")
def test_recipes_and_variables_give_the_same_settings() -> None:
    """Settings given to a recipe have the same effect as settings given by environment variables."""
    config = {"workflow.tensor_part_bytes": 65536, "workflow.array_part_bytes": 0, "network.idle_timeout_s": 7.5}
    written = Settings.read(recipe().add_server_config(config).write("run.toml"), environ={})
    variables = {f"ATOLL_{key.upper().replace('.', '__')}": str(value) for key, value in config.items()}
    plain = Settings.read(recipe().write("other.toml"), environ=variables)
    assert written == plain
    assert {key: written.at(key) for key in config} == config


def schema_of(folder: Path, settings: Settings, *model: Any) -> dict[str, Any]:
    """The tensors of a run by these settings, as its server says."""
    given = settings.changed({"network.port": 0, "disk.state_dir": folder})
    with atoll.Server(*model, settings=given) as server:
        return get(server.url, "/v1/schema")[1]


def test_an_asynchronous_recipe_waits_for_no_site(tmp_path: Path) -> None:
    """The run of an asynchronous recipe makes versions without waiting for all `min_sites` sites."""
    # `min_sites` is 2. Both sites join, and then one of them leaves.
    config = {"async.enabled": True, "aggregation.upload_codec.name": "none"}
    given = {"network.port": 0, "disk.state_dir": tmp_path / "state"}
    settings = recipe(DiLoCoRecipe).add_server_config(config).settings().changed(given)
    with atoll.Server(settings=settings) as server:
        site, other = WireSite(server.url, "a"), WireSite(server.url, "b")
        other.leave()
        site.train(1.0).submit()
        wait_until(lambda: server.status().version == 1, "a version of one site")


@pytest.mark.covers("P7")
def test_a_module_is_the_initial_model(tmp_path: Path) -> None:
    """A recipe writes a module as the run's initial model, with its buffers and tied tensors."""
    net = module()
    path = recipe(model=net).write(tmp_path / "deep" / "run.toml")
    settings = Settings.read(path, environ={})
    assert settings.model.source == str(tmp_path / "deep" / "initial.safetensors")
    loaded = load_file(settings.model.source)
    state = net.state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    assert schema_of(tmp_path / "one", settings) == schema_of(tmp_path / "other", settings, net)


@pytest.mark.covers("P17")
@pytest.mark.parametrize("kind", ["module", "function", "class path"])
def test_an_initial_checkpoint_sets_the_models_weights(kind: str, tmp_path: Path) -> None:
    """A recipe with `initial_ckpt` writes an initial model with the checkpoint's weights, whatever form the model
    has.
    """
    net = module()
    state = {
        name: tensor.clone() + (1 if tensor.is_floating_point() else 0) for name, tensor in net.state_dict().items()
    }
    save_file(state, tmp_path / "ckpt.safetensors")  # plain: it says nothing of buffers and ties
    model = {"module": net, "function": "my_model:build", "class path": {"class_path": "my_model.Net", "args": {}}}[
        kind
    ]
    path = recipe(model=model, initial_ckpt="ckpt.safetensors").write("run.toml")
    settings = Settings.read(path, environ={})
    assert settings.model.source is not None
    written = load_file(settings.model.source)
    assert all(torch.equal(written[name], state[name]) for name in state)
    assert schema_of(tmp_path / "one", settings) == schema_of(tmp_path / "other", settings, net)


def test_a_checkpoint_of_another_model_or_a_pickle_is_refused(tmp_path: Path) -> None:
    """A recipe refuses a checkpoint that does not fit the model, and a pickle. It writes no file."""
    save_file({"one.weight": torch.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(SchemaMismatch, match="initial_ckpt"):
        recipe(initial_ckpt="other.safetensors").write("run.toml")
    with pytest.raises(ConfigError, match="is a pickle"):
        recipe(initial_ckpt="weights.pt").write("run.toml")
    assert not (tmp_path / "run.toml").exists()
    with pytest.raises(SchemaMismatch, match="initial_ckpt"):
        recipe(initial_ckpt="other.safetensors").execute(LocalEnv(sites=2, folder="new"))
    assert not (tmp_path / "new").exists()


def test_models_may_be_classes_or_files() -> None:
    """A recipe's model may be a class path with arguments, a model file, or only a checkpoint."""
    path = recipe(model={"class_path": "my_model.Net", "args": {"hidden": 7}}).write("run.toml")
    settings = Settings.read(path, environ={})
    assert (settings.model.source, settings.model.args) == ("my_model:Net", {"hidden": 7})
    recipe(model=module()).write("first.toml")
    path = recipe(model=Path("initial.safetensors")).write("runs/second.toml")
    assert 'source = "../initial.safetensors"' in path.read_text()
    assert recipe(model=None, initial_ckpt="initial.safetensors").settings().model.source == "initial.safetensors"


def test_a_recipes_paths_are_relative_to_the_current_folder(tmp_path: Path) -> None:
    """A recipe takes paths as relative to the current folder. Its run file has them relative to the file's own
    folder.
    """
    (tmp_path / "mine.py").write_text("def mean(updates): ...")
    made = recipe().add_server_config(
        {
            "aggregation.aggregator.path": "mine.py:mean",
            "disk.export_dir": "out",
            "algorithm.outer_lr_of": {"head.*": 0.5},
            "workflow.result_filters": [
                {"path": "mine.py:mean", "args": {}},
                {"path": "drop", "args": {"names": ["a\n"]}},
            ],
        }
    )
    settings = Settings.read(made.write("deep/run.toml"), environ={})
    assert Path(settings.aggregation.aggregator.path.removesuffix(":mean")).resolve() == tmp_path / "mine.py"
    assert settings.disk.export_dir.resolve() == tmp_path / "out"
    assert settings.algorithm.outer_lr_of == {"head.*": 0.5}
    assert settings.workflow.result_filters[0]["path"] == "deep/../mine.py:mean"
    assert settings.workflow.result_filters[1] == {"path": "drop", "args": {"names": ["a\n"]}}


def test_the_commands_in_a_run_file_refer_to_this_file(tmp_path: Path) -> None:
    """A user can copy the commands in a recipe's run file: they give paths from the folder of the script."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").touch()
    for script, server in (("train.py", "small/run.toml"), ("code/train.py", "../small/run.toml")):
        lines = recipe(train_script=script).write("small/run.toml").read_text().splitlines()
        assert f"#   atoll server {server}" in lines
        assert lines[1].startswith(f"# folder of {script} ")
        assert [line for line in lines if line.endswith(" -- python train.py")] != []


def test_a_recipe_overwrites_only_its_own_run_files(tmp_path: Path) -> None:
    """A recipe overwrites its own run file, but not one that the user has written or changed."""
    (tmp_path / "run.toml").write_text("rounds.total = 3\n")
    with pytest.raises(UsageError, match=r"'run.toml' was not written by a recipe"):
        recipe().write("run.toml")
    with pytest.raises(UsageError, match=r"is a folder\. Give the run file"):
        recipe().write(tmp_path)
    assert (tmp_path / "run.toml").read_text() == "rounds.total = 3\n"
    recipe().write("mine.toml")
    recipe(num_rounds=5).write("mine.toml")
    assert Settings.read(tmp_path / "mine.toml", environ={}).rounds.total == 5


@pytest.mark.covers("X5")
def test_every_public_name_of_recipes_has_a_docstring() -> None:
    assert all(inspect.getdoc(getattr(atoll.recipes, name)) for name in atoll.recipes.__all__)


def test_environments_of_recipes_can_be_copied() -> None:
    for env in (SimEnv(sites=3, processes=2), LocalEnv(sites=2, folder="here")):
        assert copy.deepcopy(env) == env
        assert copy.copy(env) == env


def told(number: int, site: str) -> dict[str, object]:
    """What a recipe may name as a function: it is at the top level of a file."""
    return {"site": site}


def test_a_recipe_accepts_a_round_configuration(tmp_path: Path) -> None:
    """A recipe writes a dict of round settings into its run file, and a function by its name. It refuses functions that
    have no name.
    """
    # A dict is the table of the run file; a function or its name is named there; other functions are refused.
    table = {"lr": {"1": 0.1, "3": 0.01}, "epochs": 2}
    written = recipe(FedAvgRecipe, config=table).write(tmp_path / "run.toml")
    assert Settings.read(written, environ={}).rounds.config == table
    named = recipe(FedAvgRecipe, config=told).settings().rounds
    assert (named.config, named.config_function) == ({}, f"{__name__}:told")
    assert recipe(FedAvgRecipe, config="my_rounds:told").settings().rounds.config_function == "my_rounds:told"
    with pytest.raises(UsageError, match="which another process cannot import"):
        recipe(FedAvgRecipe, config=lambda number, site: {})
    with pytest.raises(ConfigError, match=r"rounds\.config: lr is nan"):
        recipe(FedAvgRecipe, config={"lr": float("nan")})
    with pytest.raises(ConfigError, match=r"rounds\.config"):
        recipe(FedAvgRecipe, config=3)
