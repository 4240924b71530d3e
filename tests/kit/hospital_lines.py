"""A run of one site over a slow line between two machines, with a relay in it that fails as those of hospitals do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.processes import wait_until

import atoll
from atoll.server.startup import plan_of
from kit.processes import toml
from kit.two_machines import SERVER, TESTS, long_line, two_machines

PORT, RELAY_PORT = 8512, 8513

MODEL = """
import torch
from torch import nn


def build():
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros({numel}))
    return model
"""

SITE = """
import json, time
import torch
import atoll

with atoll.join() as worker:
    begun_s = time.monotonic()
    for fl_round in worker:
        state = fl_round.state_dict()
        for value in state.values():
            value.add_(1.0)
        ready_s = time.monotonic()
        fl_round.submit(state)
        up, down = worker.bytes_up, worker.bytes_down
        took_s = time.monotonic() - ready_s
        print(json.dumps({"s": time.monotonic() - begun_s, "submit_s": took_s, "up": up, "down": down}), flush=True)
"""


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Attributes:
        submit_s: of the last round's update alone.
        seconds: from the first request for a round to the last acknowledgement.
        sent_bytes, received_bytes: tensor bytes of the site's own count, those of broken parts included.
        again: requests with a part of an update that another request had brought, or had begun to bring.
        lost: acknowledgements that were lost.
        silent_s: how long the relay passed nothing on.
        deaths: how often the server took the site for dead.
        value: of all weights of the result.
    """

    seconds: float
    submit_s: float
    sent_bytes: int
    received_bytes: int
    again: int
    lost: int
    silent_s: float
    deaths: int
    value: float


def run_over_a_line(
    folder: Path,
    *,
    nbytes: int,
    rounds: int,
    mbit_per_s: float | None,
    settings: Mapping[str, Any] | None = None,
    lose: bool = False,
    disturb: tuple[float, float] | None = None,
) -> Outcome:
    """Run it, with the default of each setting.

    Args:
        nbytes: of the model, and of each update.
        mbit_per_s: what the line carries, each way; None: it is long and lossy, as `long_line` says.
        settings: further settings.
        lose: lose the acknowledgement of each update, once, after its bytes have arrived.
        disturb: for so many seconds the relay passes everything on, then for so many nothing; then it drops all
            connections, and begins again.
    """
    folder.mkdir()
    (folder / "line_model.py").write_text(MODEL.format(numel=nbytes // 4))
    (folder / "site.py").write_text(SITE)
    values: dict[str, Any] = {
        "algorithm.name": "fedavg",
        "rounds.total": rounds,
        "rounds.sites": 1,
        "model.source": "line_model:build",
    }
    values |= dict(settings or {})
    (folder / "run.toml").write_text("".join(f"{key} = {toml(value)}\n" for key, value in values.items()))
    shape = values | {"model.source": None}
    plan = plan_of(atoll.Settings.build(shape), _empty_model(nbytes // 4))
    relay_told: dict[str, Any] = {"target": PORT, "lose": lose, "disturb": disturb}
    relay_told["parts"] = len(plan.fragments[0].update.parts)
    with ExitStack() as stack:
        log = stack.enter_context((folder / "server.log").open("w"))
        if mbit_per_s is None:
            there, here, address = stack.enter_context(long_line())
        else:
            there, here, address = *stack.enter_context(two_machines(mbit_per_s)), SERVER
        relay_told["listen"] = [address, RELAY_PORT]
        server = started_on(
            there, folder, "-m", "atoll.cli.main", "server", "run.toml", "--port", str(PORT), stdout=log, stderr=log
        )
        relay = site = None
        try:
            wait_until(lambda: "listening" in (folder / "server.log").read_text(), "the server", 120)
            relay = started_on(there, folder, "-m", "harness.relay", json.dumps(relay_told), stdin=subprocess.PIPE)
            where = {
                "ATOLL_SERVER": f"http://{address}:{RELAY_PORT}",
                "ATOLL_SITE": "a",
                "ATOLL_DIR": str(folder / "a"),
            }
            site = started_on(here, folder, "site.py", env=where)
            printed, _ = site.communicate(timeout=1800 + 600 * rounds)
            assert site.returncode == 0
            told, _ = relay.communicate(timeout=60)
            assert server.wait(120) == 0, (folder / "server.log").read_text()
        finally:
            for process in (server, relay, site):
                if process is not None and process.poll() is None:
                    process.kill()
                    process.wait()
    lines, passed = [json.loads(line) for line in printed.splitlines()], json.loads(told)
    assert len(lines) == rounds
    status = json.loads((folder / "atoll-run" / "status.json").read_text())
    return Outcome(
        seconds=lines[-1]["s"],
        submit_s=lines[-1]["submit_s"],
        sent_bytes=lines[-1]["up"],
        received_bytes=lines[-1]["down"],
        again=passed["again"],
        lost=passed["lost"],
        silent_s=passed["silent_s"],
        deaths=status["deaths"],
        value=_value_of(folder / "atoll-run" / "exports" / "model.safetensors"),
    )


def started_on(machine: str, folder: Path, *words: str, env: Mapping[str, str] | None = None, **more: Any) -> Any:
    """Start Python on a machine."""
    paths = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = os.environ | {"PYTHONPATH": paths, "HOME": str(folder), "ATOLL_TOKEN": "of-the-line"} | dict(env or {})
    line = ["ip", "netns", "exec", machine, sys.executable, *words]
    return subprocess.Popen(line, cwd=folder, env=own, text=True, **{"stdout": subprocess.PIPE} | more)


def _empty_model(numel: int) -> Any:
    import torch

    return {"w": torch.zeros(numel)}


def _value_of(path: Path) -> float:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        found = file.get_tensor("w")
    assert bool((found == found[0]).all())
    return float(found[0])
