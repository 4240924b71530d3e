"""Every way by which something can leave a site, each held to the site's policy."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from kit.models import build_model
from kit.workflows import run_workflow
from kit.world import World
from policy_world import Writes, entries, log_of
from pydantic import BaseModel

import atoll
from atoll.blobs.manifest import Cuts, Manifest
from atoll.errors import AtollError, ConfigError, PeerError, StoreError, UsageError
from atoll.protocol import messages, routes
from atoll.protocol.openapi import OPERATIONS
from atoll.protocol.task_messages import TaskAnswer, TaskBody
from atoll.tensors.layout import Part
from atoll.transport.egress_log import EgressLog
from atoll.transport.http_client import Http
from atoll.transport.object_server import ObjectHost
from atoll.transport.part_transfer import HttpTransfer
from atoll.transport.way_out import HIDDEN, OF_ADMIN, ClearedUpdate, WayOut, way_out

SERVER, DIGEST = "http://127.0.0.1:1", "d" * 64
STRICT = """
[metadata]
metrics = ["loss"]
tasks = ["train"]
labels = ["gpu"]
objects = false
host_name = false
errors = false
warnings = false
notes = false
"""


def sent(path: str, message: BaseModel) -> dict[str, Any]:
    """What leaves of a message under the policy of this process."""
    found: dict[str, Any] = json.loads(way_out().message(SERVER, path, message, "a"))
    return found


JOIN = messages.Join(protocol=1, site="a", host="ward-3", labels={"gpu": "H200", "owner": "Ann"})


@pytest.mark.parametrize(
    ("path", "message", "left"),
    [
        (routes.WORKERS, JOIN, {"protocol": 1, "site": "a", "labels": {"gpu": "H200"}}),
        (
            routes.HEARTBEAT,
            messages.Heartbeat(state="training", metrics={"loss": 1.0, "age": 81.0}, warnings=["row 7 of Ann"]),
            {"state": "training", "metrics": {"loss": 1.0}},
        ),
        (routes.HEARTBEAT, messages.Heartbeat(state="at Ann's scan"), {"state": "busy"}),
        (routes.LEAVE, messages.Leave(error="KeyError: Ann"), {"error": HIDDEN}),
        (
            routes.SIT_OUT.format(ticket=1),
            messages.SitOut(metrics={"age": 81.0, "loss": 1.0}),
            {"metrics": {"loss": 1.0}},
        ),
        (routes.TASK_ANSWER.format(task="a" * 32), TaskAnswer(error="KeyError: Ann"), {"error": HIDDEN}),
    ],
    ids=["host and labels", "metrics and warnings", "note", "error", "metrics of a round sat out", "error of a task"],
)
def test_message_leaves_without_what_the_policy_keeps(
    policy_of: Writes, path: str, message: BaseModel, left: dict[str, Any]
) -> None:
    policy_of(STRICT)
    assert sent(path, message) == left


def test_each_message_of_a_site_is_known_to_the_policy(policy_of: Writes) -> None:
    """Each body that the HTTP interface takes passes or is refused for a reason; an unknown kind is refused."""
    policy_of("")
    for operation in OPERATIONS:
        kind = operation.request
        if kind in (None, bytes) or kind in OF_ADMIN:
            continue
        assert isinstance(kind, type)
        assert issubclass(kind, BaseModel)
        why = ""
        try:
            sent(operation.path, kind.model_construct())
        except (ConfigError, AttributeError) as error:  # the message lacks fields
            why = str(error)
        assert "is unknown to" not in why, kind

    class New(messages.Message):
        """A message that the policy does not know."""

    with pytest.raises(ConfigError, match="New is unknown to the site's policy"):
        sent("/v1/new", New())


def test_what_no_filter_was_applied_to_is_refused(tmp_path: Path, policy_of: Writes) -> None:
    """A part, an update, an answer and a served file that nothing has cleared do not leave; no connection is opened."""
    policy = policy_of("")
    (tmp_path / "file").write_bytes(b"x" * 64)
    digest = blake3(b"x" * 64).digest()
    with (tmp_path / "file").open("rb") as file:
        push = HttpTransfer(Http(SERVER), 1, 5.0).push
        with pytest.raises(ConfigError, match="were not applied to a part"):
            push(routes.parts_of(1), file.fileno(), [Part(0, 0, 64, ())], {0: digest})
        with pytest.raises(ConfigError, match="were not applied to the update"):
            sent(routes.COMPLETE.format(ticket=1), messages.Complete(digest=DIGEST))
        with pytest.raises(ConfigError, match="were not applied to the answer"):
            sent(routes.TASK_ANSWER.format(task="a" * 32), TaskAnswer(body=TaskBody(plain="1")))
        host = ObjectHost(
            "127.0.0.1", 0, name=None, tls_cert=None, tls_key=None, insecure=False, idle_timeout_s=5.0, folder=None
        )
        with pytest.raises(ConfigError, match="were not applied to a part"):
            host.serve(file.fileno(), Manifest.of_cuts(Cuts(0, 64, 2**20), [digest]))
        host.close()
    assert [each.what for each in log_of(policy)] == []


def test_update_is_cleared_for_its_ticket_alone(policy_of: Writes) -> None:
    """An update that the policy let leave under ticket 1 cannot be completed under ticket 2, or after the next one is
    formed.
    """
    policy_of("")
    way = way_out()
    way.clear_update(DIGEST, ClearedUpdate("r", "a", 1, 0, 1, 64, 1.0, ()))
    assert sent(routes.COMPLETE.format(ticket=1), messages.Complete(digest=DIGEST))["digest"] == DIGEST
    assert sent(routes.PART.format(ticket=1, part=0), messages.Complete(digest=DIGEST))["digest"] == DIGEST
    for path in (routes.COMPLETE.format(ticket=2), routes.PART.format(ticket=2, part=0)):
        with pytest.raises(ConfigError):
            sent(path, messages.Complete(digest=DIGEST))
    way.clear_update("f" * 64, ClearedUpdate("r", "b", 2, 0, 1, 64, 1.0, ()))  # another site of this process
    assert sent(routes.COMPLETE.format(ticket=1), messages.Complete(digest=DIGEST))["digest"] == DIGEST
    way.clear_update("e" * 64, ClearedUpdate("r", "a", 3, 0, 2, 64, 1.0, ()))
    with pytest.raises(ConfigError):
        sent(routes.COMPLETE.format(ticket=1), messages.Complete(digest=DIGEST))


def test_sites_of_one_process_may_have_equal_updates(policy_of: Writes) -> None:
    """Two sites that have formed the same bytes each complete their own update, in any order."""
    policy = policy_of("")
    way = way_out()
    for ticket, site in enumerate("ab", 1):
        way.clear_update(DIGEST, ClearedUpdate("r", site, ticket, 0, 1, 64, 1.0, ()))
    for ticket in (2, 1):
        sent(routes.COMPLETE.format(ticket=ticket), messages.Complete(digest=DIGEST))
    assert [(each["ticket"], each["site"]) for each in entries(policy, "update")] == [(2, "b"), (1, "a")]


def test_nothing_leaves_before_its_line_is_on_the_disk(policy_of: Writes, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk fails, part, update and served bytes are refused; the lines that were written are no fault, but only
    another process sends again: this one does not know which lines the disk has.
    """

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    for what, leave in (
        ("part", lambda way: way.part(SERVER, routes.PART.format(ticket=1, part=0), b"d" * 32, 64, "a")),
        ("update", lambda way: sent(routes.COMPLETE.format(ticket=1), messages.Complete(digest=DIGEST))),
        ("served", lambda way: way.served(DIGEST, 64)),
    ):
        policy = policy_of("")
        way = way_out()
        way.clear([b"d" * 32])
        way.clear_update(DIGEST, ClearedUpdate("r", "a", 1, 0, 1, 64, 1.0, ()))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fail)
            with pytest.raises(StoreError, match="Input/output error"):
                leave(way)
        with pytest.raises(StoreError, match="Input/output error"):
            way.served(DIGEST, 64)
        WayOut(way.policy, EgressLog(policy.parent / "log")).served(DIGEST, 64)
        kinds = [each.what for each in log_of(policy) if each.what != "messages"]
        assert kinds == [what, "served"]


def test_download_of_another_process_is_in_the_log_before_its_bytes(
    tmp_path: Path, policy_of: Writes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A range that another process asks for is refused as a whole if its line cannot be written."""
    policy_of("")
    ref = atoll.objects.publish({"w": torch.ones(2**18)})
    monkeypatch.setattr(WayOut, "served", lambda *_: (_ for _ in ()).throw(StoreError("No line.", "")))
    with pytest.raises(AtollError, match="No line"):
        atoll.objects.fetch(ref)


@pytest.mark.parametrize("stream", [(), ("train",)], ids=["inline", "by reference"])
def test_answer_to_a_task_passes_the_filters(tmp_path: Path, policy_of: Writes, stream: tuple[str, ...]) -> None:
    """The answer (3, 4) arrives as (0.6, 0.8), without the head; the log names the task."""
    policy = policy_of('[tensors]\nallow = ["w"]\ndrop = ["head"]\nmax_norm = 1.0')
    answer = {"w": torch.tensor([3.0, 4.0]), "head": torch.ones(1)}

    def workflow(controller: Any) -> Any:
        return controller.send("a", "train", {}, timeout_s=30).payload

    found = run_workflow(tmp_path, workflow, {"train": lambda _: answer}, **{"workflow.streamed_tasks": stream})
    torch.testing.assert_close(found["w"], torch.tensor([0.6, 0.8]))
    assert found["head"] is None
    (entry,) = entries(policy, "answer")
    assert (entry["name"], entry["site"]) == ("train", "a")


def test_task_that_may_not_be_answered_fails(tmp_path: Path, policy_of: Writes) -> None:
    """The handler is not called, and the workflow hears why without the text of the policy."""
    policy_of('[metadata]\ntasks = ["validate"]\nerrors = false')
    called = list[Any]()

    def workflow(controller: Any) -> Any:
        return controller.send("a", "train", {}, timeout_s=30)

    answer = run_workflow(tmp_path, workflow, {"train": called.append})
    assert not called
    assert HIDDEN in str(answer.error)


def test_published_objects_pass_the_filters(tmp_path: Path, policy_of: Writes) -> None:
    """An object that a process or its server publishes is clipped; one with a forbidden tensor is refused."""
    policy = policy_of('[tensors]\nallow = ["w"]\nmax_norm = 1.0')
    with World(tmp_path, {"w": torch.zeros(2)}, "a", rounds=1) as world:
        for where in ({}, {"server": world.url}):
            ref = atoll.objects.publish({"w": torch.tensor([3.0, 4.0])}, **where)
            torch.testing.assert_close(atoll.objects.fetch(ref)["w"], torch.tensor([0.6, 0.8]))
            with pytest.raises(UsageError, match="'v' is neither allowed nor dropped"):
                atoll.objects.publish({"v": torch.ones(1)}, **where)
    assert {"served", "part", "object"} <= {each.what for each in log_of(policy)}


def test_no_object_leaves_where_none_may(tmp_path: Path, policy_of: Writes) -> None:
    policy_of(STRICT)
    with World(tmp_path, {"w": torch.zeros(2)}, "a", rounds=1) as world:
        for where in ({}, {"server": world.url}):
            with pytest.raises(ConfigError, match=r"metadata\.objects"):
                atoll.objects.publish({"w": torch.ones(2)}, **where)


@pytest.mark.slow
def test_the_policy_also_covers_a_swarms_downloads(
    tmp_path: Path, policy_of: Writes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a swarm, a site's policy filters its updates and logs all bytes that other workers download from it."""
    monkeypatch.setenv("ATOLL_SWARM", "1")
    monkeypatch.setattr(routes, "LONG_POLL_S", 2.0)
    policy = policy_of("[tensors]\nmax_norm = 0.001")
    World(tmp_path, build_model(), "ab", rounds=2, **{"swarm.enabled": True}).run()
    assert sum(each["bytes"] for each in entries(policy, "served")) > 0
    assert {each["round"] for each in entries(policy, "update")} == {1, 2}
    assert max(each["norm"] for each in entries(policy, "update")) <= 0.001  # which also has the buffers' change


def test_bytes_of_a_run_end_at_the_limit(tmp_path: Path, policy_of: Writes) -> None:
    """With room for the run's updates, an object beside them is refused once the limit is reached."""
    policy_of("[runs]\nmax_bytes = 3000")
    with World(tmp_path, {"w": torch.zeros(4)}, "a", rounds=1) as world:
        world.join("a")
        with pytest.raises(ConfigError, match=r"runs\.max_bytes"):
            atoll.objects.publish({"w": torch.zeros(1000)}, server=world.url)
        world.rounds(1.0, 1)
        world.finish()


def test_update_formed_under_another_policy_is_not_sent(tmp_path: Path, policy_of: Writes) -> None:
    """A site that is started again with another policy trains the round again, and its new filters are applied."""
    policy_of("")
    with World(tmp_path, {"w": torch.zeros(2)}, "a", rounds=1) as world:
        world.pull()
        backend = world.sites["a"].worker._backend
        place, ticket = backend.participation, world.sites["a"].round._ticket
        place.exchange.form(ticket, {"w": torch.tensor([3.0, 4.0])}, messages.Report(steps=1))
        world.sites.pop("a").close()
        policy_of("[tensors]\nmax_norm = 1.0")
        world.move("a", 1, lambda *_: {"w": torch.tensor([3.0, 4.0])})
        torch.testing.assert_close(world.finish()["w"], torch.tensor([0.6, 0.8]))


def test_receipts_of_another_key_are_refused(tmp_path: Path, policy_of: Writes) -> None:
    """A forged receipt is not kept; a run that signs with another key than before is not joined again."""
    policy = policy_of("")
    with World(tmp_path, {"w": torch.zeros(2)}, "a", rounds=1) as world:
        world.rounds(1.0, 1)
        info = world.sites["a"].worker._backend.participation.session.info
        world.finish()
    accepted = next(each for each in entries(policy, "receipt") if each["state"] == "accepted")
    forged = messages.SignedReceipt(**accepted | {"ticket": 77})
    with pytest.raises(PeerError, match="ticket 77 is not signed with the key"):
        way_out().receipt(forged)
    with pytest.raises(PeerError, match="signs its receipts with another key"):
        way_out().require_run(info.model_copy(update={"receipt_key": "0" * 64}), world.url)


def test_rounds_of_a_run_are_counted_over_restarts(policy_of: Writes) -> None:
    """With two rounds in the log, a third is refused where two are allowed, and the second may be repeated."""
    policy_of("[runs]\nmax_rounds = 2")
    way = way_out()
    assert way.log is not None
    for number in (1, 2):
        way.log.append("update", run="r", fragment=0, round=number)
    way.require_round("r", 0, 2)
    way.require_round("r", 1, 3)
    with pytest.raises(ConfigError, match=r"taken part in 2 rounds.*:2, runs\.max_rounds"):
        way.require_round("r", 0, 3)


def test_bytes_are_sent_where_the_policy_is_asked() -> None:
    """Each call that hands bytes to a socket is in a function that has asked the way out."""
    package = Path(atoll.__file__).parent
    allowed = {
        ("_pool.request(", "transport/http_client.py"): "self.allowed(path, message)",
        ("connection.put(", "transport/part_transfer.py"): "way_out.part(",
        ("serve_file(", "transport/object_server.py"): "way_out().serve(",
    }
    for path in sorted(package.rglob("*.py")):
        where, text = path.relative_to(package).as_posix(), path.read_text(encoding="utf-8")
        for (call, file), asks in allowed.items():
            if call in text.replace(f"def {call}", "") and not where.startswith("server/http/"):
                assert where == file, f"{where} calls {call}"
                assert asks in text
