"""The programs in `bench/`: the reference they check against, what they sample, and small real runs."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import round_model
import torch
from harness import process_figures
from round_run import Bench, Processes, measure
from safetensors.torch import load_file

from atoll.errors import RunFailed

BENCH = Path(__file__).parents[3] / "bench"


@pytest.fixture
def figures_of(script, tmp_path: Path):
    """Run a program of `bench/`; what it prints as JSON. It leaves nothing in its folder."""

    def run(name: str, words: str) -> Any:
        folder = tmp_path / "here"
        folder.mkdir()
        outcome = script(f"bench/{name}.py", *words.split(), "--dir", str(folder), "--json")
        assert outcome.returncode == 0, outcome.stderr
        assert list(folder.iterdir()) == []
        return json.loads(outcome.stdout)

    return run


def test_the_bench_model_has_the_requested_size(tmp_path) -> None:
    """The bench's model has the requested number of bytes, divided among the requested number of tensors."""
    sizes = round_model.names_and_sizes(4 * 1003, 10)
    assert list(sizes.values()) == [101, 101, 101, 100, 100, 100, 100, 100, 100, 100]
    round_model.write_initial(tmp_path / "model.safetensors", sizes)
    written, loaded = load_file(tmp_path / "model.safetensors"), round_model.load(sizes)[1]
    assert written.keys() == loaded.keys()
    assert all(torch.equal(written[name], loaded[name]) for name in loaded)


def by_hand(rounds: int) -> dict[str, torch.Tensor]:
    """Two workers with weights 1 and 2: θ ← θ − (u₀/3 + 2·u₁/3), u_k = θ − (θ + 0.001·(k + 1)), in fp32."""
    _, model = round_model.load(round_model.names_and_sizes(4 * 300_000, 1))
    for tensor in model.values():
        for _ in range(rounds):
            total = (tensor - (tensor + 1e-3)) * (1 / 3)
            total.add_(tensor - (tensor + 2e-3), alpha=2 / 3)
            tensor.sub_(total)
    return model


def test_the_round_bench_notices_one_wrong_bit() -> None:
    """The round bench accepts a model with the exact mean, and rejects one with a wrong bit or a missing round."""
    for rounds in (1, 3):
        assert round_model.is_exact(by_hand(rounds), range(2), rounds, "none", "none")
    model = by_hand(2)
    assert not round_model.is_exact(model, range(2), 3, "none", "none")
    (tensor,) = model.values()
    tensor[299_999] = torch.nextafter(tensor[299_999], torch.tensor(9.0))
    assert not round_model.is_exact(model, range(2), 2, "none", "none")


def test_measures_the_anonymous_memory_of_a_process() -> None:
    """The bench measures the anonymous memory of a process. For a process that does not exist, the figure is 0."""
    before = process_figures.anonymous_kb(os.getpid())
    held = bytearray(b"x") * (64 * 2**20)
    after = process_figures.anonymous_kb(os.getpid())
    assert 60 * 1024 < after - before < 90 * 1024
    del held
    assert process_figures.anonymous_kb(2**22 + 1) == 0  # no such process


def test_the_memory_peak_excludes_memory_used_before() -> None:
    """The bench reports a memory peak relative to the memory in use when the measurement began: without further use it
    is 0 MB.
    """
    peaks = process_figures.Peaks()
    try:
        pid = os.getpid()
        peaks.begin(pid)
        peaks.end(pid)
        assert peaks.peak_mb(pid) == 0.0
    finally:
        peaks.close()


@pytest.mark.slow
@pytest.mark.covers("D8", "D9")
@pytest.mark.parametrize("codec", ["none", pytest.param("bf16", marks=pytest.mark.long)])
def test_the_round_bench_is_exact_and_reports_costs(figures_of, codec: str) -> None:
    """The round bench computes the exact mean, and reports each round's time, the bytes sent and the CPU time."""
    figures = figures_of("round", f"--gb 0.002 --workers 2 --rounds 3 --tensors 7 --codec {codec}")
    assert figures["exact"] is True
    assert len(figures["rounds_s"]) == 3
    update_bytes = 2_000_000 if codec == "none" else 1_000_000
    assert 6 * update_bytes <= figures["bytes_up"] < 6.1 * update_bytes  # 2 workers × 3 rounds
    assert 12_000_000 <= figures["bytes_down"] < 12_200_000
    assert set(figures["cpu_s"]) == {"server", "worker-000", "worker-001"}
    assert figures["settings"]["tensors"] == 7


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.covers("D8", "L16")
def test_int8_both_ways_sends_a_quarter_of_the_bytes(figures_of) -> None:
    """With the codec int8 for uploads and downloads, a round is exact and sends about a quarter of the bytes."""
    figures = figures_of("round", "--gb 0.002 --workers 2 --rounds 3 --codec int8 --downlink-codec int8")
    assert figures["exact"] is True
    assert 6 * 2_000_000 / 3.94 <= figures["bytes_up"] < 6 * 2_000_000 / 3.7
    # version 0 whole, then two of the three others as differences before the last is looked at
    assert 4_000_000 + 4 * 2_000_000 / 3.94 <= figures["bytes_down"] < 4_000_000 + 4 * 2_000_000 / 3.7


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.covers("D8", "D12")
def test_the_round_bench_compares_disk_with_memory(figures_of) -> None:
    """With `--compare`, the round bench runs on disk and in memory, and both runs give the same bits."""
    answer = figures_of("round", "--gb 0.002 --workers 2 --rounds 2 --tensors 3 --compare")
    assert answer["same_bits"] is True
    assert answer["disk"]["digest"] == answer["memory"]["digest"]
    assert answer["disk"]["exact"] is answer["memory"]["exact"] is True
    assert answer["disk"]["memory_files_mb"] == 0
    assert answer["memory"]["memory_files_mb"] >= 4 * 2  # two versions and two spools at least
    assert [answer[way]["settings"]["download_to_disk"] for way in ("disk", "memory")] == [True, False]


@pytest.mark.slow
@pytest.mark.long
def test_the_round_bench_prints_its_results_in_words(script, tmp_path: Path) -> None:
    """The round bench prints its results as sentences, not only as numbers."""
    arguments = ["--gb", "0.001", "--workers", "1", "--rounds", "1", "--no-disk-streaming"]
    outcome = script("bench/round.py", *arguments, "--dir", str(tmp_path))
    assert outcome.returncode == 0, outcome.stderr
    assert "MB of updates and versions" in outcome.stdout


@pytest.mark.slow
@pytest.mark.long
def test_a_terminated_bench_leaves_no_files(tmp_path: Path) -> None:
    """A bench program that is ended by SIGTERM removes its temporary files."""
    words = ["--gb", "0.05", "--workers", "1", "--rounds", "1000", "--dir", str(tmp_path)]
    process = subprocess.Popen([sys.executable, BENCH / "round.py", *words], stderr=subprocess.PIPE, text=True)
    assert "the rounds begin" in process.stderr.readline()
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.long
def test_the_bench_compares_many_tensors_with_few(figures_of) -> None:
    """The bench compares the rounds of a model with many tensors with the rounds of a model with few tensors."""
    answer = figures_of("round_of_many_tensors", "--gb 0.001 --rounds 2 --few 2 --many 20 --repeats 1")
    assert answer["exact"] is True
    assert answer["ratio"] > 0
    assert {tensors: len(rounds) for tensors, rounds in answer["rounds_s"].items()} == {"2": 1, "20": 1}


@pytest.mark.long
def test_the_bare_round_bench_moves_a_small_model(script, tmp_path: Path) -> None:
    words = ["--gb", "0.02", "--workers", "2", "--rounds", "2", "--dir", str(tmp_path)]
    outcome = script("bench/bare_round.py", *words)
    assert outcome.returncode == 0, outcome.stderr
    assert len(json.loads(outcome.stdout)["rounds_s"]) == 2


@pytest.mark.slow
def test_the_bench_reports_a_server_that_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the server process is killed, the bench's error contains the server's last words, and every process ends."""
    spawned: dict[str, subprocess.Popen[bytes]] = {}
    start = Processes.start

    def recorded(self: Processes, name: str, *arguments: Any) -> subprocess.Popen[bytes]:
        spawned[name] = start(self, name, *arguments)
        return spawned[name]

    def say(text: str) -> None:
        if "the rounds begin" in text:
            spawned["server"].kill()

    monkeypatch.setattr(Processes, "start", recorded)
    bench = Bench(gb=0.002, workers=2, rounds=3, tensors=7, folder=tmp_path)
    with pytest.raises(RunFailed, match=r"server ended with -9 before worker-000 had trained: .* listening on http"):
        measure(bench, say)
    assert all(process.poll() is not None for process in spawned.values())


# -- the stress program: where updates are kept, and where they are aggregated, makes no difference to a bit

RUNS = [
    pytest.param("--placement swarm", [("swarm", True)], id="disk"),
    pytest.param(
        "--placement swarm --compare", [("swarm", True), ("swarm", False)], id="compare", marks=pytest.mark.long
    ),
    pytest.param(
        "--placement both --no-disk-streaming",
        [("server", False), ("swarm", False)],
        id="both-in-memory",
        marks=pytest.mark.long,
    ),
]


@pytest.mark.slow
@pytest.mark.covers("D8", "D9", "D10", "P10")
@pytest.mark.parametrize(("chosen", "ways"), RUNS)
def test_every_stress_run_has_the_same_bits(figures_of, chosen: str, ways: list[tuple[str, bool]]) -> None:
    """All stress runs end with the same bits: on disk or in memory, at the server or in a swarm."""
    runs = figures_of("stress", f"--gb 0.004 --workers 2 --rounds 2 --tensors 7 {chosen}")
    assert [(run["settings"]["placement"], run["settings"]["download_to_disk"]) for run in runs] == ways
    assert all(run["exact"] for run in runs)  # bit for bit what a server's rounds give, too
    assert len({run["digest"] for run in runs}) == 1
    for run, (placement, _) in zip(runs, ways, strict=True):
        assert len(run["rounds_s"]) == 2
        assert set(run["workers_peak_anon_mb"]) == {"worker-000", "worker-001"}
        if placement == "swarm":  # of tensors only the initial model, once: 4 MB and its header
            assert run["server_bytes_up"] == 0
            assert 4_000_000 <= run["server_bytes_down"] < 4_010_000
            assert len(set(run["aggregators"])) == 2
        else:  # two updates a round, and three versions for each worker
            assert 16_000_000 <= run["server_bytes_up"] < 16_010_000
            assert 24_000_000 <= run["server_bytes_down"] < 24_040_000


@pytest.mark.covers("D8")
@pytest.mark.parametrize("same", [True, False])
def test_the_stress_bench_fails_if_bits_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], same: bool
) -> None:
    """The stress bench fails if its four runs do not end with the same digest.

    The four runs are on disk and in memory, each with aggregation at the server and in a swarm.
    """
    program = runpy.run_path(str(BENCH / "stress.py"))
    asked: list[tuple[str, bool]] = []

    def measured(bench: Bench, say: object) -> dict[str, Any]:
        asked.append((bench.placement, bench.download_to_disk))
        return {"digest": "0" if same else str(len(asked)), "exact": True}

    main = program["main"]
    monkeypatch.setitem(main.__globals__, "measure", measured)
    monkeypatch.setattr(sys, "argv", ["stress.py", "--placement", "both", "--compare", "--json"])
    if same:
        main()
    else:
        with pytest.raises(SystemExit, match="The result is not what it should be"):
            main()
    assert asked == [("server", True), ("server", False), ("swarm", True), ("swarm", False)]
    assert len(json.loads(capsys.readouterr().out)) == 4
