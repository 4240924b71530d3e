"""What is imported when: neither package before it is used, nothing of SCAFFOLD before a run has controls."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from lightning_world import PACKAGES


@pytest.mark.usefixtures("fresh_processes")
def test_importing_it_is_cheap_and_brings_no_lightning() -> None:
    in_a_fresh_process(
        "import sys, atoll; a = atoll.integrations.lightning; import atoll.integrations.lightning as b; "
        "assert a is b and callable(a.patch); "
        "loaded = {name.split('.')[0] for name in sys.modules}; "
        "assert not loaded & {'lightning', 'pytorch_lightning', 'aiohttp'}, loaded"
    )


@pytest.mark.slow
@pytest.mark.covers("S1")
@pytest.mark.parametrize("name", [PACKAGES[0], pytest.param(PACKAGES[1], marks=pytest.mark.long)])
@pytest.mark.usefixtures("fresh_processes")
def test_controls_are_imported_when_a_run_has_them(tmp_path: Path, name: str) -> None:
    in_a_fresh_process(
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path\n"
        "from lightning_world import *\n"
        "for algorithm in ('fedavg', 'scaffold'):\n"
        f"    folder = Path({str(tmp_path)!r}) / algorithm\n"
        "    with serve(folder, algorithm, **{'rounds.total': 1}) as server:\n"
        f"        trainer = trainer_of({name!r})\n"
        "        atoll.integrations.lightning.patch(trainer, server.url, 'a', folder=folder)\n"
        f"        trainer.fit(module_class({name!r})(), data())\n"
        "        assert server.wait(60)\n"
        "        assert ('atoll.algorithms.scaffold' in sys.modules) == (algorithm == 'scaffold')\n"
    )


def in_a_fresh_process(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
