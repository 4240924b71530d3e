"""A demo: one server and several workers, real processes on this machine, train a real model.

    python examples/demo/demo.py
    python examples/demo/demo.py --algorithm fedavg

The server is `atoll server`, the workers are training scripts (`demo_worker.py`). This process starts them, shows the
server's status, and prints a summary at the end.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import demo_summary
import typer
from demo_view import View, make_view

from atoll.child_processes import Children, Terminated, raise_on_sigterm
from atoll.cli.main import run_command
from atoll.errors import AtollError, RunFailed, ServerUnreachable, UsageError

if TYPE_CHECKING:
    from atoll.protocol import status_messages

HERE = Path(__file__).parent
POLL_S = 0.5
START_S = 60.0
END_S = 45.0


class Algorithm(StrEnum):
    diloco = "diloco"
    fedavg = "fedavg"


@dataclass(frozen=True)
class Demo:
    """What one demo is made of.

    Attributes:
        metric: the measure of the global model, as workers report it; of the version a round began with.
        metric_name: the same for people.
    """

    algorithm: str
    model: str
    rounds: int
    workers: int
    sync_every: int
    seed: int
    folder: Path
    metric: str
    metric_name: str

    @property
    def work(self) -> Path:
        """What is only needed while it runs."""
        return self.folder / ".work"

    def result_file(self, site: str) -> Path:
        return self.work / f"{site}.json"


KINDS = {
    "diloco": {
        "model": "demo_models:byte_transformer",
        "rounds": 14,
        "workers": 3,
        "metric": "validation_loss",
        "metric_name": "validation loss",
    },
    "fedavg": {
        "model": "demo_models:digits_net",
        "rounds": 20,
        "workers": 4,
        "metric": "test_accuracy",
        "metric_name": "test accuracy",
    },
}


def main(
    algorithm: Annotated[
        Algorithm,
        typer.Option(help="diloco: a byte-level transformer on Python's sources; fedavg: a CNN on handwritten digits."),
    ] = Algorithm.diloco,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Folder for the results, new or empty.", show_default="atoll-demo/ALGORITHM-TIME"),
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds.", show_default="14, fedavg: 20")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, max=32, help="Worker processes.", show_default="3, fedavg: 4")
    ] = None,
    sync_every: Annotated[int, typer.Option(min=1, help="Local steps between two synchronisations (diloco).")] = 30,
    seed: Annotated[int, typer.Option(help="Of the initial model, the split of the data and the batches.")] = 0,
) -> None:
    """Train a real model across real processes on this machine, and watch it."""
    kind = KINDS[algorithm.value]
    _require_extras(algorithm.value)
    demo = Demo(
        algorithm=algorithm.value,
        model=str(kind["model"]),
        rounds=rounds or int(str(kind["rounds"])),
        workers=workers or int(str(kind["workers"])),
        sync_every=sync_every,
        seed=seed,
        folder=_folder(directory, algorithm.value),
        metric=str(kind["metric"]),
        metric_name=str(kind["metric_name"]),
    )
    raise_on_sigterm()
    try:
        run(demo)
    except (KeyboardInterrupt, Terminated) as asked:
        print(f"\nInterrupted; every process has ended. What there is lies in {demo.folder}.", flush=True)
        raise typer.Exit(128 + (signal.SIGINT if isinstance(asked, KeyboardInterrupt) else signal.SIGTERM)) from None
    finally:
        shutil.rmtree(demo.work, ignore_errors=True)


def run(demo: Demo) -> None:
    """Run a demo from the first process to the summary."""
    demo.work.mkdir(parents=True)
    begin = time.monotonic()
    with Children() as children:
        with make_view(demo) as view:
            view.say(
                f"one server and {demo.workers} workers start, which takes some seconds; "
                f"logs and results go to {demo.folder}"
            )
            server = _start_server(demo, children)
            address = _address(demo.folder / "server.log", server)
            sites = _start_workers(demo, children, address)
            _watch(demo, children, sites, address, view)
            _let_processes_end(demo, children, address, view)
            view.rounds_done(demo_summary.rounds_of(demo))
        seconds = time.monotonic() - begin
    demo_summary.show(demo, view.status, seconds)


def _require_extras(algorithm: str) -> None:
    from importlib.util import find_spec

    missing = [name for name in ("matplotlib", *(["sklearn"] if algorithm == "fedavg" else [])) if not find_spec(name)]
    if missing:
        raise UsageError(f"The demo needs {' and '.join(missing)}.", "pip install 'atoll[demo]'")


def _folder(given: Path | None, algorithm: str) -> Path:
    folder = given or Path("atoll-demo") / time.strftime(f"{algorithm}-%Y%m%d-%H%M%S")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{str(folder)!r} is not an empty folder.", "Give --dir a new one.")
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


# -- processes


def _environment(**more: str) -> dict[str, str]:
    """Of a child: one thread of torch, since the processes share the cores, and no ATOLL_* from outside."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("ATOLL_")}
    path = os.pathsep.join(filter(None, (str(HERE), inherited.get("PYTHONPATH"))))  # the server builds the demo's model
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return inherited | one_thread | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": path} | more


def _start_server(demo: Demo, children: Children) -> subprocess.Popen[bytes]:
    settings = {
        "run.name": f"demo-{demo.algorithm}",
        "model.source": demo.model,
        "run.seed": demo.seed,
        "algorithm.name": demo.algorithm,
        "rounds.total": demo.rounds,
        "rounds.sites": demo.workers,
        "rounds.min_sites": 1,  # a worker that ends is not started again here
        "diloco.sync_every": demo.sync_every,
        "network.port": 0,
        "network.heartbeat_interval_s": 0.5,
        "network.heartbeat_timeout_s": 10,
        "disk.state_dir": demo.work / "state",
        "disk.export_dir": demo.folder,
        "disk.min_free_bytes": 0,
    }
    argv = ["-m", "atoll.cli.main", "server", *(f"--set={key}={value}" for key, value in settings.items())]
    return children.spawn("server", argv, environment=_environment(), log=demo.folder / "server.log")


def _address(log: Path, server: subprocess.Popen[bytes]) -> str:
    """Where the server listens, as its log says.

    Raises:
        RunFailed: it ended, or said nothing for a minute.
    """
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        text = log.read_text(encoding="utf-8", errors="replace")
        if found := re.search(r"listening on (\S+)", text):
            return found.group(1)
        if server.poll() is not None:
            raise RunFailed(
                f"The server ended with {server.returncode}: {_last_line(log)}", f"{log} has the whole story."
            )
        time.sleep(0.05)
    raise RunFailed(f"The server printed no address within {START_S:g} s.", f"See {log}.")


def _start_workers(demo: Demo, children: Children, address: str) -> list[str]:
    sites = [f"site-{index + 1}" for index in range(demo.workers)]
    for index, site in enumerate(sites):
        own = [demo.algorithm, str(index), str(demo.workers), str(demo.seed), str(demo.result_file(site))]
        environment = _environment(ATOLL_SERVER=address, ATOLL_SITE=site, ATOLL_DIR=str(demo.work / "workers"))
        argv = [str(HERE / "demo_worker.py"), *own]
        children.spawn(site, argv, environment=environment, log=demo.folder / f"{site}.log")
    return sites


def _watch(demo: Demo, children: Children, sites: list[str], address: str, view: View) -> None:
    """Show what happens until the run is finished; a worker that dies is told of, and the others go on."""
    gone: set[str] = set()
    while (status := _status(demo, children, address)) is not None:
        view.update(status)
        if status.finished:
            return
        for site in sites:
            code = children.processes[site].poll()
            if code is not None and site not in gone:
                gone.add(site)
                log = demo.folder / f"{site}.log"
                why = (
                    f"was killed ({signal.Signals(-code).name})"
                    if code < 0
                    else f"ended with {code}: {_last_line(log)}"
                )
                view.say(f"{site} {why}; {'the others go on' if len(gone) < len(sites) else 'no site is left'}")
        if len(gone) == len(sites):
            raise RunFailed(
                "Every worker has ended before the run was finished.", f"Look into {demo.folder}/site-*.log."
            )
        time.sleep(POLL_S)


def _status(demo: Demo, children: Children, address: str) -> status_messages.Status | None:
    """The server's status; None once it has ended well, which a short run may have done between two questions.

    Raises:
        RunFailed: the server has ended with an error.
    """
    from atoll.protocol import routes, status_messages
    from atoll.transport.http_client import ask

    try:
        return ask(address, routes.STATUS, status_messages.Status)
    except ServerUnreachable:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = children.processes["server"].wait(END_S)
            if code == 0:
                return None
            log = demo.folder / "server.log"
            raise RunFailed(f"The server ended with {code}: {_last_line(log)}", f"{log} has more.") from None
        raise


def _let_processes_end(demo: Demo, children: Children, address: str, view: View) -> None:
    """Let every process end by itself, and show what happened since the last look."""
    end = time.monotonic() + END_S
    last = None
    while time.monotonic() < end and any(process.poll() is None for process in children.processes.values()):
        with contextlib.suppress(AtollError):  # it has stopped, which is what is waited for
            last = _status(demo, children, address) or last
        time.sleep(0.1)
    if last is not None:
        view.update(last)


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
