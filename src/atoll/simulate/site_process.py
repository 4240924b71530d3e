"""A site of `atoll run` as a process of its own: trains with the bits of a simulated site, at a real server.

The process imports PyTorch and the script while the server starts, then waits for the server's address in a file.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path

import torch

from atoll.errors import end_with_one_line
from atoll.simulate.script import Script
from atoll.simulate.site_surroundings import SiteSeeds
from atoll.worker.training.federated_loop import seeded_by

POLL_S = 0.05


def main(address: Path, seed: int, threads: int, script: str, *arguments: str) -> None:
    """Load the script, wait for the server, and train as the site of the environment until the run has ended.

    Args:
        address: the file that will have the server's address.
        seed: the run's seed.
        threads: number of PyTorch threads.
        script: the training code, as `name_of` in script.py returns it.
        arguments: the script's arguments.
    """
    end_with_one_line()
    torch.set_num_threads(threads)
    seeds = SiteSeeds(seed)
    seeds.begin()
    loaded = Script(script, arguments)
    while not address.exists():
        time.sleep(POLL_S)
    os.environ["ATOLL_SERVER"] = address.read_text()
    seeds.begin(os.environ["ATOLL_SITE"])
    with seeded_by(seeds.begin):
        loaded.train()
    gc.freeze()  # otherwise the end of Python visits all objects of torch, which takes a second


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
