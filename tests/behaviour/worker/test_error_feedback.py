"""What encoding loses is sent later, once and not twice, whatever becomes of an update."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import free_port, wait_until
from kit import flip_bit
from kit.by_hand import formed
from kit.client import Client
from kit.servers import plain_server
from safetensors.torch import load_file
from torch import Tensor

import atoll
from atoll.errors import ConfigError
from atoll.protocol import messages
from atoll.protocol.values import UpdateInfo
from atoll.tensors.schema import Schema, TensorSpec
from atoll.worker.exchange.base_and_outbox import ScratchFile
from atoll.worker.exchange.local_state import Owner, Residuals
from atoll.worker.exchange.participation import take_part

START = {"w": torch.zeros(2)}


def serving(folder: Path, codec: str = "int8", **options: Any) -> atoll.Server:
    return plain_server(folder, options.pop("start", START), codec=codec, **{"sites": 1, "rounds": 3} | options)


def client(server: atoll.Server, folder: Path) -> Client:
    return Client(server.url, site="a", folder=folder / "w").register()


def residual(client: Client) -> list[float]:
    session = client._place
    assert session is not None
    assert session.exchange.local.residuals is not None
    return session.exchange.local.residuals.read("w", 0, 2).tolist()


def trained(client: Client, change: list[float]) -> dict[str, Tensor]:
    """The model that a site has behind a round in which it moved by `change` along −g."""
    return {"w": client.pull()["w"] - torch.tensor(change)}


def goes_on_with_what_was_left(site: Client) -> None:
    """The second of two rounds that move by (127, 0.4): what the first has left is there, and makes 0.8 of it, so 1."""
    assert residual(site) == [0.0, pytest.approx(0.4)]
    site.submit(trained(site, [127.0, 0.4]))
    assert site.next_round() == 3
    assert site.pull()["w"].tolist() == [-254.0, -1.0]
    site.close()


def test_what_is_too_small_for_the_scale_arrives_in_the_end(tmp_path: Path) -> None:
    """Each round moves by (127, 0.4), so the scale is 1, and 0.4 alone would be rounded to 0 for ever.

    With what was left over 0.4, 0.8 and 0.2 are rounded: to 0, 1 and 0.
    """
    with serving(tmp_path) as server:
        site = client(server, tmp_path)
        left = []
        for number in (1, 2, 3):
            assert site.next_round() == number
            left.append(residual(site))
            site.submit(trained(site, [127.0, 0.4]))
        assert site.next_round() is None
        site.close()
        assert server.wait(60)
        assert load_file(server.exports / "model.safetensors")["w"].tolist() == [-381.0, -1.0]
    assert left == [[0.0, 0.0], [0.0, pytest.approx(0.4)], [0.0, pytest.approx(-0.2)]]


@pytest.mark.parametrize(("codec", "options"), [("int8", {}), ("int4", {}), ("topk", {"density": 0.01})])
def test_what_arrives_and_what_is_left_is_what_was_trained(
    tmp_path: Path, codec: str, options: dict[str, float]
) -> None:
    """Of several tensors, none of them whole blocks or tiles; a half-precision one among them."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (5000,), "b": (33, 9), "c": (1,)}
    start = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    start["h"] = torch.randn(300, generator=generator).half()
    moved = {name: torch.zeros(tensor.shape) for name, tensor in start.items()}
    with serving(tmp_path, codec, start=start, **{"aggregation.upload_codec": options, "rounds": 4}) as server:
        site = client(server, tmp_path)
        for number in (1, 2, 3, 4):
            assert site.next_round() == number
            pulled, model = site.pull(), {}
            for name, tensor in pulled.items():
                model[name] = (tensor.float() - torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
                moved[name] += tensor.float() - model[name].float()
            site.submit(model)
        place = site._place
        assert place is not None
        assert place.exchange.local.residuals is not None
        assert site.next_round() is None
        place.exchange.local.residuals.settle(place.session.outcome)
        left = {
            name: place.exchange.local.residuals.read(name, 0, tensor.numel()).view(tensor.shape)
            for name, tensor in moved.items()
        }
        site.close()
        assert server.wait(60)
        found = load_file(server.exports / "model.safetensors")
    for name in ("a", "b", "c"):
        torch.testing.assert_close(start[name] - found[name] + left[name], moved[name], rtol=0, atol=1e-5)
    assert left["a"].abs().max() > 0.001  # something was lost on the way


def test_what_a_refused_update_would_have_left_is_forgotten(tmp_path: Path) -> None:
    """The second update is refused: the third still has 0.4 of the first, makes 0.8 of it, and rounds that to 1."""
    with serving(tmp_path, **{"aggregation.max_update_norm": 1000.0}) as server:
        site = client(server, tmp_path)
        assert site.next_round() == 1
        site.submit(trained(site, [127.0, 0.4]))
        assert site.next_round() == 2
        site.submit(trained(site, [12700.0, 49.0]))
        assert server.status().refused == 1
        assert site.next_round() == 2
        goes_on_with_what_was_left(site)


@pytest.mark.parametrize("settled", [False, True])
def test_a_base_that_was_advanced_has_it_in_the_local_progress(tmp_path: Path, settled: bool) -> None:
    """The update counted, and the worker goes on from its own weights: 0.4 is sent once more, not 0.8.

    Whether it had heard that the update counted before it lost the server, or not.
    """
    with serving(tmp_path) as server:
        place = take_part(server.url, "a", folder=tmp_path / "w")
        reply = place.exchange.ask_and_resend()
        assert reply.ticket is not None
        weights = {"w": torch.zeros(2)}
        place.exchange.pull(reply.ticket.base, weights)
        weights["w"] -= torch.tensor([127.0, 0.4])
        info = UpdateInfo(steps=1)
        place.exchange.submit(reply.ticket, weights, info)
        following = place.exchange.ask()
        assert following.ticket is not None
        assert place.exchange.local.residuals is not None
        if settled:
            place.exchange.local.state.settle()
            assert place.exchange.local.residuals.read("w", 0, 2).tolist() == [0.0, pytest.approx(0.4)]
        place.exchange.advance_base()
        weights["w"] -= torch.tensor([127.0, 0.0])
        place.exchange.form(following.ticket, weights, info)
        place.exchange.local.state.settle()  # it is not in
        left = place.exchange.local.residuals._files[1 - place.exchange.local.residuals.note.current]
        assert left.values(place.exchange.local.residuals._segments["w"], 0, 2).tolist() == [0.0, pytest.approx(0.4)]
        place.leave()


def test_settles_an_earlier_update_before_it_forms_the_next(tmp_path: Path) -> None:
    """Tickets that came by `ask`: 0.4 and 0.4 that was left make 0.8, which is rounded to 1."""

    def move_(tensors: dict[str, Tensor]) -> None:
        tensors["w"] -= torch.tensor([127.0, 0.4])

    with serving(tmp_path) as server:
        place = take_part(server.url, "a", folder=tmp_path / "w")
        for _ in range(2):
            formed(place, move_)
            place.exchange.deliver()
        weights = {"w": torch.zeros(2)}
        ticket = place.exchange.ask().ticket
        assert ticket is not None
        place.exchange.pull(ticket.base, weights)
        assert weights["w"].tolist() == [-254.0, -1.0]
        place.leave()


@pytest.mark.covers("X3")
@pytest.mark.parametrize(
    ("codec", "options"), [("topk", {"density": 0.5}), ("topk", {}), ("int8", {})], ids=["denser", "default", "another"]
)
def test_a_run_does_not_change_its_codec_between_two_starts(
    tmp_path: Path, codec: str, options: dict[str, float]
) -> None:
    with serving(tmp_path, "topk", **{"aggregation.upload_codec.density": 0.25}) as server:
        site = client(server, tmp_path)
        site.next_round()
        site.submit(trained(site, [1.0, 2.0]))
        site.close()
    with pytest.raises(
        ConfigError, match=r"has a run with aggregation.upload_codec.* Start it with the old value, or begin a new run"
    ):
        serving(tmp_path, codec, **{"aggregation.upload_codec": options}).start()


@pytest.mark.parametrize("disturbed", [False, True])
def test_an_update_of_a_lost_version_is_sent_again_with_what_it_had(tmp_path: Path, disturbed: bool) -> None:
    """The server loses version 2 after its update had counted: the same bytes count again, and what they left stays."""
    options: dict[str, Any] = {"network.port": free_port()}
    server = serving(tmp_path, **options).start()
    site = client(server, tmp_path)
    for number in (1, 2):
        assert site.next_round() == number
        site.submit(trained(site, [127.0, 0.4]))
    wait_until(lambda: server.status().fragments[0].version == 2, "version 2")
    if disturbed:
        server.stop()
        with sqlite3.connect(tmp_path / "state" / "journal.sqlite") as journal:
            (slot,) = journal.execute("SELECT slot FROM versions ORDER BY version DESC LIMIT 1").fetchone()
        (path,) = (each for each in (tmp_path / "state" / "slots").glob("*version*") if each.stem.endswith(str(slot)))
        flip_bit(path, -1)
        server = serving(tmp_path, start=None, **options).start()
        assert server.status().fragments[0].version == 1
    assert site.next_round() == 3
    assert residual(site) == [0.0, pytest.approx(-0.2)]
    site.submit(trained(site, [127.0, 0.4]))  # 0.2: nothing
    assert site.next_round() is None
    site.close()
    assert server.wait(60)
    assert load_file(server.exports / "model.safetensors")["w"].tolist() == [-381.0, -1.0]
    server.stop()


@pytest.mark.covers("S2", "F41")
@pytest.mark.parametrize("how", ["gone", "damaged"])
@pytest.mark.parametrize(("became", "left"), [("counted", [0.0, 0.0]), ("refused", [1.0, 2.0])])
def test_what_is_lost_of_a_pending_update_matters_only_where_it_counted(
    tmp_path: Path, how: str, became: str, left: list[float]
) -> None:
    """A power loss takes the file that was written last, and mostly the update with it."""
    mine = counted_residuals(tmp_path / "w")
    mine.begin()
    mine.write("w", 0, torch.tensor([5.0, 6.0]))
    mine.belongs_to(8, version=4)
    mine.close()
    file = tmp_path / "w" / "residual-0.bin"
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(bytes(file.stat().st_size))
    for _ in range(2):  # nor is it believed at the next start
        residuals(tmp_path / "w").close()
    again = residuals(tmp_path / "w")
    assert again.read("w", 0, 2).tolist() == [1.0, 2.0]
    again.settle(outcome(became))
    assert again.read("w", 0, 2).tolist() == left
    again.close()


def outcome(state: str) -> Any:
    return lambda ticket: messages.Outcome(ticket=ticket, state=state, base_version=0)


def residuals(folder: Path, owner: Owner = Owner("a", "r")) -> Residuals:  # noqa: B008  a named tuple
    folder.mkdir(exist_ok=True)
    return Residuals(folder, Schema.build([TensorSpec("w", "F16", (2,))]), owner=owner)


def counted_residuals(folder: Path) -> Residuals:
    """Of an update from version 3 that counted: 1 and 2 were left."""
    mine = residuals(folder)
    mine.write("w", 0, torch.tensor([1.0, 2.0]))
    mine.belongs_to(7, version=3)
    mine.settle(outcome("counted"))
    return mine


def test_a_server_that_went_back_takes_it_along(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is left of a version that is gone, or that comes again, belongs to nothing that the server has."""
    mine = counted_residuals(tmp_path / "w")
    mine.follow(4, "a")
    assert mine.read("w", 0, 2).tolist() == [1.0, 2.0]
    mine.close()
    again = residuals(tmp_path / "w")
    assert again.read("w", 0, 2).tolist() == [1.0, 2.0]
    caplog.set_level(logging.WARNING)
    again.follow(3, "a")
    assert again.read("w", 0, 2).tolist() == [0.0, 0.0]
    assert "a: the server went back to version 3: what compression had left over is dropped" in caplog.text
    again.close()


def test_what_is_left_after_a_take_back_is_of_the_update_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Update 8, from version 4, is taken back: another one from version 4 still adds what update 7 left."""
    mine = counted_residuals(tmp_path / "w")
    mine.begin()
    mine.write("w", 0, torch.tensor([5.0, 6.0]))
    mine.belongs_to(8, version=4)
    mine.settle(outcome("counted"))
    mine.take_back(8)
    mine.follow(4, "a")
    assert mine.read("w", 0, 2).tolist() == [1.0, 2.0]
    assert caplog.text == ""
    mine.close()


@pytest.mark.parametrize("owner", [Owner("b", "r"), Owner("a", "s")], ids=["site", "run"])
def test_what_another_site_or_run_has_left_over_is_dropped(tmp_path: Path, owner: Owner) -> None:
    counted_residuals(tmp_path / "w").close()
    again = residuals(tmp_path / "w", owner)
    assert again.read("w", 0, 2).tolist() == [0.0, 0.0]
    again.close()


@pytest.mark.covers("F41")
def test_files_without_their_note_are_not_believed(tmp_path: Path) -> None:
    counted_residuals(tmp_path / "w").close()
    (tmp_path / "w" / "residual.json").unlink()
    again = residuals(tmp_path / "w")
    assert again.read("w", 0, 2).tolist() == [0.0, 0.0]
    again.close()


@pytest.mark.covers("F41")
def test_what_the_disk_has_damaged_is_not_believed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine = counted_residuals(tmp_path / "w")
    mine.close()
    path = tmp_path / "w" / "residual-1.bin"
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    again = residuals(tmp_path / "w")
    assert again.read("w", 0, 2).tolist() == [0.0, 0.0]
    assert "residual-1.bin is not what was written: it counts as lost" in caplog.text
    again.close()


def test_zeros_count_where_nothing_was_written(tmp_path: Path) -> None:
    """A digest is of what is there: a hole and written zeros are the same, and so is a copy without holes."""
    chunk, files = 2**21, [ScratchFile(tmp_path / name, 5 * 2**21 + 8, ()) for name in "ab"]
    for place in (0, 3, 5):
        for file in files:
            file.write(place * chunk, memoryview(b"12345678"))
    files[1].write(chunk, memoryview(bytes(chunk)))
    assert files[0].content_digest() == files[1].content_digest()
    files[1].write(4 * chunk, memoryview(b"\1"))
    assert files[0].content_digest() != files[1].content_digest()
    files[1].write(4 * chunk, memoryview(b"\0"))
    files[1].write(3 * chunk, memoryview(bytes(8)))
    files[1].write(2 * chunk, memoryview(b"12345678"))  # the same bytes elsewhere
    assert files[0].content_digest() != files[1].content_digest()
    for file in files:
        file.close()
