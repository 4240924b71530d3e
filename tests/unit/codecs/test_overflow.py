"""Changes and steps beyond the range of the model's own dtype: fp16's largest is 65,504, fp8's 448."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import Threads, ask_journal, exported, serve, together
from safetensors.torch import load_file
from torch import nn

import atoll
from atoll.errors import RunFailed

# -- a change that the dtype cannot hold


DTYPES = {
    "fp16": (torch.float16, 40_000.0),
    "fp8 e4m3": (torch.float8_e4m3fn, 384.0),
    "fp8 e5m2": (torch.float8_e5m2, 49_152.0),
}
"""A dtype, and a value of it: the difference to its negative has no place in the dtype."""

FEDAVG: dict[str, Any] = {
    "algorithm.name": "fedavg",
    "algorithm.outer_optimizer.lr": 1.0,
    "algorithm.outer_optimizer.momentum": 0.0,
    "rounds.sites": 1,
    "rounds.total": 1,
}


class One(nn.Module):
    """A parameter with `value` in every element, and a buffer with it."""

    def __init__(self, dtype: torch.dtype, value: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((3,), value).to(dtype), requires_grad=False)
        self.register_buffer("b", torch.full((2,), value).to(dtype))


def negate(folder: Path, kind: torch.dtype, value: float, **settings: Any) -> list[list[float]]:
    """A run whose site submits the negative of what it loads; what it has loaded, round by round. None is refused."""
    seen = []
    with serve(folder, One(kind, value), **FEDAVG | settings) as server:
        with atoll.join(server.url, site="a", folder=folder / "workers") as worker:
            for fl_round in worker:
                model = fl_round.load_into(One(kind, 0.0))
                seen.append(model.w.float().tolist())
                model.w.copy_(-model.w.float())
                fl_round.submit(model)
        server.run()
        assert server.status().refused == 0
    return seen


@pytest.mark.parametrize("codec", ["none", "bf16", "int8", "int4", "topk"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_changes_beyond_the_models_dtype_are_sent(tmp_path: Path, dtype: str, codec: str) -> None:
    """A site can send a change that the model's dtype cannot hold."""
    # The site goes from x to −x, which is a change of −2x. Each codec writes the largest value of a tile to 1 part in
    # 256.
    kind, value = DTYPES[dtype]
    assert negate(tmp_path, kind, value, **{"aggregation.upload_codec.name": codec}) == [[value] * 3]
    result = exported(tmp_path)
    assert result["w"].dtype == kind
    assert result["w"].float().tolist() == pytest.approx([-value] * 3, abs=0 if codec == "none" else 2 * value / 256)
    assert result["b"].float().tolist() == [value] * 2


@pytest.mark.parametrize("down", ["bf16", "int8"])
def test_a_difference_may_exceed_the_models_dtype(tmp_path: Path, down: str) -> None:
    """A version can be downloaded as a difference even if the difference exceeds the dtype of the model."""
    # The second round starts from −x, which the server sends as the difference from x.
    settings = {"rounds.total": 2, "aggregation.download_codec.name": down}
    first, second = negate(tmp_path, torch.float16, 40_000.0, **settings)
    assert first == [40_000.0] * 3
    assert second == pytest.approx([-40_000.0] * 3, abs=80_000 / 256)


def test_a_change_beyond_fp32_is_an_overflow(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If a site's change is too large for fp32, the server refuses the update, and the log speaks of an overflow and
    not of NaN.

    −3e38 − 3e38 is beyond fp32, although both values of the site are finite.
    """
    with serve(tmp_path, One(torch.float32, 3e38), **FEDAVG) as server, caplog.at_level(logging.WARNING):
        with atoll.join(server.url, site="a", folder=tmp_path / "workers") as worker:
            for attempt, fl_round in enumerate(worker):
                model = fl_round.load_into(One(torch.float32, 0.0))
                if attempt == 0:
                    model.w.neg_()
                fl_round.submit(model)
        server.run()
        assert server.status().refused == 1
    (said,) = [each.getMessage() for each in caplog.records if each.name == "atoll.server" and "refused" in each.msg]
    assert {"a", "w", "Inf", "F32"} <= set(re.findall(r"\w+", said))
    assert "NaN" not in said


# -- an outer step whose result the dtype cannot hold


THREE_ROUNDS = FEDAVG | {"rounds.total": 3}


@pytest.fixture(autouse=True)
def gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site ends soon after its server."""
    monkeypatch.setenv("ATOLL_GIVE_UP_S", "1")


class Model(nn.Module):
    """Two parameters: the round moves only the second."""

    def __init__(self, dtype: torch.dtype = torch.float16, value: float = 40_000.0) -> None:
        super().__init__()
        self.still = nn.Parameter(torch.ones(5).to(dtype), requires_grad=False)
        self.moved = nn.Parameter(torch.full((3,), value).to(dtype), requires_grad=False)


def train_to(
    server: atoll.Server, folder: Path, value: float, dtype: torch.dtype = torch.float16, site: str = "a"
) -> Threads:
    """A site that sets `moved` to a value in each round, as long as the server lives."""

    def work() -> None:
        try:
            with atoll.join(server.url, site=site, folder=folder / "workers", swarm=True) as worker:
                for fl_round in worker:
                    model = fl_round.load_into(Model(dtype))
                    model.moved.copy_(torch.full((3,), value))
                    fl_round.submit(model)
        except atoll.AtollError:
            pass  # the server has ended

    return Threads(work)


def names_the_overflow(error: BaseException, dtype: str) -> bool:
    said = str(error)
    return "moved" in said and dtype in said and "still" not in said


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    """Steps whole tensors, each by up to its own size."""
    return torch.optim.Adafactor(parameters, lr=1.0)


TWICE: dict[str, Any] = {"algorithm.outer_optimizer.lr": 2.0}
UNBOUNDED = {"aggregation.max_update_norm": 1e39}
FP16 = (torch.float16, 40_000.0, 60_000.0, "F16")
WHOLE: dict[str, Any] = dict.fromkeys(f"algorithm.outer_optimizer.{key}" for key in ("name", "lr", "momentum"))

CASES: dict[str, tuple[torch.dtype, float, float, str, dict[str, Any]]] = {
    "fp16": (*FP16, TWICE),
    "fp16 with a state": (*FP16, TWICE | {"algorithm.outer_optimizer.momentum": 0.5}),
    "fp8 e5m2": (torch.float8_e5m2, 32_768.0, 57_344.0, "F8_E5M2", TWICE),
    "bf16": (torch.bfloat16, 2e38, 3e38, "BF16", {"algorithm.outer_optimizer.lr": 1.9} | UNBOUNDED),
    "fp32": (torch.float32, 2e38, 3e38, "F32", TWICE | UNBOUNDED),
    "whole tensors": (torch.float16, 60_000.0, 61_000.0, "F16", WHOLE | {"outer_optimizer": adafactor}),
    "down by bf16": (*FP16, TWICE | {"aggregation.download_codec.name": "bf16"}),
    "down by int8": (*FP16, TWICE | {"aggregation.download_codec.name": "int8"}),
    "a difference down": (
        torch.float32,
        -2e38,
        1e38,
        "F32",
        {"algorithm.outer_optimizer.lr": 1.6, "aggregation.download_codec.name": "bf16"} | UNBOUNDED,
    ),
}
"""dtype, initial value, value after training, name of the dtype, and settings."""


@pytest.mark.parametrize("case", CASES)
def test_a_version_beyond_its_dtype_ends_the_run(tmp_path: Path, case: str) -> None:
    """If an outer step makes a value that the model's dtype cannot hold, the run fails before it publishes this
    version. The error names the tensor and the dtype.
    """
    dtype, first, trained, name, settings = CASES[case]
    with serve(tmp_path, Model(dtype, first), **THREE_ROUNDS | settings) as server:
        train_to(server, tmp_path, trained, dtype)
        with pytest.raises(RunFailed) as ended:
            together(server.run)
    assert names_the_overflow(ended.value, name)
    assert ask_journal(tmp_path, "SELECT MAX(version) FROM versions") == [(0,)]
    assert not (tmp_path / "state" / "exports" / "model.safetensors").exists()


def test_a_restart_after_an_overflow_fails_again(tmp_path: Path) -> None:
    """If a run has failed because of an overflow, a restarted server fails with the same error."""
    # The last good version can be exported. The first round moves by 20,000 to 60,000. In the second round, the
    # momentum alone moves by 18,000 more.
    settings = THREE_ROUNDS | {"algorithm.outer_optimizer.momentum": 0.9}
    with serve(tmp_path, Model(), **settings) as server:
        train_to(server, tmp_path, 60_000.0)
        with pytest.raises(RunFailed) as first:
            server.run()
    with serve(tmp_path, Model(), **settings) as server, pytest.raises(RunFailed) as again:
        server.run()
    assert names_the_overflow(first.value, "F16")
    assert str(again.value) == str(first.value)
    command = [sys.executable, "-m", "atoll.cli.main", "export", "good.safetensors", "--dir", "state"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    assert load_file(tmp_path / "good.safetensors")["moved"].tolist() == [60_000.0] * 3


def test_a_swarm_fails_if_all_sites_overflow(tmp_path: Path) -> None:
    """In a swarm, a second site aggregates after the first site has found an overflow. If all sites find it, the run
    fails with an error that names the overflow.
    """
    settings = THREE_ROUNDS | {"algorithm.outer_optimizer.lr": 2.0, "rounds.sites": 2, "swarm.enabled": True}
    with serve(tmp_path, Model(), **settings) as server:
        for site in ("a", "b"):
            train_to(server, tmp_path, 60_000.0, site=site)
        with pytest.raises(RunFailed) as ended:
            server.run()
    assert names_the_overflow(ended.value, "F16")


def test_the_largest_value_of_a_dtype_is_published(tmp_path: Path) -> None:
    """A version may have the largest value that its dtype can hold, which is 65,504 for fp16."""
    with serve(tmp_path, Model(), **FEDAVG) as server:
        train_to(server, tmp_path, 65_504.0)
        server.run()
    assert exported(tmp_path)["moved"].tolist() == [65_504.0] * 3
