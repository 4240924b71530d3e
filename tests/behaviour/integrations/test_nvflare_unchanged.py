"""Scripts that import NVFlare, run unchanged by `atoll worker --flare`. Skipped where NVFlare is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from harness.processes import Nursery
from kit.digests import exported
from kit.servers import plain_server

from atoll.testing.run import history

pytest.importorskip("nvflare", minversion="2.9")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_processes")]

SCRIPT = """
import sys
from helper import step                       # beside the script, as for python itself
import nvflare.client as flare
from nvflare.client.tracking import SummaryWriter

flare.init()
writer = SummaryWriter()
while flare.is_running():
    received = flare.receive()
    assert flare.is_train() and flare.system_info()["site_name"] == sys.argv[2]
    w = received.params["w"]
    writer.add_scalar("place", received.current_round, global_step=1)
    sent = {"full": w + step, "diff": w * 0 + step}[sys.argv[1].lower()]
    model = flare.FLModel(
        params={"w": sent}, params_type=flare.ParamsType(sys.argv[1]), metrics={"kind": type(w).__module__ == "KIND"},
    )
    model.metrics["kind"] = int(model.metrics["kind"])
    flare.send(model)
    assert model.params is None
"""


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_an_unchanged_script_takes_part(nursery: Nursery, tmp_path: Path, kind: str) -> None:
    """Two sites run one script, one with whole models, one with differences: w grows by 2 in each of two rounds.

    The script gets arrays, or tensors if it has imported torch.
    """
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "helper.py").write_text("step = 2.0\n")
    script = SCRIPT.replace("KIND", kind)
    (tmp_path / "code" / "client.py").write_text(f"import torch\n{script}" if kind == "torch" else script)
    with plain_server(tmp_path, {"w": torch.zeros(2)}, rounds=2, sites=2) as server:
        sites = []
        for site, sends in {"a": "FULL", "b": "DIFF"}.items():
            flags = ("--flare", "--server", server.url, "--site", site, "--dir", str(tmp_path / site))
            words = ("worker", *flags, "--", sys.executable, "code/client.py", sends, site)
            sites.append(nursery.start("atoll", *words, cwd=tmp_path))
        assert [site.wait(100) for site in sites] == [0, 0], [site.output() for site in sites]
        server.run()
    assert exported(tmp_path)["w"].tolist() == [4.0, 4.0]
    assert [line["metrics"] for line in history(tmp_path / "state")] == [
        {"kind": 1.0, "place": 0.0},
        {"kind": 1.0, "place": 1.0},
    ]
