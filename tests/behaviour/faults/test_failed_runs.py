"""A run that fails by a fault at the server: its sites end with the reason, instead of waiting for the server."""

from __future__ import annotations

import re
import socket
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import Nursery, free_port, wait_until
from kit.models import build_model
from kit.processes import command
from kit.servers import plain_server, serve, state_of
from kit.sites import DiLoCoSites, FederatedSites
from kit.wire import WireSite
from kit.workflows import AnsweringSites, workflow_server
from safetensors.torch import load_file
from torch import Tensor, nn

import atoll
from atoll.cli.status import _show_stored
from atoll.cli.stored_status import stored_status
from atoll.errors import AtollError, ConfigError, DiskFull, RunFailed, ServerFailed, StateCorrupt, out_of_memory
from atoll.filters import Filter, Outgoing
from atoll.protocol.status_messages import KEPT
from atoll.reducers import Reducer
from atoll.server import startup
from atoll.server.coordinator.run_core import RunCore
from atoll.testing.run import Threads

ASYNC = {"rounds.sites": 2, "async.enabled": True, "rounds.total": 9, "aggregation.reducer.name": "stubborn"}


class Stubborn(Reducer):
    """A reducer of a third party that raises when the test lets it.

    Attributes:
        may_raise: event that the reducer waits for.
        is_mended: whether the reducer works.
    """

    may_raise = threading.Event()
    is_mended = False

    def reduce_(self, rows: Iterable[Tensor], weights: Sequence[float], out: Tensor) -> None:
        """Write the weighted mean, or raise."""
        assert self.may_raise.wait(60)
        if not self.is_mended:
            raise ZeroDivisionError("3 of 0 rows")
        out.zero_()
        for row, weight in zip(rows, weights, strict=True):
            out.add_(row, alpha=weight)


@pytest.fixture(autouse=True)
def stubborn(monkeypatch: pytest.MonkeyPatch) -> type[Stubborn]:
    """The reducer `stubborn`, which waits and then raises."""
    monkeypatch.setattr(Stubborn, "may_raise", threading.Event())
    monkeypatch.setattr(Stubborn, "is_mended", False)
    monkeypatch.setattr("atoll.registry._registered", {})
    atoll.register("reducers", "stubborn", Stubborn)
    return Stubborn


def reason_in_journal(folder: Path) -> str:
    """What the journal of the server in `folder` says of a failure."""
    with closing(sqlite3.connect(folder / "state" / "journal.sqlite")) as db:
        ((why,),) = db.execute("SELECT failed FROM meta")
        return str(why)


class AsksHalfway(Filter):
    """A filter that calls a function while an update is being formed."""

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask = ask

    def begin(self, update: Outgoing) -> None:
        """Call the function."""
        self._ask()


def outcome(job: Callable[[], object]) -> BaseException | None:
    """The error that a function raises."""
    try:
        job()
    except BaseException as error:
        return error
    return None


@pytest.mark.covers("X9")
@pytest.mark.parametrize("moment", ["pulling", "training", "uploading"])
def test_sites_end_with_the_error_of_a_reducer(
    tmp_path: Path, stubborn: type[Stubborn], moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the server's reducer raises an error, the server ends with this error, and so does each site."""
    # Site `a` waits for the next round, while site `b` pulls, trains or uploads.
    b_is_there, has_failed = threading.Event(), threading.Event()

    def halt() -> None:
        b_is_there.set()
        assert has_failed.wait(60)

    def at(site: str, now: str) -> None:
        if site == "a" and now == "pulling":
            assert b_is_there.wait(60)
        if site == "b" and now == moment:
            halt()

    with serve(tmp_path, None, **ASYNC) as server:
        ends: dict[str, BaseException | None] = {}

        def work(site: str) -> None:
            sites = FederatedSites(
                server.url,
                tmp_path,
                site,
                before=lambda site, _: at(site, "pulling"),
                during=lambda site, _: at(site, "training"),
                filters=[AsksHalfway(lambda: at(site, "uploading"))],
            )
            ends[site] = outcome(sites.join)

        both = Threads(*(partial(work, site) for site in "ab"))
        assert b_is_there.wait(60)
        stubborn.may_raise.set()
        wait_until(lambda: server.status().failed, "the failure")
        has_failed.set()
        with pytest.raises(RunFailed, match=r"Round 1 failed: ZeroDivisionError\('3 of 0 rows'\)") as raised:
            server.run()
        both.join()
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    for site in "ab":
        error = ends[site]
        assert isinstance(error, ServerFailed)
        assert error.exit_code == 10
        assert "has failed at the server: Round 1 failed: ZeroDivisionError('3 of 0 rows')" in error.message
        assert "start this site again: it continues from its files" in error.remedy
    assert "ZeroDivisionError" in server.status().failed
    assert "ZeroDivisionError" in reason_in_journal(tmp_path)


def test_a_repaired_run_uses_the_update_that_failed(tmp_path: Path, stubborn: type[Stubborn]) -> None:
    """A run whose reducer failed can be started again with a repaired reducer, and uses the update that it already had.

    The result is the mean of one update, θ₀ + 1, after the outer step w ← w − g.
    """
    settings = {"rounds.sites": 1, "rounds.total": 1, "aggregation.reducer.name": "stubborn"}
    plain = {
        "algorithm.outer_optimizer.lr": 1.0,
        "algorithm.outer_optimizer.momentum": 0.0,
        "network.port": free_port(),
    }
    stubborn.may_raise.set()

    def train(model: nn.Module, site: str, number: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 1

    def work(server: atoll.Server) -> BaseException | None:
        return outcome(FederatedSites(server.url, tmp_path, "a", train=train).join)

    with serve(tmp_path, None, **settings, **plain) as server:
        assert isinstance(work(server), ServerFailed)
        with pytest.raises(RunFailed):
            server.run()
    stubborn.is_mended = True
    with serve(tmp_path, None, **settings, **plain) as server:
        assert reason_in_journal(tmp_path) == ""
        assert work(server) is None
        server.run()
        assert server.status().failed == ""
    result = load_file(tmp_path / "state" / "exports" / "model.safetensors")
    for name, parameter in build_model().named_parameters():
        assert torch.allclose(result[name], parameter + 1)


def test_a_failed_run_ends_a_diloco_site_between_steps(tmp_path: Path, stubborn: type[Stubborn]) -> None:
    """If the run fails while a DiLoCo site trains, a heartbeat tells the site, and its next step raises the error."""
    settings = {"algorithm": "diloco", "H": 10**6, "network.heartbeat_interval_s": 0.2} | ASYNC
    settings |= {"codec": "none"}
    stubborn.may_raise.set()
    with serve(tmp_path, None, **settings) as server:
        loops: list[DiLoCoSites] = []

        def work() -> None:
            loops.append(DiLoCoSites(server.url, tmp_path, 10**9, "b"))
            assert isinstance(outcome(loops[0].join), ServerFailed)

        running = Threads(work)
        wait_until(lambda: state_of(server, "b") == "alive", "site b")
        WireSite(server.url, "a").train(1.0).submit()
        running.join()
        with pytest.raises(RunFailed):
            server.wait(60)


def fails_at_once(controller: Any) -> None:
    controller.sites(at_least=1, timeout_s=30)
    raise KeyError("no such column")


def test_a_failed_workflow_ends_waiting_sites(tmp_path: Path) -> None:
    """If a workflow raises an error, a site that waits for tasks ends with this error."""
    with workflow_server(tmp_path, fails_at_once) as server:
        error = outcome(AnsweringSites(server.url, "a", {"echo": lambda payload: payload}).join)
        with pytest.raises(RunFailed) as raised:
            server.run()
    assert isinstance(error, ServerFailed)
    assert "The workflow fails_at_once failed: KeyError: 'no such column'" in error.message
    assert isinstance(raised.value.__cause__, KeyError)


def test_a_site_ends_if_an_evaluation_has_no_values(tmp_path: Path) -> None:
    """If an evaluation gets no value from any site, the run fails, and waiting sites end with the error."""

    def raises(model: object) -> dict[str, float]:
        raise ValueError("no data here")

    steps = {
        "workflow.steps": ({"kind": "cross_site_evaluation", "args": {"site_models": False}},),
        "rounds.total": 0,
        "rounds.sites": 1,
    }
    with plain_server(tmp_path, build_model(), **steps) as server:

        def work() -> None:
            with atoll.tasks(server.url, "a") as worker:
                worker.evaluates(raises)
                worker.run()

        error = outcome(work)
        with pytest.raises(RunFailed):
            server.run()
    assert isinstance(error, ServerFailed)
    assert "evaluated nothing: version 0 on a: ValueError: no data here" in error.message


def test_a_failed_restart_tells_sites_both_errors(tmp_path: Path) -> None:
    """If a failed run cannot be started again, the new server tells its sites both errors.

    The second start fails before the run begins, because its workflow's file cannot be imported.
    """
    (tmp_path / "flow.py").write_text("def main(controller):\n    raise KeyError('w')\n")
    settings = {"workflow.function": f"{tmp_path}/flow.py:main", "network.port": free_port()}
    server = plain_server(tmp_path, **settings)
    with pytest.raises(RunFailed):
        server.run()
    (tmp_path / "other.py").write_text("import no_such_package\n")
    again = plain_server(tmp_path, **settings | {"workflow.function": f"{tmp_path}/other.py:main"})
    starting = Threads(again.run)

    def ask() -> BaseException | None:
        return outcome(lambda: atoll.tasks(f"http://127.0.0.1:{settings['network.port']}", "a"))

    error = ask()
    again.stop()
    assert isinstance(error, ServerFailed)
    assert "KeyError: 'w'" in error.message
    assert "It cannot be started again: " in error.message
    assert "no_such_package" in error.message
    with pytest.raises(ConfigError, match="no_such_package"):
        starting.join()


@pytest.mark.covers("X9")
def test_a_failed_restart_waits_only_for_uninformed_sites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If a failed run cannot be started again, the new server stays up only for sites that do not know of the failure
    yet.
    """
    # The first server told site `a`, and the second start tells site `b`. The third start waits for no site.
    monkeypatch.setattr("atoll.server.serve.ASK_AGAIN_S", 3600.0)
    (tmp_path / "other.py").write_text("import no_such_package\n")
    port = {"network.port": free_port()}

    def fails(controller: Any) -> None:
        controller.sites(at_least=2, timeout_s=30)
        raise KeyError("w")

    def start_again() -> atoll.Server:
        silent = {"network.heartbeat_interval_s": 0.0, "network.heartbeat_timeout_s": 0.0}
        return plain_server(tmp_path, **(port | silent | {"workflow.function": f"{tmp_path}/other.py:main"}))

    with workflow_server(tmp_path, fails, **port, **{"network.heartbeat_interval_s": 0.2}) as server:
        b = WireSite(server.url, "b")
        assert isinstance(
            outcome(AnsweringSites(server.url, "a", {"echo": lambda payload: payload}).join), ServerFailed
        )
        with pytest.raises(RunFailed):
            server.run()
    second = start_again()
    starting = Threads(second.run)
    wait_until(lambda: "telling the sites of the run" in caplog.text, "the second start")
    assert b.post("/v1/heartbeat", {})[1]["code"] == ServerFailed.code
    with pytest.raises(ConfigError, match="no_such_package"):
        starting.join()
    caplog.clear()
    with pytest.raises(ConfigError, match="no_such_package"):
        Threads(start_again().run).join()
    assert "telling the sites of the run" not in caplog.text


@pytest.mark.covers("X9")
def test_a_failure_during_a_stop_is_recorded(
    tmp_path: Path, stubborn: type[Stubborn], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the run fails at the moment at which the server is stopped, the journal and the stored status have the reason.

    This happens if Ctrl-C comes at the moment of the failure.
    """
    fail = RunCore.fail

    def fail_and_stop(run: RunCore, error: AtollError) -> None:
        fail(run, error)
        server._thread.stopping.set()

    monkeypatch.setattr(RunCore, "fail", fail_and_stop)
    stubborn.may_raise.set()
    with serve(tmp_path, None, **{"rounds.sites": 1, "aggregation.reducer.name": "stubborn"}) as server:
        WireSite(server.url, "a").train(1.0).submit()
        with pytest.raises(RunFailed):
            server.run()
    assert "ZeroDivisionError" in reason_in_journal(tmp_path)
    assert "ZeroDivisionError" in stored_status(tmp_path / "state")[0].failed
    assert server.status().workers[0].state == "not told"


def test_a_failed_first_start_tells_no_site(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the first start of a run fails, the server tells no site.

    A wrong run file would otherwise end the sites of a run that has not failed.
    """
    (tmp_path / "flow.py").write_text("import no_such_package\n")
    port = free_port()
    with pytest.raises(ConfigError):
        plain_server(tmp_path, **{"workflow.function": f"{tmp_path}/flow.py:main", "network.port": port}).start()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5).close()
    assert "telling the sites" not in caplog.text


@pytest.mark.covers("X9")
@pytest.mark.parametrize("is_again", [False, True], ids=["first start", "restarted"])
def test_a_failed_server_gives_up_silent_sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_again: bool) -> None:
    """A failed server stays up to tell its sites the error, but not longer than until a silent site's heartbeat is
    overdue.
    """
    monkeypatch.setattr("atoll.server.serve.ASK_AGAIN_S", 3600.0)
    may_fail = threading.Event()

    def fails(controller: Any) -> None:
        controller.sites(at_least=1, timeout_s=30)
        assert may_fail.wait(60)
        raise KeyError("w")

    settings = {"network.heartbeat_interval_s": 0.2, "network.heartbeat_timeout_s": 3600.0}
    server = workflow_server(tmp_path, fails, **settings).start()
    WireSite(server.url, "a")
    if is_again:
        server.stop()
        server = workflow_server(tmp_path, fails, **settings).start()
    may_fail.set()
    with pytest.raises(RunFailed):
        Threads(server.run).join()
    (worker,) = server.status().workers
    assert worker.state == "not told"


@pytest.mark.covers("X9")
def test_the_stored_status_says_why_a_run_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The stored status of a failed run shows the reason, and shows no site as alive."""
    # Site `a` was told of the failure, and site `b` was silent. The status is shown with the saved status file and
    # without it.

    def fails(controller: Any) -> None:
        controller.sites(at_least=2, timeout_s=30)
        raise KeyError("no such column")

    with workflow_server(tmp_path, fails, **{"network.heartbeat_interval_s": 0.2}) as server:
        WireSite(server.url, "b")
        assert isinstance(
            outcome(AnsweringSites(server.url, "a", {"echo": lambda payload: payload}).join), ServerFailed
        )
        with pytest.raises(RunFailed):
            server.run()
    assert {worker.site: worker.state for worker in server.status().workers} == {"a": "ended", "b": "not told"}
    for states in ({"a": "ended", "b": "not told"}, dict.fromkeys("ab", "not told")):
        _show_stored(tmp_path / "state", json=False)
        shown = capsys.readouterr().out
        assert ", FAILED" in shown
        assert "The run has failed: The workflow " in shown
        assert "KeyError: 'no such column'" in shown
        for site, state in states.items():
            assert re.search(rf"^{site} +{state} ", shown, re.MULTILINE)
        assert "alive" not in shown
        (tmp_path / "state" / KEPT).unlink(missing_ok=True)


@pytest.mark.covers("X9")
@pytest.mark.parametrize("when", ["now", "always"])
def test_sites_learn_that_buffer_shapes_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """If the server fails to adopt the buffer shapes of the first update, it tells the sites the error, and also if the
    run cannot be opened again.
    """

    write, written = startup.write_version, list[object]()

    def write_once(*given: Any) -> Any:
        written.append(given)
        if len(written) == 1:  # version 0
            return write(*given)
        if when == "always":
            monkeypatch.setattr("atoll.server.serve.open_run", refuse)
        raise RuntimeError("no such dtype")

    def refuse(*_: object) -> None:
        raise ConfigError("The model is gone.")

    def build() -> nn.Module:
        model = nn.Linear(2, 1)
        model.register_buffer("extra", torch.zeros(0))
        return model

    def grow(model: nn.Module, *_: object) -> None:
        model.extra = torch.ones(3)

    monkeypatch.setattr(startup, "write_version", write_once)
    settings = {"network.heartbeat_interval_s": 0.2, "model.buffers": {"extra": "first"}, "rounds.sites": 1}
    with serve(tmp_path, build(), **settings) as server:
        error = outcome(FederatedSites(server.url, tmp_path, "a", build=build, train=grow).join)
        with pytest.raises((RunFailed, ConfigError)) as raised:
            server.run()
    assert isinstance(error, ServerFailed)
    if when == "always":
        assert "It cannot be started again: The model is gone." in error.message
        return
    assert "Taking over the shapes of the first update failed: RuntimeError('no such dtype')" in error.message
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert "no such dtype" in reason_in_journal(tmp_path)


@pytest.mark.parametrize(
    ("error", "is_final"),
    [
        (RunFailed("the workflow failed"), True),
        (ConfigError("no such metric"), True),
        (DiskFull("no space"), False),
        (StateCorrupt("a damaged base"), False),
        (out_of_memory(MemoryError()), False),
        (
            out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")),
            False,
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_errors_that_would_repeat_are_final(error: AtollError, is_final: bool) -> None:
    """An error is final only if it would occur again after a restart. A full disk or a lack of memory is not final."""
    assert error.is_final == is_final


@pytest.mark.slow
def test_a_failed_runs_worker_is_not_restarted(nursery: Nursery, tmp_path: Path) -> None:
    """If the run has failed at the server, `atoll worker` does not start its script again."""
    script = tmp_path / "train.py"
    script.write_text(
        "import atoll\nwith atoll.tasks() as worker:\n"
        "    open('begun', 'a').write('x')\n"
        "    for task in worker.tasks():\n        pass\n"
    )
    with workflow_server(tmp_path, fails_at_once) as server:
        words = ("--server", server.url, "--site", "a", "--restarts", "3", "--", sys.executable, str(script))
        process = nursery.start("atoll", "worker", *words, cwd=tmp_path)
        assert process.wait(60) == 10, process.output()
        with pytest.raises(RunFailed):
            server.run()
    assert "not restarted, because the run has failed at the server" in process.output()
    assert "atoll: The run atoll has failed at the server: The workflow fails_at_once failed: " in process.output()
    assert (tmp_path / "begun").read_text() == "x"
    shown = command(nursery, tmp_path, "status", "--dir", str(tmp_path / "state"))
    assert "FAILED" in shown.stdout
    assert "The run has failed: The workflow fails_at_once failed: KeyError: 'no such column'" in shown.stdout
