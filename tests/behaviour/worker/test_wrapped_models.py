"""Wrappers around a model, its blocks or its optimizer change names, but not what is trained: the bits stay."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit import SETTINGS, SITES, DiLoCoSites, build_model, exported, local_step, serve, tensors_digest, together
from kit.servers import new_server, plain_server
from safetensors.torch import save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import atoll
from atoll.errors import UsageError

Build = Callable[[], nn.Module]


def build_checkpointed() -> nn.Module:
    """Activation checkpointing of some blocks."""
    model = build_model()
    model[0], model[1] = checkpoint_wrapper(model[0]), checkpoint_wrapper(model[1])
    return model


def build_compiled() -> nn.Module:
    return torch.compile(build_model(), backend="eager")


def build_with_compiled_blocks() -> nn.Module:
    """One block is compiled, one compiled and checkpointed in both orders."""
    model = build_model()
    model[0] = torch.compile(model[0], backend="eager")
    model[1] = checkpoint_wrapper(torch.compile(model[1], backend="eager"))
    model[2] = torch.compile(checkpoint_wrapper(model[2]), backend="eager")
    return model


def build_compiled_in_ddp() -> nn.Module:
    return DistributedDataParallel(build_compiled())


def build_compiled_ddp() -> nn.Module:
    return torch.compile(DistributedDataParallel(build_with_compiled_blocks()), backend="eager")


def sgd(model: nn.Module) -> Any:
    return SGD(model.parameters(), lr=0.05, momentum=0.9)


def compiled(model: nn.Module) -> Any:
    optimizer = sgd(model)
    optimizer.followed = torch.compile(optimizer.step, backend="eager")
    return optimizer


def compiled_around(model: nn.Module) -> Any:
    def step() -> None:
        optimizer.step()

    optimizer = sgd(model)
    optimizer.followed = torch.compile(step, backend="eager")
    return optimizer


def accelerated(model: nn.Module) -> Any:
    return pytest.importorskip("accelerate").Accelerator(cpu=True).prepare_optimizer(sgd(model))


def step_(model: nn.Module, optimizer: Any, site: str, number: int) -> None:
    """A local step, by the wrapper of an optimizer's step where there is one."""
    local_step(model, SimpleNamespace(step=getattr(optimizer, "followed", optimizer.step)), site, number)


def result(
    folder: Path, algorithm: str, sites: Build = build_model, server: Build = build_model, inner: Any = sgd
) -> str:
    """The digest of what a run of two sites exports: of DiLoCo, or of an algorithm that corrects local steps."""

    def work(site: str) -> None:
        model = sites()
        optimizer = inner(model)
        with atoll.join(served.url, site=site, folder=folder / "workers") as worker:
            for fl_round in worker:
                fl_round.load_into(model)
                with fl_round.correct(model, optimizer):
                    for number in range(2):
                        step_(model, optimizer, site, 10 * fl_round.number + number)
                fl_round.submit(model)

    run: dict[str, Any] = {"algorithm": algorithm, "algorithm.outer_optimizer.name": None, "H": 2, "rounds": 2}
    outer = {"algorithm.outer_optimizer.lr": 1.0, "algorithm.outer_optimizer.momentum": 0.0}
    if algorithm == "diloco":
        with serve(folder, server(), **run) as served:
            DiLoCoSites(served.url, folder, 10, build=sites, inner=inner, step=step_).join()
            served.run()
    else:
        with serve(folder, server(), **run | outer | {"H": None}) as served:
            together(*(partial(work, site) for site in SITES), served.run)
    return tensors_digest(exported(folder))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Algorithm → the result without a wrapper."""
    return cache(lambda algorithm: result(tmp_path_factory.mktemp("plain"), algorithm))


@pytest.mark.parametrize("build", [build_checkpointed, build_compiled, build_with_compiled_blocks])
def test_wrapped_models_train_to_the_same_bits(tmp_path: Path, plain: Callable[[str], str], build: Build) -> None:
    """A checkpointed or compiled model gives the same result, bit for bit, as the plain model."""
    assert result(tmp_path / "both", "diloco", build, build) == plain("diloco")
    assert result(tmp_path / "sites", "diloco", build) == plain("diloco")


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """Of one rank, which is all that DistributedDataParallel asks for."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "group"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("build", [build_compiled_in_ddp, build_compiled_ddp])
def test_compiled_ddp_models_train_to_the_same_bits(tmp_path: Path, plain: Callable[[str], str], build: Build) -> None:
    """A compiled model in DDP and a compiled DDP model give the same result, bit for bit, as the plain model."""
    assert result(tmp_path / "ddp", "diloco", build) == plain("diloco")


@pytest.mark.parametrize(
    ("algorithm", "inner"),
    [(name, inner) for name in ("diloco", "scaffold") for inner in (compiled, accelerated)]
    + [("diloco", compiled_around)],
)
def test_compiled_and_wrapped_steps_are_followed(
    tmp_path: Path, plain: Callable[[str], str], algorithm: str, inner: Callable[[nn.Module], Any]
) -> None:
    """If a script compiles an optimizer's step or wraps the optimizer with Accelerate, the result has the same bits as
    with a plain optimizer.
    """
    assert result(tmp_path, algorithm, inner=inner) == plain(algorithm)


@pytest.mark.parametrize("algorithm", ["fedprox", "scaffold"])
@pytest.mark.parametrize("build", [build_checkpointed, build_with_compiled_blocks])
def test_corrections_follow_wrapped_parameters(
    tmp_path: Path, plain: Callable[[str], str], algorithm: str, build: Build
) -> None:
    """FedProx and SCAFFOLD give the same bits with a checkpointed or compiled model as with the plain model."""
    assert result(tmp_path, algorithm, build, build) == plain(algorithm)


def test_published_tensors_have_unwrapped_names(tmp_path: Path) -> None:
    """`publish` gives the tensors of a compiled model the names of the model without the wrapper. `fetch` can load such
    tensors into a compiled model.
    """
    names = set(build_model().state_dict())
    compiled = build_with_compiled_blocks()
    with serve(tmp_path) as server:
        assert set(atoll.objects.fetch(atoll.objects.publish(compiled, server=server.url))) == names
        plain = atoll.objects.fetch(atoll.objects.publish(build_model(), server=server.url), into=compiled)
        assert plain is compiled


class Detached(nn.Linear):
    """Its state holds other tensors than its own, of the same memory."""

    def state_dict(self, *args: object, **options: object) -> dict[str, torch.Tensor]:
        return {name: tensor.detach() for name, tensor in super().state_dict(*args, **options).items()}


def seeded(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind()


def test_parameters_detached_in_the_state_are_trained(tmp_path: Path) -> None:
    """If a model's `state_dict` returns detached tensors, the model's parameters still count as parameters, and the
    result is the same as without detaching.
    """
    plain, detached = (partial(seeded, partial(kind, 4, 5)) for kind in (nn.Linear, Detached))
    assert result(tmp_path / "detached", "diloco", detached, detached) == result(tmp_path, "diloco", plain, plain)


def test_a_submodule_may_have_a_wrappers_name(tmp_path: Path) -> None:
    """If a submodule has the name `_orig_mod`, like the wrapper of a compiled model, the exported tensors keep this
    name.
    """
    build = partial(seeded, lambda: nn.ModuleDict({"_orig_mod": nn.Linear(2, 3)}))
    result(tmp_path, "diloco", build, build)
    assert set(exported(tmp_path)) == {"_orig_mod.weight", "_orig_mod.bias"}


# -- mappings and files with a wrapper's names


def compiled_state() -> dict[str, torch.Tensor]:
    return dict(build_compiled().state_dict())


def checkpointed_state() -> dict[str, torch.Tensor]:
    """As `named_parameters` and `named_buffers` name them: `state_dict` leaves the wrapper's name out."""
    model = build_checkpointed()
    return {name: each.detach() for name, each in (*model.named_parameters(), *model.named_buffers())}


STATES = {
    "compiled": (compiled_state, "_orig_mod."),
    "checkpointed": (checkpointed_state, "_checkpoint_wrapped_module."),
}


@pytest.mark.parametrize("given", ["mapping", "file", "function"])
@pytest.mark.parametrize("wrapper", list(STATES))
def test_a_server_accepts_names_with_wrappers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrapper: str, given: str
) -> None:
    """If the initial tensors have the names of a compiled or checkpointed model, the server takes the wrapper out of
    these names.

    The tensors come from a mapping, a file or a function.
    """
    state, name = STATES[wrapper]
    tensors = state()
    assert any(name in each for each in tensors)
    settings = SETTINGS | {"network.port": 0, "disk.state_dir": tmp_path / "state", "sites": 1, "rounds": 1}
    if given == "file":
        save_file(tensors, tmp_path / "initial.safetensors")
        settings["model.source"] = str(tmp_path / "initial.safetensors")
    if given == "function":
        monkeypatch.setattr(sys.modules[__name__], "STATE", staticmethod(state), raising=False)
        settings["model.source"] = f"{__name__}:STATE"
    first = [tensors] if given == "mapping" else []
    with new_server(*first, **settings) as server, atoll.join(server.url, "a", folder=tmp_path / "w") as worker:
        for fl_round in worker:
            loaded = fl_round.state_dict()
            fl_round.submit(loaded)
    assert tensors_digest(loaded) == tensors_digest(build_model().state_dict())


def test_a_site_may_submit_names_with_wrappers(tmp_path: Path) -> None:
    """If a site submits tensors with the names of a compiled model, the result has the names without the wrapper."""
    with plain_server(tmp_path, build_model(), sites=1, rounds=1) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "workers") as worker:
            for fl_round in worker:
                fl_round.state_dict()
                fl_round.submit({name: torch.ones_like(each) for name, each in compiled_state().items()})
        server.run()
    result = exported(tmp_path)
    assert set(result) == set(build_model().state_dict())
    assert all(torch.allclose(each.double(), torch.ones((), dtype=torch.float64)) for each in result.values())


def test_equal_names_without_wrapper_are_refused(tmp_path: Path) -> None:
    """If two initial tensors have the same name without the wrapper, the server refuses them and names one of them."""
    tensors = {"0.weight": torch.zeros(2), "_orig_mod.0.weight": torch.ones(2)}
    with pytest.raises(UsageError, match=r"'_orig_mod\.0\.weight'"):
        plain_server(tmp_path, tensors, algorithm="diloco").start()
