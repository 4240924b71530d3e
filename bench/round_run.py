"""One run of `bench/round.py`: starts the processes, watches their memory, puts their times together."""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import urllib3
from harness.process_figures import Peaks, cpu_s, memory_files_bytes
from kit.tls import write_certificate

from atoll.errors import RunFailed, UsageError
from atoll.protocol import routes
from atoll.protocol.invitation import Invitation
from atoll.transport.authority_files import authority_file
from atoll.transport.enrolment import enrol

TOKEN = "t" * 43
"""The run's token, where workers show one."""

LOOK_S = 0.5
"""Between two looks at whether the server is there, while a worker is waited for."""


@dataclass(frozen=True)
class Bench:
    """What is measured.

    Attributes:
        gb: of the model, in 10⁹ bytes.
        downlink_codec: how versions go down.
        folder: where files go while it runs; by default the system's temporary folder.
        download_to_disk: as the setting: false keeps updates and versions in memory where rounds are aggregated.
        placement: as the setting: where that is.
        tls: whether the connections are encrypted, with a certificate made for this run.
        credential: what the workers show: nothing, the token of the run, or a certificate of their own (with TLS).
        policy: whether the workers have a policy, which limits nothing, and an egress log.
    """

    gb: float
    workers: int
    rounds: int
    tensors: int
    codec: str = "none"
    downlink_codec: str = "none"
    durability: str = "process"
    folder: Path | None = None
    download_to_disk: bool = True
    placement: str = "server"
    tls: bool = False
    credential: str = "none"
    policy: bool = False

    @property
    def total_bytes(self) -> int:
        return int(self.gb * 1e9)

    @property
    def disk_bytes(self) -> int:
        """The initial model, some versions, and per worker a spool, a base file and an outbox.

        More where less travels; in memory the initial model, and per worker a base file, an outbox and the result.
        """
        if not self.download_to_disk:
            return self.total_bytes * (1 + 3 * self.workers)
        more = self.downlink_codec != "none"  # masters and deltas at the server, a delta at each worker
        return self.total_bytes * (5 + 6 * more + (3 + more) * self.workers)


def measure(bench: Bench, say: Callable[[str], None]) -> dict[str, Any]:
    """Run it; returns the figures, as `bench/round.py --json` prints them.

    Raises:
        RunFailed: a process ended early; its last words are told.
        UsageError: the disk is too small, or something is asked for none times.
    """
    for what in ("workers", "rounds", "tensors", "total_bytes"):
        if (count := getattr(bench, what)) < 1:
            raise UsageError(f"A bench with {what} {count} measures nothing.", "Give 1 or more.")
    with tempfile.TemporaryDirectory(prefix="atoll-bench-", dir=bench.folder, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        _require_space(bench, folder)
        peaks = Peaks()
        try:
            with Processes() as processes:
                return _Conductor(bench, folder, processes, peaks, say).conduct()
        finally:
            peaks.close()


def steady(rounds: Sequence[float]) -> Sequence[float]:
    """Of figures by round those behind the first two, which write into files that are new; all where there are no more.

    The second one also waits for what the first has left to be written to the disk.
    """
    return rounds[2:] or rounds[1:] or rounds


def _require_space(bench: Bench, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < bench.disk_bytes:
        raise UsageError(
            f"{folder.parent} has {free / 1e6:.1f} MB free; this needs about {bench.disk_bytes / 1e6:.1f} MB.",
            "Name another folder with --dir.",
        )


class Processes(dict[str, subprocess.Popen[bytes]]):
    """Processes by name, with pipes for input and output. What still runs at the end of the block is ended."""

    def start(self, name: str, argv: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Start a process with this standard error, in a session of its own: Ctrl-C ends it through this process."""
        with log.open("wb") as errors:
            self[name] = subprocess.Popen(
                argv,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        return self[name]

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self.values()):
            process.terminate()
        for process in self.values():
            with process:  # closes its pipes
                try:
                    process.wait(5.0)
                except subprocess.TimeoutExpired:
                    process.kill()


class _Child:
    """A process that says where it stands and waits to be told to go on."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, server: _Child | None) -> None:
        """`server`: the server that a worker needs; if it has ended, do not wait for the worker."""
        self.process, self.log, self._server = process, log, server

    def expect(self, mark: str) -> dict[str, Any]:
        """The line in which it reports `mark`."""
        assert self.process.stdout is not None
        said_something = select.poll()  # `select` takes no descriptor above 1,023
        said_something.register(self.process.stdout, select.POLLIN)
        while not said_something.poll(1e3 * LOOK_S):
            if self._server is not None and self._server.process.poll() is not None:
                raise self._server.ended(f"{self.log.stem} had {mark}")
        line = self.process.stdout.readline()
        said: dict[str, Any] = json.loads(line) if line.startswith(b"{") else {}
        if said.get("mark") != mark:
            raise self.ended(f"it had {mark}")
        return said

    def ended(self, before: str) -> RunFailed:
        """That it has ended too early."""
        code = self.process.wait()
        said = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        last = "".join(said).rstrip(".") or "no word"
        return RunFailed(f"{self.log.stem} ended with {code} before {before}: {last}.")

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()


class _Conductor:
    def __init__(
        self, bench: Bench, folder: Path, processes: Processes, peaks: Peaks, say: Callable[[str], None]
    ) -> None:
        self.bench, self.folder, self.processes, self.peaks, self.say = bench, folder, processes, peaks, say

    def conduct(self) -> dict[str, Any]:
        bench = self.bench
        server, url = self._server()
        workers = [self._worker(index, server, url) for index in range(bench.workers)]
        for worker in workers:
            worker.expect("loaded")
            self.peaks.begin(worker.process.pid)
        self.say(f"{bench.workers} workers hold {bench.gb:g} GB in {bench.tensors} tensors; the rounds begin")
        server_cpu_s = cpu_s(server.process.pid)
        for worker in workers:
            worker.go()
        trained = [worker.expect("trained") for worker in workers]
        server_cpu_s = cpu_s(server.process.pid) - server_cpu_s
        for child in (server, *workers):
            self.peaks.end(child.process.pid)
        self.say("the rounds are done; every worker checks its model")
        for worker in workers:
            worker.go()
        exact, digests = [], set()
        for worker in workers:
            checked = worker.expect("checked")
            exact.append(bool(checked["exact"]))
            digests.add(str(checked["digest"]))
            worker.go()
        holding = [server] if bench.placement == "server" else workers
        in_memory_mb = max(memory_files_bytes(child.process.pid) for child in holding) / 1e6
        ca = self.folder / "ca.pem" if bench.tls or bench.credential == "certificate" else None
        reader = self.folder / "state" / "reader.token"
        token = reader.read_text().strip() if reader.exists() else TOKEN
        through = _status(url, ca, token)
        for worker in workers:
            worker.process.wait()
        server.go()
        server.process.wait()
        figures = self._figures(server, workers, trained, server_cpu_s, all(exact) and len(digests) == 1)
        return figures | {
            "memory_files_mb": round(in_memory_mb, 1),
            "server_bytes_up": through["bytes_up"],
            "server_bytes_down": through["bytes_down"],
            "aggregators": [summary["aggregator"] for summary in through["history"]],
            "digest": min(digests),
        }

    def _server(self) -> tuple[_Child, str]:
        bench = self.bench
        settings = {
            "run.name": "bench",
            "model.source": str(self.folder / "initial.safetensors"),
            "algorithm.name": "fedavg",
            "rounds.total": 0,
            "rounds.sites": bench.workers,
            "rounds.min_sites": bench.workers,
            "aggregation.upload_codec.name": bench.codec,
            "aggregation.download_codec.name": bench.downlink_codec,
            "disk.durability": bench.durability,
            "network.port": 0,
            "disk.state_dir": str(self.folder / "state"),
            "disk.min_free_bytes": 0,
            "disk.in_files": bench.download_to_disk,
            "swarm.enabled": bench.placement == "swarm",
        }
        if bench.credential == "certificate":
            settings["trust.required"] = True
        elif bench.tls:
            settings |= {name: str(path) for name, path in write_certificate(self.folder, "127.0.0.1").items()}
        self._initial()
        token = {"ATOLL_TOKEN": TOKEN} if bench.credential == "token" else {}
        child = self._spawn("server", "serve", {"settings": settings}, threads=None, variables=token)
        child.expect("imported")
        self.peaks.begin(child.process.pid)
        child.go()
        url = str(child.expect("listening")["url"])
        if bench.credential == "certificate":
            self._enrol(url)
        return child, url

    def _enrol(self, url: str) -> None:
        """Let each worker have a certificate of its own, as with `atoll invite` and `atoll enrol`."""
        state = self.folder / "state"
        shutil.copy(authority_file(state), self.folder / "ca.pem")
        admin = (state / "admin.token").read_text().strip()
        with urllib3.PoolManager(ca_certs=str(self.folder / "ca.pem")) as pool:
            for index in range(self.bench.workers):
                answer = pool.request(
                    "POST",
                    f"{url}{routes.INVITE}",
                    json={"site": name_of(index)},
                    headers={"Authorization": f"Bearer {admin}"},
                )
                enrol(Invitation.parse(answer.json()["invitation"]), self.folder / "credentials" / name_of(index))

    def _initial(self) -> None:
        """Written by a process of its own, so that this one stays small beside those that are measured."""
        options = {
            "path": str(self.folder / "initial.safetensors"),
            "total_bytes": self.bench.total_bytes,
            "tensors": self.bench.tensors,
        }
        child = self._spawn("initial", "write", options, threads=1)
        child.expect("written")
        child.go()

    def _worker(self, index: int, server: _Child, url: str) -> _Child:
        of_the_bench = ("workers", "rounds", "total_bytes", "tensors", "codec", "downlink_codec")
        options = {"index": index, **{key: getattr(self.bench, key) for key in of_the_bench}}
        name = name_of(index)
        more = {"ATOLL_SERVER": url, "ATOLL_SITE": name, "ATOLL_DIR": str(self.folder / "workers")}
        if self.bench.credential == "certificate":
            more["ATOLL_CREDENTIAL"] = str(self.folder / "credentials" / name)
        elif self.bench.tls:
            more["ATOLL_TLS_CA"] = str(self.folder / "ca.pem")
        if self.bench.credential == "token":
            more["ATOLL_TOKEN"] = TOKEN
        if self.bench.policy:
            policy = self.folder / "policy.toml"
            policy.write_text('[log]\nfolder = "egress"\n', encoding="utf-8")
            more["ATOLL_POLICY"] = str(policy)
        return self._spawn(name, "work", options, threads=1, server=server, variables=more)

    def _spawn(
        self,
        name: str,
        role: str,
        options: dict[str, Any],
        threads: int | None,
        server: _Child | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> _Child:
        path, log = self.folder / f"{name}.json", self.folder / f"{name}.log"
        path.write_text(json.dumps(options), encoding="utf-8")
        argv = [sys.executable, str(Path(__file__).with_name("round_child.py")), role, str(path)]
        return _Child(self.processes.start(name, argv, _environment(threads) | dict(variables or {}), log), log, server)

    def _figures(
        self, server: _Child, workers: list[_Child], trained: list[dict[str, Any]], server_cpu_s: float, exact: bool
    ) -> dict[str, Any]:
        rounds = self.bench.rounds
        times = [said["times"] for said in trained]
        # a round is over when the last worker holds the ticket of the next one; all processes read the same clock
        opened = [max(mine[number]["opened_s"] for mine in times) for number in range(rounds + 1)]
        rounds_s = [after - before for before, after in itertools.pairwise(opened)]

        def phase(key: str) -> float:
            values = [max(mine[number][key] for mine in times) for number in range(rounds)]
            return round(float(statistics.median(steady(values))), 4)

        close = [opened[n + 1] - max(mine[n]["submitted_s"] for mine in times) for n in range(rounds)]
        settings = asdict(self.bench) | {"folder": str(self.bench.folder or tempfile.gettempdir())}
        return {
            "steady_round_s": round(statistics.median(steady(rounds_s)), 4),
            "rounds_s": [round(seconds, 4) for seconds in rounds_s],
            "server_peak_anon_mb": round(self.peaks.peak_mb(server.process.pid), 1),
            "worker_peak_anon_mb": round(max(self.peaks.peak_mb(worker.process.pid) for worker in workers), 1),
            "workers_peak_anon_mb": {
                name_of(index): round(self.peaks.peak_mb(worker.process.pid), 1) for index, worker in enumerate(workers)
            },
            "bytes_up": sum(int(said["bytes_up"]) for said in trained),
            "bytes_down": sum(int(said["bytes_down"]) for said in trained),
            "cpu_s": {
                "server": round(server_cpu_s, 2),
                **{name_of(index): round(said["cpu_s"], 2) for index, said in enumerate(trained)},
            },
            "exact": exact,
            "phases": {
                "pull_s": phase("pull_s"),
                "train_s": phase("train_s"),
                "submit_s": phase("submit_s"),
                "close_s": round(statistics.median(steady(close)), 4),
            },
            "settings": settings,
        }


def _status(url: str, ca: Path | None, token: str) -> dict[str, Any]:
    """What the server says of the run."""
    shown = {"Authorization": f"Bearer {token}"}
    with urllib3.PoolManager(ca_certs=str(ca) if ca else None) as pool:
        answer: dict[str, Any] = pool.request("GET", f"{url}/v1/status", headers=shown).json()
    return answer


def name_of(index: int) -> str:
    """The name of a worker's site."""
    return f"worker-{index:03d}"


def _environment(threads: int | None) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("ATOLL_")}
    return inherited | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
