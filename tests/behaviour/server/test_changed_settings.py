"""A server that is started again with other settings: what is refused, and from when on the rest holds."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import free_port, wait_until
from kit.manual_site import ManualSite
from kit.servers import plain_server
from kit.sites import manual_sites
from torch import nn

import atoll
from atoll.errors import ConfigError

STREAMING: dict[str, Any] = {
    "diloco.sync_every": 40,
    "diloco.num_fragments": 2,
    "diloco.fragment_sync_delay": 4,
    "diloco.fragment_update_alpha": 0.5,
    "diloco.max_inflight": 1,
}


def diloco_server(folder: Path, **settings: Any) -> atoll.Server:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    return plain_server(folder, model, **({"algorithm.name": "diloco"} | settings))


FRAGMENTS = ("diloco.num_fragments", "diloco.fragment_sync_delay", "diloco.fragment_update_alpha")
ASYNC: dict[str, Any] = {"async.enabled": True}
TOPK: dict[str, Any] = {"aggregation.upload_codec.name": "topk"}
FEDPROX: dict[str, Any] = {"algorithm.name": "fedprox", "algorithm.mu": 0.1}


@pytest.mark.covers("L11")
@pytest.mark.parametrize(
    ("first", "key", "was", "sets"),
    [
        (STREAMING, "diloco.sync_every", 40, 80),
        (STREAMING, FRAGMENTS, 2, (1, 0, 0.0)),
        (STREAMING, "diloco.fragment_sync_delay", 4, 8),
        (STREAMING, "diloco.fragment_update_alpha", 0.5, 0.0),
        (STREAMING, "diloco.max_inflight", 1, 2),
        ({}, "async.enabled", False, True),
        (ASYNC, "async.sync_rounds_first", 0, 9),
        ({}, "algorithm.name", "diloco", "fedavg"),
        ({}, "aggregation.upload_codec.name", "bf16", "int8"),
        (TOPK, "aggregation.upload_codec.density", None, 0.5),
        ({}, "aggregation.download_codec.name", "none", "int8"),
        ({}, "network.part_bytes", 2**24, 2**17),
        ({}, "model.ranks", 1, 2),
        (FEDPROX, "algorithm.mu", 0.1, 0.2),
    ],
    ids=str,
)
def test_a_restart_with_a_changed_setting_is_refused(
    tmp_path: Path, first: dict[str, Any], key: str | tuple[str, ...], was: object, sets: Any
) -> None:
    """A server that continues a run refuses a changed setting that must stay. The error names the first of several
    ones.
    """
    other = {key: sets} if isinstance(key, str) else dict(zip(key, sets, strict=True))
    named, value = next(iter(other.items()))
    require_refused(tmp_path, first, other, f"{named} = {was!r}, but this start sets {value!r}")


@pytest.mark.covers("L11")
@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"algorithm.outer_optimizer.lr": 0.3}, "{'lr': 0.7}, but this start sets {'lr': 0.3}"),
        ({"algorithm.outer_lr_of": {"0.*": 0.3}}, "{}, but this start sets {'lrs': {'0.*': 0.3}}"),
    ],
    ids=["rate", "rates"],
)
def test_a_restart_with_another_outer_optimizer_is_refused(tmp_path: Path, other: dict[str, Any], told: str) -> None:
    """A server that continues a run refuses another outer optimizer, and the error shows only the options that
    differ.
    """
    require_refused(tmp_path, {}, other, f"algorithm.outer_optimizer = {told}")


def require_refused(folder: Path, first: dict[str, Any], other: dict[str, Any], told: str) -> None:
    """A start with other settings is refused; with the first ones the run goes on."""
    with diloco_server(folder, **first):
        pass
    with pytest.raises(ConfigError, match=re.escape(f" has {told}.")) as caught:
        diloco_server(folder, **(first | other)).start()
    assert "Start with the old value, or start a new run in another disk.state_dir" in caught.value.remedy
    with diloco_server(folder, **first) as again:
        assert again.status().epoch >= 2


def test_a_restart_with_another_torch_build_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If a run continues with another version of torch, the log says with which version it started."""
    with diloco_server(tmp_path):
        pass
    with closing(sqlite3.connect(tmp_path / "state" / "journal.sqlite")) as journal, journal:
        ((text,),) = journal.execute("SELECT settings_json FROM run")
        older = text.replace(f'"torch": "{torch.__version__}"', '"torch": "2.1.0"')
        assert older != text
        journal.execute("UPDATE run SET settings_json = ?, torch_build = '2.1.0'", (older,))
    with diloco_server(tmp_path):
        assert "the run was started with torch 2.1.0 on" in caplog.text


def test_sites_keep_network_settings_until_they_join_again(tmp_path: Path) -> None:
    """If a restarted server has other network settings, a site keeps the settings that it got until it joins again."""
    # Site `a` joined before the restart and site `b` joins afterwards. Both take part.
    told = {"network.connections": 1, "network.heartbeat_interval_s": 0.2, "network.idle_timeout_s": 7.0}
    later = {"network.connections": 3, "network.heartbeat_interval_s": 40.0, "network.idle_timeout_s": 9.0}
    run: dict[str, Any] = {"algorithm.name": "fedavg", "network.port": free_port(), "rounds.total": 3}
    with diloco_server(tmp_path, **run, **told) as server:
        (a,) = manual_sites(server, tmp_path, "a").values()
        one_round(a)
    with diloco_server(tmp_path, **run, **later) as server:
        one_round(a)
        (b,) = manual_sites(server, tmp_path, "b").values()
        for client, expected in ((a, told), (b, later)):
            place = client._place
            assert place is not None
            assert {key: getattr(place.session.info, key.partition(".")[2]) for key in told} == expected
        wait_until(lambda: heard_s(server, "a") < 0.15, "a heartbeat of a, as often as before")
        assert a.next_round() == 3
        a.submit(a.pull())
        a.close()
        b.close()


@pytest.mark.covers("L11")
def test_some_changed_settings_take_effect_at_the_next_start(tmp_path: Path) -> None:
    """Settings that may change take effect when the server is started again.

    The restarted server makes one more round, needs fewer sites, uses the median, and refuses large updates.
    """
    run: dict[str, Any] = {"algorithm.name": "fedavg", "network.port": free_port(), "rounds.sites": 2}
    with diloco_server(tmp_path, **run, rounds=1, **{"rounds.min_sites": 2}) as server:
        sites = manual_sites(server, tmp_path)
        for client in sites.values():
            one_round(client)
        wait_until(lambda: server.finished, "the end of its one round")
    changed = {"rounds.min_sites": 1, "aggregation.reducer.name": "median", "aggregation.max_update_norm": 0.5}
    with diloco_server(tmp_path, **run, **changed, rounds=2) as server:
        a, b = sites.values()
        for client in (a, b):
            assert client.next_round() == 2
        a.submit({name: tensor + 1.0 for name, tensor in a.pull().items()})
        assert server.status().refused == 1
        a.close()
        b.submit(b.pull())
        assert b.next_round() is None
        b.close()
        assert server.wait(60)
        assert server.status().history[-1].workers == ["b"]


def one_round(client: ManualSite) -> None:
    assert client.next_round() is not None
    client.submit(client.pull())


def heard_s(server: atoll.Server, site: str) -> float:
    return next(each.last_heartbeat_s for each in server.status().workers if each.site == site)
