"""The specification: what it may import, how long it may be, and what runs after a fault have of it."""

from __future__ import annotations

import ast
import copy
import sys
import tempfile
from pathlib import Path

import pytest
import specification as spec
import torch
from drawn_runs import Drawn, by_specification, drawn_runs, run
from golden_runs import replaced_by
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.world import World

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from size import code_lines

SOURCE = Path(spec.__file__).read_text(encoding="utf-8")
KINDS = ("federated", "diloco", "async")


def test_the_specification_needs_only_torch() -> None:
    """The specification imports only PyTorch and the standard library, and calls neither `open` nor `exec` nor
    `eval`.
    """
    trees = list(ast.walk(ast.parse(SOURCE)))
    names = {alias.name for tree in trees if isinstance(tree, ast.Import) for alias in tree.names}
    names |= {str(tree.module) for tree in trees if isinstance(tree, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} - sys.stdlib_module_names == {"torch"}
    calls = {tree.func.id for tree in trees if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name)}
    assert not calls & {"open", "exec", "eval", "__import__"}


def test_the_specification_has_at_most_400_lines() -> None:
    assert code_lines(SOURCE) <= 400


def compare(drawn: Drawn) -> None:
    """Run it, and compare each tensor of the exported model with the specification's."""
    with tempfile.TemporaryDirectory() as folder:
        found, norms = run(drawn, Path(folder))
    expected = by_specification(drawn, replaced_by(norms))
    assert found.keys() == expected.keys()
    assert not [name for name in found if not torch.equal(found[name], expected[name])]


@pytest.mark.covers("D8", "V1")
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=4, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_drawn_runs_have_the_specified_values(kind: str, data: st.DataObject) -> None:
    """A few randomly drawn runs give the values of the specification, and they are the same runs each time.

    `test_many_drawn_runs_have_the_specified_values` draws other runs each time.
    """
    compare(data.draw(drawn_runs(kind)))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=104, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_many_drawn_runs_have_the_specified_values(kind: str, data: st.DataObject) -> None:
    """Many randomly drawn runs give the values of the specification."""
    compare(data.draw(drawn_runs(kind)))


def test_a_run_that_goes_back_matches_the_specification(tmp_path: Path) -> None:
    """A run that goes back to a copy of its folder from two rounds before still gives the values of the
    specification.
    """
    # The server's outer state goes back, too. The sites' residuals of error feedback are dropped.
    start = {"w": torch.linspace(-1, 1, 300)}

    def step_of(site: str) -> spec.LocalStep:
        def step(k: int, w: spec.Tensors, correct: object) -> None:
            w["w"] -= 0.01 * torch.sin(w["w"] * (k + 1 + ord(site)))

        return step

    outer = spec.of_torch(torch.optim.SGD, lr=0.7, momentum=0.9)
    rules = spec.Rules(outer, up=spec.quantized(7), feedback=True)
    sites = [spec.Site(rules, site, copy.deepcopy(start), step_of(site)) for site in "ab"]
    server = spec.Fragment(rules, start)
    spec.federated(server, sites, 1)
    earlier = copy.deepcopy(server)
    spec.federated(server, sites, 2)
    for site in sites:
        site.restart(earlier.b, went_back=True)
    spec.federated(earlier, sites, 3)

    taken = dict.fromkeys("ab", 0)

    def train(site: str, number: int, w: spec.Tensors) -> spec.Tensors:
        step_of(site)(taken[site], w, None)
        taken[site] += 1
        return w

    sgd = {"name": "sgd", "lr": 0.7, "momentum": 0.9}
    world = World(tmp_path, start, codec="int4", rounds=4, **{"algorithm.outer_optimizer": sgd})
    with world:
        world.rounds(train, 1)
    backup = world.backup()
    with world:
        world.rounds(train, 2, 3)
    world.put_back(backup)
    with world:
        world.rounds(train, 2, 3, 4)
        assert torch.equal(world.finish()["w"], earlier.result()["w"])
