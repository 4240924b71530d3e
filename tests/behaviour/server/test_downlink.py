"""Versions that go down as differences: the bits, the bytes, and which site gets what."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from down_world import (
    WEIGHTS,
    Reference,
    down_bytes,
    finish_as,
    mixed,
    play,
    pull_head,
    require_equal,
    serve,
    start,
    trained,
)
from kit.client import Client
from kit.sites import clients, play_round
from safetensors.torch import load_file
from torch import Tensor

import atoll
from atoll.codecs import build_codecs

PART_BYTES = 2**16


def whole_bytes(folder: Path) -> int:
    """Of a version: a safetensors file, as the sites keep it."""
    return next((folder / "w").rglob("base.safetensors")).stat().st_size


def delta_bytes(codec: str, options: dict[str, Any] | None = None) -> int:
    """Of a delta of the small model: encoded parameters and new buffers, each from a multiple of 64 on."""
    encoding = build_codecs(codec, options or {})[codec]
    sizes = [
        tensor.nbytes if name.startswith("bn.") else encoding.encoded_bytes(tensor.numel(), "F32")
        for name, tensor in start().items()
    ]
    return sum(-(-size // 64) * 64 for size in sizes)


@pytest.mark.covers("L16")
@pytest.mark.parametrize(
    ("up", "down", "options"),
    [
        ("none", "int8", {}),
        ("none", "int4", {}),
        ("none", "topk", {"density": 0.05}),
        ("none", "bf16", {}),
        ("int8", "int8", {}),
        ("int4", "topk", {}),
    ],
    ids=["int8", "int4", "topk", "bf16", "int8-both-ways", "int4-up-topk-down"],
)
def test_every_site_holds_what_the_formula_says_bit_for_bit(
    tmp_path: Path, up: str, down: str, options: dict[str, float]
) -> None:
    """θ ← step, b ← b + dec(D(θ − b)), written down for whole tensors; and what comes down is counted."""
    reference = Reference(start(), up, down, options)
    with serve(
        tmp_path,
        **{
            "aggregation.upload_codec.name": up,
            "aggregation.download_codec.name": down,
            "aggregation.download_codec": options,
            "disk.in_files": down != "bf16",  # without a disk the bits are the same
        },
    ) as server:
        sites = clients(server, tmp_path)
        for number in (1, 2, 3, 4):
            play(sites, number, reference)
        received = [down_bytes(client) for client in sites.values()]
        assert received == 2 * [whole_bytes(tmp_path) + 3 * delta_bytes(down, options)]
        status = server.status()
        assert status.bytes_down == sum(received)
        assert [worker.bytes_down for worker in status.workers] == received
        finish_as(reference, server, sites)
    assert not torch.equal(reference.held["large"], reference.exported["large"])  # something was lost on the way


@pytest.mark.parametrize("down", ["int8", "topk"])
@pytest.mark.parametrize(
    ("name", "optimizer", "options"),
    [
        ("sgd", torch.optim.SGD, {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
        ("adam", torch.optim.Adam, {"lr": 0.01}),
        ("torch.optim:Adafactor", torch.optim.Adafactor, {"lr": 0.01}),
    ],
    ids=["momentum", "adam", "whole-tensors"],
)
def test_all_dtypes_under_other_outer_optimizers(
    tmp_path: Path, down: str, name: str, optimizer: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    """fp64, bf16 and fp16, empty and 0-d tensors, buffers and integers; Adafactor sees whole tensors."""
    model = mixed()
    if optimizer is torch.optim.Adafactor:  # takes its default eps of the first parameter's dtype
        model = {key: value for key, value in model.items() if value.dtype != torch.float64}
    with serve(
        tmp_path,
        model,
        **{
            "aggregation.download_codec.name": down,
            "algorithm.outer_optimizer": {"path" if ":" in name else "name": name, **options},
            "rounds.total": 3,
        },
    ) as server:
        sites = clients(server, tmp_path)
        reference = Reference(model, down=down).outer(optimizer, **options)
        for number in (1, 2, 3):
            play(sites, number, reference)
        finish_as(reference, server, sites)


def test_what_the_way_down_lost_arrives_once_the_updates_are_zero(tmp_path: Path) -> None:
    """θ stands still, and b comes as near to it as numbers can: what a difference lost is part of the next one."""
    model = {"w": torch.randn(5000, generator=torch.Generator().manual_seed(0))}
    with serve(
        tmp_path, model, **{"aggregation.download_codec.name": "int4", "rounds.sites": 1, "rounds.total": 0}
    ) as server:
        (client,) = clients(server, tmp_path, "a").values()
        apart = []
        for number in range(1, 12):
            assert client.next_round() == number
            state = client.pull()
            theta = load_file(server.save_state(tmp_path / "theta.safetensors"))["w"]
            apart.append(float((theta - state["w"]).abs().max()))
            client.submit(trained(state, "a", number) if number == 1 else state)
        client.close()
    assert apart[0] == 0.0
    assert apart[1] > 1e-4
    assert apart[-1] <= 2.0**-23


@pytest.mark.covers("L16")
def test_a_late_joiner_pulls_it_whole_and_holds_the_same(tmp_path: Path) -> None:
    reference = Reference(start(), "int8")
    with serve(tmp_path, **{"aggregation.upload_codec.name": "int8", "rounds.min_sites": 1}) as server:
        sites = clients(server, tmp_path)
        for number in (1, 2):
            play(sites, number, reference)
        for client in sites.values():
            assert client.next_round() == 3
        assert pulled_anew(server, tmp_path, "late", reference) == whole_bytes(tmp_path)
        for client in sites.values():
            require_equal(client.pull(), reference.held)
            client.close()


def test_a_late_worker_applies_the_kept_differences_in_between(tmp_path: Path) -> None:
    """With keep_versions = 2 that is two differences; a site further behind pulls whole."""
    reference = Reference(start())
    with serve(tmp_path, **{"rounds.min_sites": 1, "rounds.total": 0}) as server:
        sites = clients(server, tmp_path)
        play(sites, 1, reference)
        sites.pop("b").close()  # its base file has version 0
        play(sites, 2, reference)
        assert sites["a"].next_round() == 3
        assert pulled_anew(server, tmp_path, "b", reference) == 2 * delta_bytes("int8")
        for number in (3, 4, 5):
            play(sites, number, reference)
        assert sites["a"].next_round() == 6
        assert pulled_anew(server, tmp_path, "b", reference) == whole_bytes(tmp_path)
        sites["a"].close()


def pulled_anew(server: atoll.Server, folder: Path, site: str, reference: Reference) -> int:
    """Another process of a site pulls the head; returns how many bytes came."""
    client = Client(server.url, site=site, folder=folder / "w").register()
    require_equal(pull_head(client, reference.held), reference.held)
    received = down_bytes(client)
    client.close()
    return received


def test_a_base_beside_the_one_in_use_is_made_of_it(tmp_path: Path) -> None:
    """As DiLoCo does it when it missed a version: the old base stays, the new one lies beside it."""
    from atoll.tensors.layout import version_layout
    from atoll.tensors.module_tensors import schema_of

    (first, *_) = version_layout(schema_of(start(), ("bn.*",)), PART_BYTES).parts
    reference = Reference(start())
    with serve(tmp_path) as server:
        sites = clients(server, tmp_path)
        play(sites, 1, reference)
        client = sites["a"]
        assert client.next_round() == 2
        session = client._place
        assert session is not None
        before, received = session.exchange.base.digest(first), down_bytes(client)
        head = session.exchange.ask(wait_s=0.0)
        session.exchange.pull(head.head, None, beside=True)
        moved = session.exchange.files.beside()
        assert session.exchange.base.digest(first) == before
        assert down_bytes(client) - received == delta_bytes("int8")
        assert moved.holds(session.session.info.run, head.head.digest)
        state = load_file(moved.path)
        require_equal(state, reference.held)
        for each in sites.values():
            each.close()


def test_a_base_that_was_damaged_meanwhile_is_mended_by_the_part(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What a difference is added to is not what it was: the digests tell, and that part alone is pulled whole."""
    caplog.set_level(logging.WARNING)
    reference = Reference(start())
    with serve(tmp_path) as server:
        sites = clients(server, tmp_path)
        play(sites, 1, reference)
        client = sites["a"]
        (base,) = (tmp_path / "w" / "a").rglob("base.safetensors")
        with base.open("r+b") as file:
            file.seek(PART_BYTES * 3 // 2)  # within the second part
            file.write(b"\x00" * 64)
        received = down_bytes(client)
        play(sites, 2, reference)
        assert 0 < down_bytes(client) - received - delta_bytes("int8") <= PART_BYTES
        for each in sites.values():
            each.close()
    assert (
        "a: 1 of 4 parts of version 1 did not match after adding the difference, and are downloaded in full"
        in caplog.text
    )


def slot_of_delta(folder: Path) -> Path:
    return max((folder / "state" / "slots").glob("delta-*.bin"), key=lambda path: path.stat().st_mtime_ns)


def test_a_delta_that_is_damaged_at_the_server_is_not_needed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    reference = Reference(start())
    with serve(tmp_path) as server:
        sites = clients(server, tmp_path)
        play(sites, 1, reference)
        for client in sites.values():
            assert client.next_round() == 2  # the version is there, and no site has pulled it
        with slot_of_delta(tmp_path).open("r+b") as file:
            file.seek(1000)
            file.write(b"\xff\x00\xff")
        received = down_bytes(sites["a"])
        for number in (2, 3, 4):
            play(sites, number, reference)
            if number == 2:
                assert down_bytes(sites["a"]) - received >= whole_bytes(tmp_path)
        finish_as(reference, server, sites)
    assert "a: version 1 is downloaded in full: Part 0 from" in caplog.text


def test_a_delta_that_is_damaged_at_a_start_is_dropped(tmp_path: Path) -> None:
    reference = Reference(start())
    with serve(tmp_path) as server:
        sites = clients(server, tmp_path)
        play(sites, 1, reference)
        for client in sites.values():
            assert client.next_round() == 2
            client.close()
    with slot_of_delta(tmp_path).open("r+b") as file:
        file.write(b"\xff\x00\xff")
    with serve(tmp_path) as server:
        sites = clients(server, tmp_path)
        for number in (2, 3, 4):
            play(sites, number, reference)
            if number == 2:
                assert down_bytes(sites["a"]) == whole_bytes(tmp_path)
        finish_as(reference, server, sites)


class Kept:
    """A persistor that keeps what it is handed."""

    saved: ClassVar[dict[str, dict[str, Tensor]]] = {}

    def save(self, state: dict[str, Tensor], info: dict[str, Any]) -> None:
        Kept.saved[f"{info['version']}"] = state

    def save_best(self, state: dict[str, Tensor], info: dict[str, Any]) -> None:
        Kept.saved["best"] = state


def test_whatever_is_for_people_is_the_master(tmp_path: Path) -> None:
    """Numbered exports, the best version and a persistor get θ, version by version."""
    reference, theta = Reference(mixed()), [mixed()]
    Kept.saved.clear()
    best: dict[str, Any] = {"rounds.best_metric": "loss", "rounds.best_mode": "min"}
    with serve(
        tmp_path,
        mixed(),
        **{"disk.export_every": 1, "model.persistor.path": "test_downlink:Kept", "rounds.total": 3},
        **best,
    ) as server:
        sites = clients(server, tmp_path)
        for number in (1, 2, 3):
            loss = {"loss": [3.0, 1.0, 2.0][number - 1]}
            play_round(sites, number, lambda site, state: trained(state, site, number), WEIGHTS, metrics=loss)  # noqa: B023
            reference.round(number)
            theta.append(reference.exported)
        finish_as(reference, server, sites)
        exports = server.exports
    for number in (1, 2, 3):
        path = exports / f"model-{number:06d}.safetensors"
        if path.exists() or number == 3:  # one that was overtaken is not written
            require_equal(load_file(path), theta[number])
    require_equal(load_file(exports / "best.safetensors"), theta[1])
    assert {"3", "best"} <= Kept.saved.keys()
    for name, state in Kept.saved.items():
        require_equal(state, theta[1 if name == "best" else int(name)])


def test_what_saves_nothing_is_told_and_versions_are_pulled_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A block of 256 values takes 260 bytes, one of 3 as many; the three are 12."""
    model = {f"layer.{index}": torch.full((3,), float(index)) for index in range(100)}
    with serve(tmp_path, model, **{"rounds.total": 3}) as server:
        sites = clients(server, tmp_path)
        reference = Reference(model)
        for number in (1, 2, 3):
            play(sites, number, reference)
        assert [down_bytes(client) for client in sites.values()] == 2 * [3 * whole_bytes(tmp_path)]
        finish_as(reference, server, sites)
    assert (
        "aggregation.download_codec 'int8' saves nothing: the difference between versions would take 32.0 kB"
        in caplog.text
    )


def test_files_of_the_way_down_go_with_those_of_an_earlier_run(tmp_path: Path) -> None:
    reference = Reference(start())
    with serve(tmp_path) as server:
        sites = clients(server, tmp_path)
        for number in (1, 2, 3):
            play(sites, number, reference)
        for client in sites.values():
            client.close()
    (earlier,) = (tmp_path / "w" / "a").iterdir()
    assert {"delta.bin", "delta.json"} < {path.name for path in earlier.iterdir()}
    with serve(tmp_path, **{"disk.state_dir": tmp_path / "another"}) as server:
        for client in clients(server, tmp_path).values():
            client.close()
    assert not earlier.exists()


def test_after_a_fall_back_no_worker_trains_from_a_lost_version(tmp_path: Path) -> None:
    """Version 2 is damaged while the server is down: sites that have it pull version 1 whole, and go on from there."""
    reference = Reference(start())
    with serve(tmp_path, **{"rounds.min_sites": 2}) as server:
        sites = clients(server, tmp_path)
        play(sites, 1, reference)
        held, theta = dict(reference.held), {name: p.detach().clone() for name, p in reference.theta.items()}
        play(sites, 2, reference)
        for client in sites.values():
            assert client.next_round() == 3
            require_equal(client.pull(), reference.held)
            client.close()
    slots = (tmp_path / "state" / "slots").glob("version-*")
    with max(slots, key=lambda path: path.stat().st_mtime_ns).open("r+b") as file:
        file.seek(-8, 2)
        file.write(b"\x55" * 8)
    for note in (tmp_path / "w").glob("*/*/outbox.json"):  # else round 2 would be served from it
        note.unlink()
    reference.held = held
    for name, parameter in reference.theta.items():
        parameter.data.copy_(theta[name])
    with serve(tmp_path, **{"rounds.min_sites": 2}) as server:
        sites = clients(server, tmp_path)
        for number in (2, 3, 4):
            play(sites, number, reference)
        # version 3 has the bits that version 2 had, and what makes it of version 1 is still there
        assert [down_bytes(client) for client in sites.values()] == 2 * [whole_bytes(tmp_path) + delta_bytes("int8")]
        finish_as(reference, server, sites)
