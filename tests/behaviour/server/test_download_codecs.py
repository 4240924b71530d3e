"""Versions that are downloaded as differences: the bits, the bytes, and which site gets what, beside other settings."""

from __future__ import annotations

import logging
import re
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import specification as spec
import torch
from harness.processes import Nursery
from harness.proxy import Fault, Proxy
from kit import flip_bit
from kit.aggregators import MEAN
from kit.manual_site import ManualSite
from kit.processes import export
from kit.servers import PLAIN_DILOCO
from kit.world import World, require_equal
from safetensors.torch import load_file
from torch import Tensor, nn

import atoll
from atoll.codecs import build_codecs
from atoll.errors import Gone, StateCorrupt
from atoll.filters import NormClip
from atoll.registry import OwnName

WEIGHTS = {"a": 1.0, "b": 2.5}
PART_BYTES = 2**16
BUFFERS = {"bn.*": "mean"}


def start() -> dict[str, Tensor]:
    """Tensors that cross parts and tiles, none of whole blocks; buffers and integers among them."""
    generator = torch.Generator().manual_seed(3)
    return {
        "large": torch.randn(170, 301, generator=generator),
        "odd": torch.randn(5003, generator=generator),
        "one": torch.tensor(0.5),
        "none": torch.zeros(0, 3),
        "bn.running_mean": torch.randn(33, generator=generator),
        "bn.batches": torch.tensor(3),
    }


def mixed() -> dict[str, Tensor]:
    """The same in other dtypes, too."""
    generator = torch.Generator().manual_seed(4)
    more = {
        "double": torch.randn(4097, generator=generator, dtype=torch.float64),
        "brain": torch.randn(9000, generator=generator).bfloat16(),
        "half": torch.randn(17, 19, generator=generator).half(),
    }
    return more | start()


def coded(folder: Path, model: Any = None, sites: Any = WEIGHTS, **options: Any) -> World:
    """A run of four rounds that begins with this model, by default with `start()`."""
    settings = {"rounds": 4, "network.part_bytes": PART_BYTES, "model.buffers": BUFFERS}
    return World(folder, model or start(), sites, **settings | {"aggregation.download_codec.name": "int8"} | options)


def trained(site: str, number: int, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a site makes of what it pulled."""
    moved = {}
    for name, tensor in state.items():
        generator = torch.Generator().manual_seed(1000 * sum(name.encode()) + 100 * number + ord(site))
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            moved[name] = (tensor.double() + 0.01 * noise).to(tensor.dtype)
        else:
            moved[name] = tensor + ord(site)
    return moved


INT8, INT4 = spec.quantized(127), spec.quantized(7)
UP = {"none": (spec.none, False), "int8": (INT8, True), "int4": (INT4, True)}
"""Codec of updates → what it does, and whether its error is fed back."""
SGD = spec.of_torch(torch.optim.SGD, lr=1.0)


class Reference:
    """The run by the specification; `round` is one with these sites."""

    def __init__(self, model: dict[str, Tensor], up: str = "none", down: Any = INT8, outer: spec.Outer = SGD) -> None:
        codec, feedback = UP[up]
        buffers = {"bn.running_mean": "mean", "bn.batches": "max"}
        rules = spec.Rules(lambda x, *given: x.numel() and outer(x, *given), codec, feedback, down, buffers=buffers)
        self.fragment = spec.Fragment(rules, model)
        self.sites = {
            name: spec.Site(rules, name, deepcopy(model), partial(self._train, name), weight=weight)
            for name, weight in WEIGHTS.items()
        }

    @staticmethod
    def _train(site: str, number: int, w: dict[str, Tensor], _: object) -> None:
        w.update(trained(site, number, w))

    @property
    def held(self) -> dict[str, Tensor]:
        """What sites hold."""
        return self.fragment.b

    @property
    def exported(self) -> dict[str, Tensor]:
        return deepcopy(self.fragment.result())

    def round(self, number: int, sites: str = "ab") -> None:
        updates = []
        for site in map(self.sites.__getitem__, sites):
            site.k = number
            site.load(self.held)
            site.train({})
            updates.append(site.update(site.w))
        self.fragment.close(updates)


def down_bytes(client: ManualSite) -> int:
    """Of tensors, that this client's process has received so far."""
    received: int = client.worker.bytes_down
    return received


def follow(world: World, reference: Reference, *numbers: int, **about: Any) -> None:
    """Rounds in which every site holds what the reference says."""

    def train(site: str, number: int, state: dict[str, Tensor]) -> dict[str, Tensor]:
        require_equal(state, reference.held)
        return trained(site, number, state)

    for number in numbers:
        world.rounds(train, number, **about)
        reference.round(number, "".join(world.sites))


def received(world: World) -> list[int]:
    """Bytes of tensors that each site has received."""
    return [down_bytes(client) for client in world.sites.values()]


def whole_bytes(folder: Path) -> int:
    """Of a version: a safetensors file, as the sites keep it."""
    return next((folder / "workers").rglob("base.safetensors")).stat().st_size


def delta_bytes(codec: str, options: dict[str, Any] | None = None) -> int:
    """Of a delta of the small model: encoded parameters and new buffers, each from a multiple of 64 on."""
    encoding = build_codecs(OwnName(codec), options or {})[codec]
    sizes = [
        tensor.nbytes if name.startswith("bn.") else encoding.encoded_bytes(tensor.numel(), "F32")
        for name, tensor in start().items()
    ]
    return sum(-(-size // 64) * 64 for size in sizes)


@pytest.mark.covers("L16")
@pytest.mark.parametrize(
    ("up", "down", "codec", "options"),
    [
        ("none", "int8", INT8, {}),
        ("none", "int4", INT4, {}),
        ("none", "topk", spec.topk(0.05), {"density": 0.05}),
        ("none", "bf16", spec.bf16, {}),
        ("int8", "int8", INT8, {}),
        ("int4", "topk", spec.topk(), {}),
    ],
    ids=["int8", "int4", "topk", "bf16", "int8-both-ways", "int4-up-topk-down"],
)
def test_sites_hold_the_specified_compressed_parameters(
    tmp_path: Path, up: str, down: str, codec: Any, options: dict[str, float]
) -> None:
    """With a download codec, every site holds after every round the parameters that the specification computes, bit for
    bit.
    """
    # The bytes that each site downloads are one whole version and three differences. The status counts them.
    codecs = {"upload_codec.name": up, "download_codec.name": down, "download_codec": options}
    in_files = down != "bf16"  # without a disk the bits are the same
    settings = {f"aggregation.{key}": value for key, value in codecs.items()}
    reference = Reference(start(), up, codec)
    with coded(tmp_path, **settings, **{"disk.in_files": in_files}) as world:
        follow(world, reference, 1, 2, 3, 4)
        came = received(world)
        assert came == 2 * [whole_bytes(tmp_path) + 3 * delta_bytes(down, options)]
        status = world.status
        assert status.bytes_down == sum(came)
        assert [worker.bytes_down for worker in status.workers] == came
        require_equal(world.finish(), reference.exported)
    assert not torch.equal(reference.held["large"], reference.exported["large"])  # something was lost on the way


@pytest.mark.parametrize("down", ["int8", "topk"])
@pytest.mark.parametrize(
    ("name", "outer", "options"),
    [
        ("sgd", partial(spec.of_torch, torch.optim.SGD), {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
        ("adam", partial(spec.of_torch, torch.optim.Adam, fused=True), {"lr": 0.01}),
        ("torch.optim:Adafactor", partial(spec.of_torch, torch.optim.Adafactor), {"lr": 0.01}),
    ],
    ids=["momentum", "adam", "whole-tensors"],
)
def test_a_download_codec_supports_dtypes_and_outer_optimizers(
    tmp_path: Path, down: str, name: str, outer: Any, options: dict[str, Any]
) -> None:
    """A download codec gives the reference's bits for all dtypes and with other outer optimizers."""
    # The model has fp64, bf16 and fp16 tensors, empty and 0-d tensors, buffers and integers. Adafactor steps on whole
    # tensors.
    model = mixed()
    if ":" in name:  # Adafactor takes its default eps of the first parameter's dtype
        model = {key: value for key, value in model.items() if value.dtype != torch.float64}
    settings = {
        "aggregation.download_codec.name": down,
        "algorithm.outer_optimizer": {"path" if ":" in name else "name": name, **options},
    }
    reference = Reference(model, down=INT8 if down == "int8" else spec.topk(), outer=outer(**options))
    with coded(tmp_path, model, rounds=3, **settings) as world:
        follow(world, reference, 1, 2, 3)
        require_equal(world.finish(), reference.exported)


def test_a_site_two_versions_behind_downloads_two_differences(tmp_path: Path) -> None:
    """A site that is two versions behind downloads two differences; a site that is further behind downloads the whole
    version.
    """
    # By default, the server keeps the differences of two versions.
    reference = Reference(start())
    with coded(tmp_path, rounds=0, **{"rounds.min_sites": 1}) as world:

        def pulled_anew() -> int:
            """Another process of b pulls the head; how many bytes came."""
            with ManualSite(world.server.url, site="b", folder=world.workers) as client:
                found = client.worker.load_into({n: torch.zeros_like(t) for n, t in reference.held.items()})
                require_equal(found, reference.held)
                return down_bytes(client)

        follow(world, reference, 1)
        world.sites.pop("b").close()  # its base file has version 0
        follow(world, reference, 2)
        world.ask(number=3)
        assert pulled_anew() == 2 * delta_bytes("int8")
        follow(world, reference, 3, 4, 5)
        world.ask(number=6)
        assert pulled_anew() == whole_bytes(tmp_path)


def test_applying_a_difference_keeps_the_old_base(tmp_path: Path) -> None:
    """A site can apply a downloaded difference to a copy of its base file, so that the old one stays unchanged."""
    # The new base file lies beside the old one. DiLoCo does so after it missed a version.
    from atoll.tensors.layout import version_layout
    from atoll.tensors.module_tensors import schema_of

    (first, *_) = version_layout(schema_of(start(), ("bn.*",)), PART_BYTES).parts
    reference = Reference(start())
    with coded(tmp_path) as world:
        follow(world, reference, 1)
        world.ask(number=2)
        client = world.sites["a"]
        place = client._place
        before, received = place.exchange.base.digest(first), down_bytes(client)
        head = place.exchange.ask(wait_s=0.0)
        place.exchange.pull(head.head, None, to_next=True)
        moved = place.exchange.files.next_base()
        assert place.exchange.base.digest(first) == before
        assert down_bytes(client) - received == delta_bytes("int8")
        assert moved.holds(place.session.info.run, head.head.digest)
        require_equal(load_file(moved.path), reference.held)


def test_a_site_repairs_single_parts_of_its_base(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If a site's base file is damaged, the site notices it after adding a downloaded difference, and downloads only
    the damaged part again.
    """
    reference = Reference(start())
    with coded(tmp_path) as world:
        follow(world, reference, 1)
        (base,) = (tmp_path / "workers" / "a").rglob("base.safetensors")
        flip_bit(base, PART_BYTES * 3 // 2)  # within the second part
        received = down_bytes(world.sites["a"])
        follow(world, reference, 2)
        assert 0 < down_bytes(world.sites["a"]) - received - delta_bytes("int8") <= PART_BYTES
    assert "after the downloaded difference was added, 1 of 4 parts of version 1 are not as expected" in caplog.text


def newest_slot(folder: Path, kind: str) -> Path:
    return max((folder / "state" / "slots").glob(f"{kind}-*"), key=lambda path: path.stat().st_mtime_ns)


@pytest.mark.parametrize("restarted", [False, True])
def test_sites_download_whole_versions_for_damaged_differences(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, restarted: bool
) -> None:
    """If the server's difference to version 1 is damaged, sites download version 1 whole, and the result is right."""
    # The damage is found by a download, or at a restart of the server, which then deletes the difference.
    caplog.set_level(logging.INFO)
    reference = Reference(start())
    with coded(tmp_path) as world:
        follow(world, reference, 1)
        world.ask(number=2)
        if not restarted:
            flip_bit(newest_slot(tmp_path, "delta"), 1000)
            received = down_bytes(world.sites["a"])
            follow(world, reference, 2)
            assert down_bytes(world.sites["a"]) - received >= whole_bytes(tmp_path)
            follow(world, reference, 3, 4)
            require_equal(world.finish(), reference.exported)
    if restarted:
        flip_bit(newest_slot(tmp_path, "delta"), 0)
        with world:
            follow(world, reference, 2)
            assert down_bytes(world.sites["a"]) == whole_bytes(tmp_path)
            follow(world, reference, 3, 4)
            require_equal(world.finish(), reference.exported)
    assert ("a: version 1 is downloaded in full, not as a difference: Part 0 from" in caplog.text) == (not restarted)


class Saved:
    """A persistor; what it is handed by name of the version."""

    states: ClassVar[dict[str, dict[str, Tensor]]] = {}

    def save(self, state: dict[str, Tensor], info: dict[str, Any]) -> None:
        Saved.states[f"{info['version']}"] = state

    def save_best(self, state: dict[str, Tensor], info: dict[str, Any]) -> None:
        Saved.states["best"] = state


def test_exports_get_the_full_precision_parameters(tmp_path: Path) -> None:
    """With a download codec, every export and every state for the persistor has the server's
    full-precision parameters.
    """
    # The less precise parameters that the sites hold are in none of them.
    theta = [mixed()]
    Saved.states.clear()
    settings = {"rounds.best_metric": "loss", "rounds.best_mode": "min", "disk.export_every": 1}
    reference = Reference(mixed())
    with coded(tmp_path, mixed(), rounds=3, **settings, **{"model.persistor.path": f"{__name__}:Saved"}) as world:
        for number, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
            follow(world, reference, number, metrics={"loss": loss})
            theta.append(reference.exported)
        require_equal(world.finish(), reference.exported)
        exports = world.server.exports
    for number in (1, 2, 3):
        path = exports / f"model-{number:06d}.safetensors"
        if path.exists() or number == 3:  # one that was overtaken is not written
            require_equal(load_file(path), theta[number])
    require_equal(load_file(exports / "best.safetensors"), theta[1])
    assert {"3", "best"} <= Saved.states.keys()
    for name, state in Saved.states.items():
        require_equal(state, theta[1 if name == "best" else int(name)])


def test_a_custom_aggregator_works_with_a_download_codec(tmp_path: Path) -> None:
    """The result of a custom aggregator steps the server's full-precision parameters, not the encoded ones that sites
    download.
    """
    (tmp_path / "mine.py").write_text(MEAN)
    reference = Reference(start())
    with coded(tmp_path, rounds=3, **{"aggregation.aggregator.path": f"{tmp_path}/mine.py:mean"}) as world:
        follow(world, reference, 1, 2, 3)
        require_equal(world.finish(), reference.exported)


def test_pulls_versions_whole_if_differences_save_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If an encoded difference would not be smaller than the version, sites download whole versions, and the log says
    why.
    """
    # A block of up to 256 values takes 260 bytes when encoded. Each tensor here has 3 values, which are 12 bytes.
    model = {f"layer.{index}": torch.full((3,), float(index)) for index in range(100)}
    reference = Reference(model)
    with coded(tmp_path, model, rounds=3) as world:
        follow(world, reference, 1, 2, 3)
        assert received(world) == 2 * [3 * whole_bytes(tmp_path)]
        require_equal(world.finish(), reference.exported)
    told = "aggregation.download_codec 'int8' saves nothing: the difference between versions would take 32.0 kB"
    assert told in caplog.text


def test_removes_differences_of_an_earlier_run(tmp_path: Path) -> None:
    """When a site joins another run, it deletes the folder of its earlier run, with the downloaded difference in it."""
    reference = Reference(start())
    with coded(tmp_path) as world:
        follow(world, reference, 1, 2, 3)
    (earlier,) = (tmp_path / "workers" / "a").iterdir()
    assert {"delta.bin", "delta.json"} < {path.name for path in earlier.iterdir()}
    with coded(tmp_path, **{"disk.state_dir": tmp_path / "another"}) as world:
        world.join()
        assert not earlier.exists()


def test_sites_abandon_a_version_the_server_lost(tmp_path: Path) -> None:
    """If the server finds its newest version damaged at a restart, sites that have this version download the one before
    it whole.
    """
    # Version 2 is damaged while the server is down. The sites continue from version 1, and the result is right.
    reference = Reference(start())
    with coded(tmp_path, **{"rounds.min_sites": 2}) as world:
        follow(world, reference, 1)
        before = deepcopy(reference)
        follow(world, reference, 2)
        world.ask(number=3)
        for client in world.sites.values():
            require_equal(client.pull(), reference.held)
    flip_bit(newest_slot(tmp_path, "version"), -8)
    for note in (tmp_path / "workers").glob("*/*/outbox.json"):  # else round 2 would be served from it
        note.unlink()
    with world:
        follow(world, before, 2, 3, 4)
        # version 3 has the bits that version 2 had, and what makes it of version 1 is still there
        assert received(world) == 2 * [whole_bytes(tmp_path) + delta_bytes("int8")]
        require_equal(world.finish(), before.exported)


def whole_pull(world: World, model: Any) -> tuple[dict[str, Tensor], int]:
    """What a new site gets, with what its file has beside the model; and its bytes."""
    client = ManualSite(world.url, site="joiner", folder=(folder := world.folder / "joiner")).join()
    client.worker.load_into(model)
    (base,) = folder.rglob("base.safetensors")
    state, nbytes = load_file(base), down_bytes(client)
    client.close()
    return state, nbytes


@pytest.mark.parametrize(
    "options",
    [
        {"aggregation.reducer.name": "median", "aggregation.upload_codec.name": "int4"},
        {"aggregation.reducer.name": "clipped_mean", "aggregation.upload_codec.name": "int8"},
        {"filters": [NormClip(1.0)], "aggregation.upload_codec.name": "int8"},
    ],
    ids=["median", "clipped-mean", "server-filter"],
)
def test_differences_and_whole_downloads_give_equal_models(tmp_path: Path, options: dict[str, Any]) -> None:
    """Sites that downloaded differences hold the same parameters as a new site that downloads the whole version."""
    with coded(tmp_path, sites="ab", **{"rounds.min_sites": 1}, **options) as world:
        world.rounds(trained, 1, 2, 3)
        world.ask(number=4)
        held, nbytes = whole_pull(world, start())
        for client in world.sites.values():
            require_equal({name: client.pull()[name] for name in held}, held)
            assert down_bytes(client) < 2 * nbytes  # three differences are less than a version


def test_scaffold_controls_are_downloaded_unencoded(tmp_path: Path) -> None:
    """A download codec encodes only the parameters. Sites receive SCAFFOLD's global controls exactly, as a new site
    does.
    """
    model = dict(nn.Linear(90, 60).state_dict())
    rules = {"rounds.min_sites": 1, "model.buffers": {}}
    with coded(tmp_path, model, "ab", algorithm="scaffold", **rules) as world:
        for number in (1, 2, 3):
            controls = {"control": {name: torch.full_like(tensor, 0.1 * number) for name, tensor in model.items()}}
            world.rounds(trained, number, steps=1, groups=controls)
        world.ask(number=4)
        held, nbytes = whole_pull(world, model)
        for client in world.sites.values():
            require_equal(client.pull(), {name: held[name] for name in model})
            found = client.round.global_state("control")
            require_equal(found, {name: held[f"atoll.control.{name}"] for name in model})
            assert nbytes < down_bytes(client) < nbytes * (1 + 3 * 0.65)  # controls whole, parameters a quarter
    assert found["weight"].any()


def test_diloco_computes_updates_from_the_downloaded_parameters(tmp_path: Path) -> None:
    """A DiLoCo loop computes its update from the parameters b that it downloaded, not from the server's full-precision
    parameters θ.
    """
    # With H = 1, learning rate 1 and gradient s, the site trains b to b − s. The encoded update is u = bf16(b − (b −
    # s)). The server steps θ ← θ − 0.5·u, and the site gets b ← b + int4(θ − b). The loop ends with b.
    start = {"weight": torch.randn(1, 9000, generator=torch.Generator().manual_seed(0))}
    theta, held = start["weight"].clone(), start["weight"].clone()
    model = nn.Linear(9000, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scale = torch.linspace(0.1, 1.0, 9000)
    settings = PLAIN_DILOCO | {"aggregation.upload_codec.name": "bf16", "aggregation.download_codec.name": "int4"}
    settings["algorithm.outer_optimizer.lr"] = 0.5
    with coded(tmp_path, start, "a", rounds=3, H=1, **settings) as world:
        with atoll.DiLoCo(model, optimizer, server=world.url, site="a", folder=world.workers):
            for _ in range(3):
                assert torch.equal(model.weight.data, held)
                optimizer.zero_grad()
                (model.weight * scale).sum().backward()
                update = spec.bf16(held - (held - scale), torch.float32)
                optimizer.step()
                theta.add_(update * 1.0, alpha=-0.5)
                held = held + INT4(theta - held, torch.float32)
        assert torch.equal(model.weight.data, held)
        assert world.server.wait(60)
        assert torch.equal(world.result["weight"], theta)
    assert not torch.equal(held, theta)


@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": 0.9}, {"name": "adam"}, {"path": "torch.optim:Adafactor"}],
    ids=["plain", "momentum", "adam", "whole-tensors"],
)
def test_damaged_full_precision_parameters_are_not_exported(
    tmp_path: Path, nursery: Nursery, options: dict[str, Any]
) -> None:
    """If one bit of the server's file with the full-precision parameters is flipped, `atoll export` refuses and writes
    no file.
    """
    out = tmp_path / "model.safetensors"
    with coded(tmp_path, sites="ab", rounds=1, **{"algorithm.outer_optimizer": options}) as world:
        world.rounds(trained, 1)
        exported = world.finish()
    state = str(tmp_path / "state")
    assert export(nursery, out, "--dir", state) == 1
    require_equal(load_file(out), exported)
    (path,) = (tmp_path / "state" / "slots").glob("state-*")
    for offset in (9, path.stat().st_size // 2, -1):
        flip_bit(path, offset)
        refused = str(export(nursery, tmp_path / "never.safetensors", "--dir", state))
        assert re.search(rf"(?s)^exit {StateCorrupt.exit_code}: .*state-0-.* is damaged: its digest differs", refused)
        flip_bit(path, offset)
    assert not (tmp_path / "never.safetensors").exists()


@pytest.mark.covers("L16")
def test_the_export_command_writes_the_full_precision_parameters(tmp_path: Path, nursery: Nursery) -> None:
    """`atoll export` writes the server's full-precision parameters of the newest version or of one that is kept."""
    # The newest gives the bytes of the server's own export. After a damaged or broken transfer, the command downloads
    # only the affected parts again.
    theta, out = {}, tmp_path / "model.safetensors"
    reference = Reference(mixed())
    with coded(tmp_path, mixed()) as world, Proxy(world.server.port) as line:
        url = world.url
        assert export(nursery, out, "--server", url) == 0
        require_equal(load_file(out), mixed())  # the initial model is both
        for number in (1, 2):
            follow(world, reference, number)
            world.ask(number=number + 1)
            theta[number] = reference.exported
        flipped = Fault(r"GET .*/model/1 ", "down", at=1000, action="flip")
        broken = Fault(r"GET .*/model/2 ", "down", at=5000, action="reset")
        line.faults += [flipped, broken]
        assert export(nursery, out, "--server", line.url) == 2
        assert flipped.reached.is_set()
        assert broken.reached.is_set()
        assert (line.count(r"GET .*/model/1 "), line.count(r"GET .*/model/3 ")) == (2, 1)  # they alone came again
        own = out.read_bytes()
        require_equal(world.model, load_file(out))
        require_equal(load_file(out), theta[2])
        assert not torch.equal(theta[2]["large"], reference.held["large"])
        assert export(nursery, out, "--server", url, "--version", "1") == 1
        require_equal(load_file(out), theta[1])
        refused = str(export(nursery, out, "--server", url, "--version", "9"))
        assert refused.startswith(f"exit {Gone.exit_code}: ")
    assert export(nursery, out, "--dir", str(tmp_path / "state")) == 2
    assert out.read_bytes() == own


def test_the_export_command_covers_every_fragment(tmp_path: Path, nursery: Nursery) -> None:
    """In a run with several fragments, `atoll export` writes the server's full-precision parameters of all
    fragments.
    """
    model, out = nn.Sequential(nn.Linear(60, 70), nn.Linear(70, 80)), tmp_path / "model.safetensors"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"algorithm": "diloco", "K": 2, "H": 2, "model.buffers": {}}
    with coded(tmp_path, model, "a", rounds=0, **options) as world:
        with atoll.DiLoCo(model, optimizer, server=world.url, site="a", folder=world.workers):
            for _ in range(6):
                optimizer.zero_grad()
                model(torch.ones(1, 60)).square().mean().backward()
                optimizer.step()
        assert {each.version for each in world.status.fragments} == {3}
        assert export(nursery, out, "--server", world.url) == 3
        require_equal(world.model, load_file(out))
