"""What a server can make a site do with a swarm: nothing that the site has not said, and never code that it names."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import wait_until
from harness.proxy import Proxy
from kit.lying_server import LyingServer, in_place_of
from kit.models import wide_model
from kit.peers import Peer
from kit.requests import post
from kit.swarm_peers import peer_server
from kit.wire import WireSite
from swarm_world import left_by, serve_swarm

import atoll
from atoll import functional
from atoll.errors import ConfigError
from atoll.protocol.routes import SWARM_PLAN
from atoll.tensors.reference import TensorRef

pytestmark = pytest.mark.covers("P10")


@pytest.mark.covers("X8")
def test_a_site_joins_a_swarm_only_by_consent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site joins a swarm only if an argument or a variable at this site allows it. Without that, it does not even ask
    for the swarm's plan.
    """

    def join(**options: Any) -> None:
        with atoll.join(proxy.url, site="a", folder=tmp_path / "w", **options):
            pass

    with serve_swarm(tmp_path, **{"network.idle_timeout_s": 0.2}) as server, Proxy(server.port) as proxy:
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
        assert proxy.count(SWARM_PLAN) == 0
        for variables in ({"ATOLL_SWARM": "1"}, {"ATOLL_PEER_PORT": "0"}):
            with monkeypatch.context() as patch:
                for name, value in variables.items():
                    patch.setenv(name, value)
                join()
        join(swarm=True)
        assert [worker.site for worker in server.status().workers] == ["a"]
        assert proxy.count(SWARM_PLAN) == 3
        monkeypatch.setenv("ATOLL_SWARM", "Maybe")
        with pytest.raises(ConfigError, match=r"ATOLL_SWARM is 'Maybe'\. Set it to 1"):
            join(swarm=True)


def by_steps(url: str) -> None:
    model = wide_model()
    atoll.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), server=url, site="a").start()


def by_trainer(url: str) -> None:
    from atoll.integrations.trainer_driver import TrainerDriver

    TrainerDriver(url, "a").state()


@pytest.mark.covers("X8")
@pytest.mark.parametrize("join", [by_steps, by_trainer, partial(functional.init, site="a")])
def test_no_interface_joins_a_swarm_without_consent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, join: Callable[[str], object]
) -> None:
    """The DiLoCo loop, the trainer integration and `functional.init` refuse to join a swarm without the site's
    consent.
    """
    monkeypatch.setenv("ATOLL_DIR", str(tmp_path / "w"))
    with serve_swarm(tmp_path) as server:
        with pytest.raises(ConfigError, match=r"is a swarm: .* pass swarm=True"):
            join(server.url)
        assert server.status().workers == []


@pytest.mark.covers("X8", "X3")
def test_the_server_verifies_addresses_of_sites(tmp_path: Path) -> None:
    """The server refuses a site that reports an address which it cannot prove, and tells no other site of it."""
    # The false addresses are the port of another program, of another site, of a cloud's secrets, and an address that
    # leads nowhere.
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


@pytest.mark.covers("X8")
def test_logs_each_address_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A worker of a swarm logs the address of each other worker once, when it first connects to it."""
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


@pytest.mark.covers("X9")
def test_a_site_survives_invalid_orders(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the server of a swarm sends orders that make no sense, a worker goes on, without a traceback or repeated log
    lines.
    """
    said = list[Any]()

    def next_orders() -> Any:
        known = orders(TensorRef.parse(json.loads(liar.bodies["/v1/swarm"])["peer"]).server)
        said.append(known[min(len(said), len(known) - 1)])
        return said[-1]

    with (
        serve_swarm(tmp_path, **{"network.idle_timeout_s": 0.5}) as server,
        LyingServer(server.url, in_place_of("/v1/swarm", next_orders)) as liar,
        caplog.at_level(logging.INFO, "atoll"),
    ):
        with atoll.join(liar.url, site="a", folder=tmp_path / "w", swarm=True):
            wait_until(
                lambda: bool(said) and isinstance(said[-1], dict) and said[-1]["stamp"] == 99, "the last order", 90
            )
    assert not [record for record in caplog.records if record.exc_info], caplog.text
    lines = [line for line in caplog.messages if "cannot ask the server for work" in line]
    assert len(lines) > 3
    assert all(line != following for line, following in itertools.pairwise(lines))
    assert sum(path.stat().st_size for path in (tmp_path / "w").rglob("*") if path.is_file()) < 4 * 2**20


@pytest.mark.covers("X9")
def test_a_site_pauses_between_changing_orders(tmp_path: Path) -> None:
    """If the server of a swarm always answers at once and with nothing to do, the worker pauses between
    its requests.
    """
    stamps = itertools.count(1)

    def next_orders() -> dict[str, int]:
        stamp = next(stamps)
        return {"stamp": stamp, "order": stamp}

    with (
        serve_swarm(tmp_path, **{"network.idle_timeout_s": 0.5}) as server,
        LyingServer(server.url, in_place_of("/v1/swarm", next_orders)) as liar,
    ):
        with atoll.join(liar.url, site="a", folder=tmp_path / "w", swarm=True):
            liar.ended.wait(2.0)
    assert 2 <= next(stamps) - 1 < 15


@pytest.mark.covers("X3")
def test_refuses_an_option_too_long_for_messages(tmp_path: Path) -> None:
    """A swarm refuses to start with an option of more than 256 characters, which would not fit into the swarm's
    messages.
    """
    model = {"2.*" + "*" * 300: 0.5}
    with pytest.raises(ConfigError, match=r"algorithm\.outer_lr_of\..* has 303 characters, but at most 256"):
        with serve_swarm(tmp_path, **{"algorithm.outer_lr_of": model}):
            pass
