"""Schemas: storage order, the digest both sides compare, and the first difference in words."""

from __future__ import annotations

import itertools

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import SchemaMismatch, UsageError
from atoll.tensors.schema import BUFFERS, ITEM_BYTES, Schema, TensorSpec

SPECS = st.lists(
    st.builds(
        TensorSpec,
        name=st.text(min_size=1, max_size=6),
        dtype=st.sampled_from(sorted(ITEM_BYTES)),
        shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
        group=st.sampled_from(["params", "buffers"]),
    ),
    max_size=8,
    unique_by=lambda spec: spec.name,
)


@given(SPECS)
def test_storage_order_is_widest_first_and_otherwise_the_models(specs: list[TensorSpec]) -> None:
    ordered = Schema.build(specs).tensors
    assert sorted(ordered, key=str) == sorted(specs, key=str)
    for one, two in itertools.pairwise(ordered):
        assert one.item_bytes > two.item_bytes or (
            one.item_bytes == two.item_bytes and specs.index(one) < specs.index(two)
        )


@given(SPECS, SPECS)
def test_digests_are_equal_exactly_when_schemas_are(one: list[TensorSpec], two: list[TensorSpec]) -> None:
    first, second = Schema.build(one), Schema.build(two)
    assert (first.digest == second.digest) == (first == second)
    assert Schema.from_json(first.to_json()) == first
    assert Schema.from_json(first.to_json()).digest == first.digest


def test_the_digest_is_that_of_the_canonical_json() -> None:
    schema = Schema.build([TensorSpec("w", "F32", (2, 3))], {"v": "w"})
    text = b'{"aliases":[["v","w"]],"tensors":[["w","F32",[2,3],"params"]]}'
    assert schema.digest == blake3(text).hexdigest()


def test_sizes_count_a_scalar_as_one_element_and_an_empty_tensor_as_none() -> None:
    # 6 · 4 bytes + 1 · 8 bytes + 0 · 2 bytes
    specs = [
        TensorSpec("w", "F32", (2, 3)),
        TensorSpec("n", "I64", (), BUFFERS),
        TensorSpec("e", "BF16", (4, 0)),
    ]
    schema = Schema.build(specs)
    assert [spec.numel for spec in schema.tensors] == [1, 6, 0]
    assert (schema.numel, schema.nbytes) == (7, 32)
    assert [spec.is_float for spec in schema.tensors] == [False, True, True]


def test_what_is_no_schema_is_refused_by_name() -> None:
    spec = TensorSpec("w", "F32", (1,))
    with pytest.raises(UsageError, match=r"'w' has the dtype C64, which Atoll does not support\. Use one of F64"):
        TensorSpec("w", "C64", (1,))
    with pytest.raises(UsageError, match="'w' occurs twice"):
        Schema.build([spec, spec])
    with pytest.raises(UsageError, match="'w' occurs twice"):
        Schema.build([spec], {"w": "w"})
    with pytest.raises(UsageError, match="'v' is tied to 'x', which is not one of the tensors"):
        Schema.build([spec], {"v": "x"})


BASE = [TensorSpec("a", "F32", (2,)), TensorSpec("b", "F32", (3,))]


@pytest.mark.covers("X3")
@pytest.mark.parametrize(
    ("worker", "server", "difference"),
    [
        (
            Schema.build(BASE),
            Schema.build(BASE[:1]),
            "worker clinic-a has b F32[3] in params, but the server has no such tensor",
        ),
        (
            Schema.build(BASE[:1]),
            Schema.build(BASE),
            "the server has b F32[3] in params, but worker clinic-a has no such tensor",
        ),
        (
            Schema.build(BASE),
            Schema.build([BASE[0], TensorSpec("b", "F32", (3, 1))]),
            "worker clinic-a has b F32[3] in params, but the server has b F32[3, 1] in params",
        ),
        (
            Schema.build(BASE),
            Schema.build([BASE[0], TensorSpec("b", "BF16", (3,))]),
            "worker clinic-a has b F32[3] in params, but the server has b BF16[3] in params",
        ),
        (
            Schema.build(BASE),
            Schema.build([BASE[0], TensorSpec("b", "F32", (3,), BUFFERS)]),
            "worker clinic-a has b F32[3] in params, but the server has b F32[3] in buffers",
        ),
        (Schema.build(BASE, {"c": "a"}), Schema.build(BASE), "only worker clinic-a ties c to a"),
        (Schema.build(BASE), Schema.build(BASE, {"c": "a"}), "only the server ties c to a"),
        (Schema.build(BASE, {"c": "a"}), Schema.build(BASE, {"c": "b"}), "only worker clinic-a ties c to a"),
        (
            Schema.build(BASE[:1], {"b": "a"}),
            Schema.build(BASE),
            "worker clinic-a ties b to a, but the server has two tensors",
        ),
        (
            Schema.build(BASE),
            Schema.build(BASE[:1], {"b": "a"}),
            "the server ties b to a, but worker clinic-a has two tensors",
        ),
    ],
    ids=[
        "further",
        "missing",
        "shape",
        "dtype",
        "group",
        "tied-here",
        "tied-there",
        "tied-otherwise",
        "two-there",
        "two-here",
    ],
)
def test_two_models_that_differ_are_refused_with_both_digests_and_the_first_difference(
    worker: Schema, server: Schema, difference: str
) -> None:
    with pytest.raises(SchemaMismatch) as caught:
        worker.require_equal(server, mine="worker clinic-a", theirs="the server")
    assert caught.value.message == (
        f"The model of worker clinic-a (schema {worker.digest[:12]}) is not the model of the server "
        f"(schema {server.digest[:12]}): {difference}."
    )
    assert caught.value.remedy


def test_the_same_model_in_another_order_is_accepted() -> None:
    Schema.build(BASE).require_equal(Schema.build(BASE[::-1]), mine="worker clinic-a", theirs="the server")


def test_the_same_model_is_accepted() -> None:
    one, two = (Schema.build(BASE, {"c": "a"}) for _ in range(2))
    one.require_equal(two, mine="worker clinic-a", theirs="the server")
