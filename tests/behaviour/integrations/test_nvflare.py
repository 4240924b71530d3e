"""Scripts on NVFlare's Client API, without NVFlare: rounds, evaluations, what is logged, and what is refused."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import Nursery
from kit.digests import exported
from kit.processes import ForkedSite
from kit.servers import plain_server
from torch import Tensor, nn

import atoll
import atoll.integrations.nvflare as flare
from atoll.cli.flare import flare_command
from atoll.errors import ConfigError, SchemaMismatch, UsageError
from atoll.integrations.nvflare import __main__ as launcher
from atoll.integrations.nvflare.tracking import MLflowWriter, SummaryWriter, WandBWriter
from atoll.testing.run import history

ZEROS = {"w": torch.zeros(2)}


@pytest.fixture
def take_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., atoll.Server]]:
    """Starts a server of a model, and takes part in its run as its only site."""
    servers = []

    def start(model: Any = ZEROS, **settings: Any) -> atoll.Server:
        servers.append(plain_server(tmp_path, model, **{"rounds": 2} | settings).start())
        for name, value in {"SERVER": servers[0].url, "SITE": "a", "DIR": str(tmp_path / "sites")}.items():
            monkeypatch.setenv(f"ATOLL_{name}", value)
        flare.init()
        return servers[0]

    yield start
    flare.shutdown()
    for server in servers:
        server.stop()


def play(nursery: Nursery, folder: Path, server: atoll.Server, scripts: Mapping[str, str], **env: str) -> None:
    """Run a script at each site, to the end of the run."""
    sites = [ForkedSite(nursery, folder, server.url, site, script).start(**env) for site, script in scripts.items()]
    assert [site.wait(60) for site in sites] == [0] * len(sites), [site.output() for site in sites]
    server.run()


NUMPY = """
import numpy as np
import atoll.integrations.nvflare as flare

flare.init()
while flare.is_running():
    received = flare.receive()
    w = received.params["w"]
    assert type(w) is np.ndarray and received.total_rounds == 2 and received.params_type == flare.ParamsType.FULL
    flare.log("place", 10.0 * received.current_round, flare.AnalyticsDataType.SCALAR)
    flare.send(
        flare.FLModel(
            params={{"w": {params}}}, params_type="{kind}", metrics={{"seen": np.mean(w)}},
            meta={{"NUM_STEPS_CURRENT_ROUND": {steps}}},
        )
    )
"""


@pytest.mark.slow
def test_numpy_scripts_send_models_and_differences(nursery: Nursery, tmp_path: Path) -> None:
    """Two sites send a whole model and a difference, weighted by their steps; metrics are those of what they received.

    In each round w grows by (1·1 + 3·5) / 4 = 4. float64 params are rounded to the run's float32.
    """
    with plain_server(tmp_path, ZEROS, rounds=2, sites=2) as server:
        full = NUMPY.format(params="w + np.ones(2)", kind="FULL", steps=1)  # float64
        diff = NUMPY.format(params="np.full(2, 5.0)", kind="DIFF", steps=3)
        play(nursery, tmp_path, server, {"a": full, "b": diff}, ATOLL_FLARE_PARAMS="numpy")
    assert exported(tmp_path)["w"].tolist() == [8.0, 8.0]
    assert [line["metrics"] for line in history(tmp_path / "state")] == [
        {"seen": 0.0, "place": 0.0},
        {"seen": 4.0, "place": 10.0},
    ]
    assert [site["steps"] for site in history(tmp_path / "state")[0]["sites"]] == [1, 3]


def test_torch_scripts_get_a_state_dict(take_part: Callable[..., atoll.Server]) -> None:
    """A script that has imported torch gets tensors under the module's names; `send` frees those of both models."""
    model = nn.Linear(2, 1)
    server = take_part(model)
    assert flare.is_running()
    assert flare.is_running()
    assert flare.is_train()
    assert flare.get_site_name() == "a"
    assert flare.system_info()["job_id"] == server.status().run
    received = flare.receive()
    assert flare.receive() is received  # until send
    assert received.current_round == 0
    model.load_state_dict(received.params)
    sent = flare.FLModel(params={name: value + 1 for name, value in received.params.items()})
    flare.send(sent)
    assert sent.params is None
    assert received.params is None
    assert not flare.is_train()
    received = flare.receive()
    assert torch.equal(received.params["weight"], model.weight + 1)
    flare.send(flare.FLModel(params=received.params), clear_cache=False)
    assert received.params is not None
    assert not flare.is_running()
    assert flare.receive() is None


EVALUATED = """
import torch
import atoll.integrations.nvflare as flare

target, own = {target}, None
flare.init()
while flare.is_running():
    received = flare.receive()
    if flare.is_submit_model():
        assert flare.get_task_name() == "submit_model" and received.params is None
        flare.send(flare.FLModel(params=own))
    elif flare.is_evaluate():
        flare.send(flare.FLModel(metrics={{"loss": ((received.params["w"] - target) ** 2).mean()}}))
    else:
        own = {{"w": torch.full((2,), target)}}
        flare.send(flare.FLModel(params=dict(own)))
"""


@pytest.mark.slow
def test_scripts_answer_a_cross_site_evaluation(nursery: Nursery, tmp_path: Path) -> None:
    """A script evaluates other models where `is_evaluate`, and sends its own where `is_submit_model`.

    The sites' models are 0 and 4, and that of the run is their mean, 2; a loss is (w − target)².
    """
    steps = [{"kind": "train"}, {"kind": "cross_site_evaluation"}]
    with plain_server(tmp_path, ZEROS, rounds=1, sites=2, **{"workflow.steps": steps}) as server:
        play(nursery, tmp_path, server, {"a": EVALUATED.format(target=0.0), "b": EVALUATED.format(target=4.0)})
        found = {(cell.model, cell.site): cell.metrics["loss"] for cell in server.evaluation.cells}
    of_run = {("version 1", "a"): 4.0, ("version 1", "b"): 4.0}
    assert found == of_run | {("a", "a"): 0.0, ("a", "b"): 16.0, ("b", "a"): 16.0, ("b", "b"): 0.0}


def test_decorated_functions_receive_and_send(take_part: Callable[..., atoll.Server], tmp_path: Path) -> None:
    """The older decorators pass the received model to each function, and send what it returns with its metrics."""
    server = take_part(rounds=1)

    @flare.evaluate
    def measure(given: flare.FLModel, scale: float = 1.0) -> dict[str, float]:
        return {"mean": scale * float(given.params["w"].mean())}

    @flare.train
    def fit(given: flare.FLModel, by: float = 0.0) -> flare.FLModel:
        return flare.FLModel(params={"w": given.params["w"] + by})

    assert measure(scale=3.0) == {"mean": 0.0}
    fit(by=2.0)
    assert not flare.is_running()
    server.run()  # its files are written after the sites hear of the end
    assert exported(tmp_path)["w"].tolist() == [2.0, 2.0]
    assert history(tmp_path / "state")[0]["metrics"] == {"mean": 0.0}


def test_writers_send_numbers_only(
    take_part: Callable[..., atoll.Server], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The last number under each name travels with the next model; for other values a warning says so once."""
    server = take_part(rounds=1)
    received = flare.receive()
    SummaryWriter().add_scalar("loss", 3.0, global_step=1)
    SummaryWriter().add_scalar("loss", 2.0, global_step=2)
    SummaryWriter().add_scalars("error", {"small": 0.5})
    MLflowWriter().log_metric("rate", 0.1)
    WandBWriter().log({"depth": 4})
    with caplog.at_level(logging.WARNING, "atoll"):
        MLflowWriter().set_tag("kind", "trial")
        MLflowWriter().set_tag("owner", "me")
        for number in range(200):
            flare.log(f"many {number}", number, flare.AnalyticsDataType.METRIC)
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING] == [
        "a: a value of type TAG is not sent to the server, such as 'kind'",
        "a: 'many 124' is not sent: an update takes at most 128 logged numbers",
    ]
    flare.send(flare.FLModel(params=received.params, metrics={"loss": 1.0}))  # given, so not the logged one
    assert not flare.is_running()
    server.run()
    found = history(tmp_path / "state")[0]["metrics"]
    assert len(found) == 128
    assert {name: value for name, value in found.items() if not name.startswith("many")} == {
        "loss": 1.0,
        "error/small": 0.5,
        "rate": 0.1,
        "depth": 4.0,
    }


def test_scaffold_controls_have_flares_names(take_part: Callable[..., atoll.Server]) -> None:
    """A run of SCAFFOLD gives the run's controls in `meta`, and takes their change: with one site, c = 0 + 2."""
    take_part(nn.Linear(2, 1, bias=False), algorithm="scaffold")
    received = flare.receive()
    assert received.meta["scaffold_c_global"]["weight"].tolist() == [[0.0, 0.0]]
    with pytest.raises(UsageError, match=r"scaffold, but the model was sent without meta\['scaffold_c_diff'\]"):
        flare.send(flare.FLModel(params=received.params, meta={"NUM_STEPS_CURRENT_ROUND": 3}))
    meta = {"NUM_STEPS_CURRENT_ROUND": 3, "scaffold_c_diff": {"weight": torch.full((1, 2), 2.0)}}
    flare.send(flare.FLModel(params=received.params, meta=meta))
    assert flare.receive().meta["scaffold_c_global"]["weight"].tolist() == [[2.0, 2.0]]


def test_refuses_a_run_that_corrects_steps(take_part: Callable[..., atoll.Server]) -> None:
    with pytest.raises(ConfigError, match="fedprox, corrects each local step, and NVFlare's Client API has no call"):
        take_part(nn.Linear(2, 1), algorithm="fedprox", **{"algorithm.mu": 0.1})


def ones(**changed: Any) -> flare.FLModel:
    return flare.FLModel(**{"params": {"w": torch.ones(2)}} | changed)


def twice() -> None:
    flare.receive()
    flare.send(ones())
    flare.send(ones())


def after_the_end() -> None:
    for _ in range(2):
        flare.receive()
        flare.send(ones())
    assert not flare.is_running()
    flare.send(ones())


def unsent() -> None:
    flare.receive()
    flare.is_running()


def sends(**changed: Any) -> Callable[[], None]:
    def send() -> None:
        flare.receive()
        flare.send(ones(**changed))

    return send


def params(**given: Tensor) -> dict[str, Any]:
    return {"params": given}


@pytest.mark.parametrize(
    ("act", "error", "words"),
    [
        (unsent, UsageError, r"Round 1 was received, but nothing was sent. Call flare.send"),
        (twice, UsageError, r"A model was sent, but none was received since the last send. Call flare.receive"),
        (after_the_end, UsageError, r"the run is over. End the loop when flare.is_running"),
        (
            lambda: flare.send(ones(params_type="DIFF")),
            UsageError,
            r"A model of type DIFF was sent, but none was received",
        ),
        (sends(params=None), UsageError, r"Round 1 asks for a model, but the params that were sent are none. Send"),
        (sends(params=[1.0]), UsageError, r"the params that were sent are of type list"),
        (sends(params={"w": "text"}), UsageError, r"'w' is of type str: not a tensor"),
        (sends(**params(v=torch.ones(2))), SchemaMismatch, r"'v'|v "),
        (sends(**params(w=torch.ones(3))), SchemaMismatch, r"\[3\]"),
        (sends(**params(w=torch.ones(1)), params_type="DIFF"), SchemaMismatch, r"\[1\]"),
        (sends(**params(w=torch.ones(2, dtype=torch.complex64))), UsageError, "complex64"),
        (
            sends(meta={"NUM_STEPS_CURRENT_ROUND": -1}),
            UsageError,
            r"meta\['NUM_STEPS_CURRENT_ROUND'\] is -1. Give the number of local steps",
        ),
        (sends(metrics={"loss": "low"}), UsageError, r"metric 'loss' is 'low'"),
        (sends(metrics=0.5), UsageError, r"metrics are of type float, not a dict"),
        (lambda: flare.send({"w": 1}), UsageError, r"called with an object of type dict. Give an FLModel"),
        (lambda: flare.FLModel(params_type="DIFF"), UsageError, r"params_type 'DIFF', but no params"),
        (lambda: ones(params_type="HALF"), UsageError, r"params_type is 'HALF'. Use FULL or DIFF"),
        (lambda: flare.init(rank=1), UsageError, r"rank 1; only rank 0 can take part"),
        (lambda: flare.patch(None), UsageError, r"no 'patch'. Use atoll.integrations.lightning.patch"),
    ],
)
def test_a_wrong_call_is_refused_at_the_site(
    take_part: Callable[..., atoll.Server], act: Callable[[], object], error: type[Exception], words: str
) -> None:
    take_part()
    with pytest.raises(error, match=words):
        act()


def test_a_refused_model_can_be_sent_again(take_part: Callable[..., atoll.Server]) -> None:
    """After a model was refused at the site, the round is still open: a right model ends it."""
    take_part(rounds=1)
    with pytest.raises(SchemaMismatch):
        sends(**params(w=torch.ones(3)))()
    flare.send(ones())
    assert not flare.is_running()


def test_needs_a_server_and_init(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATOLL_SERVER", raising=False)
    api = flare.api.__class__(flare.FLModel)
    with pytest.raises(UsageError, match=r"takes part in no run yet. Call flare.init\(\) first"):
        api.receive()
    with pytest.raises(ConfigError, match="ATOLL_SERVER"):
        api.init()
    monkeypatch.setenv("ATOLL_FLARE_PARAMS", "jax")
    with pytest.raises(ConfigError, match=r"ATOLL_FLARE_PARAMS is 'jax'. Set it to torch or numpy"):
        api.init()


@pytest.mark.slow
def test_a_script_that_ends_unsent_says_so(nursery: Nursery, tmp_path: Path) -> None:
    """A script that ends between `receive` and `send` leaves the run, with the reason at both sides."""
    script = "import atoll.integrations.nvflare as flare\nflare.init()\nflare.receive()\n"
    with plain_server(tmp_path, ZEROS, rounds=1) as server:
        site = ForkedSite(nursery, tmp_path, server.url, "a", script).start()
        assert site.wait(60) == 0
        words = "Round 1 was received, but nothing was sent."
        assert words in site.output()
        assert words in next(worker.error for worker in server.status().workers if worker.site == "a")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"params": ZEROS, "metrics": {"loss": 1.0}}, "with params"),
        ({"metrics": {}}, "without metrics"),
    ],
)
def test_an_evaluation_takes_metrics_only(
    take_part: Callable[..., atoll.Server], answer: dict[str, Any], words: str
) -> None:
    """Where the server asks for metrics, a trained model is refused at the site; the remedy names `is_evaluate`."""
    steps = [{"kind": "cross_site_evaluation", "site_models": False}, {"kind": "train"}]
    take_part(**{"workflow.steps": steps})
    assert flare.receive().params["w"].tolist() == [0.0, 0.0]
    assert flare.is_evaluate()
    with pytest.raises(UsageError, match=f"Task 'validate' asks for metrics, but the model was sent {words}.*is_eval"):
        flare.send(flare.FLModel(**answer))


@pytest.mark.parametrize(
    ("given", "runs"),
    [
        ("python client.py --lr 1", "python -m atoll.integrations.nvflare client.py --lr 1"),
        ("/bin/python3 -u -m my.client", "/bin/python3 -u -m atoll.integrations.nvflare -m my.client"),
    ],
)
def test_the_launcher_comes_before_the_script(given: str, runs: str) -> None:
    assert flare_command(given.split()) == runs.split()


@pytest.mark.parametrize("given", ["bash run.sh", "python", "python -c pass", "torchrun client.py"])
def test_only_a_python_script_is_launched(given: str) -> None:
    with pytest.raises(UsageError, match=r"no Python script. Give the script after `--`"):
        flare_command(given.split())


def test_a_missing_nvflare_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvflare", None)
    with pytest.raises(ConfigError, match=r"cannot be imported by .*pip install 'atoll\[nvflare\]'"):
        launcher.provide()
