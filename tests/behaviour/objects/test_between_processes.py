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
def test_another_process_can_fetch_published_tensors(
    nursery: Nursery, tmp_path: Path, how: str, chunk_bytes: int | None
) -> None:
    """A process fetches the tensors that another process has published, into memory or onto disk, and gets the same
    bits.
    """
    publisher, ref = start_publisher(nursery, tmp_path, "flat", chunk_bytes=chunk_bytes)
    assert output_of(start_fetch(nursery, tmp_path, ref, how=how)) == "same"
    publisher.kill()


@pytest.mark.covers("P5", "P14")
def test_fetch_names_a_killed_publisher(nursery: Nursery, tmp_path: Path) -> None:
    """If the publisher was killed, the error of `fetch` names it. With `optional`, `fetch` returns None."""
    publisher, ref = start_publisher(nursery, tmp_path, "flat")
    publisher.kill()
    assert output_of(start_fetch(nursery, tmp_path, ref, optional=True)) == "none"
    with pytest.raises(
        ServerUnreachable, match=rf"The publisher of reference {ref.object[:8]} at 127.0.0.1:{ref.port}"
    ):
        atoll.objects.fetch(ref, idle_timeout_s=0.2)


@pytest.mark.covers("P14")
def test_fetch_accepts_none_only_if_optional() -> None:
    """`fetch` accepts None in place of a reference only with `optional`, and then returns None."""
    assert atoll.objects.fetch(None, optional=True) is None
    with pytest.raises(UsageError, match="fetch got None instead of a reference"):
        atoll.objects.fetch(None)


@pytest.mark.covers("P14")
def test_an_expired_reference_gives_an_error_with_a_remedy() -> None:
    """If a reference has expired, the error names it and recommends a longer `expires_s`.

    With `optional`, `fetch` returns None.
    """
    with atoll.objects.Publisher() as publisher:
        ref = publisher.publish(flat(), expires_s=0.01)
        wait_until(lambda: atoll.objects.fetch(ref, optional=True) is None, "the end of what has expired")
        late = dataclasses.replace(ref, expires_at=1)  # expires_s below a second: the clock in the text is rounded
        with pytest.raises(Gone, match=rf"{ref.object[:8]} .*it expired at 1970-01-01 00:00:01 UTC.*longer expires_s"):
            atoll.objects.fetch(late)
        assert atoll.objects.fetch(ref, optional=True) is None


@pytest.mark.covers("P1", "P14")
def test_a_withdrawn_object_can_no_longer_be_fetched() -> None:
    """A withdrawn object can no longer be fetched. Tensors that were fetched before stay usable."""
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
def test_a_reference_with_a_wrong_field_is_refused(field: str, error: type[atoll.AtollError], words: str) -> None:
    """`fetch` refuses a reference with a wrong secret, object or digest. The text form of a reference hides the
    secret.
    """
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
def test_a_text_that_is_no_reference_is_refused(text: str) -> None:
    """`fetch` refuses a text that is not a valid reference, before it sends a request."""
    with pytest.raises(UsageError, match="reference"):
        atoll.objects.fetch(text)


@pytest.mark.covers("T1", "P1")
def test_fetching_a_payload_leaves_its_references_unresolved() -> None:
    """If a published payload contains a reference, fetching the payload does not fetch what the reference names."""
    ref = atoll.objects.publish({"w": torch.ones(3)})
    tree = {"task": "train", "model": ref}
    assert atoll.objects.fetch(atoll.objects.publish(tree)) == tree
    outer = atoll.objects.publish({"inner": ref, "x": torch.zeros(1)})
    assert torch.equal(atoll.objects.fetch(atoll.objects.fetch(str(outer))["inner"])["w"], torch.ones(3))
    six = dataclasses.replace(ref, host="fe80::1", secure=True)
    assert atoll.TensorRef.parse(str(six)) == six


@pytest.mark.covers("T6", "P6")
def test_publishing_keeps_no_tensor_alive() -> None:
    """After tensors and arrays are published, their memory can be freed, and the object can still be fetched."""
    tensor, array = torch.ones(1000), np.ones(1000)
    seen = [weakref.ref(tensor), weakref.ref(array)]
    ref = atoll.objects.publish({"t": tensor, "a": array}, chunk_bytes=PART)
    del tensor, array
    assert [each() for each in seen] == [None, None]
    assert float(atoll.objects.fetch(ref)["t"].sum()) == 1000.0


@pytest.mark.covers("D5", "D6", "D4")
def test_memory_of_fetched_tensors_is_freed_on_disk(tmp_path: Path) -> None:
    """The disk space of tensors that were fetched onto disk is freed when the last of them is deleted."""
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
def test_fetch_writes_into_existing_tensors_and_arrays() -> None:
    """`fetch` can write into existing tensors and arrays, also into a tensor with other strides."""
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
def test_fetch_names_what_does_not_fit_the_target(payload: Any, target: dict[str, Any], words: str) -> None:
    """If an object does not fit the target, `fetch` says why before it writes a byte."""
    with pytest.raises(SchemaMismatch, match=words):
        atoll.objects.fetch(atoll.objects.publish(payload), into=target)
    assert not any(tensor.any() for tensor in target.values())


@pytest.mark.covers("P4")
def test_tied_tensors_travel_once() -> None:
    """Tied tensors are sent once and arrive under both names. In an untied target, each name gets its own copy."""
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
def test_fetch_refuses_wrong_arguments(options: dict[str, Any], words: str) -> None:
    ref = atoll.objects.publish({"a": torch.ones(2)})
    with pytest.raises(UsageError, match=words):
        atoll.objects.fetch(**{"ref": ref, **options})


@pytest.mark.covers("P14", "P2", "X3")
@pytest.mark.parametrize("chunk_bytes", [1, PART - 64, PART + 1, 2**24 + 64, -1, 1.5])
def test_an_impossible_chunk_size_is_refused(chunk_bytes: Any) -> None:
    with pytest.raises(UsageError, match="chunk_bytes"):
        atoll.objects.publish({}, chunk_bytes=chunk_bytes)


@pytest.mark.covers("P2")
def test_inline_objects_have_a_size_limit() -> None:
    """With `chunk_bytes=0`, an object travels inside one message. A larger object than a message may hold is
    refused.
    """
    with pytest.raises(UsageError, match="inside a message"):
        atoll.objects.publish({"w": torch.zeros(2**22 + 1)}, chunk_bytes=0)
    assert plain(atoll.objects.fetch(atoll.objects.publish(flat(), chunk_bytes=0))) == plain(flat())


@pytest.mark.covers("X2")
def test_a_publisher_for_other_machines_needs_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher that other machines can reach needs TLS. `fetch` refuses a certificate of an unknown authority."""
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
def test_publishing_and_fetching_hold_few_parts_in_memory() -> None:
    """Publishing and fetching a tensor of 96 MiB take little memory, though the tensor is transposed."""
    # With parts of 16 MiB, publishing takes less than one part, and fetching takes less than one and a half. Both sides
    # run in this process.
    tensor = torch.arange(96 * 2**18, dtype=torch.int32).reshape(1024, -1).t()
    into = {"w": torch.ones_like(tensor, memory_format=torch.contiguous_format)}
    kept: list[Any] = [atoll.objects.fetch(atoll.objects.publish({"small": torch.zeros(1)}))]  # what is loaded once
    refs: list[TensorRef] = []
    part = 16 * 2**20
    assert peak_growth(lambda: refs.append(atoll.objects.publish({"w": tensor}, chunk_bytes=part))) < part
    assert peak_growth(lambda: kept.append(atoll.objects.fetch(refs[0], to_disk=True))) < 1.5 * part
    assert peak_growth(lambda: kept.append(atoll.objects.fetch(refs[0], into=into))) < 1.5 * part
    assert torch.equal(into["w"], tensor)


def test_a_publishers_errors_name_its_arguments(tmp_path: Path) -> None:
    """The errors of `publish` name its own arguments, not the settings of a run."""
    write_certificate(tmp_path)
    (tmp_path / "other.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match=r"^The TLS certificate '.*other\.pem' cannot be used with the TLS key '"):
        atoll.objects.Publisher(tls_cert=tmp_path / "other.pem", tls_key=tmp_path / "key.pem")
    with pytest.raises(UsageError, match=r"^idle_timeout_s is 0, not a positive number"):
        atoll.objects.Publisher(idle_timeout_s=0)
