"""Low-communication training of a byte transformer: loss, bytes and wall time of each way, at equal tokens.

Four workers train on four parts of a text, 1,500 steps each (the slow one of an asynchronous run fewer, the others
more). Each way trains at its own best inner learning rate, found on a seed of its own. Every run but the first is a
real server with four DiLoCo loops over HTTP; the first is data-parallel training in one process: a step is AdamW on
the mean gradient of the four workers' batches. Its bytes are those of a ring all-reduce, 2·(n−1)/n·S each way for
every worker and step.

    python bench/quality/low_communication.py --text PATH             # a text file; by default Python's own sources
    python bench/quality/low_communication.py --only diloco --seeds 0 --more
    python bench/quality/low_communication.py --seeds --more          # the search for the best rates alone
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "demo"))

import torch
from demo_data import corpus
from demo_models import ByteTransformer, validation_loss
from low_communication_report import Runs, Tuning, best_rate, report
from low_communication_ways import (
    BATCH,
    CLIP,
    FAST_S,
    MARKS,
    MOST_RATES,
    NAME,
    OWN_TEXT,
    RATES,
    SLOW_S,
    STEPS,
    TRIED,
    TUNED_ON,
    WARMUP,
    WAYS,
    WINDOW,
    WORKERS,
    Inner,
    Way,
)
from results import FOLDER
from safetensors.torch import load_file
from torch import Tensor, nn

import atoll


def build(seed: int) -> ByteTransformer:
    """About 0.13 M parameters."""
    torch.manual_seed(seed)
    return ByteTransformer(width=64, layers=2, heads=4)


@dataclass(frozen=True)
class Data:
    """A text of bytes for each worker, and validation windows [N, WINDOW + 1] that none of them has."""

    texts: list[Tensor]
    validation: Tensor

    @classmethod
    def read(cls, path: Path | None) -> Data:
        """The file in parts: nine tenths for the workers, one after the other, the rest to measure by."""
        if path is None:
            texts, windows = corpus(WORKERS, seed=0)
            return cls(texts, windows[:, : WINDOW + 1])
        text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        cut = len(text) * 9 // 10
        starts = torch.linspace(cut, len(text) - WINDOW - 1, 192).long().tolist()
        windows = torch.stack([text[start : start + WINDOW + 1] for start in starts]).long()
        return cls(list(torch.chunk(text[:cut], WORKERS)), windows)

    def batches(self, worker: int, seed: int) -> Callable[[], Tensor]:
        """Asked for the next batch [BATCH, WINDOW + 1] of a worker; the same ones for a seed, whatever the way."""
        text, generator = self.texts[worker], torch.Generator().manual_seed(1000 * seed + worker)

        def following() -> Tensor:
            starts = torch.randint(len(text) - WINDOW - 1, (BATCH,), generator=generator).tolist()
            return torch.stack([text[start : start + WINDOW + 1] for start in starts]).long()

        return following


class Steps:
    """Steps of one model: AdamW, or Muon beside it; a short rise of the rate, then a cosine."""

    def __init__(self, model: ByteTransformer, inner: Inner, rate: float) -> None:
        self._model, self._inner, self._rate = model, inner, rate
        inside = [each for each in model.blocks.parameters() if each.dim() == 2] if inner.muon else []
        others = [each for each in model.parameters() if not any(each is its for its in inside)]
        groups = [
            {"params": [each for each in others if each.dim() >= 2], "weight_decay": inner.weight_decay},
            {"params": [each for each in others if each.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, betas=inner.betas)]
        if inside:
            decay = inner.weight_decay
            self.optimizers.append(torch.optim.Muon(inside, weight_decay=decay, adjust_lr_fn="match_rms_adamw"))

    def share(self, progress: float) -> float:
        """Share of the learning rate; `progress` from 0 to 1."""
        risen = progress * self._inner.steps / WARMUP
        if risen < 1:
            return risen
        floor = self._inner.floor
        return floor + (1 - floor) / 2 * (1 + math.cos(math.pi * min(1.0, progress)))

    def take(self, progress: float, *batches: Tensor) -> None:
        """One step on the mean loss of the batches."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._rate * self.share(progress)
        self._model.zero_grad()
        self._model.loss(torch.cat(batches)).backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), CLIP)
        for optimizer in self.optimizers:
            optimizer.step()


def data_parallel(inner: Inner, data: Data, seed: int, rate: float) -> dict[str, Any]:
    """Every step on the batches of all workers."""
    model, steps = build(seed), inner.steps
    mine, sources = Steps(model, inner, rate), [data.batches(worker, seed) for worker in range(WORKERS)]
    curve = []
    for step in range(steps):
        mine.take(step / steps, *(source() for source in sources))
        if (step + 1) % (steps // MARKS) == 0:
            curve.append([WORKERS * (step + 1), validation_loss(model, data.validation)])
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    each_way = WORKERS * steps * 2 * (WORKERS - 1) * nbytes / WORKERS
    return {"loss": curve[-1][1], "curve": curve, "up": each_way, "down": each_way, "seconds": None, "steps": steps}


class Pace:
    """How many steps were made by all together, and when each worker may go on."""

    def __init__(self, way: Way) -> None:
        self._way, self._lock, self.steps = way, threading.Lock(), 0
        self._due_s = [0.0] * WORKERS

    def wait(self, worker: int) -> None:
        """Let a step take its time."""
        if self._way.slow:
            duration_s = SLOW_S if worker == WORKERS - 1 else FAST_S
            now_s = time.monotonic()
            self._due_s[worker] = max(now_s, self._due_s[worker] + duration_s)
            time.sleep(self._due_s[worker] - now_s)

    def count(self) -> None:
        with self._lock:
            self.steps += 1


def run(way: Way, data: Data, seed: int, rate: float) -> dict[str, Any]:
    """One training at an inner learning rate: loss of the global model at the end and on its way, bytes, seconds."""
    if not way.settings:
        return data_parallel(way.inner, data, seed, rate)
    is_async, steps = way.settings.get("async.enabled"), way.inner.steps
    total, pace, model = WORKERS * steps, Pace(way), build(seed)
    with tempfile.TemporaryDirectory() as folder:
        rounds = 0 if is_async else steps // way.settings["diloco.sync_every"]
        options = {
            **way.settings,
            "rounds.total": rounds,
            "rounds.sites": WORKERS,
            "network.port": 0,
            "network.heartbeat_interval_s": 1.0,
        }
        server = atoll.Server(
            model, settings={"algorithm.name": "diloco", "disk.state_dir": Path(folder) / "state", **options}
        ).start()
        told: list[dict[str, float]] = [{} for _ in range(WORKERS)]
        step_s = [0.0] * WORKERS

        def work(worker: int) -> None:
            mine, following = build(seed), data.batches(worker, seed)
            stepping = Steps(mine, way.inner, rate)
            with atoll.DiLoCo(
                mine, stepping.optimizers, server=server.url, site=f"w{worker}", folder=Path(folder) / "workers"
            ) as diloco:
                began = time.monotonic()
                while (pace.steps < total) if is_async else (diloco.step < steps):
                    pace.wait(worker)
                    progress = pace.steps / total if is_async else diloco.step / steps
                    stepping.take(progress, following())
                    pace.count()
                trained_s = time.monotonic() - began - diloco.sync_metrics["seconds_waited"]
                step_s[worker] = trained_s / max(1, diloco.step)
            told[worker] = diloco.sync_metrics

        threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in range(WORKERS)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        probe, curve = build(seed), []

        def measure(path: Path) -> float:
            probe.load_state_dict(load_file(path), strict=False)
            return validation_loss(probe, data.validation)

        for mark in range(1, MARKS):
            while pace.steps < total * mark // MARKS and any(thread.is_alive() for thread in threads):
                time.sleep(0.05)
            curve.append([pace.steps, measure(server.save_state(Path(folder) / "now.safetensors"))])
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - began
        if is_async:
            path = server.save_state(Path(folder) / "now.safetensors")
        else:
            server.run()
            path = server.exports / "model.safetensors"
        curve.append([pace.steps, measure(path)])
        stale = server.status().staleness
        server.stop()
    return {
        "loss": curve[-1][1],
        "curve": curve,
        "up": sum(each["bytes_up"] for each in told),
        "down": sum(each["bytes_down"] for each in told),
        "seconds": seconds,
        "waited": sum(each["seconds_waited"] for each in told) / WORKERS,
        "steps": pace.steps / WORKERS,
        "step_s": step_s,
        "staleness": stale,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path, help="by default Python's own sources")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--only", nargs="*", choices=WAYS, default=list(WAYS), help="these ways")
    parser.add_argument(
        "--tried", nargs="*", choices=TRIED, default=[], help="these variants, on the seed of the search"
    )
    parser.add_argument("--more", action="store_true", help="keep the runs that docs/results has, and add these")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the results go")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("atoll").setLevel(logging.WARNING)
    data, settings = Data.read(options.text), described(options.text)
    runs: Runs = {name: [] for name in WAYS}
    tuning: Tuning = {name: {} for name in WAYS | TRIED}
    path = options.folder / f"{NAME}.json"
    if options.more and path.exists():
        document = json.loads(path.read_text())
        before, ways = document["settings"], document["settings"]["ways"]
        had, tried = document["figures"]["runs"], document["figures"]["tuning"]
        same = all(before.get(key) == value for key, value in settings.items() if key != "ways")
        if not same or any(ways[name] != settings["ways"].get(name) for name in had if had[name] or tried[name]):
            raise SystemExit(f"{path} has runs of other settings; leave --more out.")
        runs |= had
        tuning |= tried
    for name in [*options.only, *options.tried]:
        way = (WAYS | TRIED)[name]
        if way.tuned_as:
            continue
        for rate in untried(way.rates, tuning[name]):
            loss = run(way, data, TUNED_ON, rate)["loss"]
            tuning[name][f"{rate:g}"] = loss
            print(f"rate {rate:g} {name:15} loss {loss:.4f}", flush=True)
            report(runs, tuning, settings, options.folder)
    for seed, name in itertools.product(options.seeds, options.only):
        rate = best_rate(tuning[WAYS[name].tuned_as or name])
        runs[name] = [each for each in runs[name] if each["seed"] != seed]
        runs[name].append({"seed": seed, "rate": rate} | run(WAYS[name], data, seed, rate))
        last = runs[name][-1]
        print(f"seed {seed} {name:15} loss {last['loss']:.4f}, {last['seconds'] or 0:.0f} s", flush=True)
        report(runs, tuning, settings, options.folder)


def untried(rates: Iterable[float], losses: dict[str, float]) -> Iterator[float]:
    """The rates that a way has still to be tried with: `rates`, and some beyond them while the best is at an end.

    `losses` (rate → loss) grows while this goes on.
    """
    for rate in rates:
        if f"{rate:g}" not in losses:
            yield rate
    while len(losses) < MOST_RATES:
        tried = sorted(map(float, losses))
        best = best_rate(losses)
        if best not in (tried[0], tried[-1]):
            return
        yield best / 2 if best == tried[0] else best * 2


def described(text: Path | None) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "text": text.name if text else OWN_TEXT,
        "workers": WORKERS,
        "steps": STEPS,
        "batch": BATCH,
        "window": WINDOW,
        "rates": list(RATES),
        "tuned_on": TUNED_ON,
        "parameters": sum(parameter.numel() for parameter in build(0).parameters()),
        "fast_s": FAST_S,
        "slow_s": SLOW_S,
        "ways": {name: way.settings for name, way in WAYS.items()},
    }


if __name__ == "__main__":
    main()
