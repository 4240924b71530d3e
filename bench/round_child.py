"""The processes of `bench/round.py`: a server, and workers whose training is an addition.

Each says where it stands by a line of JSON on standard output, and waits for a line on standard input before it goes
on: so the parent takes baselines while nothing moves.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any


def tell(mark: str, **values: Any) -> None:
    """Say that a mark was reached, and wait until the parent has seen it."""
    print(json.dumps({"mark": mark, **values}), flush=True)
    if not sys.stdin.readline():
        raise SystemExit(f"the parent is gone at {mark!r}")


def write(options: dict[str, Any]) -> None:
    """Write the initial model; in a process of its own, so that the parent stays small beside those it measures."""
    import round_model

    sizes = round_model.names_and_sizes(options["total_bytes"], options["tensors"])
    round_model.write_initial(Path(options["path"]), sizes)
    tell("written")


def serve(options: dict[str, Any]) -> None:
    """Serve the run until the parent says that it has seen enough."""
    import torch  # noqa: F401  the baseline is what a process has that has imported everything

    from atoll import Settings
    from atoll.errors import AtollError
    from atoll.runtime import return_freed_memory
    from atoll.server import serve
    from atoll.server.coordinator import coordinator  # noqa: F401

    return_freed_memory()  # as `atoll server` does
    settings = Settings.build(options["settings"])
    tell("imported")
    server = serve.Server(settings=settings).start()
    stopping = threading.Event()

    def watch() -> None:
        """A run that failed ends this process: the workers would try again for ever, and the parent wait for them."""
        try:
            server.run()
        except AtollError as error:
            if not stopping.is_set():
                print(error, file=sys.stderr, flush=True)
                os._exit(error.exit_code)

    threading.Thread(target=watch, daemon=True).start()
    tell("listening", url=server.url)
    stopping.set()
    server.stop()


def work(options: dict[str, Any]) -> None:
    """Take part in every round, then check the model of the last one."""
    import round_model
    import torch
    from blake3 import blake3

    from atoll.tensors.chunks import bytes_of
    from atoll.worker.training.federated_loop import join

    torch.set_num_threads(1)
    index, rounds = int(options["index"]), int(options["rounds"])
    flat, model = round_model.load(round_model.names_and_sizes(options["total_bytes"], options["tensors"]))
    tell("loaded")
    cpu_before, times = _cpu_s(), []
    with join(swarm=True) as worker:
        round_: Any
        for number, round_ in enumerate(worker):
            opened_s = time.monotonic()
            if number == rounds:
                times.append({"opened_s": opened_s})
                figures = {"times": times, "bytes_up": worker.bytes_up, "bytes_down": worker.bytes_down}
                tell("trained", cpu_s=_cpu_s() - cpu_before, **figures)
                round_.load_into(model)
                workers = range(options["workers"])
                exact = round_model.is_exact(model, workers, rounds, options["codec"], options["downlink_codec"])
                tell("checked", exact=exact, digest=blake3(bytes_of(flat)).hexdigest())
                break
            round_.load_into(model)
            pulled_s = time.monotonic()
            round_model.train_(flat, index)
            trained_s = time.monotonic()
            round_.submit(model, weight=round_model.weight_of(index))
            submitted_s = time.monotonic()
            times.append(
                {
                    "opened_s": opened_s,
                    "pull_s": pulled_s - opened_s,
                    "train_s": trained_s - pulled_s,
                    "submit_s": submitted_s - trained_s,
                    "submitted_s": submitted_s,
                }
            )


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """`python round_child.py write|serve|work OPTIONS.json`."""
    role, path = sys.argv[1:]
    options = json.loads(Path(path).read_text(encoding="utf-8"))
    {"write": write, "serve": serve, "work": work}[role](options)
    sys.stdout.flush()
    os._exit(0)  # nothing is left to do; a large model need not be given back piece by piece


if __name__ == "__main__":
    main()
