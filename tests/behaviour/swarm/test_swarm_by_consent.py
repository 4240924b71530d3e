"""What a server can make a site do with a swarm: nothing that the site has not said, and never code that it names."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import Nursery, wait_until
from kit.models import wide_model
from kit.peers import Connection, Peer, Request
from kit.processes import ForkedSite
from kit.requests import get, post, send
from kit.swarm_peers import peer_server
from kit.wire import WireSite
from swarm_world import left_by, serve_swarm

import atoll
from atoll import functional
from atoll.errors import ConfigError
from atoll.tensors.reference import TensorRef

SITE = """
import os, sys, urllib.request

events = []
WATCHED = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "socket.connect")


def hook(event, args):
    if event in WATCHED or "planted" in repr(args)[:2000] and event in ("import", "open", "exec", "compile"):
        events.append(f"{event} {args!r}")


import atoll

sys.addaudithook(hook)
for number in range(int(os.environ["TIMES"])):
    urllib.request.urlopen(os.environ["ATOLL_SERVER"] + "/next").read()
    try:
        with atoll.join(swarm=os.environ["SWARM"] == "1"):
            print("JOINED", flush=True)
    except atoll.AtollError as error:
        print(f"{type(error).__name__}: {error}".replace(chr(10), " "), flush=True)
server = int(os.environ["ATOLL_SERVER"].rpartition(":")[2])
print("EVENTS", [each for each in events if f"('127.0.0.1', {server})" not in each], flush=True)
"""
PLANTED = "from pathlib import Path\nPath(__file__).with_name('code-has-run').touch()\nclass C: pass\n"


class HostileServer:
    """Answers what a real server of a swarm would, apart from its plan: another one after each request for /next.

    Attributes:
        told: numbers of the plans that were asked for.
    """

    def __init__(self, url: str, plans: list[Any]) -> None:
        self._honest = {path: get(url, path)[1] for path in ("/v1/run", "/v1/schema")}
        self._plans, self._now, self.told = plans, -1, set[int]()

    def answer(self, connection: Connection, request: Request) -> None:
        if request.path == "/next":
            self._now += 1
            connection.answer(200, b"{}")
        elif request.path == "/v1/swarm/plan":
            self.told.add(self._now)
            connection.answer(200, json.dumps(self._plans[self._now]).encode())
        elif request.path in self._honest:
            connection.answer(200, json.dumps(self._honest[request.path]).encode())
        else:
            connection.answer(404, b"{}")


def taken_apart(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Each value in a message, and where it is."""
    yield at, value
    for key, each in value.items() if isinstance(value, dict) else ():
        yield from taken_apart(each, (*at, key))


def with_value(message: Any, at: tuple[Any, ...], value: Any) -> Any:
    return {**message, at[0]: with_value(message.get(at[0], {}), at[1:], value)} if at else value


@pytest.mark.slow
@pytest.mark.covers("X8")
@pytest.mark.parametrize("swarm", [False, True], ids=["plain", "swarm"])
def test_no_plan_of_a_server_runs_code_at_a_site(nursery: Nursery, tmp_path: Path, swarm: bool) -> None:
    """Every value of the plan is a path to code once, and settings are sent in place of the plan."""
    (tmp_path / "planted.py").write_text(PLANTED)
    command = {"path": "subprocess:getoutput", "cmd": f"touch {tmp_path / 'code-has-run'}"}
    hostile = [
        "planted:C",
        f"{tmp_path}/planted.py:C",
        "../planted.py:C",
        "http://127.0.0.1:1/planted",
        "os:system",
        command,
    ]
    with serve_swarm(tmp_path) as server:
        status, plan = get(server.url, "/v1/swarm/plan")
        assert status == 200
        plans: list[Any] = [
            {"settings": {"swarm": {"enabled": False}, "aggregation": {"reducer": command}}},
            {"settings": {"algorithm": {"path": "planted:C"}, "swarm": {"enabled": False}}},
            plan | {"settings": {"aggregation": {"reducer": command}}},
        ]
        plans += [with_value(plan, at, each) for at, _ in taken_apart(plan) for each in hostile if at]
        plans += [plan | {"reducer": {"name": "mean", "options": {"path": each, "cmd": "x"}}} for each in hostile[:2]]
        hostile_server = HostileServer(server.url, plans)
        with Peer.answering(hostile_server.answer) as liar:
            site = ForkedSite(nursery, tmp_path, liar.url, "a", SITE)
            variables = {"ATOLL_GIVE_UP_S": "0.01", "PYTHONPATH": str(tmp_path)}  # no pause before the one retry
            process = site.start(TIMES=str(len(plans)), SWARM=str(int(swarm)), **variables)
            assert process.wait(100) == 0, process.output()
    said = process.output()
    assert len(hostile_server.told) == (len(plans) if swarm else 0)
    assert len(plans) > 50
    assert "EVENTS []" in said, said
    assert not (tmp_path / "code-has-run").exists()
    assert "JOINED" not in said
    ends = [line for line in said.splitlines() if line.startswith(("ConfigError: ", "VersionSkew: "))]
    assert len(ends) == len(plans), said
    if not swarm:
        assert all("is a swarm: other sites connect to this one and this site connects to them" in end for end in ends)


@pytest.mark.covers("X8", "P10")
def test_a_site_takes_part_in_a_swarm_only_if_its_own_side_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def join(**options: Any) -> None:
        with atoll.join(server.url, site="a", folder=tmp_path / "w", **options):
            pass

    with serve_swarm(tmp_path, **{"network.idle_timeout_s": 0.2}) as server:
        refused: list[dict[str, str]] = [{}, {"ATOLL_SWARM": "0", "ATOLL_PEER_PORT": "0"}, {"ATOLL_PEER_INSECURE": "0"}]
        for variables in refused:
            with monkeypatch.context() as patch:
                for name, value in variables.items():
                    patch.setenv(name, value)
                with pytest.raises(ConfigError, match=r"is a swarm: .* pass swarm=True"):
                    join()
        assert server.status().workers == []
        with monkeypatch.context() as patch:
            patch.setenv("ATOLL_SWARM", "0")
            with pytest.raises(ConfigError, match=r"while ATOLL_SWARM is not 0"):
                join(swarm=True)  # the site's user has the last word
        assert server.status().workers == []
        for variables in ({"ATOLL_SWARM": "1"}, {"ATOLL_PEER_PORT": "0"}):
            with monkeypatch.context() as patch:
                for name, value in variables.items():
                    patch.setenv(name, value)
                join()
        join(swarm=True)
        assert [worker.site for worker in server.status().workers] == ["a"]
        monkeypatch.setenv("ATOLL_SWARM", "Maybe")
        with pytest.raises(ConfigError, match=r"ATOLL_SWARM is 'Maybe'\. Set it to 1"):
            join(swarm=True)


def by_steps(url: str) -> None:
    model = wide_model()
    atoll.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), server=url, site="a").start()


def by_trainer(url: str) -> None:
    from atoll.integrations.trainer_driver import TrainerDriver

    TrainerDriver(url, "a").state()


@pytest.mark.covers("X8", "P10")
@pytest.mark.parametrize("join", [by_steps, by_trainer, partial(functional.init, site="a")])
def test_no_other_way_in_joins_a_swarm_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, join: Callable[[str], object]
) -> None:
    monkeypatch.setenv("ATOLL_DIR", str(tmp_path / "w"))
    with serve_swarm(tmp_path) as server:
        with pytest.raises(ConfigError, match=r"is a swarm: .* pass swarm=True"):
            join(server.url)
        assert server.status().workers == []


@pytest.mark.covers("X8", "P10", "X3")
def test_an_address_that_is_not_the_sites_own_is_told_to_no_other_site(tmp_path: Path) -> None:
    """A site says that it is at the port of another program, of another site, of a cloud's secrets, and nowhere."""
    with (
        serve_swarm(tmp_path) as server,
        closing(peer_server()) as own,
        closing(peer_server()) as others,
        Peer.answering(lambda connection, _: connection.answer(200, b"{}")) as trap,
    ):
        proof = own.prove()

        def at(host: str, port: int, path: str = "") -> str:
            return str(TensorRef(host, port, False, proof.object, proof.secret, proof.digest, proof.expires_at, path))

        good = WireSite(server.url, "good", peer=str(others.prove()))
        there = TensorRef.parse(str(others.prove()))
        for place in (
            at("127.0.0.1", trap.port),
            at(there.host, there.port),
            at("169.254.169.254", 80),
            at("0.0.0.0", 80),
            at("127.0.0.1", trap.port, "/path"),
        ):
            status, problem = post(server.url, "/v1/workers", {"protocol": 1, "site": "bad", "peer": place})
            assert (status, problem["code"]) == (400, "config"), problem
            assert "The server cannot reach bad at" in problem["message"]
        for text in ("http://127.0.0.1:80/x", f"atoll-ref://u@127.0.0.1:{trap.port}/x?expires=1#a.b", ""):
            assert post(server.url, "/v1/workers", {"protocol": 1, "site": "bad", "peer": text})[0] in (400, 422)
        report = {"peer": str(others.prove()), "number": 1, "seen": 0}
        status, work = good.post("/v1/swarm", report)
        assert (status, work.get("peers", []), work.get("probe", [])) == (200, [], [])
        WireSite(server.url, "bad", peer=str(proof))  # its own address
        status, work = good.post("/v1/swarm", report | {"number": 2})
        assert (status, work["peers"], work["probe"]) == (200, [own.address], [own.address])
        assert trap.requests
        assert {request.path.rpartition("/")[0] for request in trap.requests} == {"/v1/objects"}


@pytest.mark.covers("P10", "X8")
def test_each_site_logs_each_address_that_it_connects_to_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "atoll"):
        left_by(tmp_path)
    said = [line for line in caplog.messages if "connects to the worker of another site at http://127.0.0.1:" in line]
    assert len(said) == len(set(said)) == 3 * 2  # each of three sites is told of the two others


def orders(address: str) -> list[Any]:
    """What a server says in answer to a report; the last one is repeated."""
    digest, other = "1" * 64, "http://127.0.0.1:1"
    source = f"atoll-ref://127.0.0.1:1/{'0' * 32}?expires=1#{'0' * 32}.{digest}"
    update = {"ticket": 1, "site": "b", "digest": digest, "weight": 1.0, "steps": 1, "norm": 1.0, "scale": 1.0}
    closing = {"fragment": 0, "number": 1, "base_version": 0, "version": 1, "updates": [update]}
    hold = {"fragment": 0, "version": 1, "digest": digest, "sources": [{"version": source}]}
    collect = {"ticket": 1, "fragment": 0, "site": "b", "digest": digest, "source": source}
    own = source.replace("127.0.0.1:1/", address.removeprefix("http://") + "/")
    works: list[dict[str, Any]] = [
        {"hold": [hold | {"fragment": 1}]},
        {"hold": [hold | {"fragment": 2**61, "version": 2**61}]},
        {"hold": [hold | {"version": version} for version in range(1000)]},
        {"hold": [hold] * 5000},
        {"hold": [hold | {"version": 0, "sources": []}]},
        {"hold": [hold, hold | {"digest": "2" * 64}]},
        {"hold": [hold | {"sources": [{"version": "atoll-ref://nowhere", "state": "atoll-ref://"}]}]},
        {"hold": [hold | {"sources": [{"version": own}], "state_digest": digest}]},
        {"hold": [hold], "peers": [other], "probe": [other]},
        {"collect": [collect]},
        {"collect": [collect | {"source": own}]},
        {"collect": [collect | {"ticket": ticket} for ticket in range(4000)]},
        {"collect": [collect], "close": [closing]},
        {"close": [closing | {"updates": []}]},
        {"close": [closing | {"fragment": 7}]},
        {"close": [closing | {"population_scale": 1e308, "population_weight": 1e308}]},
        {"peers": ["http://169.254.169.254:80"], "probe": ["http://169.254.169.254:80"]},
        {"peers": [f"http://127.0.0.1:{port}/x" for port in range(1, 9)]},
        {"finished": True, "hold": [hold | {"version": 2**61, "sources": []}]},
        {"stay": "yes"},
        {"stay": True, "server": 2**61, "order": 2**61},
    ]
    texts: list[Any] = [b"", b"[]", b"[" * 1000, b"NaN", b'{"stamp": NaN}', b'{"stamp": 1e400}', b'{"stamp": -1}']
    return (
        [{"stamp": at, "order": at} | work for at, work in enumerate(works, 1)] + texts + [{"stamp": 99, "order": 99}]
    )


@pytest.mark.covers("X9", "P10")
def test_a_site_goes_on_whatever_its_server_orders(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No order ends in a traceback, and what a line says of orders that do not fit is said once."""
    said, address = list[Any](), list[str]()

    def answer(connection: Connection, request: Request) -> None:
        body = connection.body(request) if "content-length" in request.headers else None
        if request.path == "/v1/swarm":
            address[:] = address or [TensorRef.parse(json.loads(body or b"")["peer"]).server]
            known = orders(address[0])
            work = known[min(len(said), len(known) - 1)]
            said.append(work)
            connection.answer(200, work if isinstance(work, bytes) else json.dumps(work).encode())
        else:
            lease = request.headers.get("atoll-lease", "")
            status, reply = send(server.url, request.method, request.path, body, lease)
            connection.answer(status, json.dumps(reply).encode())

    with (
        serve_swarm(tmp_path, **{"network.idle_timeout_s": 0.5}) as server,
        Peer.answering(answer) as liar,
        caplog.at_level(logging.INFO, "atoll"),
    ):
        with atoll.join(liar.url, site="a", folder=tmp_path / "w", swarm=True):
            wait_until(
                lambda: bool(said) and isinstance(said[-1], dict) and said[-1]["stamp"] == 99, "the last order", 90
            )
    assert not [record for record in caplog.records if record.exc_info], caplog.text
    lines = [line for line in caplog.messages if "cannot ask the server for work" in line]
    assert len(set(lines)) == len(lines) > 3
    assert sum(path.stat().st_size for path in (tmp_path / "w").rglob("*") if path.is_file()) < 4 * 2**20


@pytest.mark.covers("X9", "P10")
def test_a_server_with_ever_new_orders_at_once_is_not_asked_all_the_time(tmp_path: Path) -> None:
    """The stamp of the orders is another one each time, and there is nothing to do."""
    said = 0

    def answer(connection: Connection, request: Request) -> None:
        nonlocal said
        body = connection.body(request) if "content-length" in request.headers else None
        if request.path == "/v1/swarm":
            said += 1
            connection.answer(200, json.dumps({"stamp": said, "order": said}).encode())
        else:
            status, reply = send(server.url, request.method, request.path, body, request.headers.get("atoll-lease", ""))
            connection.answer(status, json.dumps(reply).encode())

    with serve_swarm(tmp_path, **{"network.idle_timeout_s": 0.5}) as server, Peer.answering(answer) as liar:
        with atoll.join(liar.url, site="a", folder=tmp_path / "w", swarm=True):
            liar.ended.wait(2.0)
    assert 2 <= said < 15


@pytest.mark.covers("P10", "X3")
def test_an_option_that_no_message_can_carry_is_refused_at_the_server(tmp_path: Path) -> None:
    model = {"2.*" + "*" * 300: 0.5}
    with pytest.raises(ConfigError, match=r"algorithm\.outer_lr_of\..* has 303 characters, but at most 256"):
        with serve_swarm(tmp_path, **{"algorithm.outer_lr_of": model}):
            pass
