"""Sites of a swarm that come late, go early, cannot be reached or are refused; TLS between them, and what they keep."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import Nursery, wait_until
from kit import Gate, Threads, copy_folder, flip_bit, run_to_end, tensors_digest
from kit.admin import asked, pause, resume, stop
from kit.folders import put_back
from kit.models import wide_model
from kit.processes import command, export
from kit.results import Result, of_sites
from kit.tls import write_certificate
from safetensors.torch import load_file
from swarm_world import EVERY_SITE_AND_ROUND, IN_TURN, PLAIN, QUICK, SITES, SiteProcess, Sites, serve_swarm, trains
from torch import nn

import atoll
from atoll.errors import ConfigError, Conflict, Gone, ServerLost, UsageError
from atoll.filters import NormClip
from atoll.protocol import routes
from atoll.protocol.admin_messages import RollBack

pytestmark = pytest.mark.covers("P10")


@pytest.mark.slow
@pytest.mark.covers("X3")
def test_a_swarm_waits_for_a_second_worker(nursery: Nursery, tmp_path: Path) -> None:
    """If only one worker is left in a swarm, the run waits and the status says why. Once the other site is back, the
    run finishes.
    """
    gate, settings = Gate(2, "a"), {"rounds.sites": 2, "rounds.min_sites": 1, "rounds.total": 2}
    with serve_swarm(tmp_path, **settings, **QUICK, **{"swarm.aggregators": ["a", "b"]}) as server:
        a = Sites(server.url, tmp_path, "a", during=gate)
        with SiteProcess(nursery, tmp_path, server.url, "b", HOLD=f"2:{tmp_path / 'never'}") as b:
            gate.wait()
            wait_until(lambda: trains(b.process.now, 2), "round 2 at b")
        gate.open()
        wait_until(lambda: "waits for a second worker: version 2" in server.status().fragments[0].reason, "the reason")
        again = Sites(server.url, tmp_path, "b")
        run_to_end(server, a, again)
    assert a.digests == again.digests


@pytest.mark.slow
@pytest.mark.covers("X3")
def test_an_unreachable_worker_gets_an_error_at_once(nursery: Nursery, tmp_path: Path) -> None:
    """A worker that the other workers cannot reach gets an error before the first round, which names the setting to
    change.
    """
    with serve_swarm(tmp_path, **{"rounds.min_sites": 3, "network.idle_timeout_s": 1.0}) as server:
        first = Sites(server.url, tmp_path, "ab")
        wait_until(lambda: len(server.status().workers) == 2, "two workers")
        with SiteProcess(nursery, tmp_path, server.url, "c", ATOLL_PEER_NAME="127.0.0.2") as hidden:
            assert hidden.process.wait(60) != 0
        told = hidden.process.now.output()
        assert "cannot reach c at http://127.0.0.2:" in told
        assert "ATOLL_PEER_NAME" in told
        assert server.status().version == 0
        third = Sites(server.url, tmp_path, "c")
        run_to_end(server, first, third)
    assert first.digests == third.digests


def test_a_swarm_refuses_bad_updates(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In a swarm, an update with NaN or with a too large norm is refused, and the log says which site."""
    # The other sites go on. The site that collects the updates checks them. In round 1, the update of site `a` has NaN.
    # Gradients of norm √83,488 give the norm 0.05 · √83,488 · √steps: 14.4 for `c`, 20.4 for `a`, 25.0 for `b`.

    def spoil(site: str, number: int, model: nn.Module) -> None:
        if (site, number) == ("a", 1):
            torch.nn.init.constant_(model.get_parameter("2.bias"), float("nan"))

    with serve_swarm(tmp_path, **{"aggregation.max_update_norm": 22.0, "rounds.min_sites": 1}) as server:
        run_to_end(server, Sites(server.url, tmp_path, steps={"a": 2, "b": 3, "c": 1}, during=spoil))
    result = Result(tmp_path)
    assert of_sites(result.history) == [["c"], ["a", "c"], ["a", "c"]]
    refused = {(site, base + 1) for site, base, state in result.tickets if state == "refused"}
    assert refused == {("a", 1), ("b", 1), ("b", 2), ("b", 3)}
    assert [line for line in caplog.messages if "update refused" in line and "2.bias" in line]
    assert re.search(r"b: update refused: its norm is 25\.\d+, above aggregation.max_update_norm 22", caplog.text)


@pytest.mark.slow
@pytest.mark.parametrize("damaged", [1, 2], ids=["one", "both"])
def test_all_workers_die_and_come_back(nursery: Nursery, tmp_path: Path, damaged: int) -> None:
    """If all workers of a swarm die and start again, the run continues from an undamaged version that a worker has.

    If all files of the version are damaged, the status says that it is lost and what to do.
    """
    with serve_swarm(tmp_path, **IN_TURN) as server:
        never = f"2:{tmp_path / 'never'}"
        running = [SiteProcess(nursery, tmp_path, server.url, site, HOLD=never) for site in SITES]
        wait_until(lambda: all(trains(each.process.now, 2) for each in running), "round 2")
        for each in running:
            each.process.close()
        holders = sorted(path.parent for path in (tmp_path / "workers").glob("*/*/held.json"))
        assert len(holders) == 2  # have version 1
        for folder in holders[:damaged]:
            for path in folder.glob("version-0-*"):
                flip_bit(path, -1)
        if damaged == 2:
            waiting = [SiteProcess(nursery, tmp_path, server.url, site) for site in SITES]
            lost = "no connected worker has version 1, and a and b have lost it: export an older version"
            wait_until(lambda: lost in server.status().fragments[0].reason, "the reason")
            for each in waiting:
                each.process.close()
            return
        sites = Sites(server.url, tmp_path)
        run_to_end(server, sites)
    assert len(sites.digests) == 1
    assert Result(tmp_path).counted() == EVERY_SITE_AND_ROUND


def test_sites_may_join_late_or_leave_early(tmp_path: Path) -> None:
    """In a swarm, a site may join after round 1 and another may leave early."""
    # All sites that stay end with the same model. The worker that leaves holds the newest version, so it stays until
    # another worker has it.
    gate, settings = Gate(2, "b"), {"rounds.sites": 2, "rounds.total": 5, "swarm.aggregators": ["a"]}
    with serve_swarm(tmp_path, **settings) as server:
        early = Sites(server.url, tmp_path, "ab", during=gate, last={"a": 3})
        gate.wait()
        late = Sites(server.url, tmp_path, "c")
        wait_until(lambda: len(server.status().workers) == 3, "c")
        gate.open()
        run_to_end(server, early, late)
    assert early.digests == late.digests
    assert {site for site, number in Result(tmp_path).counted() if number > 3} == {"b", "c"}


@pytest.mark.slow
def test_a_versions_only_holder_stays(nursery: Nursery, tmp_path: Path) -> None:
    """If a worker is the only one that has the newest version, it leaves only after another worker has it."""
    # Of the two that have version 1, `b` is killed for good in round 2, and `a` leaves with its update of that round.
    gate, settings = Gate(2, "acd"), {"rounds.sites": 4, "rounds.min_sites": 2, "swarm.aggregators": ["a", "b"]}
    with serve_swarm(tmp_path, **settings, **QUICK) as server:
        others = Sites(server.url, tmp_path, "acd", during=gate, last={"a": 2})
        with SiteProcess(nursery, tmp_path, server.url, "b", HOLD=f"2:{tmp_path / 'never'}") as b:
            gate.wait()
            wait_until(lambda: trains(b.process.now, 2), "round 2 at b")
            held = sorted(path.parent.parent.name for path in (tmp_path / "workers").glob("*/*/held.json"))
            assert held == ["a", "b"]
        gate.open()
        run_to_end(server, others)
    result = Result(tmp_path)
    assert (len(others.models), len(others.digests)) == (2, 1)
    assert ("a", 2) in result.counted()
    assert [len(summary["sites"]) for summary in result.history] == [4, 3, 2]


def test_only_the_sites_keep_a_swarms_result(nursery: Nursery, tmp_path: Path) -> None:
    """At the end of a swarm, each site has the result in its folder, and the server does not. `atoll export` and
    evaluation at the server are refused.
    """
    with serve_swarm(tmp_path, **PLAIN | {"algorithm.name": "scaffold"}) as server:
        ran = Sites(server.url, tmp_path)
        run_to_end(server, ran)
    for site in SITES:
        found = load_file(tmp_path / "workers" / site / "model.safetensors")
        assert {tensors_digest(found)} == ran.digests
        assert not list((tmp_path / "workers" / site).glob("*/spool-*"))
    state = server.settings.disk.state_dir
    ended = command(nursery, tmp_path, "export", "out.safetensors", "--dir", str(state))
    assert ended.returncode == Gone.exit_code
    said = " ".join(ended.stderr.split())
    assert "version 3 is stored at its sites" in said
    assert "take model.safetensors from a site's folder" in said
    with pytest.raises(UsageError, match=r"so the server cannot evaluate them\. .*versions = "):
        atoll.Server(settings=server.settings, evaluation={})


@pytest.mark.covers("X3")
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rounds.sites": 1}, "rounds.sites is 1"),
        ({"disk.export_every": 2}, "disk.export_every"),
        ({"rounds.best_metric": "loss"}, "best_metric"),
        ({"aggregation.download_codec.name": "int8"}, "aggregation.download_codec"),
        ({"model.ranks": 2}, "ranks"),
        ({"disk.durability": "power"}, "durability"),
        ({"aggregation.aggregator.path": "mine.py:Mean"}, "aggregator"),
        ({"aggregation.reducer.path": "mine.py:Mean"}, "reducer"),
        (
            {"algorithm.outer_optimizer.name": None, "algorithm.outer_optimizer.path": "mine.py:Adam"},
            "algorithm.outer_optimizer",
        ),
        (
            {"outer_optimizer": torch.optim.Adam},
            "outer_optimizer is given by the argument outer_optimizer, but swarm.*entry point",
        ),
        (
            {"filters": [NormClip(1.0)]},
            "by the argument filters, but swarm.*filter at the sites. Leave the argument filters out",
        ),
        ({"workflow": print, "rounds.total": 0}, "by the argument workflow, but swarm.enabled is true"),
        ({"workflow.function": "mine.py:main"}, "workflow"),
        ({"workflow.result_filters": [{"filters": [{"path": "mine.py:Clip"}]}]}, "workflow.result_filters"),
        ({"model.persistor": {"path": "mine.py:Keep"}}, "persistor"),
        ({"aggregation.upload_codec.path": "mine.py:Codec"}, "codec"),
        ({"algorithm.name": None, "algorithm.path": "mine.py:MINE"}, "algorithm"),
        ({"swarm.enabled": False, "swarm.aggregators": ("a",)}, "aggregators"),
    ],
)
def test_unsupported_settings_of_a_swarm_are_refused(tmp_path: Path, settings: dict[str, Any], named: str) -> None:
    """A swarm refuses settings and arguments that it does not support, and `swarm.aggregators` is refused without a
    swarm.
    """
    with pytest.raises(ConfigError, match=named):
        with serve_swarm(tmp_path, **settings):
            pass


def test_an_export_of_a_swarm_uses_its_workers(nursery: Nursery, tmp_path: Path) -> None:
    """`atoll export` downloads the model of a running swarm from its workers. `atoll status` says which site aggregated
    a round.
    """
    gate = Gate(3, SITES)
    with serve_swarm(tmp_path) as server:
        sites = Sites(server.url, tmp_path, during=gate)
        gate.wait()
        assert export(nursery, tmp_path / "out.safetensors", "--server", server.url) == 2
        assert load_file(tmp_path / "out.safetensors").keys() == wide_model().state_dict().keys()
        shown = command(nursery, tmp_path, "status", "--server", server.url)
        assert (shown.returncode, "aggregated by " in shown.stdout) == (0, True)
        gate.open()
        run_to_end(server, sites)


@pytest.mark.covers("X2")
def test_a_swarm_works_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A swarm finishes with TLS between the workers, which show each other certificates, and with a token between each
    worker and the server.
    """
    tls = write_certificate(tmp_path)
    for name, value in {
        "ATOLL_TOKEN": "a-token-of-the-run",
        "ATOLL_TLS_CA": str(tmp_path / "ca.pem"),
        "ATOLL_PEER_NAME": "localhost",
        "ATOLL_PEER_TLS_CERT": str(tls["network.tls_cert"]),
        "ATOLL_PEER_TLS_KEY": str(tls["network.tls_key"]),
    }.items():
        monkeypatch.setenv(name, value)
    with serve_swarm(tmp_path, **tls) as server:
        sites = Sites(server.url.replace("127.0.0.1", "localhost"), tmp_path)
        run_to_end(server, sites)
        peers = server._require_served().place
        assert peers is not None
        assert all(peer.address.startswith("https://localhost:") for peer in peers.view.peers.values())
    assert len(set(Result(tmp_path).aggregators)) > 1
    assert (len(sites.models), len(sites.digests)) == (len(SITES), 1)


@pytest.mark.covers("X3")
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"ATOLL_PEER_PORT": "http"}, "ATOLL_PEER_PORT is 'http'"),
        (
            {"ATOLL_PEER_HOST": "0.0.0.0"},
            "Worker a cannot listen .* without TLS.* Set ATOLL_PEER_HOST .* ATOLL_PEER_TLS_CERT and ",
        ),
        (
            {"ATOLL_PEER_HOST": "192.0.2.1", "ATOLL_PEER_INSECURE": "1"},
            "Worker a cannot listen for the other workers: host '192.0.2.1' is not an address of this machine. Set",
        ),
        (
            {"ATOLL_PEER_TLS_KEY": "a.key"},
            "Only one of tls_cert and tls_key is set.* ATOLL_PEER_TLS_CERT and ATOLL_PEER_TLS_KEY",
        ),
    ],
    ids=["port", "without-tls", "address", "one-of-two"],
)
def test_a_wrong_listen_address_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], said: str
) -> None:
    """A worker of a swarm refuses a port, an address or TLS files that it cannot use to listen for the other
    workers.
    """
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with serve_swarm(tmp_path) as server:
        with pytest.raises(ConfigError, match=said):
            with atoll.join(server.url, site="a", folder=tmp_path / "w", swarm=True):
                pass


@pytest.mark.parametrize("is_swarm", [True, False], ids=["swarm", "server"])
def test_sites_may_sit_out_rounds_in_a_swarm(tmp_path: Path, is_swarm: bool) -> None:
    """A swarm gives the same result as a server if sites sit out rounds."""
    # Without an update, a round makes no version. Site `b` sits out round 2, but in the swarm still aggregates it. All
    # sites sit out round 3.
    weights = {2: {"b": 0.0}, 3: dict.fromkeys(SITES, 0.0)}

    def work(site: str) -> None:
        model = wide_model()
        with atoll.join(server.url, site=site, folder=tmp_path / "workers", swarm=is_swarm) as worker:
            for number, fl_round in enumerate(worker, 1):
                fl_round.load_into(model)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter += number
                fl_round.submit(model, weight=weights.get(number, {}).get(site, 1.0))
            ends[site] = worker.load_into(model)

    ends: dict[str, Any] = {}
    settings = IN_TURN if is_swarm else {"swarm.enabled": False}
    with serve_swarm(tmp_path, **PLAIN, **settings, **{"rounds.total": 4}) as server:
        run_to_end(server, Threads(*(partial(work, site) for site in SITES)))
        history = server.status().history
    others = {site for site in SITES if site != "b"}
    assert [(set(row.workers), row.sat_out) for row in history] == [
        (set(SITES), []),
        (others, ["b"]),
        (set(), [*SITES]),
        (set(SITES), []),
    ]
    begun = dict(wide_model().named_parameters())
    for model in ends.values():  # moved by 1, 2 and 4
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter, begun[name] + 7.0, rtol=0, atol=1e-5)


@pytest.mark.covers("F42")
def test_a_restored_swarm_reports_a_lost_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a swarm's server is restored from a backup whose version every worker has dropped, the log and status say how
    to go on.

    The workers keep only later versions than that of the backup.
    """
    monkeypatch.setattr("atoll.server.swarm.assignments.LACKING_S", 0.0)
    settings = {"rounds.total": 9, "network.idle_timeout_s": 0.5, **IN_TURN}

    def rounds_to(last: int) -> None:
        with serve_swarm(tmp_path, **settings) as server:
            Sites(server.url, tmp_path, last=dict.fromkeys(SITES, last)).join()

    def join_in_vain() -> None:
        with pytest.raises(ServerLost):
            Sites(server.url, tmp_path).join()

    rounds_to(2)
    backup = copy_folder(tmp_path / "state", tmp_path / "backup")
    rounds_to(7)
    put_back(backup, tmp_path / "state")
    monkeypatch.setenv("ATOLL_GIVE_UP_S", "1")
    lost = (  # said once all three have joined; before, the warning tells the operator to start them
        r"no connected worker has version \d, and \w and \w have lost it: export an older version.*"
        r"restore the folders of \w and \w from a backup of the same time.* a, b and c said what they have"
    )
    with serve_swarm(tmp_path, **settings) as server:
        sites = Threads(join_in_vain)
        wait_until(lambda: re.search(lost, caplog.text), "the warning")
        wait_until(lambda: re.search(lost, server.status().fragments[0].reason), "the reason in the status")
    sites.join()


@pytest.mark.long
@pytest.mark.covers("S2")
def test_a_restored_scaffold_swarm_goes_on(tmp_path: Path) -> None:
    """If a SCAFFOLD swarm's server is restored from a backup, the run continues, and the status warns that controls
    begin at zero again.
    """
    # The controls of all sites are two rounds ahead of the backup, and workers still have its version.
    settings = {"algorithm.name": "scaffold", "rounds.total": 7, "disk.keep_versions": 8, **PLAIN}
    settings["network.idle_timeout_s"] = 0.5  # how long a site that leaves waits for workers that need its data

    def rounds_to(last: int) -> int:
        with serve_swarm(tmp_path, **settings) as server:
            Sites(server.url, tmp_path, last=dict.fromkeys(SITES, last)).join()
            return server.status().fragments[0].version

    begun = rounds_to(2)
    backup = copy_folder(tmp_path / "state", tmp_path / "backup")
    assert rounds_to(5) >= begun + 2
    put_back(backup, tmp_path / "state")
    with serve_swarm(tmp_path, **settings) as server:
        sites = Sites(server.url, tmp_path)
        run_to_end(server, sites)
        assert any("begins at zero again" in text for text in server.status().warnings)
    assert len(sites.digests) == 1


@pytest.mark.slow
def test_a_swarm_can_be_paused_and_stopped(tmp_path: Path) -> None:
    """A swarm can be paused and stopped. It cannot go back to an earlier version, since only its sites have that."""
    gate = Gate(2, "ab")
    with serve_swarm(tmp_path, **QUICK, **{"rounds.sites": 2, "rounds.total": 50}) as server:
        sites = Sites(server.url, tmp_path, "ab", during=gate)
        gate.wait()
        pause(server)
        gate.open()
        wait_until(lambda: server.status().fragments[0].phase == "paused", "the end of round 2")
        assert server.status().version == 2
        with pytest.raises(Conflict, match="The run is a swarm"):
            asked(server, routes.ROLLBACK, RollBack(version=1))
        resume(server)
        wait_until(lambda: server.status().version >= 3, "round 3")
        stop(server)
        run_to_end(server, sites)
        assert server.status().stopped == "stopped by its admin"
    assert len(sites.digests) == 1
