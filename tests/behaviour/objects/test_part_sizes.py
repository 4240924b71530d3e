"""Sizes of parts from every source, and many small tensors: the same bits, and what is counted is what would cost."""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.processes import Nursery
from harness.proxy import Proxy
from kit.payloads import PART_SIZE_SETTINGS, PART_SIZE_VARIABLES, calls_of, choose_part_sizes, manifest_of, plain
from kit.peers import Peer
from kit.processes import command
from kit.requests import get, joined, post
from kit.servers import new_server
from kit.workflows import AnsweringSites
from object_world import PART, through_proxy

import atoll
from atoll import Settings, TensorRef, resolve
from atoll.config import FIELDS, set_values
from atoll.errors import ConfigError, TransferStalled, UsageError

# -- sizes of parts
#
# The tree has 6 x 64 KiB of torch and 3 x 64 KiB of NumPy: 589,824 bytes. What an object's file has behind its head is
# what is streamed; what is not is in the head.


EIGHT = 8 * 2**20
MOST_INLINE_BYTES = 15 * 2**20
TORCH, NUMPY = 6 * PART, 3 * PART

CASES = {
    "default": (None, None, (EIGHT, TORCH + NUMPY, False)),
    "torch smaller": (PART, EIGHT, (PART, TORCH + NUMPY, False)),
    "numpy smaller": (EIGHT, PART, (PART, TORCH + NUMPY, False)),
    "torch inline": (0, PART, (PART, NUMPY, False)),
    "numpy inline": (2 * PART, 0, (2 * PART, TORCH, False)),
    "both inline": (0, 0, (EIGHT, TORCH + NUMPY, True)),
}
"""Torch's size, NumPy's; bytes of a part, bytes that are streamed (or would be), whether all comes in one answer."""


def tree() -> dict[str, Any]:
    array = np.arange(NUMPY // 4, dtype=np.int32).reshape(3, -1)
    return {"t": torch.arange(TORCH // 4, dtype=torch.float32), "a": array, "again": [array], "lr": 0.5}


def sizes_of(message: dict[str, Any]) -> tuple[int, int, bool]:
    """What a manifest, or the request to keep an object, says of its sizes."""
    return message["part_bytes"], message["nbytes"] - message["head_bytes"], bool(message.get("inline"))


def settings_of(*sizes: int | None) -> dict[str, int]:
    return {key: size for key, size in zip(PART_SIZE_SETTINGS, sizes, strict=True) if size is not None}


def sizes_both_ways(folder: Path, settings: Settings) -> list[tuple[int, int, bool]]:
    """How the payload of a task and its answer travel; they must be the same bits."""
    came: dict[str, Any] = {}

    def main(controller: Any) -> None:
        came["back"] = controller.send("a", "train", tree(), timeout_s=30).payload

    settings = settings.changed({"network.port": 0, "disk.state_dir": folder / "state"})
    with atoll.Server(workflow=main, settings=settings) as server, Proxy(server.port) as proxy:
        assert get(server.url, "/v1/run")[1]["idle_timeout_s"] == settings.network.idle_timeout_s
        _, reply = post(server.url, "/v1/tasks", {"wait_s": 20.0}, joined(server.url, "a"))
        key = reply["task"]["body"]["object"]
        sent = sizes_of(manifest_of(TensorRef("127.0.0.1", server.port, False, **key)))
        AnsweringSites(proxy.url, "a", {"train": lambda payload: payload}).join()
        server.run()
    assert plain(came["back"]) == plain(tree())
    assert came["back"]["a"] is came["back"]["again"][0]
    (answered,) = [json.loads(body) for line, body in proxy.posted if line.startswith("POST /v1/objects ")]
    return [sent, sizes_of(answered)]


@pytest.mark.covers("P13", "P2")
@pytest.mark.parametrize("case", CASES)
def test_any_part_size_gives_the_same_bits(tmp_path: Path, case: str) -> None:
    """The part sizes in the settings do not change the bits of a task's tensors or of its answer."""
    *sizes, expected = CASES[case]
    assert sizes_both_ways(tmp_path, Settings.build(settings_of(*sizes))) == [expected, expected]


@pytest.mark.covers("P13")
@pytest.mark.parametrize("source", ["file", "variable", "flag", "keyword"])
def test_part_sizes_can_be_set_in_every_way(tmp_path: Path, source: str) -> None:
    """Part sizes have the same effect from a run file, from variables, from flags and from keywords."""
    given = {**settings_of(0, PART), "network.idle_timeout_s": 7.5}
    path = tmp_path / "run.toml"
    path.write_text("".join(f"{key} = {value}\n" for key, value in given.items()) if source == "file" else "")
    variables = (*PART_SIZE_VARIABLES, "ATOLL_NETWORK__IDLE_TIMEOUT_S")
    environ = dict(zip(variables, map(str, given.values()), strict=True)) if source == "variable" else {}
    flags = set_values([f"{key}={value}" for key, value in given.items()], FIELDS) if source == "flag" else {}
    settings = new_server(**given).settings if source == "keyword" else Settings.read(path, flags, environ)
    assert settings.network.idle_timeout_s == 7.5
    assert sizes_both_ways(tmp_path, settings) == [CASES["torch inline"][2]] * 2


@pytest.mark.covers("P13")
def test_a_workers_environment_sets_its_part_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's environment variables decide the part sizes of its answers. The server's settings decide those of
    tasks.
    """
    choose_part_sizes(monkeypatch, 0, PART)
    sent, answered = sizes_both_ways(tmp_path, Settings.build({}))
    assert sent == CASES["default"][2]
    assert answered == CASES["torch inline"][2]


@pytest.mark.covers("P13", "P8")
@pytest.mark.parametrize("case", CASES)
def test_the_environment_sets_the_part_sizes_of_published_objects(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Environment variables decide the part sizes of what a process publishes. The argument `chunk_bytes` takes
    precedence.
    """
    *sizes, expected = CASES[case]
    choose_part_sizes(monkeypatch, *sizes)
    with atoll.objects.Publisher() as publisher:
        ref = publisher.publish(tree())
        assert sizes_of(manifest_of(ref)) == expected
        assert plain(atoll.objects.fetch(ref)) == plain(tree())
        chosen = publisher.publish(tree(), chunk_bytes=2 * PART)  # what is said counts more
        assert manifest_of(chosen)["part_bytes"] == 2 * PART


@pytest.mark.covers("P13", "T11")
def test_too_large_tensors_are_streamed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Tensors that are too large for one message are sent in parts, with a warning."""
    # The limit is 15 MiB for the tensors together with their description. 15 MiB of tensors exceed it, and 1,000 bytes
    # less fit. One tensor's description takes 256 bytes, and the text of the tree takes less than 100 bytes.
    large = {"w": torch.zeros(MOST_INLINE_BYTES, dtype=torch.uint8), "a": np.zeros(2)}
    fits = {"w": large["w"][:-1000], "a": large["a"]}
    with caplog.at_level(logging.WARNING, "atoll"), atoll.objects.Publisher() as publisher:
        choose_part_sizes(monkeypatch, 0, PART)
        assert sizes_of(manifest_of(publisher.publish(fits))) == (PART, 16, False)  # the array alone
        assert "too many" not in caplog.text
        ref = publisher.publish(large)
        assert sizes_of(manifest_of(ref)) == (PART, MOST_INLINE_BYTES + 16, False)
        assert f"{MOST_INLINE_BYTES} bytes, too many for one message, so they are sent in parts" in caplog.text
        assert torch.equal(atoll.objects.fetch(ref)["w"], large["w"])
        choose_part_sizes(monkeypatch, 0, 0)
        assert sizes_of(manifest_of(publisher.publish(large))) == (EIGHT, MOST_INLINE_BYTES + 16, False)


@pytest.mark.covers("P13")
def test_the_largest_inline_object_fits_into_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest object that may travel inside a message fits into one answer of the publisher."""
    # 10,000 tensors of 1 KiB are 9.8 MiB. Their description, with 256 bytes per tensor and the text of the tree, is 3
    # MiB.
    choose_part_sizes(monkeypatch, 0, 0)
    ref = atoll.objects.publish({f"{index:05}": torch.zeros(1024, dtype=torch.uint8) for index in range(10_000)})
    manifest = manifest_of(ref)
    assert manifest["inline"]
    assert manifest["nbytes"] <= 16 * 2**20
    assert len(atoll.objects.fetch(ref)) == 10_000


@pytest.mark.covers("P13", "X3")
@pytest.mark.parametrize(("key", "variable"), list(zip(PART_SIZE_SETTINGS, PART_SIZE_VARIABLES, strict=True)))
@pytest.mark.parametrize("value", ["-1", "1", "65535", "65600001", "16777280", "65568", "8 MiB", "1.5", ""])
def test_a_wrong_part_size_is_refused_with_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, variable: str, value: str
) -> None:
    """An impossible part size is refused, and the error names the command line or the variable that it comes from."""
    with pytest.raises(ConfigError, match=rf"command line: {key} = "):
        Settings.read(None, {key: value}, {})
    monkeypatch.setenv(variable, value)
    shown = value if re.fullmatch(r"-?[0-9.]+", value) else f"'{value}'"  # a number is shown as one
    with pytest.raises(
        ConfigError, match=rf"{variable}: {key} = {shown}(: |, but it must be a whole number).*\. {key}: "
    ):
        atoll.objects.publish({})
    path = tmp_path / "run.toml"
    path.write_text(f"{key} = 65600\n")  # a multiple of 64, and no less than 64 KiB
    assert Settings.read(path, {}, {}).at(key) == 65_600


@pytest.mark.covers("P13", "X3")
def test_the_idle_timeout_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An environment variable sets the idle timeout of `fetch`. Wrong values are refused."""
    ref = atoll.objects.publish({})
    for wrong in (0, -1.0, float("nan"), "5", True):
        with pytest.raises(UsageError, match="idle_timeout_s is"):
            atoll.objects.fetch(ref, idle_timeout_s=wrong)
    monkeypatch.setenv("ATOLL_NETWORK__IDLE_TIMEOUT_S", "never")
    for call in (
        lambda: atoll.objects.fetch(ref),
        atoll.objects.Publisher,
        lambda: atoll.objects.publish({}, server="http://127.0.0.1:1"),
    ):
        with pytest.raises(ConfigError, match=r"ATOLL_NETWORK__IDLE_TIMEOUT_S: network\.idle_timeout_s = 'never'"):
            call()
    monkeypatch.setenv("ATOLL_NETWORK__IDLE_TIMEOUT_S", "0.2")
    silent = Peer(lambda _: peer.ended.wait(60))
    with silent as peer, pytest.raises(TransferStalled, match=r"No byte .* for 0\.2 s"):
        atoll.objects.fetch(dataclasses.replace(ref, port=peer.port))


# -- 5,000 small tensors against 50 of the same total
#
# 5,000 x 3,200 bytes and 50 x 320,000 are 16 MB each, behind heads of 0.7 MB and 7 KB.


MANY, FEW = 5000, 50
TOTAL = 16_000_000
ROOT = Path(__file__).resolve().parents[3]


def tensors(count: int) -> dict[str, Any]:
    return {f"layer.{i}.weight": torch.full((TOTAL // 4 // count,), float(i)) for i in range(count)}


@pytest.mark.covers("T5", "P2")
def test_small_tensors_are_written_to_disk_together() -> None:
    """Publishing many small tensors needs few writes to disk, because small tensors are gathered in blocks of 2 MiB."""
    # 5,000 tensors of 3,200 bytes need ceil(5,000 / 655) = 8 writes, since 2 MiB hold 655 of them. The head is larger
    # than 256 KiB and needs one more write. The 50 large tensors are written one by one from where they are, and their
    # small head needs one write: 51.
    for count, writes in ((MANY, 9), (FEW, 51)):
        with calls_of("pwrite") as calls:
            ref = atoll.objects.publish(tensors(count))
        assert len(calls) == writes
        assert plain(atoll.objects.fetch(ref)) == plain(tensors(count))


@pytest.mark.covers("T5")
@pytest.mark.parametrize("count", [MANY, FEW], ids=["many", "few"])
def test_requests_do_not_grow_with_the_number_of_tensors(count: int) -> None:
    """Fetching 5,000 small tensors takes as many requests and writes as fetching 50 tensors of the same total size."""
    # 16 MB in parts of 8 MiB are 2 parts, and so 2 requests over two connections. The head and the manifest need one
    # request each. On disk, each part is written in 4 runs of at most 2 MiB.
    ref = atoll.objects.publish(tensors(count))
    with through_proxy(ref) as (proxy, through):
        with calls_of("pwrite") as writes:
            lazy = atoll.objects.fetch(through, to_disk=True)
        assert proxy.count("GET ") == 1 + 1 + 2
        assert len(writes) == 8
        proxy.requests.clear()
        target = {name: torch.zeros_like(tensor) for name, tensor in tensors(count).items()}
        atoll.objects.fetch(through, into=target)
        assert proxy.count("GET ") == 1 + 1 + 2
    assert plain(target) == plain(tensors(count))
    with calls_of("preadv") as reads:
        assert plain(resolve(lazy)) == plain(tensors(count))
    assert len(reads) == count  # each when it is asked for


@pytest.mark.covers("T5")
def test_many_small_tensors_cause_few_garbage_collections() -> None:
    """Publishing and fetching 5,000 small tensors starts only a few garbage collections."""
    # Python starts a collection with every 700 further objects, and about every hundredth one looks at all objects.
    # 5,000 tensors in new memory cause 7. Objects that describe them would cause 50 to 100.
    begun: list[str] = []

    def note(phase: str, _: dict[str, int]) -> None:
        begun.append(phase)

    def collections(work: Callable[[], Any]) -> tuple[int, Any]:
        begun.clear()
        gc.callbacks.append(note)
        try:
            result = work()
        finally:
            gc.callbacks.remove(note)
        return begun.count("start"), result

    published = tensors(MANY)
    target = {name: torch.zeros_like(tensor) for name, tensor in published.items()}
    atoll.objects.withdraw(atoll.objects.publish(tensors(FEW)))  # what is made once is there
    assert gc.isenabled()
    publishing, ref = collections(lambda: atoll.objects.publish(published))
    into, _ = collections(lambda: atoll.objects.fetch(ref, into=target))
    to_disk, lazy = collections(lambda: atoll.objects.fetch(ref, to_disk=True))
    to_memory, state = collections(lambda: atoll.objects.fetch(ref))
    assert gc.isenabled()
    assert list(lazy) == list(state) == list(published)
    assert max(publishing, into, to_disk) <= 6
    assert to_memory <= 16


@pytest.mark.slow
def test_the_bench_of_many_tensors_runs(nursery: Nursery, tmp_path: Path) -> None:
    words = ("--gb", "0.02", "--repetitions", "1", "--json", "--dir", str(tmp_path))
    done = command(nursery, tmp_path, *words, program=str(ROOT / "bench/many_tensors.py"))
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert set(measured) == {"50", "5000"}
    assert set(measured["50"]) == {"publish", "fetch", "fetch into", "fetch to disk", "load", "lazily, both"}
