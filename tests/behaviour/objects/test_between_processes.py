"""What one process publishes, another one fetches: into memory, onto disk, in place; directly, and as it was."""

from __future__ import annotations

import dataclasses
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.processes import Nursery, wait_until
from kit.folders import nameless_files
from kit.payloads import plain
from kit.tls import write_certificate
from object_world import PART, flat, model, nested, output_of, start_fetch, start_publisher
from torch import nn

import atoll
from atoll import TensorRef
from atoll.errors import AuthError, ConfigError, Gone, PartCorrupt, SchemaMismatch, ServerUnreachable, UsageError
from atoll.objects import LazyTensor
from atoll.testing.contracts import peak_growth


@pytest.mark.covers("P1", "P4", "P8")
@pytest.mark.parametrize("chunk_bytes", [None, PART, 0])
@pytest.mark.parametrize("how", ["memory", "disk"])
def test_another_process_gets_what_was_published(
    nursery: Nursery, tmp_path: Path, how: str, chunk_bytes: int | None
) -> None:
    """Another process gets what was published."""
    publisher, ref = start_publisher(nursery, tmp_path, "flat", chunk_bytes=chunk_bytes)
    assert output_of(start_fetch(nursery, tmp_path, ref, how=how)) == "same"
    publisher.kill()


@pytest.mark.covers("P5", "P14")
def test_names_a_killed_publisher(nursery: Nursery, tmp_path: Path) -> None:
    """The error names the publisher; an optional fetch returns None."""
    publisher, ref = start_publisher(nursery, tmp_path, "flat")
    publisher.kill()
    assert output_of(start_fetch(nursery, tmp_path, ref, optional=True)) == "none"
    with pytest.raises(
        ServerUnreachable, match=rf"The publisher of reference {ref.object[:8]} at 127.0.0.1:{ref.port}"
    ):
        atoll.objects.fetch(ref, idle_timeout_s=0.2)


@pytest.mark.covers("P14")
def test_no_reference_may_be_none() -> None:
    """An absent reference is None where that is allowed."""
    assert atoll.objects.fetch(None, optional=True) is None
    with pytest.raises(UsageError, match="fetch got None instead of a reference"):
        atoll.objects.fetch(None)


@pytest.mark.covers("P14")
def test_an_expired_reference_says_so() -> None:
    """The error has its name and a remedy."""
    with atoll.objects.Publisher() as publisher:
        ref = publisher.publish(flat(), expires_s=0.01)
        wait_until(lambda: atoll.objects.fetch(ref, optional=True) is None, "the end of what has expired")
        late = dataclasses.replace(ref, expires_at=1)  # expires_s below a second: the clock in the text is rounded
        with pytest.raises(Gone, match=rf"{ref.object[:8]} .*it expired at 1970-01-01 00:00:01 UTC.*longer expires_s"):
            atoll.objects.fetch(late)
        assert atoll.objects.fetch(ref, optional=True) is None


@pytest.mark.covers("P1", "P14")
def test_withdrawn_objects_free_their_disk() -> None:
    """What is withdrawn is gone."""
    ref = atoll.objects.publish(flat())
    state = atoll.objects.fetch(ref, to_disk=True)
    assert atoll.objects.withdraw(str(ref))
    assert not atoll.objects.withdraw(ref)
    with pytest.raises(Gone, match="withdrawn"):
        atoll.objects.fetch(ref)
    assert torch.equal(state["w"], flat()["w"])  # what was fetched is the fetcher's own


@pytest.mark.covers("P1")
@pytest.mark.parametrize(
    ("field", "error", "words"),
    [
        ("secret", AuthError, "refuses the secret of reference"),
        ("object", Gone, "is no longer valid"),
        ("digest", PartCorrupt, "is not the expected one"),
    ],
)
def test_a_foreign_reference_is_refused(field: str, error: type[atoll.AtollError], words: str) -> None:
    ref = atoll.objects.publish(flat())
    foreign = dataclasses.replace(ref, **{field: "0" * len(getattr(ref, field))})
    with pytest.raises(error, match=words):
        atoll.objects.fetch(foreign)
    assert ref.secret not in repr(ref)


@pytest.mark.covers("P14", "X3")
@pytest.mark.parametrize(
    "text",
    [
        "",
        "http://127.0.0.1:1/",
        "atoll-ref://127.0.0.1:1/x?expires=1#y.z",
        f"atoll-ref://a b:1/{'0' * 32}?expires=1#{'0' * 32}.{'0' * 64}",
        f"atoll-ref://host:99999/{'0' * 32}?expires=1#{'0' * 32}.{'0' * 64}",
        f"atoll-ref://host:1/{'0' * 31}g?expires=1#{'0' * 32}.{'0' * 64}",
        f"atoll-ref://host:1/{'0' * 32}?expires=1#{'0' * 32}.{'0' * 64}\n",
    ],
    ids=["empty", "url", "short", "space", "port", "hex", "line"],
)
def test_no_reference_is_refused_at_once(text: str) -> None:
    """A text that is not a reference is refused before anything is asked."""
    with pytest.raises(UsageError, match="reference"):
        atoll.objects.fetch(text)


@pytest.mark.covers("T1", "P1")
def test_a_reference_travels_in_a_payload_unresolved() -> None:
    ref = atoll.objects.publish({"w": torch.ones(3)})
    tree = {"task": "train", "model": ref}
    assert atoll.objects.fetch(atoll.objects.publish(tree)) == tree
    outer = atoll.objects.publish({"inner": ref, "x": torch.zeros(1)})
    assert torch.equal(atoll.objects.fetch(atoll.objects.fetch(str(outer))["inner"])["w"], torch.ones(3))
    six = dataclasses.replace(ref, host="fe80::1", secure=True)
    assert atoll.TensorRef.parse(str(six)) == six


@pytest.mark.covers("T6", "P6")
def test_nothing_refers_to_what_was_published() -> None:
    tensor, array = torch.ones(1000), np.ones(1000)
    seen = [weakref.ref(tensor), weakref.ref(array)]
    ref = atoll.objects.publish({"t": tensor, "a": array}, chunk_bytes=PART)
    del tensor, array
    assert [each() for each in seen] == [None, None]
    assert float(atoll.objects.fetch(ref)["t"].sum()) == 1000.0


@pytest.mark.covers("D5", "D6", "D4")
def test_tensors_on_disk_go_with_their_last_user(tmp_path: Path) -> None:
    """Files of fetched tensors have no name, and their space is free after the last tensor is deleted."""
    state = atoll.objects.fetch(atoll.objects.publish(flat()), to_disk=tmp_path)
    assert list(state) == list(flat())
    lazy = state.ref("across")
    tree = atoll.objects.fetch(atoll.objects.publish(nested()), to_disk=tmp_path)
    assert isinstance(tree["model"]["layers"][0], LazyTensor)
    assert tree["name"] == "task"
    assert list(tmp_path.iterdir()) == []
    assert len(nameless_files(tmp_path)) == 2
    del state, tree
    assert torch.equal(lazy.resolve(), flat()["across"])
    assert len(nameless_files(tmp_path)) == 1
    del lazy
    assert not nameless_files(tmp_path)


@pytest.mark.covers("P1", "P4")
def test_in_place_into_tensors_arrays_and_other_strides() -> None:
    target: dict[str, Any] = {key: torch.zeros_like(torch.as_tensor(value)) for key, value in flat().items()}
    target["across"] = torch.zeros(20, 30, dtype=torch.int64).t()
    array = target["array"] = np.zeros((3, 4), np.int16)
    atoll.objects.fetch(atoll.objects.publish(flat(), chunk_bytes=PART), into=target)
    assert target["array"] is array
    assert plain(target) == plain(flat())


ONES = {"a": torch.ones(2), "b": torch.ones(2)}
TIED = torch.zeros(2)


@pytest.mark.covers("P4", "P1")
@pytest.mark.parametrize(
    ("payload", "target", "words"),
    [
        (ONES, {"a": torch.zeros(2)}, "only the object has the tensor 'b'"),
        (ONES, {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(1)}, "only the target has the tensor 'c'"),
        (ONES, {"a": torch.zeros(2), "b": torch.zeros(3)}, r"'b' is F32\[2\] in the object, F32\[3\] in the target"),
        (ONES, {"a": torch.zeros(2), "b": torch.zeros(2).double()}, r"'b' is F32\[2\] in the object, F64\[2\] in the"),
        (ONES, {"a": TIED, "b": TIED}, "ties 'b' to another tensor"),
        ([torch.ones(2)], {"a": torch.zeros(2)}, "not a flat dict"),
    ],
    ids=["name", "extra", "shape", "dtype", "tie", "list"],
)
def test_names_what_does_not_fit_in_place(payload: Any, target: dict[str, Any], words: str) -> None:
    """What does not fit is named before a byte is written."""
    with pytest.raises(SchemaMismatch, match=words):
        atoll.objects.fetch(atoll.objects.publish(payload), into=target)
    assert not any(tensor.any() for tensor in target.values())


@pytest.mark.covers("P4")
def test_tied_tensors_travel_once() -> None:
    """Tied tensors travel once, and arrive under both names."""
    ref = atoll.objects.publish(model())
    state = atoll.objects.fetch(ref)
    assert state["0.weight"] is state["2.weight"]
    untied = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    atoll.objects.fetch(ref, into=untied)
    assert torch.equal(untied[2].weight, model()[0].weight)
    assert untied[2].weight.data_ptr() != untied[0].weight.data_ptr()


@pytest.mark.covers("P14", "X3")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ref": 3}, "not a reference to tensors"),
        ({"ref": b"atoll-ref://"}, "not a reference to tensors"),
        ({"abort": True}, "abort is of type bool"),
        ({"into": [torch.zeros(2)]}, "into is of type list"),
        ({"into": {"a": torch.zeros(1).expand(2)}}, "tensor 'a' was made by expand"),
    ],
    ids=["number", "bytes", "abort", "list", "expanded"],
)
def test_what_fetch_cannot_use_is_named(options: dict[str, Any], words: str) -> None:
    ref = atoll.objects.publish({"a": torch.ones(2)})
    with pytest.raises(UsageError, match=words):
        atoll.objects.fetch(**{"ref": ref, **options})


@pytest.mark.covers("P14", "P2", "X3")
@pytest.mark.parametrize("chunk_bytes", [1, PART - 64, PART + 1, 2**24 + 64, -1, 1.5])
def test_a_chunk_size_that_cannot_be_is_refused(chunk_bytes: Any) -> None:
    with pytest.raises(UsageError, match="chunk_bytes"):
        atoll.objects.publish({}, chunk_bytes=chunk_bytes)


@pytest.mark.covers("P2")
def test_inline_is_one_answer_and_has_a_limit() -> None:
    with pytest.raises(UsageError, match="inside a message"):
        atoll.objects.publish({"w": torch.zeros(2**22 + 1)}, chunk_bytes=0)
    assert plain(atoll.objects.fetch(atoll.objects.publish(flat(), chunk_bytes=0))) == plain(flat())


@pytest.mark.covers("X2")
def test_others_can_reach_a_publisher_only_with_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"published without TLS on 0\.0\.0\.0, which other machines can reach"):
        atoll.objects.Publisher("0.0.0.0")
    write_certificate(tmp_path)
    with atoll.objects.Publisher(
        "127.0.0.1", name="localhost", tls_cert=tmp_path / "cert.pem", tls_key=tmp_path / "key.pem"
    ) as publisher:
        ref = publisher.publish(flat(), chunk_bytes=PART)
        assert str(ref).startswith("atoll-refs://localhost:")
        with pytest.raises(ServerUnreachable, match="cannot prove its identity"):
            atoll.objects.fetch(ref, idle_timeout_s=0.2)
        monkeypatch.setenv("ATOLL_TLS_CA", str(tmp_path / "ca.pem"))
        assert plain(atoll.objects.fetch(ref)) == plain(flat())


@pytest.mark.covers("P2", "D1")
def test_neither_side_holds_more_than_a_few_chunks() -> None:
    """96 MiB across their rows, in parts of 16 MiB. Both sides are here: one part at a time is written; two come."""
    tensor = torch.arange(96 * 2**18, dtype=torch.int32).reshape(1024, -1).t()
    into = {"w": torch.ones_like(tensor, memory_format=torch.contiguous_format)}
    kept: list[Any] = [atoll.objects.fetch(atoll.objects.publish({"small": torch.zeros(1)}))]  # what is loaded once
    refs: list[TensorRef] = []
    part = 16 * 2**20
    assert peak_growth(lambda: refs.append(atoll.objects.publish({"w": tensor}, chunk_bytes=part))) < part
    assert peak_growth(lambda: kept.append(atoll.objects.fetch(refs[0], to_disk=True))) < 1.5 * part
    assert peak_growth(lambda: kept.append(atoll.objects.fetch(refs[0], into=into))) < 1.5 * part
    assert torch.equal(into["w"], tensor)


def test_a_publisher_names_what_it_was_given_wrongly(tmp_path: Path) -> None:
    """The error names its arguments, not settings of a run, which it does not have."""
    write_certificate(tmp_path)
    (tmp_path / "other.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match=r"^The TLS certificate '.*other\.pem' cannot be used with the TLS key '"):
        atoll.objects.Publisher(tls_cert=tmp_path / "other.pem", tls_key=tmp_path / "key.pem")
    with pytest.raises(UsageError, match=r"^idle_timeout_s is 0, not a positive number"):
        atoll.objects.Publisher(idle_timeout_s=0)
