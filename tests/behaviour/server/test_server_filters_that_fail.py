"""Filters at the server that fail, are slow or have no disk, and servers that end meanwhile: updates count once."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_filters import Infinite, Shorter, Undecided
from filter_world import Halved, become, join, serving
from harness.processes import free_port, wait_until
from kit.sites import finish
from kit.wire import WireSite
from safetensors.torch import load_file
from torch import Tensor

from atoll.errors import RunFailed
from atoll.filters import Drop, Filter, Outgoing
from atoll.testing.run import failpoints


@pytest.mark.covers("T8")
def test_a_disk_without_space_for_what_filters_leave_is_told_as_such(tmp_path: Path) -> None:
    """The site is told to come back, and does."""
    with serving(tmp_path, **{"rounds.sites": 1}, filters=[Halved()]) as server:
        update = WireSite(server.url).train(lambda tensors: tensors["w"].copy_(torch.tensor([2.0, 4.0]))).push()
        with failpoints("filters.write=enospc"):
            assert update.complete()[1]["code"] == "disk_full"
            assert update.complete()[0] == 200
        server.wait(30)
        assert load_file(server.save_state(tmp_path / "result.safetensors"))["w"].tolist() == [1.0, 2.0]


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
        (Leaving, r"update of b was refused: a filter of the server called sys.exit\(2\)"),
        (Broken, r"update of b was refused: the server's filter Broken\(\) failed at 'head': KeyError: 'salt'"),
        (Undecided, r"update of b was refused: the server's filter Undecided\(\) failed at '\w+': KeyError: '\w+'"),
        (
            Shorter,
            r"update of b was refused: the server's filter Shorter\(\) made torch.float32 \[\d\] of '\w+', which was",
        ),
        (
            Infinite,
            r"update of b was refused: the values of '\w+' after the server's filter Infinite\(\) are not finite",
        ),
        (lambda: Drop("haed"), r"update of b was refused: .*no tensor of the model has the name 'haed'"),
    ],
    ids=["exits", "raises", "keeps", "shape", "infinite", "name"],
)
def test_the_round_goes_on_without_a_site_with_a_failing_filter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Any, told: str
) -> None:
    with serving(tmp_path, **{"rounds.min_sites": 1}, filters={"b": [kind()]}) as server:
        good, bad = join(server, tmp_path, "ab").values()
        good.submit(become([1.0, 2.0], 3.0))
        bad.submit(become([9.0, 9.0], 9.0))
        assert re.search(told, caplog.text)  # the site is told
        bad.close()
        found, status = finish(server, {"a": good}), server.status()
    assert (found["w"].tolist(), found["head"].tolist()) == ([1.0, 2.0], [3.0])
    assert status.refused == 1
    assert status.history[-1].workers == ["a"]


@pytest.mark.covers("T8")
def test_an_accepted_update_is_filtered_anew_behind_a_restart(tmp_path: Path) -> None:
    """What was received is kept as it was: the second server halves it once, not twice."""
    port = free_port()
    with serving(tmp_path, filters=[Halved()], **{"network.port": port}) as server:
        clients = join(server, tmp_path, "ab")
        clients["a"].submit(become([2.0, 4.0], 0.0))
    with serving(tmp_path, filters=[Halved()], **{"network.port": port}) as server:
        clients["b"].submit(become([6.0, 8.0], 0.0))
        assert finish(server, clients)["w"].tolist() == [2.0, 3.0]


@pytest.mark.covers("T8", "X3")
def test_a_filter_that_fails_at_what_it_took_before_ends_the_server_and_loses_nothing(tmp_path: Path) -> None:
    port = free_port()
    with serving(tmp_path, filters=[Filter()], **{"network.port": port}) as server:
        clients = join(server, tmp_path, "ab")
        clients["a"].submit(become([2.0, 4.0], 0.0))
    with serving(tmp_path, filters={"a": [Broken()]}, **{"network.port": port}) as server:
        clients["b"].submit(become([6.0, 8.0], 0.0))
        with pytest.raises(
            RunFailed,
            match=r"update of a for round 1 .*Broken\(\) failed at 'head'.*it continues with the same updates",
        ):
            server.wait(60)
    with serving(tmp_path, filters=[Halved()], **{"network.port": port}) as server:  # mended
        assert finish(server, clients)["w"].tolist() == [2.0, 3.0]


@pytest.mark.covers("T8")
def test_an_update_that_is_completed_twice_at_once_is_accepted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The word that it is complete is sent again while the filter still works: both get the same receipt.

    The filter, which keeps state, works once; and no other update takes the place of what it reads.
    """

    from atoll.protocol import messages, routes
    from atoll.server.update_filters import HOLDER

    class Slow(Filter):
        def begin(self, update: Outgoing) -> None:
            begins.append(update.about.site)
            begun.set()
            assert go.wait(30)

    begins: list[str] = []
    begun, go = threading.Event(), threading.Event()
    with serving(tmp_path, **{"rounds.sites": 1}, filters=[Slow()]) as server:
        refusal, asked = server._run.filtering.refusal, list[int]()  # type: ignore[union-attr]

        async def counted(row: Any, *rest: Any) -> str:
            asked.append(row.ticket)
            return await refusal(row, *rest)

        monkeypatch.setattr(server._run.filtering, "refusal", counted)  # type: ignore[union-attr]
        client = join(server, tmp_path, "a")["a"]
        session = client._place
        assert session is not None
        threads = [threading.Thread(target=lambda: client.submit(become([2.0, 4.0], 0.0)))]
        threads[0].start()
        assert begun.wait(30)
        note = session.exchange.outbox.note
        assert note is not None
        said = messages.Complete(
            digest=note.digest, base_digest=note.base_digest, weight=1.0, steps=0, metrics=dict(note.metrics)
        )
        again: list[messages.Receipt] = []
        path = routes.COMPLETE.format(ticket=note.ticket)
        threads.append(
            threading.Thread(target=lambda: again.append(session.session.http.post(path, said, messages.Receipt)))
        )
        threads[1].start()
        wait_until(lambda: len(asked) == 2, "that both wait")
        slot = server._run.store.tickets.spool(note.ticket).slot  # type: ignore[union-attr]
        held = slot.holds[HOLDER]
        go.set()
        for thread in threads:
            thread.join()
        assert (begins, held) == (["a"], 1)
        assert HOLDER not in slot.holds
        assert [receipt.digest for receipt in again] == [note.digest]
        assert client.next_round() is None
        client.close()
