"""The Python on the pages runs: the walkthrough and the tutorials as they are, the scripts against a server."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.processes import Nursery
from pages import PAGES, ROOT, Block, blocks

SERVE = """\
import os
import torch
from torch import nn
import atoll

settings = {{"algorithm.name": {algorithm!r}, "rounds.total": 2, "network.port": 0, "disk.state_dir": "state"}}
server = atoll.Server(nn.Linear(4, 2), settings).start()
os.environ["ATOLL_SERVER"], os.environ["ATOLL_SITE"] = server.url, "site-1"
model, dataset = nn.Linear(4, 2), [torch.randn(4)] * 10
"""

END = """\
assert server.wait(30)
status = server.status()
server.run()
assert status.fragments[0].version == 2
"""

DILOCO = (
    SERVE.format(algorithm="diloco")
    + """
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loader = [torch.randn(3, 4)] * 1000  # H = 500: two rounds
loss_of = lambda model, batch: model(batch).square().mean()
"""
)

OWN_CODE = """
from torch.utils.data import DataLoader

data = train_data = test_data = test_loader = dataset
accuracy = evaluate = lambda model, data: 0.9
validate = lambda model: 0.5
load_data = lambda *given: (DataLoader(dataset), DataLoader(dataset))
test = lambda net, loader: (0.5, 0.9)
net, partitions, batch_size, local_epochs, learning_rate = model, 2, 4, 1, 0.1

def train(model, *rest):
    if rest and isinstance(rest[0], torch.optim.Optimizer):
        model(torch.randn(3, 4)).square().mean().backward()
        rest[0].step()
    with torch.no_grad():
        model.bias += 1.0
    return 0.5
"""
FEDAVG, SCAFFOLD = (SERVE.format(algorithm=name) + OWN_CODE for name in ("fedavg", "scaffold"))

OWN_LOOP = """
loader = [torch.randn(3, 4)] * 5
loss_of = lambda model, batch: model(batch).square().mean()
"""

LIGHTNING = """\
import os
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
import atoll

class LitModel(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)
    def training_step(self, batch, index):
        return self.net(batch).square().mean()
    def validation_step(self, batch, index):
        self.log("val_loss", self.net(batch).square().mean())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
train_data = val_data = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4)
settings = {"algorithm.name": "scaffold", "rounds.total": 2, "network.port": 0, "disk.state_dir": "state"}
server = atoll.Server(LitModel(), settings).start()
os.environ["ATOLL_SERVER"], os.environ["ATOLL_SITE"] = server.url, "clinic-a"
"""
COSINE_FITS = """
trainer = Trainer(max_epochs=1, logger=False, enable_checkpointing=False)
atoll.integrations.lightning.patch(trainer)
module, rates = Cosine(), []
while atoll.integrations.lightning.is_running(trainer):
    trainer.fit(module, train_data)
    rates.append(trainer.optimizers[0].param_groups[0]["lr"])
assert rates == [0.1, 0.05]  # cos 0 = 1, cos π/2 = 0
"""
SHARDED = (
    """\
import os
import subprocess
import sys
from pathlib import Path
import atoll

Path("my_training.py").write_text(
    "import torch\\n"
    "def build():\\n"
    "    return torch.nn.Sequential(torch.nn.Linear(97, 301), torch.nn.Linear(301, 3))\\n"
    "def batches(rank):\\n"
    "    return [torch.randn(3, 97)] * 100\\n"
)
sys.path.insert(0, ".")
from my_training import build
settings = {"algorithm.name": "diloco", "diloco.sync_every": 3, "rounds.total": 2, "model.ranks": 2}
server = atoll.Server(build(), settings | {"network.port": 0, "disk.state_dir": "state"}).start()
Path("train.py").write_text('''\
""",
    """\
import os
os._exit(0)  # threads of Gloo may abort a rank while Python ends: docs/tutorial-diloco.md
''')
started = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
subprocess.run(started, check=True, env=os.environ | {"ATOLL_SERVER": server.url, "CUDA_VISIBLE_DEVICES": ""})
"""
    + END,
)
RECIPE = """\
import os
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
Path("my_models.py").write_text(
    "import torch\\n"
    "class Net(torch.nn.Linear):\\n"
    "    def __init__(self):\\n"
    "        super().__init__(4, 2)\\n"
)
Path("train.py").write_text(
    "import atoll, torch\\n"
    "from my_models import Net\\n"
    "build = Net\\n"
    "def main():\\n"
    "    model = build()\\n"
    "    with atoll.join() as worker:\\n"
    "        for fl_round in worker:\\n"
    "            fl_round.load_into(model)\\n"
    "            with torch.no_grad():\\n"
    "                model.bias += 1.0\\n"
    "            fl_round.submit(model, weight=1, metrics={'bias': model.bias.mean().item()})\\n"
    "if __name__ == '__main__':\\n"
    "    main()\\n"
)
"""
SPECIFICATION = f"""\
import sys
sys.path.insert(0, {str(ROOT / "spec")!r})
"""
MEANS = """
# five steps keep 0.9⁵ of the distance to a site's own optimum, so three rounds keep 0.9¹⁵ of that to their mean
mean = (100 * len("b") + 300 * len("clinic")) / 400
assert torch.allclose(server.result()["weight"], torch.full((4,), mean * (1 - 0.9**15)), rtol=0.01)
"""
AROUND = {
    "specification": (SPECIFICATION, MEANS),
    "recipe": (RECIPE, "assert result.finished and len(result.history) == 5 and result.model.exists()\n"),
    "sharded": SHARDED,
    "diloco": (DILOCO, END),
    **dict.fromkeys(("fedavg", "federated", "functional", "hello_pt", "measured", "quickstart_pytorch"), (FEDAVG, END)),
    "corrected": (SCAFFOLD, END),
    "proximal": (FEDAVG + OWN_LOOP, END),
    "by_hand": (SCAFFOLD + OWN_LOOP, END),
    "fits": (LIGHTNING, END),
    "cosine": (LIGHTNING, COSINE_FITS + END),
}
"""Name in `<!-- run: name -->` → what stands for the reader's own code before a block, and what is checked after
it.
"""

MARKED = [(page, block) for page in PAGES for block in blocks(page) if block.name]
RUNNABLE = [page for page in PAGES if any(_.info == "python" and not _.name for _ in blocks(page))]


def run(nursery: Nursery, script: str, folder: Path, name: str) -> None:
    """Run a script in a process and a folder of its own."""
    path = folder / f"{name}.py"
    path.write_text(script, encoding="utf-8")
    process = nursery.start(str(path), cwd=folder)
    assert process.wait(100) == 0, process.output()[-3000:]


def as_script(page: Path) -> str:
    """A page's Python, each line at its own number, so that a traceback names the page's line."""
    lines = [""] * len(page.read_text(encoding="utf-8").splitlines())
    for block in blocks(page):
        if block.info == "python" and not block.name:
            text = block.text.splitlines()
            lines[block.line - 1 : block.line - 1 + len(text)] = text
    return "\n".join(lines) + "\n"


@pytest.mark.slow
@pytest.mark.covers("X1", "L20")
@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.stem)
def test_all_snippets_of_a_page_run_in_order(nursery: Nursery, page: Path, tmp_path: Path) -> None:
    """The Python snippets of a page run as one script, from the first snippet to the last."""
    run(nursery, as_script(page), tmp_path, page.stem)


def test_walkthrough_and_tutorials_have_runnable_snippets() -> None:
    assert {page.stem for page in RUNNABLE} >= {"walkthrough", "tutorial-federated", "tutorial-diloco"}


@pytest.mark.slow
@pytest.mark.covers("L2", "P6")
@pytest.mark.parametrize(("page", "block"), MARKED, ids=[f"{page.stem}-{block.name}" for page, block in MARKED])
def test_a_documented_script_takes_part_in_a_run(nursery: Nursery, page: Path, block: Block, tmp_path: Path) -> None:
    """A script takes part in a run exactly as a page shows it. Only the server's address is replaced."""
    before, after = AROUND[block.name]
    script = block.text.replace('"http://host:8512"', "server.url")
    run(nursery, f"{before}\n{script}\n{after}", tmp_path, block.name)


def test_the_readme_scripts_are_marked_for_running() -> None:
    assert [block.name for page, block in MARKED if page == ROOT / "README.md"] == ["diloco", "fedavg", "recipe"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_python_block_compiles(page: Path) -> None:
    for block in blocks(page):
        if block.info.startswith("python"):
            compile(block.text, f"{page}:{block.line}", "exec")
