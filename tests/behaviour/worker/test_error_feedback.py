"""What encoding loses is sent later, once and not twice, whatever becomes of an update."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import free_port, wait_until
from kit import flip_bit
from kit.client import Client
from kit.servers import plain_server
from safetensors.torch import load_file
from torch import Tensor

import atoll
from atoll.errors import ConfigError

START = {"w": torch.zeros(2)}


def serving(folder: Path, codec: str = "int8", **options: Any) -> atoll.Server:
    return plain_server(folder, options.pop("start", START), codec=codec, **{"sites": 1, "rounds": 3} | options)


def client(server: atoll.Server, folder: Path) -> Client:
    return Client(server.url, site="a", folder=folder / "w").register()


def trained(client: Client, change: list[float]) -> dict[str, Tensor]:
    """The model that a site has behind a round in which it moved by `change` along −g."""
    return {"w": client.pull()["w"] - torch.tensor(change)}


def goes_on_with_what_was_left(site: Client) -> None:
    """The second of two rounds that move by (127, 0.4): what the first has left is there, and makes 0.8 of it, so 1."""
    site.submit(trained(site, [127.0, 0.4]))
    assert site.next_round() == 3
    assert site.pull()["w"].tolist() == [-254.0, -1.0]
    site.close()


def test_what_is_too_small_for_the_scale_arrives_in_the_end(tmp_path: Path) -> None:
    """Each round moves by (127, 0.28), so the scale is 1, and 0.28 alone would be rounded to 0 for ever.

    With what was left over 0.28, 0.56, −0.16 and 0.12 are rounded: to 0, 1, 0 and 0.
    """
    with serving(tmp_path, rounds=4) as server:
        site = client(server, tmp_path)
        for number in (1, 2, 3, 4):
            assert site.next_round() == number
            site.submit(trained(site, [127.0, 0.28]))
        assert site.next_round() is None
        site.close()
        assert server.wait(60)
        assert load_file(server.exports / "model.safetensors")["w"].tolist() == [-508.0, -1.0]


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_all_that_was_trained_arrives(tmp_path: Path, codec: str) -> None:
    """Of several tensors, none of them whole blocks or tiles; a half-precision one among them.

    Four rounds train; in ten more only what is left over is sent.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (5000,), "b": (33, 9), "c": (1,)}
    start = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    start["h"] = torch.randn(300, generator=generator).half()
    moved = {name: torch.zeros(tensor.shape) for name, tensor in start.items()}
    versions = []
    with serving(tmp_path, codec, start=start, rounds=14) as server:
        site = client(server, tmp_path)
        while (number := site.next_round()) is not None:
            model = dict(site.pull())
            versions.append({name: tensor.clone() for name, tensor in model.items()})
            for name, tensor in model.items() if number <= 4 else ():
                model[name] = (tensor.float() - torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
                moved[name] += tensor.float() - model[name].float()
            site.submit(model)
        site.close()
        assert server.wait(60)
        versions.append(load_file(server.exports / "model.safetensors"))
    for name in shapes:
        torch.testing.assert_close(start[name] - versions[-1][name], moved[name], rtol=0, atol=1e-5)
    assert (start["a"] - versions[4]["a"] - moved["a"]).abs().max() > 0.001  # something was lost on the way


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
        ConfigError, match=r"has aggregation.upload_codec.* Start with the old value, or start a new run"
    ):
        serving(tmp_path, codec, **{"aggregation.upload_codec": options}).start()


@pytest.mark.parametrize("disturbed", [False, True])
def test_an_update_of_a_lost_version_is_sent_again_with_what_it_had(tmp_path: Path, disturbed: bool) -> None:
    """The server loses version 2 after its update had counted: the same bytes count again, and what they left stays.

    0.28, 0.56, −0.16 and 0.12 are rounded; the third would be −0.6 or 0.28 with what was left twice, or not at all.
    """
    options: dict[str, Any] = {"network.port": free_port(), "rounds": 4}
    server = serving(tmp_path, **options).start()
    site = client(server, tmp_path)
    for number in (1, 2):
        assert site.next_round() == number
        site.submit(trained(site, [127.0, 0.28]))
    wait_until(lambda: server.status().fragments[0].version == 2, "version 2")
    if disturbed:
        server.stop()
        with sqlite3.connect(tmp_path / "state" / "journal.sqlite") as journal:
            (slot,) = journal.execute("SELECT slot FROM versions ORDER BY version DESC LIMIT 1").fetchone()
        (path,) = (each for each in (tmp_path / "state" / "slots").glob("*version*") if each.stem.endswith(str(slot)))
        flip_bit(path, -1)
        server = serving(tmp_path, start=None, **options).start()
        assert server.status().fragments[0].version == 1
    for number in (3, 4):
        assert site.next_round() == number
        site.submit(trained(site, [127.0, 0.28]))
    assert site.next_round() is None
    site.close()
    assert server.wait(60)
    assert load_file(server.exports / "model.safetensors")["w"].tolist() == [-508.0, -1.0]
    server.stop()
