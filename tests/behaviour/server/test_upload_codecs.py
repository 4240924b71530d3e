"""Codecs of the way up: one of the user's own, and bytes that no codec has written."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.packages import install
from kit.servers import new_simulation
from kit.world import World
from safetensors.torch import load_file
from torch import Tensor

import atoll
from atoll import registry
from atoll.codecs import Codec, build_codecs
from atoll.errors import ConfigError, StoreError
from atoll.registry import OwnName, ReceivedName

OWN = '''
from dataclasses import dataclass
from typing import ClassVar

import torch

from atoll.codecs import Elementwise


@dataclass(frozen=True)
class Thousandths:
    """Whole multiples of 1/1000, or of what `per` says, in two bytes."""

    name: ClassVar[str] = "thousandths"
    elementwise: ClassVar[bool] = True
    raw: ClassVar[bool] = False
    feedback: ClassVar[bool] = True
    per: int = 1000

    def __post_init__(self):
        if range(self.per) == range(0):
            raise ValueError("per is not above zero")

    def encoded_bytes(self, numel, dtype):
        return 2 * numel

    def encode_(self, source, target, dtype):
        target.view(torch.int16).copy_(source.mul(self.per).round())

    def decode_(self, source, target, dtype):
        target.copy_(source.view(torch.int16)).div_(self.per)


class Bare:
    def encoded_bytes(self, numel, dtype): ...
    def encode_(self, source, target, dtype): ...
    def decode_(self, source, target, dtype): ...


class Unstored(Elementwise):
    name = "unstored"


class Int8(Thousandths):
    name = "int8"


class Wide(Thousandths):
    name = "wide"  # what carries dtypes of a short range beside every codec


def a_function(): ...
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "own_codec.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_registered", {})
    yield "own_codec:Thousandths"
    sys.modules.pop("own_codec", None)


def encoded(folder: Path, codec: str, **options: Any) -> World:
    """A run of two rounds of one site with this codec."""
    settings: dict[str, Any] = {f"aggregation.upload_codec.{'path' if ':' in codec else 'name'}": codec}
    settings |= {f"aggregation.upload_codec.{key}": value for key, value in options.items()}
    return World(folder, {"w": torch.zeros(3)}, "a", rounds=2, **settings)


@pytest.mark.covers("L16")
@pytest.mark.parametrize("name", ["own_codec:Thousandths", "own_codec.py:Thousandths"])
def test_an_own_upload_codec_gets_its_options(own: str, name: str, tmp_path: Path) -> None:
    """A server names an own codec by its path with options. The site finds it under the codec's own name, which it has
    registered.
    """
    # The codec rounds to quarters. The move 0.26 arrives as ¼ and leaves 0.01. The next move 0.12 + 0.01 = 0.13 arrives
    # as ¼ too.
    with encoded(tmp_path, name, per=4) as world:
        atoll.register("codecs", "thousandths", import_module("own_codec").Thousandths)
        world.rounds(-0.26, 1)
        world.pull(number=2)
        assert world.sites["a"].pull()["w"].tolist() == [-0.25] * 3
        world.submit("a", -0.12)
        assert world.finish()["w"].tolist() == [-0.5] * 3  # 0.12 + 0.01 = 0.13, which rounds to ¼


@pytest.mark.covers("X2", "X3", "X8")
def test_a_site_imports_no_code_its_server_names(own: str, tmp_path: Path) -> None:
    """A site refuses a codec that the server names by a path or a module, and imports no code. This holds even if its
    process has imported that code before.
    """
    words = r"codec 'thousandths' is neither .* at this site.*call atoll.register\('codecs', 'thousandths', …\)"
    with encoded(tmp_path, own) as world:
        for is_imported in (True, False):
            if not is_imported:
                del sys.modules["own_codec"]
            with pytest.raises(ConfigError, match=words):
                atoll.join(world.url, "a", folder=world.workers)
            assert ("own_codec" in sys.modules) == is_imported
        assert world.status.workers == []
    for text, options in (
        ("subprocess:Popen", {"args": f"touch {tmp_path}/ran", "shell": 1}),
        ("os:system", {"command": f"touch {tmp_path}/ran"}),
        ("own_codec:Thousandths", {}),
        ("own_codec.py:Thousandths", {}),
    ):
        with pytest.raises(ConfigError, match="is neither a part of Atoll nor registered or installed"):
            build_codecs(ReceivedName(text), options)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "path", ["own_codec:Thousandths", "own_codec.py:Thousandths", "{folder}/own_codec.py:Thousandths"]
)
def test_entry_point_and_path_mean_one_codec(
    own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """If a package is installed and its codec is named by a path, the server treats both as one codec.

    A class of another file with the same name is another codec, and refused.
    """
    install(monkeypatch, tmp_path, "own_codec", OWN, {"atoll.codecs": {"thousandths": own}})
    with encoded(tmp_path, path.format(folder=tmp_path)) as world:
        world.rounds(-0.25, 1, 2)
        assert world.finish()["w"].tolist() == [-0.5] * 3
    (tmp_path / "other.py").write_text(OWN)
    with pytest.raises(ConfigError, match="has the name 'thousandths', which another codec has already"):
        encoded(tmp_path / "2", "other:Thousandths").start()
    sys.modules.pop("other")


@pytest.mark.usefixtures("own")
def test_package_and_file_mean_one_codec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a codec's file is imported twice, by its path and as a module of its package, the server treats both classes
    as one codec.
    """
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "coarse.py").write_text(OWN)
    install(monkeypatch, tmp_path, "installed", "", {"atoll.codecs": {"thousandths": "inner.coarse:Thousandths"}})
    encoded(tmp_path, "inner/coarse.py:Thousandths").start().stop()
    assert sys.modules.pop("coarse") is not sys.modules.pop("inner.coarse")
    del sys.modules["inner"]


def test_a_simulation_loads_a_codecs_file(own: str, tmp_path: Path) -> None:
    """The processes of a simulation load a codec from the file that the settings name."""
    # The moves 0.26 and 0.26 + 0.01 give two quarters.
    settings = {"algorithm.name": "fedavg", "rounds.total": 2, "disk.state_dir": tmp_path / "state"}
    settings["aggregation.upload_codec"] = {"path": "own_codec.py:Thousandths", "per": 4}
    done = new_simulation({"w": torch.zeros(3)}, script=f"{__file__}:move", sites=1, **settings).run()
    assert load_file(done.model)["w"].tolist() == [-0.5] * 3


def move(worker: Iterable[atoll.Round]) -> None:
    """In the processes of a simulation."""
    for fl_round in worker:
        model = fl_round.load_into({"w": torch.zeros(3)})
        fl_round.submit({"w": model["w"] - 0.26})


@pytest.mark.covers("X3")
@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("own_codec:Bare", {}, "lacks one of the properties"),
        ("own_codec:Unstored", {}, "'own_codec:Unstored': encoded_bytes.* failed.* define stored"),
        ("own_codec:Int8", {}, "has the name 'int8', which another codec has"),
        ("own_codec:Wide", {}, "has the name 'wide', which another codec has"),
        ("own_codec:a_function", {}, "is not a codec"),
        ("own_codec:Thousandth", {}, "Did you mean 'Thousandths'"),
        ("own_codec:Thousandths", {"per": 0}, r"aggregation.upload_codec = .*per is not above zero"),
        ("own_codec:Thousandths", {"per": [4]}, "aggregation.upload_codec"),
        ("own_codec:Thousandths", {"per": True}, "per is True, but must be a number"),
        ("own_codec:Thousandths", {"bits": 4}, "aggregation.upload_codec = .*bits"),
    ],
)
def test_refuses_an_object_that_is_no_codec(
    own: str, tmp_path: Path, name: str, options: dict[str, Any], said: str
) -> None:
    """The server refuses an own codec that lacks a part, has wrong options or has another codec's name. The error says
    the mistake.
    """
    with pytest.raises(ConfigError, match=said):
        encoded(tmp_path, name, **options).start()


@pytest.mark.covers("X3")
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_site_reports_that_its_folder_was_removed(tmp_path: Path, codec: str) -> None:
    """If a site's folder was removed while it trained, `submit` raises an error that says so. A restarted worker
    completes the run.
    """
    with encoded(tmp_path, codec) as world:
        world.pull()
        shutil.rmtree(world.workers)
        with pytest.raises(StoreError, match=r"cannot be written.*folder was removed, start that worker again"):
            world.submit("a", -1.0)
        world.sites.pop("a").close()
        world.rounds(-1.0, 1, 2)
        assert world.finish()["w"].tolist() == [-2.0] * 3


class Forged:
    """A codec with changed bytes."""

    elementwise, raw, feedback = False, False, True

    def __init__(self, codec: Codec, change: Callable[[Tensor], Any]) -> None:
        self.name, self.encoded_bytes, self.decode_ = codec.name, codec.encoded_bytes, codec.decode_
        self._codec, self._change = codec, change

    def encode_(self, source: Tensor, target: Tensor, dtype: str) -> None:
        self._codec.encode_(source, target, dtype)
        if source.numel() == 300:
            self._change(target)


def scale(value: float) -> Callable[[Tensor], Any]:
    return lambda encoded: encoded[4:8].view(torch.float32).fill_(value)


def same_places(encoded: Tensor) -> None:
    """Every one of the 64 the last of the tile, behind the 300th; three bytes for two of them."""
    encoded[8 : 8 + 96] = 255


def all_ones(encoded: Tensor) -> None:
    encoded[8:] = 255


FORGED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "int8-nan": (scale(float("nan")), "w contains NaN or Inf"),
    "int8-inf": (scale(-float("inf")), "w contains Inf: a value"),
    "int8-overflow": (scale(3e38), "w contains Inf: a value"),
    "int8-huge": (scale(1e30), "its norm is"),
    "int8-negative": (scale(-1.0), ""),
    "int4-inf": (scale(float("inf")), "w contains Inf: a value"),
    "int4-ones": (all_ones, ""),
    "topk-inf": (scale(float("inf")), "w contains Inf: a value"),
    "topk-same-places": (same_places, ""),
    "topk-ones": (all_ones, ""),
}
"""Codec and change of its bytes → the change, and why the update is refused."""


@pytest.mark.covers("L16", "X3")
@pytest.mark.parametrize("forged", FORGED)
def test_forged_codec_bytes_give_no_infinite_values(tmp_path: Path, forged: str) -> None:
    """If a site forges the bytes of a codec, the server refuses the update if its values are not finite
    or too large.
    """
    # Otherwise the forged bytes give finite values.
    codec, (change, refused) = forged.partition("-")[0], FORGED[forged]
    with World(tmp_path, {"w": torch.zeros(300), "v": torch.zeros(5)}, "a", rounds=2, codec=codec) as world:
        codecs = world.sites["a"]._place.exchange.local.layouts.codecs
        honest, moved = build_codecs(OwnName(codec), {})[codec], {"w": torch.linspace(1, 2, 300), "v": torch.ones(5)}
        rounds = [Forged(honest, change), honest] + [honest] * bool(refused)  # a refused update is a round that was not
        for used in rounds:
            codecs[codec] = used
            world.pull()
            world.submit("a", lambda _, number, state: {name: value - moved[name] for name, value in state.items()})
            assert world.status.refused == bool(refused)
        found = world.finish()
    assert (refused in world.text) if refused else ("refused" not in world.text)
    assert all(bool(tensor.isfinite().all()) for tensor in found.values())


@pytest.mark.covers("X4")
def test_the_log_says_how_to_register_a_codec(tmp_path: Path) -> None:
    """At the start, the log says how sites register the server's own codec. For a built-in codec it has no such
    line.
    """
    (tmp_path / "mine.py").write_text(OWN)
    with encoded(tmp_path / "1", "bf16") as world:
        assert "register" not in world.text
    with encoded(tmp_path / "2", f"{tmp_path / 'mine.py'}:Thousandths") as world:
        pass
    (line,) = [line for line in world.log if "register" in line]
    assert f"{tmp_path / 'mine.py'}:Thousandths by the name 'thousandths'" in line
    assert "atoll.register('codecs', 'thousandths', …)" in line
