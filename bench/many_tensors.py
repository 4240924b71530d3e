"""Objects of many small tensors against objects of few large ones of the same total: publish, fetch, load.

Both ends are this process. Seconds of CPU, all threads: on a machine that does other work, too, they are what can be
compared; each is the least of the repetitions, which take turns.

    python bench/many_tensors.py --gb 1
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import atoll

FEW, MANY = 50, 5000


def once(tensors: dict[str, torch.Tensor], publisher: atoll.objects.Publisher, folder: Path) -> dict[str, float]:
    """CPU seconds of each step, for one object."""
    took: dict[str, float] = {}

    def timed(step: str, work: Callable[[], Any]) -> Any:
        gc.collect()  # what the steps before have left is not this one's
        begin = time.process_time()
        result = work()
        took[step] = time.process_time() - begin
        return result

    ref = timed("publish", lambda: publisher.publish(tensors))
    state = timed("fetch", lambda: atoll.objects.fetch(ref))
    timed("fetch into", lambda: atoll.objects.fetch(ref, into=state))
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())
    state.clear()
    lazy = timed("fetch to disk", lambda: atoll.objects.fetch(ref, to_disk=folder))
    timed("load", lambda: [lazy[name] for name in lazy])
    took["lazily, both"] = took["fetch to disk"] + took["load"]
    lazy.release()
    publisher.withdraw(ref)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="of each object, in 10⁹ bytes")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--dir", default=None, help="for files while it runs")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    each = {count: max(1, int(given.gb * 1e9) // 4 // count) for count in (FEW, MANY)}
    took: dict[int, list[dict[str, float]]] = {FEW: [], MANY: []}
    with tempfile.TemporaryDirectory(dir=given.dir) as name, atoll.objects.Publisher(folder=name) as publisher:
        for repetition in range(given.repetitions + 1):
            for count, numel in each.items():
                tensors = {f"layer.{i}.weight": torch.full((numel,), float(i)) for i in range(count)}
                found = once(tensors, publisher, Path(name))
                if repetition:  # the first one warms up
                    took[count].append(found)
    least = {count: {step: min(row[step] for row in rows) for step in rows[0]} for count, rows in took.items()}
    if given.json:
        print(json.dumps({str(count): steps for count, steps in least.items()}))
        return
    print(f"{given.gb:g} GB, least CPU s    {FEW} tensors    {MANY} tensors    ratio")
    for step in least[FEW]:
        few, many = least[FEW][step], least[MANY][step]
        print(f"{step:22} {few:12.3f} {many:14.3f} {many / few:9.2f}")


if __name__ == "__main__":
    main()
