"""Models on a device whose memory the CPU may not touch: whatever the way to train, the same bits as on the CPU."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from every_way import WAYS, Awkward
from far_device import compiled
from harness.processes import Nursery
from safetensors.torch import load_file

SCRIPT = Path(__file__).with_name("every_way.py")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.covers("P1", "L7", "L16")
def test_training_on_another_device_gives_the_same_bits(nursery: Nursery, tmp_path: Path) -> None:
    """Every way to train gives the same bits on another device as on the CPU.

    The CPU may not touch this device's memory: a process that tries crashes.
    """
    library = compiled()
    touched, far, cpu = (
        nursery.start(str(SCRIPT), how, str(library), str(tmp_path / how), cwd=tmp_path)
        for how in ("touched", "far", "cpu")
    )
    assert touched.wait(120) == -signal.SIGSEGV  # so code that reads the device's memory as the CPU's crashes
    for process in (far, cpu):
        assert process.wait(300) == 0, process.output()[-4000:]
        assert "Warning" not in process.output()
    for way in WAYS:
        there, here = (load_file(tmp_path / how / f"{way}.safetensors") for how in ("far", "cpu"))
        assert there.keys() == here.keys()
        assert [name for name in here if not torch.equal(there[name], here[name])] == []
        assert any(name.endswith("long") for name in here)
    model_nbytes = sum(tensor.nbytes for tensor in Awkward().parameters())
    from_pinned = json.loads((tmp_path / "far" / "from_pinned.json").read_text())
    assert from_pinned.pop("tasks") == 0  # their payloads are tensors of the CPU
    assert min(from_pinned.values()) > 0.9 * model_nbytes  # every site pulls, and places what it pulls through them
    assert set(json.loads((tmp_path / "cpu" / "from_pinned.json").read_text()).values()) == {0}
