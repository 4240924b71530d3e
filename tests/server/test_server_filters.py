"""Filters at the server: what is aggregated of a site's update is what they left, and what was received stays."""

from __future__ import annotations

import logging
import os
import re
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_filters import Infinite, Shorter, Undecided
from safetensors.torch import load_file
from torch import Tensor

import atoll
from atoll import failpoints
from atoll.config import Settings
from atoll.errors import ConfigError, DiskFull, RunFailed, UsageError
from atoll.filters import Drop, Filter, NormClip, Outgoing
from atoll.server.filters import HOLDER
from atoll.store.rows import TicketRow
from atoll.tensors.chunks import CHUNK_ELEMENTS
from atoll.testing.processes import wait_until
from atoll.wire import messages, routes

START = {"w": torch.zeros(2), "head": torch.zeros(1), "bn.running_mean": torch.zeros(1), "n": torch.tensor(7)}
State = dict[str, Tensor]


def become(w: list[float], head: float, mean: float = 0.0, n: int = 7) -> State:
    return {
        "w": torch.tensor(w),
        "head": torch.tensor([head]),
        "bn.running_mean": torch.tensor([mean]),
        "n": torch.tensor(n),
    }


def serving(folder: Path, start: State = START, **options: Any) -> atoll.Server:
    settings: dict[str, Any] = {"algorithm": "fedavg", "rounds": 1, "num_workers": 2, "threads": 1}
    where = {"port": 0, "min_free_bytes": 0, "state_dir": folder / "state"}
    return atoll.Server(start, **(where | settings | options))


def join(server: atoll.Server, folder: Path, sites: str) -> dict[str, atoll.Client]:
    clients = {site: atoll.Client(server.url, site=site, folder=folder / "w").register() for site in sites}
    for client in clients.values():
        assert client.next_round() == 1
        client.pull()
    return clients


def play(server: atoll.Server, folder: Path, updates: dict[str, State]) -> State:
    """One round of these sites; returns the result."""
    clients = join(server, folder, "".join(updates))
    for site, client in clients.items():
        client.submit(updates[site])
    for client in clients.values():
        assert client.next_round() is None
        client.close()
    assert server.wait(60)
    server.run()
    return load_file(server.exports / "model.safetensors")


@pytest.mark.covers("T8")
def test_filters_of_the_run_file_are_for_everybody_or_for_a_named_site(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """a's head is dropped; b moved by (6, 8), of norm 10, and is clipped to 5; everybody's n stays.

    The mean: w = (1 + 3)/2, (1 + 4)/2. Integers are not averaged, so the 9 of b would have won.
    """
    (tmp_path / "run.toml").write_text(
        """
        algorithm = "fedavg"
        task_result_filters = [
            {path = "drop", args = ["n"]},
            {path = "drop", args = ["head"], sites = ["a"]},
            {path = "norm_clip", args = {max_norm = 5.0}, sites = ["b"]},
        ]
        """
    )
    given = Settings.read(tmp_path / "run.toml", environ={}).task_result_filters
    caplog.set_level(logging.INFO, "atoll.server")
    with serving(tmp_path, task_result_filters=given) as server:
        found = play(server, tmp_path, {"a": become([1.0, 1.0], 7.0), "b": become([6.0, 8.0], 0.0, n=9)})
    assert (found["w"].tolist(), found["head"].tolist(), found["n"].item()) == ([2.0, 2.5], [0.0], 7)
    assert "Drop('n') of every site, Drop('head') of a, NormClip(5, noise=0) of b" in caplog.text


@pytest.mark.covers("T8")
def test_a_program_gives_filters_by_site_and_buffers_are_filtered_too(tmp_path: Path) -> None:
    """a's change is (3, 4) and 12 in the buffer, of norm 13: half of it is left. b sends no change of the buffer."""
    filters = {"a": [NormClip(6.5)], "b": [Drop("*.running_mean")]}
    with serving(tmp_path, filters=filters) as server:
        found = play(server, tmp_path, {"a": become([3.0, 4.0], 0.0, 12.0), "b": become([0.0, 0.0], 0.0, 99.0)})
    assert found["w"].tolist() == [0.75, 1.0]  # (1.5 + 0)/2, (2 + 0)/2
    assert found["bn.running_mean"].item() == 3.0  # (6 + 0)/2


class Halved(Filter):
    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        assert len(values) <= CHUNK_ELEMENTS
        return values.div_(2)


MEAN = """
def mean(updates):
    for name in updates[0].tensors:
        yield name, sum(update.tensors[name].float() for update in updates) / len(updates)


class Arriving:
    def __init__(self):
        self.reset()

    def accept(self, update):
        self.updates.append(update)

    def aggregate(self):
        return mean(self.updates)

    def reset(self):
        self.updates = []
"""


@pytest.mark.covers("T8", "D7", "D13")
@pytest.mark.parametrize("how", ["mean", "median", "own", "arriving", "memory"])
def test_reducers_and_aggregators_see_what_the_filters_left(tmp_path: Path, how: str) -> None:
    """Of (2, 4) and (6, 8) half is left: the mean, and the median of two, is (2, 3)."""
    (tmp_path / "mine.py").write_text(MEAN)
    options: dict[str, dict[str, Any]] = {
        "median": {"reducer": "median"},
        "own": {"aggregator": f"{tmp_path}/mine.py:mean"},
        "arriving": {"aggregator": f"{tmp_path}/mine.py:Arriving"},
        "memory": {"download_to_disk": False},
    }
    with serving(tmp_path, filters=[Halved()], **options.get(how, {})) as server:
        found = play(server, tmp_path, {"a": become([2.0, 4.0], 0.0), "b": become([6.0, 8.0], 0.0)})
        assert server._run is not None
        assert server._run.filtering._kept == {}  # nothing is left of the round
    assert found["w"].tolist() == [2.0, 3.0]


@pytest.mark.covers("T8", "D13")
@pytest.mark.parametrize("to_disk", [True, False])
def test_what_filters_leave_is_a_file_without_a_name_or_memory(tmp_path: Path, to_disk: bool) -> None:
    """A machine without a disk has nothing of it in the state directory, not even nameless."""
    state, nameless = tmp_path / "state", set[bool]()

    class Looking(Filter):
        def apply(self, name: str, start: int, values: Tensor) -> Tensor:
            links = []
            for entry in os.listdir("/proc/self/fd"):
                with suppress(FileNotFoundError):  # closed by another thread meanwhile
                    links.append(os.readlink(f"/proc/self/fd/{entry}"))
            nameless.add(any(link.startswith(f"{state}/") and link.endswith("(deleted)") for link in links))
            return values

    with serving(tmp_path, num_workers=1, filters=[Looking()], download_to_disk=to_disk) as server:
        play(server, tmp_path, {"a": become([2.0, 4.0], 0.0)})
    assert nameless == {to_disk}


@pytest.mark.covers("T8")
def test_a_disk_without_space_for_what_filters_leave_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site is told to come back, and does."""
    raised: list[type[BaseException]] = []
    with serving(tmp_path, num_workers=1, filters=[Halved()]) as server:
        prepare = server._run.filtering.prepare  # type: ignore[union-attr]

        async def noted(row: TicketRow, number: int) -> None:
            try:
                await prepare(row, number)
            except BaseException as error:
                raised.append(type(error))
                raise

        monkeypatch.setattr(server._run.filtering, "prepare", noted)  # type: ignore[union-attr]
        monkeypatch.setattr(failpoints, "_actions", failpoints._parse("filters.write=enospc"))
        monkeypatch.setattr(failpoints, "_reached", type(failpoints._reached)())
        assert play(server, tmp_path, {"a": become([2.0, 4.0], 0.0)})["w"].tolist() == [1.0, 2.0]
    assert raised == [DiskFull]


@pytest.mark.covers("T8")
def test_a_reducer_that_clips_knows_the_norm_behind_the_filters(tmp_path: Path) -> None:
    """Halves of (6, 8) and (0, 4): norms 5 and 2. Clipped to 2.5: (1.5, 2) and (0, 2); the mean is (0.75, 2).

    The norm is that of parameters: a's buffer, which moves by 24, does not count.
    """
    options = {"reducer": "clipped_mean", "reducer_options": {"max_norm": 2.5}}
    with serving(tmp_path, filters=[Halved()], **options) as server:
        found = play(server, tmp_path, {"a": become([6.0, 8.0], 0.0, 24.0), "b": become([0.0, 4.0], 0.0)})
    assert found["w"].tolist() == [0.75, 2.0]


class Spy(Filter):
    seen: list[tuple[str, int, int]] = []  # noqa: RUF012 (shared with the test)

    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        self.seen.append((name, start, len(values)))
        return values


@pytest.mark.covers("T8")
@pytest.mark.parametrize("codec", ["none", "bf16"])
def test_a_filter_that_changes_nothing_changes_no_bit(tmp_path: Path, codec: str) -> None:
    Spy.seen.clear()
    generator = torch.Generator().manual_seed(0)
    start: State = {
        "large": torch.randn(CHUNK_ELEMENTS + 5, generator=generator),
        "half": torch.randn(7, generator=generator).half(),
        "double": torch.randn(7, generator=generator).double(),
        "x.running_var": torch.rand(9, generator=generator),
        "x.num_batches_tracked": torch.tensor(3),
        "scalar": torch.tensor(1.5),
    }
    updates = {
        site: {name: (value + number * 0.1).to(value.dtype) for name, value in start.items()}
        for number, site in enumerate("ab", 1)
    }
    results = []
    for folder, filters in ((tmp_path / "plain", []), (tmp_path / "filtered", [Spy()])):
        with serving(folder, start, codec=codec, filters=filters) as server:
            results.append(play(server, folder, updates))
    assert [name for name in start if not torch.equal(results[0][name], results[1][name])] == []
    assert Spy.seen.count(("large", 0, CHUNK_ELEMENTS)) == 2  # once a site, and never more at a time
    assert Spy.seen.count(("large", CHUNK_ELEMENTS, 5)) == 2


@pytest.mark.covers("T8")
def test_a_filter_may_look_at_the_lazy_whole_and_its_metadata(tmp_path: Path) -> None:
    class Looking(Filter):
        def begin(self, update: Outgoing) -> None:
            about = update.about
            seen[about.site] = (
                about.round,
                about.version,
                about.weight,
                dict(about.metrics),
                update.tensor("w").tolist(),
            )

    seen: dict[str, object] = {}
    with serving(tmp_path, num_workers=1, filters=[Looking()]) as server:
        client = join(server, tmp_path, "a")["a"]
        client.submit(become([1.0, 2.0], 0.0), weight=3.0, metrics={"loss": 0.5})
        assert client.next_round() is None
        client.close()
    assert seen == {"a": (1, 0, 3.0, {"loss": 0.5}, [-1.0, -2.0])}


class Broken(Filter):
    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        if name == "head":
            raise KeyError("salt")
        return values


class Leaving(Filter):
    def begin(self, update: Outgoing) -> None:
        raise SystemExit(2)


@pytest.mark.covers("T8", "T7", "X3")
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Leaving, r"update of b is refused: a filter of the server called sys.exit\(2\)"),
        (Broken, r"update of b is refused: the server's filter Broken\(\) failed at 'head': KeyError: 'salt'"),
        (Undecided, r"update of b is refused: the server's filter Undecided\(\) failed at '\w+': KeyError: '\w+'"),
        (Shorter, r"update of b is refused: the server's filter Shorter\(\) made torch.float32 \[\d\] where '\w+' had"),
        (Infinite, r"update of b is refused: what the server's filter Infinite\(\) left of '\w+' is not finite"),
        (lambda: Drop("haed"), r"update of b is refused: .*no tensor of the model is called 'haed'"),
    ],
    ids=["exits", "raises", "keeps", "shape", "infinite", "name"],
)
def test_the_round_goes_on_without_a_site_whose_filter_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Any, told: str
) -> None:
    with serving(tmp_path, min_workers=1, filters={"b": [kind()]}) as server:
        good, bad = join(server, tmp_path, "ab").values()
        good.submit(become([1.0, 2.0], 3.0))
        bad.submit(become([9.0, 9.0], 9.0))
        assert re.search(told, caplog.text)  # the site is told
        bad.close()
        assert good.next_round() is None
        good.close()
        assert server.wait(60)
        status = server.status()
        server.run()
        found = load_file(server.exports / "model.safetensors")
    assert (found["w"].tolist(), found["head"].tolist()) == ([1.0, 2.0], [3.0])
    assert status.refused == 1
    assert status.history[-1].workers == ["a"]


@pytest.mark.covers("T8")
def test_an_accepted_update_is_filtered_anew_behind_a_restart(tmp_path: Path) -> None:
    """What was received is kept as it was: the second server halves it once, not twice."""
    with serving(tmp_path, filters=[Halved()]) as server:
        clients = join(server, tmp_path, "ab")
        clients["a"].submit(become([2.0, 4.0], 0.0))
        port = server.port
    with serving(tmp_path, filters=[Halved()], port=port) as server:
        clients["b"].submit(become([6.0, 8.0], 0.0))
        for client in clients.values():
            assert client.next_round() is None
            client.close()
        assert server.wait(60)
        assert load_file(server.exports / "model.safetensors")["w"].tolist() == [2.0, 3.0]


@pytest.mark.covers("T8", "X3")
def test_a_filter_that_fails_at_what_it_took_before_ends_the_server_and_loses_nothing(tmp_path: Path) -> None:
    with serving(tmp_path, filters=[Filter()]) as server:
        clients = join(server, tmp_path, "ab")
        clients["a"].submit(become([2.0, 4.0], 0.0))
        port = server.port
    with serving(tmp_path, filters={"a": [Broken()]}, port=port) as server:
        clients["b"].submit(become([6.0, 8.0], 0.0))
        with pytest.raises(RunFailed, match=r"update of a for round 1 .*Broken\(\) failed at 'head'.*Nothing is lost"):
            server.wait(60)
    with serving(tmp_path, filters=[Halved()], port=port) as server:  # mended
        for client in clients.values():
            assert client.next_round() is None
            client.close()
        assert server.wait(60)
        assert load_file(server.exports / "model.safetensors")["w"].tolist() == [2.0, 3.0]


@pytest.mark.covers("T8")
def test_scaffolds_controls_pass_as_they_came(tmp_path: Path) -> None:
    """c is the mean of what sites hold as c_i, and a site does not know what the server does to its update."""
    with serving(tmp_path, algorithm="scaffold", num_workers=1, rounds=2, filters=[Halved()]) as server:
        with atoll.Client(server.url, site="a", folder=tmp_path / "w") as client:
            client.next_round()
            client.pull()
            client.submit(
                become([2.0, 4.0], 0.0),
                steps=1,
                control_difference={"w": torch.tensor([1.0, 2.0]), "head": torch.tensor([3.0])},
            )
            client.next_round()
            assert client.pull()["w"].tolist() == [1.0, 2.0]
            assert client.global_controls()["w"].tolist() == [1.0, 2.0]
            assert client.own_controls()["w"].tolist() == [1.0, 2.0]


def test_every_site_has_a_filter_of_its_own(tmp_path: Path) -> None:
    """Filters keep state between `begin` and `apply`: one for both would give the second site the first one's."""
    from atoll.server.site_filters import SiteFilters

    filters = SiteFilters(Settings(), [NormClip(1.0)])
    (a,), (b,) = filters.of("a"), filters.of("b")
    assert a is not b
    assert filters.of("a") == (a,)


@pytest.mark.covers("T8")
def test_sites_do_not_share_their_noise(tmp_path: Path) -> None:
    """Without a change only the noise is left; the same noise twice would not become smaller in the mean."""
    moved: list[Tensor] = []

    class Noted(Filter):
        def apply(self, name: str, start: int, values: Tensor) -> Tensor:
            if name == "w":
                moved.append(values.clone())
            return values

    with serving(tmp_path, filters=[NormClip(1.0, noise=1.0), Noted()]) as server:
        play(server, tmp_path, {"a": dict(START), "b": dict(START)})
    assert len(moved) == 2
    assert not torch.equal(*moved)


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({"path": "norm_clip", "args": {"norm": 1.0}}, "norm_clip.*with args"),
        ({"path": "nrom_clip"}, "not one of the filters.*Did you mean 'norm_clip'"),
        ({"name": "drop"}, "not understood"),
        ({"path": "drop", "args": ["w"], "site": "a"}, "not understood"),
        ({"path": "drop", "args": ["w"], "sites": "a"}, "not understood"),
        ({"path": "math:sqrt", "args": [4.0]}, "makes a float"),
    ],
)
def test_an_entry_that_is_wrong_is_refused_at_the_start(entry: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        atoll.Server(START, task_result_filters=[entry])


def test_what_a_program_gives_wrongly_is_refused() -> None:
    with pytest.raises(UsageError, match="is not a filter"):
        atoll.Server(START, filters=["drop"])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="Give one of them"):
        atoll.Server(START, filters=[Halved()], task_result_filters=[{"path": "cast", "args": ["bf16"]}])
    with pytest.raises(UsageError, match="Server got data_filters, and its settings have task_data_filters"):
        atoll.Server(START, data_filters=[Halved()], task_data_filters=[{"path": "cast", "args": ["bf16"]}])


@pytest.mark.covers("T8", "X3")
def test_rounds_refuse_filters_that_only_tasks_can_have() -> None:
    for options in ({"data_filters": [Halved()]}, {"task_data_filters": [{"path": "cast", "args": ["bf16"]}]}):
        told = r"task_data_filters are set \(.* of every site\), and the run has rounds.*one file.*Leave them out"
        with pytest.raises(ConfigError, match=told):
            atoll.Server(START, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"name the tasks train, and a run of rounds has none.*Leave tasks out"):
        atoll.Server(START, filters={"a": {"train": [Halved()]}})


def test_a_filter_in_a_file_beside_the_run_file_and_in_a_variable(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("from atoll.filters import Filter\nclass Mine(Filter): ...\n")
    (tmp_path / "run.toml").write_text('task_result_filters = [{path = "own.py:Mine"}]\n')
    (filter_,) = atoll.Server(START, Settings.read(tmp_path / "run.toml", environ={}))._filters.results.of("a")
    assert repr(filter_) == "Mine()"
    text = '[{path = "cast", args = ["bf16"]}]'
    settings = Settings.read(environ={"ATOLL_TASK_RESULT_FILTERS": text})
    assert settings.task_result_filters == ({"path": "cast", "args": ["bf16"]},)


def test_a_flag_has_tables() -> None:
    from atoll.cli.server import _parsed

    assert _parsed("task_result_filters", '[{path = "drop", args = ["w"]}]') == [{"path": "drop", "args": ["w"]}]
    with pytest.raises(ConfigError, match="or a list of such tables"):
        _parsed("task_result_filters", "drop")


@pytest.mark.covers("T8")
def test_an_update_that_is_completed_twice_at_once_is_accepted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The word that it is complete is sent again while the filter still works: both get the same receipt.

    The filter, which keeps state, works once; and no other update takes the place of what it reads.
    """

    class Slow(Filter):
        def begin(self, update: Outgoing) -> None:
            begins.append(update.about.site)
            begun.set()
            assert go.wait(30)

    begins: list[str] = []
    begun, go = threading.Event(), threading.Event()
    with serving(tmp_path, num_workers=1, filters=[Slow()]) as server:
        refusal, asked = server._run.filtering.refusal, list[int]()  # type: ignore[union-attr]

        async def counted(row: TicketRow, *rest: Any) -> str:
            asked.append(row.ticket)
            return await refusal(row, *rest)

        monkeypatch.setattr(server._run.filtering, "refusal", counted)  # type: ignore[union-attr]
        client = join(server, tmp_path, "a")["a"]
        session = client._session
        assert session is not None
        threads = [threading.Thread(target=lambda: client.submit(become([2.0, 4.0], 0.0)))]
        threads[0].start()
        assert begun.wait(30)
        note = session.outbox.note
        assert note is not None
        said = messages.Complete(
            digest=note.digest, base_digest=note.base_digest, weight=1.0, steps=0, metrics=dict(note.metrics)
        )
        again: list[messages.Receipt] = []
        path = routes.COMPLETE.format(ticket=note.ticket)
        threads.append(threading.Thread(target=lambda: again.append(session.http.post(path, said, messages.Receipt))))
        threads[1].start()
        wait_until(lambda: len(asked) == 2, "that both wait")
        slot = server._run.store.spool(note.ticket).slot  # type: ignore[union-attr]
        held = slot.holds[HOLDER]
        go.set()
        for thread in threads:
            thread.join()
        assert (begins, held) == (["a"], 1)
        assert HOLDER not in slot.holds
        assert [receipt.digest for receipt in again] == [note.digest]
        assert client.next_round() is None
        client.close()
