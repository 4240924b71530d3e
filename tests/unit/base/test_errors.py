"""The exception tree: what is drawn is what is there, and every code is its own."""

from __future__ import annotations

import re

import pytest

from atoll import errors
from atoll.errors import BY_CODE, AtollError, PeerError, UpdateRefused

LINE = re.compile(r"^([ │├└─]*)(\w+)(?:  +\S.*)?$")


def drawn_tree() -> dict[str, str]:
    """Class → base, as the docstring of the module draws them: one level is four columns."""
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = LINE.match(line)
        if match and line.startswith("    "):
            depth = len(match[1]) // 4 - 1
            path[depth:] = [match[2]]
            if depth:
                parents[match[2]] = path[depth - 1]
    return parents


def real_tree(root: type[AtollError] = AtollError) -> dict[str, str]:
    children = root.__subclasses__()
    return {sub.__name__: root.__name__ for sub in children} | {
        name: base for sub in children for name, base in real_tree(sub).items()
    }


def test_the_tree_at_the_top_of_the_file_is_the_tree() -> None:
    assert drawn_tree() == {name: base for name, base in real_tree().items() if hasattr(errors, name)}


def test_every_error_has_a_wire_code_of_its_own() -> None:
    kinds = [AtollError, *(getattr(errors, name) for name in real_tree() if hasattr(errors, name))]
    assert len({kind.code for kind in kinds}) == len(kinds)
    assert all(BY_CODE[kind.code] is kind for kind in kinds)


def test_exit_codes_are_those_of_a_failure_and_of_no_signal() -> None:
    assert all(1 <= kind.exit_code < 126 for kind in BY_CODE.values())


@pytest.mark.covers("X3")
def test_an_error_reads_as_message_and_remedy() -> None:
    error = UpdateRefused("Worker clinic-a: head.weight is not finite.", "Lower the learning rate.")
    assert str(error) == "Worker clinic-a: head.weight is not finite. Lower the learning rate."
    assert (error.message, error.remedy) == (
        "Worker clinic-a: head.weight is not finite.",
        "Lower the learning rate.",
    )
    assert str(PeerError("The server is older.")) == "The server is older."


def test_causes_are_told_each_once_where_they_are_a_circle_too() -> None:
    first, second, third = ValueError("first"), OSError("second"), KeyError("third")
    first.__cause__, second.__cause__, third.__cause__ = second, third, second
    assert list(errors.causes(first)) == [first, second, third]
