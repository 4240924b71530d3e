"""Flower's records, messages and grid over the tasks of a workflow."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from kit.workflows import run_workflow

from atoll.errors import BadRequest, ConfigError, StoreError, UsageError
from atoll.integrations.flower import message_tasks as fm
from atoll.integrations.flower.app_folder import AppFolder, read_pairs
from atoll.integrations.flower.grid import TaskGrid
from atoll.integrations.flower.kept_state import FILE, KeptState
from atoll.integrations.flower.records import from_payload, to_payload
from atoll.tensors.payload import pack, unpack

RECORDS = RecordDict(
    {
        "arrays": ArrayRecord(
            {
                "matrix": Array(np.arange(6.0).reshape(2, 3)),
                "by-columns": Array(np.asfortranarray(np.arange(6, dtype=np.int32).reshape(2, 3))),
                "number": Array(np.asarray(2.5, np.float32)),
                "nothing": Array(np.zeros((0, 3))),
                "names": Array(np.array([["a", "bcd"]])),
                "own": Array("thirds", (2,), "example.thirds", b"\x01\x02\x03"),
            }
        ),
        "metrics": MetricRecord({"loss": np.float64(0.5), "counts": [1, 2]}),
        "config": ConfigRecord({"on": True, "text": "ä", "raw": b"\x00", "list": ["a", "b"], "none": []}),
    }
)


def carried(payload: Any) -> Any:
    """A payload as the other side gets it."""
    packed = pack(payload)
    return unpack(packed.skeleton, packed.tensors)


def test_every_kind_of_record_arrives_as_it_was() -> None:
    found = from_payload(carried(to_payload(RECORDS)))
    assert list(found) == list(RECORDS)
    for key, array in RECORDS["arrays"].items():
        other = found["arrays"][key]
        assert (other.dtype, other.shape, other.stype) == (array.dtype, array.shape, array.stype)
        if array.stype == "numpy.ndarray":
            np.testing.assert_array_equal(other.numpy(), array.numpy())
    assert found["arrays"]["own"].data == b"\x01\x02\x03"
    assert found["arrays"]["matrix"].data == RECORDS["arrays"]["matrix"].data  # for apps that read the bytes
    for name in ("metrics", "config"):
        assert dict(found[name]) == dict(RECORDS[name])
    assert type(found["metrics"]["loss"]) is float  # NumPy's own is no value of a message
    assert isinstance(found["config"]["on"], bool)


def test_an_array_of_a_message_can_be_changed() -> None:
    """Each call of `numpy` gives new memory, as Flower's own arrays do."""
    (array,) = from_payload(carried(to_payload(RecordDict({"a": ArrayRecord([np.zeros(2)])}))))["a"].values()
    array.numpy()[0] = 1
    assert array.numpy().tolist() == [0, 0]


@pytest.mark.parametrize(
    "payload",
    [None, 3, [["a"]], [["a", "files", []]], [["a", "metrics", [["x", {"deep": 1}]]]], [["a", "arrays", [["w", {}]]]]],
)
def test_a_payload_without_records_is_refused(payload: Any) -> None:
    with pytest.raises(BadRequest, match="no valid records"):
        from_payload(payload)


# -- the grid


def replying(change: Callable[[Message], Message]) -> Callable[[Any], Any]:
    """A site's handler of tasks: what a ClientApp replies to each message."""
    return lambda payload: fm.to_answer(change(fm.from_task("task", payload, 7)))


def doubled(message: Message) -> Message:
    arrays = [each * 2 for each in message.content["arrays"].to_numpy_ndarrays()]
    return Message(RecordDict({"arrays": ArrayRecord(arrays)}), reply_to=message)


def messages_to(grid: TaskGrid, *, size: int = 3) -> list[Message]:
    content = RecordDict({"arrays": ArrayRecord([np.ones(size)])})
    return [grid.create_message(content, "train", node, "1") for node in grid.get_node_ids()]


def run_grid(folder: Path, app: Callable[[TaskGrid], Any], handler: Callable[[Any], Any], names: str = "ab") -> Any:
    """What a function of a grid returns, with sites that answer `train`."""

    def main(controller: Any) -> Any:
        fm.identify(1)
        return app(TaskGrid(controller))

    return run_workflow(folder, main, {"train": handler}, names)


def test_replies_belong_to_their_messages(tmp_path: Path) -> None:
    """Each reply names its message and its site, and its arrays stay on disk until the app reads them."""

    def app(grid: TaskGrid) -> Any:
        sent = messages_to(grid, size=5000)
        replies = grid.send_and_receive(sent, timeout=60)
        lazy = [each._held for reply in replies for each in reply.content["arrays"].values()]
        assert not any(isinstance(each, np.ndarray) for each in lazy)
        return {each.metadata.message_id: each.metadata.dst_node_id for each in sent}, [
            (each.metadata.reply_to_message_id, each.metadata.src_node_id, each.content["arrays"]["0"].numpy().sum())
            for each in replies
        ]

    sent, replies = run_grid(tmp_path, app, replying(doubled))
    assert sorted(replies) == sorted((number, node, 10_000.0) for number, node in sent.items())
    assert set(sent.values()) == {fm.node_id_of("a"), fm.node_id_of("b")}


def test_a_content_for_several_sites_is_written_once(tmp_path: Path) -> None:
    tasks: list[int] = []

    def main(controller: Any) -> None:
        fm.identify(1)
        broadcast = controller.broadcast
        controller.broadcast = lambda *words, **given: (tasks.append(len(given["sites"])), broadcast(*words, **given))
        grid = TaskGrid(controller)
        grid.send_and_receive(messages_to(grid))

    run_workflow(tmp_path, main, {"train": replying(doubled)}, "abc")
    assert tasks == [3]


def test_a_reply_can_be_pulled_before_the_others_come(tmp_path: Path) -> None:
    """An asynchronous app gets the reply of a quick site while another one still works."""
    go_on, slow = threading.Event(), threading.Lock()

    def work(message: Message) -> Message:
        if slow.acquire(blocking=False):  # the first of both sites
            assert go_on.wait(60)
        return doubled(message)

    def app(grid: TaskGrid) -> Any:
        ids, first, second = grid.push_messages(messages_to(grid)), list[Message](), list[Message]()
        while not first:
            first = grid.pull_messages(ids)
        go_on.set()
        while not second:
            second = grid.pull_messages(ids)
        return len(first), len(second), grid.pull_messages(ids)

    assert run_grid(tmp_path, app, replying(work)) == (1, 1, [])


def test_a_message_ends_with_its_time_to_live(tmp_path: Path) -> None:
    """A site that does not answer in time has no reply, and the app goes on without it."""
    over = threading.Event()

    def work(message: Message) -> Message:
        assert over.wait(60)
        return doubled(message)

    def app(grid: TaskGrid) -> Any:
        content = RecordDict({"arrays": ArrayRecord([np.ones(3)])})
        sent = [grid.create_message(content, "train", node, "1", ttl=0.05) for node in grid.get_node_ids()]
        replies = grid.send_and_receive(sent)
        over.set()
        return replies

    assert run_grid(tmp_path, app, replying(work), "a") == []


def test_an_app_gets_the_errors_of_its_clients(tmp_path: Path) -> None:
    """A site that fails, or that answers without a reply, is an error reply, which says why."""

    def fail(message: Message) -> Message:
        raise RuntimeError("the scanner is off")

    for number, (handler, why) in enumerate([(replying(fail), "the scanner is off"), (lambda payload: 3, "no reply")]):
        (reply,) = run_grid(tmp_path / str(number), lambda grid: grid.send_and_receive(messages_to(grid)), handler, "a")
        assert reply.has_error()
        assert why in reply.error.reason


def test_a_message_to_an_unknown_node_is_refused(tmp_path: Path) -> None:
    def app(grid: TaskGrid) -> str:
        with pytest.raises(UsageError) as raised:
            grid.push_messages([grid.create_message(RecordDict(), "train", 12, "1")])
        return str(raised.value)

    assert "node 12, which has never joined" in run_grid(tmp_path, app, replying(doubled), "a")


def test_a_task_of_another_workflow_is_no_message() -> None:
    with pytest.raises(BadRequest, match="no message of a Flower app"):
        fm.from_task("task", {"w": 1}, 7)


def test_flower_sends_no_telemetry_by_itself() -> None:
    """Flower reads its variable when it is imported, so Atoll sets it before that, unless the environment has it."""
    shown = (
        "import atoll.integrations.flower.client_app, flwr.supercore.telemetry as t; print(t.FLWR_TELEMETRY_ENABLED)"
    )
    plain = {key: value for key, value in os.environ.items() if key != "FLWR_TELEMETRY_ENABLED"}
    for wanted, environment in (("0", plain), ("1", plain | {"FLWR_TELEMETRY_ENABLED": "1"})):
        assert subprocess.check_output([sys.executable, "-c", shown], env=environment, text=True).strip() == wanted


# -- the folder of an app


PARTS = "[tool.flwr.app.components]\n"


@pytest.mark.parametrize(
    ("project", "said"),
    [
        (None, "cannot be read: No such file"),
        ("[", "is not valid TOML"),
        ("[project]\nname = 'a'", "names no parts of a Flower app"),
        (PARTS + "clientapp = 'a:app'", "has no serverapp"),
        (PARTS + "serverapp = 'no_such_module:app'", "cannot be imported: No module named 'no_such_module'"),
        (PARTS + "serverapp = 'json:laods'", "no 'laods'. Did you mean 'loads'?"),
    ],
)
def test_a_folder_without_an_app_is_refused(tmp_path: Path, project: str | None, said: str) -> None:
    if project is not None:
        (tmp_path / "pyproject.toml").write_text(project)
    with pytest.raises(ConfigError) as raised:
        AppFolder.read(tmp_path).component("serverapp")
    assert said in str(raised.value)


def test_the_configuration_of_an_app_is_changed_by_pairs(tmp_path: Path) -> None:
    """Pairs are read as Flower reads them, also from a file; an unknown key is refused with the nearest."""
    (tmp_path / "pyproject.toml").write_text(PARTS + "[tool.flwr.app.config]\nrounds = 3\nmodel.name = 'cnn'\n")
    (tmp_path / "more.toml").write_text("[model]\nname = 'mlp'\n")
    app = AppFolder.read(tmp_path)
    pairs = read_pairs(["rounds=5  model.name='a b=c'", str(tmp_path / "more.toml")], "--run-config")
    assert app.configured(pairs) == {"rounds": 5, "model.name": "mlp"}
    assert read_pairs(["x=true y='a b=c'"], "--run-config") == {"x": True, "y": "a b=c"}
    with pytest.raises(ConfigError, match=r"no key 'round'.*Did you mean 'rounds'"):
        app.configured({"round": 5})
    with pytest.raises(ConfigError, match="cannot be read"):
        read_pairs(["rounds=five"], "--run-config")


# -- the state that a ClientApp keeps


def test_a_state_outlives_its_process(tmp_path: Path) -> None:
    """A message that comes again begins with the state of before; the next one with the state after it."""
    kept = KeptState(tmp_path / "a" / "run", tmp_path)
    assert not kept.begin("first")
    kept.end(RecordDict({"seen": ConfigRecord({"messages": 1}), "w": ArrayRecord([np.ones(2)])}))
    again = KeptState(tmp_path / "a" / "run", tmp_path)
    assert not again.begin("first")
    after = again.begin("second")
    assert after["seen"]["messages"] == 1
    assert after["w"]["0"].numpy().tolist() == [1, 1]


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    kept = KeptState(tmp_path, tmp_path)
    kept.begin("first")
    kept.end(RecordDict({"seen": ConfigRecord({"messages": 1})}))
    (tmp_path / FILE).write_bytes(b"damaged")
    with pytest.raises(StoreError, match="is damaged"):
        KeptState(tmp_path, tmp_path)
