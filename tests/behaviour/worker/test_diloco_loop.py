"""The loop of `atoll.DiLoCo`: it takes part once, resumes from checkpoints, and says which steps an outage has cost."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.processes import Nursery
from harness.proxy import BEFORE_HEADER, Fault, Proxy
from kit import DiLoCoSites, build_model, diloco, serve, take_steps
from kit.processes import command
from kit.servers import plain_server
from torch import nn
from torch.optim import SGD

import atoll
from atoll.errors import ConfigError, UsageError

DILOCO: dict[str, Any] = {"algorithm": "diloco", "H": 2, "rounds": 2, "sites": 1}
STREAMS = {"K": 2, "tau": 1}


def alive(server: atoll.Server) -> set[str]:
    return {worker.site for worker in server.status().workers if worker.state == "alive"}


# -- a start that is refused or fails leaves nothing behind that others wait for


@pytest.mark.covers("L2", "L20")
@pytest.mark.parametrize("alone", [False, True])
def test_a_diloco_loop_cannot_start_twice(tmp_path: Path, alone: bool) -> None:
    """A DiLoCo loop that has started or ended cannot start again. The running loop goes on undisturbed."""
    with serve(tmp_path, **DILOCO) as server:
        loop = diloco("" if alone else server, tmp_path)
        with loop:
            with pytest.raises(UsageError):
                loop.start()
            assert alive(server) == (set() if alone else {"a"})  # the running one goes on
            take_steps(loop, 1)
            assert loop.step == 1
        with pytest.raises(UsageError), loop:
            pass
        assert alive(server) == set()


UNSTARTED = """
import sys
import torch
import atoll

model = torch.nn.Linear(2, 1)


def make(optimizer):
    return atoll.DiLoCo(model, optimizer)


def main(loop):
    if sys.argv[1] == "stays":
        globals()["kept"] = loop
    elif sys.argv[1] == "error":
        raise ValueError("no data")
    elif sys.argv[1] == "start":
        with loop:
            pass
    elif sys.argv[1] == "constructor":
        try:
            make(optimizer=None)
        except atoll.errors.AtollError:
            loop.start()


main(make(torch.optim.SGD(model.parameters(), lr=0.1)))
"""


@pytest.mark.slow
@pytest.mark.covers("L2", "X3")
@pytest.mark.parametrize(
    ("script", "times"), [("drops", 1), ("stays", 1), ("error", 0), ("start", 0), ("constructor", 0)]
)
def test_warns_once_if_the_loop_never_started(nursery: Nursery, tmp_path: Path, script: str, times: int) -> None:
    """If a script makes a DiLoCo loop and never starts it, a line at its end says so. It says nothing if the script
    failed or started the loop.
    """
    (tmp_path / "train.py").write_text(UNSTARTED)
    ended = command(nursery, tmp_path, script, program=str(tmp_path / "train.py"))
    told = "atoll: atoll.DiLoCo was never started: write `with diloco:` around the training loop, or call start().\n"
    assert ended.stderr.count(told) == times, ended.stderr
    assert ended.stderr.count("never started") == times


class HooksFail(SGD):
    """Joining works, hooking does not."""

    works = False

    def register_step_post_hook(self, hook: Callable[..., Any]) -> Any:
        if not self.works:
            raise RuntimeError("no hooks today")
        return super().register_step_post_hook(hook)


@pytest.mark.parametrize("settings", [{}, STREAMS], ids=["whole", "streaming"])
def test_a_failed_start_ends_the_membership(tmp_path: Path, settings: dict[str, Any]) -> None:
    """If the start of a loop fails after it joined, its site leaves the run with the error. No round waits for it, and
    the site can join again.
    """
    model = build_model()
    optimizer = HooksFail(model.parameters(), lr=0.05)
    with serve(tmp_path, **DILOCO | settings | {"sites": 2}) as server:
        loop = diloco(server, tmp_path, "c", model, optimizer)
        with pytest.raises(RuntimeError):
            loop.start()
        (left,) = server.status().workers
        assert (left.site, left.state) == ("c", "failed")
        assert "no hooks today" in left.error
        assert not optimizer._optimizer_step_pre_hooks
        optimizer.works = True
        with loop:  # its files are free again, and so is its name
            assert alive(server) == {"c"}
        with pytest.raises(ZeroDivisionError):
            diloco(server, tmp_path, "d", metrics=lambda: {"a": 1 / 0}).start()
        assert alive(server) == set()
        DiLoCoSites(server.url, tmp_path, 10).join()  # no round waits for c or d
        server.run()


@pytest.mark.covers("L2")
@pytest.mark.parametrize("same", ["optimizer", "model"])
def test_two_loops_cannot_train_the_same_parameters(tmp_path: Path, same: str) -> None:
    """While a loop trains a model or uses an optimizer, a second loop with the same one refuses to start. Afterwards,
    it starts.
    """
    model = build_model()
    optimizer = SGD(model.parameters(), lr=0.05)
    with serve(tmp_path, **DILOCO) as server:
        other = diloco(server, tmp_path, "b", model, optimizer if same == "optimizer" else None)
        with diloco(server, tmp_path, "a", model, optimizer):
            with pytest.raises(UsageError):
                other.start()
            assert alive(server) == {"a"}
        with other:  # the first one has ended
            assert alive(server) == {"b"}


def test_loops_may_share_a_frozen_part(tmp_path: Path) -> None:
    """Two active loops may share a layer that neither trains."""
    shared = nn.Linear(4, 4).requires_grad_(False)

    def loop(site: str) -> atoll.DiLoCo:
        model = nn.Sequential(shared, nn.Linear(4, 4))
        return diloco(server, tmp_path, site, model, SGD(model[1].parameters(), lr=0.05))

    with serve(tmp_path, nn.Sequential(shared, nn.Linear(4, 4)), **DILOCO) as server, loop("a"), loop("b"):
        assert alive(server) == {"a", "b"}


@pytest.mark.parametrize("tries", [-1, 2.5])
def test_refuses_an_impossible_number_of_retries(tmp_path: Path, tries: Any) -> None:
    with pytest.raises(UsageError, match=f"max_sync_retries is {tries}"):
        diloco("", tmp_path, max_sync_retries=tries)


# -- checkpoints of a trainer: in their own run, with the folder that they were written beside

RESUMED = DILOCO | {"H": 1, "rounds": 4}


def train(loop: atoll.DiLoCo, steps: int) -> dict[str, Any]:
    """The state after some steps; each is a round."""
    with loop:
        take_steps(loop, steps)
        return loop.state_dict()


def test_resumes_from_a_checkpoint_of_its_folder(tmp_path: Path) -> None:
    """A DiLoCo loop resumes from a checkpoint whose version is not above that of its folder."""
    with serve(tmp_path, **RESUMED) as server:
        early, late = (train(diloco(server, tmp_path), 1) for _ in range(2))
        assert (early["versions"], late["versions"]) == ([1], [2])
        for state in (early, late):
            loop = diloco(server, tmp_path)
            loop.load_state_dict(json.loads(json.dumps(state)))
            train(loop, 1)
        assert server.status().fragments[0].version == 4


@pytest.mark.covers("X3")
def test_a_checkpoint_must_match_the_workers_folder(tmp_path: Path) -> None:
    """A DiLoCo loop refuses a checkpoint if its folder has no version or an older one, or if the run or site is
    another.
    """
    with serve(tmp_path, **RESUMED) as server:
        state = train(diloco(server, tmp_path), 2)
        for loop, changed, words in [
            (diloco(server, tmp_path / "new"), {}, r"trained from version 2, .* has no version"),
            (diloco(server, tmp_path), {"versions": [3]}, r"trained from version 3, .* has version 2"),
            (diloco(server, tmp_path), {"run": "f" * 32}, "belongs to site 'a' in run ffffffff, not to site 'a'"),
            (diloco(server, tmp_path, "b"), {}, "belongs to site 'a' in run .*, not to site 'b'"),
        ]:
            loop.load_state_dict(state | changed)
            with pytest.raises(UsageError, match=words):
                loop.start()
        assert server.status().fragments[0].version == 2


def test_load_state_dict_refuses_other_data(tmp_path: Path) -> None:
    """`load_state_dict` refuses data that Atoll did not write, and a loop that has started. Without a server, the state
    is empty.
    """
    with serve(tmp_path, **RESUMED) as server:
        loop = diloco(server, tmp_path)
        with pytest.raises(UsageError, match="state_dict was not written by Atoll: it has the keys 'epoch'"):
            loop.load_state_dict({"epoch": 3})
        with loop, pytest.raises(UsageError, match="This DiLoCo object has already started"):
            loop.load_state_dict({})
    with diloco("", tmp_path) as alone:
        assert alone.state_dict() == {}


# -- a loop that ends while its server is away

ENDLESS = DILOCO | {"H": 4, "rounds": 100}


def train_into_an_outage(folder: Path, lost_at: int, steps: int, **settings: Any) -> atoll.DiLoCo:
    """Steps of one worker; its server goes away for good after step `lost_at`."""
    with serve(folder, **ENDLESS | settings) as server:
        with diloco(server, folder, max_sync_retries=0) as loop:
            take_steps(loop, lost_at)
            server.stop()
            take_steps(loop, steps - lost_at)
    return loop


@pytest.mark.covers("L7")
@pytest.mark.parametrize("settings", [{}, STREAMS], ids=["whole", "streaming"])
def test_warns_once_of_an_outage(tmp_path: Path, warned: Callable[[], list[str]], settings: dict[str, Any]) -> None:
    """If the server is lost for good, the log warns once of skipped synchronisations, and says how many steps since the
    last synchronisation are lost.
    """
    # Fragments are taken after 2, 4, 6 and 8 steps, and that of step 8 is merged after 9.
    loop = train_into_an_outage(tmp_path, 9, 40, **settings)
    assert loop.step == 40
    assert loop.skipped > 3
    lines = warned()
    assert "a: the 32 local steps after step 8 were not sent; only this script's model contains them" in lines
    assert len([line for line in lines if "skipped" in line]) == 1


def test_an_outage_after_training_causes_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, warned: Callable[[], list[str]]
) -> None:
    """If the server is lost only after the last synchronisation of the training, the log says which steps only the
    local model has.
    """
    # It does not warn. Of 11 steps, 8 are in two updates.
    caplog.set_level("INFO", "atoll")
    train_into_an_outage(tmp_path, 11, 11)
    assert "a: only the local model has the last 3 steps, made after the last synchronisation" in caplog.text
    assert warned() == []


@pytest.mark.covers("L2")
@pytest.mark.parametrize(
    ("settings", "first", "of"), [({}, 4, ""), ({"K": 2}, 2, ", 2 fragments")], ids=["whole", "fragments"]
)
def test_warns_of_training_without_a_synchronisation(
    tmp_path: Path, warned: Callable[[], list[str]], settings: dict[str, Any], first: int, of: str
) -> None:
    """If a loop ends before its first synchronisation, the log warns that the worker never synchronised. If an error
    ended the loop, it does not.
    """
    with serve(tmp_path, **ENDLESS | settings) as server:
        failed = diloco(server, tmp_path).start()
        take_steps(failed, 1)
        failed.stop(ZeroDivisionError())
        assert warned() == []
        with diloco(server, tmp_path) as loop:
            take_steps(loop, 1)
    assert warned() == [
        f"a: this worker never synchronised: it made 1 of the {first} local steps before the first synchronisation "
        f"(diloco.sync_every = 4{of}). Train longer, or start a new run with a smaller diloco.sync_every."
    ]


@pytest.mark.covers("X4")
def test_a_failed_update_shows_no_transfer_rate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If an update does not arrive, the log has no line about its transfer. After a successful one, the line comes at
    DEBUG.
    """
    caplog.set_level("DEBUG", "atoll")
    with serve(tmp_path, **ENDLESS) as server, Proxy(server.port) as proxy:
        with diloco(proxy.url, tmp_path, max_sync_retries=0) as loop:
            proxy.faults += [Fault("PUT .*", "up", BEFORE_HEADER, "reset") for _ in range(100)]
            take_steps(loop, 4)
            assert loop.skipped == 1
            assert "a: submitting" not in caplog.text
            proxy.faults.clear()
            take_steps(loop, 4)
            assert "a: submitting" in caplog.text


@pytest.mark.covers("X3")
@pytest.mark.parametrize("join", [atoll.join, atoll.functional.init], ids=["join", "functions"])
def test_round_scripts_are_refused_in_a_diloco_run(tmp_path: Path, join: Callable[..., Any]) -> None:
    """A script that trains round by round cannot join a DiLoCo run.

    The weight of such a script would be a number of samples, while that of the other workers is 1.
    """
    with plain_server(tmp_path, nn.Linear(2, 1), algorithm="diloco", H=5, rounds=0) as server:
        with pytest.raises(
            ConfigError, match=r"synchronises every 5 local steps.*Use atoll\.DiLoCo\(model, optimizer\)"
        ):
            join(server.url, site="a", folder=tmp_path / "w")
        assert server.status().workers == [], "it has not joined"


@pytest.mark.covers("X3")
def test_a_round_script_may_join_diloco_for_tasks(tmp_path: Path) -> None:
    """In a DiLoCo run with tasks, a script that trains round by round may join to answer the tasks. It is refused at
    its first round.
    """
    steps = ({"kind": "train"}, {"kind": "cross_site_evaluation"})
    settings = {"workflow.steps": steps, "rounds.total": 1, "rounds.sites": 1}
    with plain_server(tmp_path, nn.Linear(2, 1), algorithm="diloco", **settings) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "w") as worker:
            worker.evaluates(lambda model: {"loss": 0.0})
            with pytest.raises(ConfigError, match="this script trains round by round"):
                next(iter(worker))


@pytest.mark.covers("X3")
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"sync_every": True}, "sync_every is True"),
        ({"sync_every": "5"}, "sync_every is '5'"),
        ({"num_fragments": 1.0}, "num_fragments is 1.0"),
        ({"max_sync_retries": True}, "max_sync_retries is True"),
    ],
    ids=str,
)
def test_refuses_arguments_of_another_type(given: dict[str, Any], told: str) -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(UsageError, match=told):
        atoll.DiLoCo(model, SGD(model.parameters(), lr=0.1), **given)


@pytest.mark.covers("X3")
def test_labels_must_be_texts(tmp_path: Path) -> None:
    """A worker whose labels are not all texts is refused with the wrong label."""
    with plain_server(tmp_path, nn.Linear(2, 1), rounds=1) as server:
        with pytest.raises(UsageError, match=r"labels is \{'gpu': 1\}: input should be a valid string"):
            atoll.join(server.url, site="a", folder=tmp_path / "w", labels={"gpu": 1})


@pytest.mark.covers("X11")
@pytest.mark.parametrize("interval_s", [0.0, 0.5])
@pytest.mark.parametrize(("steps", "said"), [(0, "nothing was trained"), (1, "this worker never synchronised")])
def test_training_that_never_synchronised_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, steps: int, said: str, interval_s: float
) -> None:
    """If a loop ends without any training or any synchronisation, the status, the worker's log and the server's log say
    so.

    This holds with and without heartbeats.
    """
    caplog.set_level(logging.WARNING)
    beats = {"network.heartbeat_interval_s": interval_s, "network.heartbeat_timeout_s": 100 * interval_s}
    with serve(tmp_path, **DILOCO, **beats) as server:
        with diloco(server, tmp_path, "a") as loop:
            take_steps(loop, steps, "a")
        assert [text for text in server.status().warnings if text.startswith(f"a: {said}")]
    assert [each.name for each in caplog.records if said in each.getMessage()] == ["atoll", "atoll.server"]
