"""The demo: real processes that train; what is left of them is files."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from harness.processes import wait_until
from kit.processes import running_in

from atoll import child_processes
from atoll.child_processes import Children

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "demo"))

import demo
import demo_data
import demo_models
import demo_summary


def test_the_demo_transformer_sees_no_later_byte() -> None:
    """In the demo's transformer, changing a byte changes no output for an earlier byte."""
    # The model has about a million parameters, and its head shares the weight of the embedding.
    model = demo_models.byte_transformer().eval()
    assert 0.9e6 < sum(parameter.numel() for parameter in model.parameters()) < 1.2e6
    assert model.head.weight is model.embedding.weight
    text = torch.randint(256, (1, 16))
    changed = text.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    before, after = model(text), model(changed)
    assert torch.equal(before[0, :10], after[0, :10])
    assert not torch.equal(before[0, 10:], after[0, 10:])


def test_the_demo_holds_out_validation_text() -> None:
    """The demo splits its corpus between the sites, and no site has the text used for validation."""
    texts, windows = demo_data.corpus(3, seed=0)
    assert windows.shape == (192, demo_models.CONTEXT_BYTES + 1)
    sizes = [len(text) for text in texts]
    total = sum(path.stat().st_size for path in demo_data.standard_library())
    assert 0.85 * total < sum(sizes) < 0.91 * total
    assert min(sizes) > 0.2 * sum(sizes)
    needle = bytes(windows[100].to(torch.uint8).tolist())
    assert all(needle not in text.numpy().tobytes() for text in texts)


def test_the_demo_gives_sites_different_digits() -> None:
    """The demo divides all digits between its sites, with different shares of the labels."""
    sites, (test_images, test_labels) = demo_data.digits(4, seed=0)
    counts = [torch.bincount(labels, minlength=10) for _, labels in sites]
    assert sum(len(labels) for _, labels in sites) + len(test_labels) == 1797
    assert test_images.shape[1:] == (1, 8, 8)
    assert min(len(labels) for _, labels in sites) >= 20
    shares = torch.stack(counts).double()
    assert (shares / shares.sum(dim=0)).max() > 0.6  # one site has most of some digit


def test_the_demo_compares_traffic_with_a_ring_allreduce(tmp_path) -> None:
    """The demo's summary compares the bytes sent with those of a ring all-reduce."""
    # By hand: with 3 workers, 10 MB and 5 steps, a ring sends 2·(2/3)·10 MB·5 = 66.7 MB per worker. The demo's worker
    # sent 1 MB, which is 67 times less.
    (tmp_path / "a.json").write_text(json.dumps({"steps": 5, "bytes_up": 1_000_000, "bytes_down": 2_000_000}))
    demo = SimpleNamespace(workers=3, result_file=lambda site: tmp_path / f"{site}.json")
    status = SimpleNamespace(
        model_bytes=10_000_000, workers=[SimpleNamespace(site="a"), SimpleNamespace(site="that died")]
    )
    sent, ring = demo_summary.traffic(demo, status)
    assert sent == "each worker sent 1.0 MB and received 2.0 MB in 5 local steps"
    assert "66.7 MB each, 67 × as much" in ring


def test_the_demo_kills_processes_that_ignore_sigterm(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(child_processes, "GRACE_S", 0.2)
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(60)"
    )
    with Children() as group:
        process = group.spawn("stubborn", ["-c", stubborn], environment=os.environ, log=tmp_path / "log")
        wait_until((tmp_path / "log").read_text, "its first word")
    assert process.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.covers("X1", "X4")
def test_the_federated_demo_writes_its_results_and_ends(script, tmp_path) -> None:
    """The federated demo writes its model, metrics, plot and logs, and leaves none of its processes running."""
    outcome = script(
        "examples/demo/demo.py", "--algorithm", "fedavg", "--dir", "demo", "--rounds", "3", "--workers", "2"
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert "round  3 of 3" in outcome.stdout
    lines = outcome.stdout.splitlines()
    assert lines[0].endswith(f"2 workers start, which takes some seconds; logs and results go to {tmp_path / 'demo'}")
    said = next(number for number, line in enumerate(lines) if "measuring the final model" in line)
    # an empty line between the two
    assert next(line for line in lines[: said - 1][::-1] if "all rounds are done" not in line).split()[2:4] == [
        "round",
        "3",
    ]
    time_line = next(number for number, line in enumerate(lines) if line.startswith("time: "))
    assert "from the start of the processes to their end" in lines[time_line + 1]
    assert "data-parallel training would have sent" in outcome.stdout
    folder = tmp_path / "demo"
    files = {"model.safetensors", "metrics.jsonl", "loss.png", "server.log", "site-1.log", "site-2.log"}
    assert {path.name for path in folder.iterdir()} == files
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    accuracy = float(outcome.stdout.split("at the start, ")[1].split()[0])
    assert accuracy > 0.5
    assert running_in(tmp_path) == []


@pytest.mark.slow
@pytest.mark.covers("X1")
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_every_process_of_the_demo(tmp_path) -> None:
    folder = tmp_path / "demo"
    argv = [sys.executable, Path(demo_data.__file__).with_name("demo.py"), "--dir", folder, "--workers", "2"]
    process = subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_until(lambda: len(running_in(tmp_path)) == 4, "the demo, its server and two workers", 60)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert "every process has ended" in output
    assert running_in(tmp_path) == []
    assert not (folder / ".work").exists()


@pytest.mark.covers("X3")
@pytest.mark.parametrize("source", [demo.__file__, demo_data.__file__], ids=["usage", "error"])
def test_the_demo_accepts_the_options_that_it_advises(source: str) -> None:
    """The demo accepts the options that its own usage text and its own errors recommend."""
    text = Path(source).read_text(encoding="utf-8")
    advised = re.findall(r"examples/demo/demo\.py (--[^\n\".]+)", text)
    assert advised == ["--algorithm fedavg"]
    app = typer.Typer()
    app.command()(demo.main)
    typer.main.get_command(app).make_context("demo", advised[0].split())


def test_the_demo_refuses_a_folder_that_has_files(script, tmp_path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    outcome = script("examples/demo/demo.py", "--dir", "full")
    assert outcome.returncode == 2
    assert "not an empty folder" in outcome.stderr
