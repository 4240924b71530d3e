"""The environments in which a recipe can be executed: real processes here, a simulation, or a running server.

LocalEnv    start `atoll server` and a process for each site; all of them end before the call returns
SimEnv      simulate the sites: a few processes train them in turn
ServerEnv   take part as one site in the run of a running server, if this run has the recipe's settings
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll import registry
from atoll.child_processes import Children
from atoll.config import Settings
from atoll.errors import (
    AtollError,
    ConfigError,
    RunFailed,
    ServerFailed,
    UsageError,
    public_api,
)
from atoll.format_text import number_of, numbers
from atoll.posix import OWN_FOLDER, read_named
from atoll.protocol import routes
from atoll.protocol.messages import RunInfo
from atoll.protocol.status_messages import RoundSummary, Status
from atoll.recipes.recipe import Recipe, RunResult, Strict, require_number, require_path, slug
from atoll.recipes.run_processes import SITES, RunProcesses, ended_by_sigterm, environment
from atoll.rounds.state import Rules
from atoll.simulate import require_engine, with_own_folder
from atoll.store.store import lock_directory
from atoll.transport.http_client import ask
from atoll.worker.arguments import require_site

RUN_FILE = "run.toml"
POLL_S = 0.2
SCRIPT_POLL_S = 1.0
"""Seconds between two requests of `ServerEnv` for the status. A server stays for clients that ask more often than that
in `serve.WATCHED_S`."""

NOT_COMPARED = {"protocol", "run", "receipt_key", "trains", "sends_tasks", "keeps_local", "local_package"}
"""Fields of a server's run description that are not compared with the recipe."""
SETTING_OF = {
    "name": "run.name",
    "schema_digest": "model.source",
    "algorithm": "algorithm.name",
    "local": "algorithm",
    "rounds": "rounds.total",
    "mode": "async.enabled",
    "placement": "swarm.enabled",
    "fragments": "diloco.num_fragments",
    "tau": "diloco.fragment_sync_delay",
    "alpha": "diloco.fragment_update_alpha",
    "codec": "aggregation.upload_codec",
    "codec_options": "aggregation.upload_codec",
    "downlink_codec": "aggregation.download_codec",
    "downlink_codec_options": "aggregation.download_codec",
}
"""Field of a server's run description → the setting that decides it, if the names differ."""


@dataclass(frozen=True)
class _HereEnv(Strict):
    """Base class of the environments that execute the whole run, with all sites, from this machine."""

    sites: int
    folder: str | Path | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        require_number(self, "sites", self.sites, 1)
        if self.folder is not None:
            require_path(self, "folder", self.folder)

    def _prepared(self, recipe: Recipe) -> tuple[Path, Settings]:
        """Write the run file into the run's folder; return the folder and the settings in that file.

        Raises:
            UsageError: there are too few sites for a round, or the folder cannot be used.
        """
        require_sites(recipe, self.sites)
        folder = prepared(recipe, self.folder, self.sites)
        return folder, Settings.read(folder / RUN_FILE, environ={})

    def _say(self, line: str) -> None:
        if not self.quiet:
            print(line, flush=True)


@public_api
@dataclass(frozen=True)
class LocalEnv(_HereEnv):
    """An environment of real processes on this machine: a server, and a process for each site.

    Args:
        sites: number of sites; round 1 waits for all of them.
        folder: the folder for the run file, logs, state and result; by default a new one in `atoll-recipes`. If the
            folder has a run of the same recipe already, that run is continued.
        quiet: print nothing during the run.
        threads: number of PyTorch threads in each process; 0: not set by Atoll.

    Raises:
        UsageError: a value has a wrong type, or a number is too small.
    """

    threads: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number(self, "threads", self.threads, 0)

    def run(self, recipe: Recipe) -> RunResult:
        """Execute a recipe, and return the result. When this method returns or raises, all its processes have ended.

        Raises:
            AtollError: the server could not start, too few sites are left, or the run failed.
        """
        folder, settings = self._prepared(recipe)
        if settings.disk.state_dir.is_dir():  # a server that still runs there writes to the log in the folder
            lock_directory(settings.disk.state_dir).close()
        run = _LocalRun(self, recipe, folder, settings)
        with ended_by_sigterm(), run.children:
            status = run.run()
        return result_of(settings, folder, status)


@public_api
@dataclass(frozen=True)
class SimEnv(_HereEnv):
    """An environment of simulated sites, on this machine or on Ray. Results are bit-identical to those of `LocalEnv`.

    Args:
        sites: number of sites; round 1 waits for all of them.
        folder: as for `LocalEnv`.
        quiet: print nothing during the run.
        processes: number of processes that train the sites in turn; by default one for each core.
        engine: `local`, or `ray` (`pip install 'atoll[ray]'`).
        address: the address of a Ray cluster; by default, Ray is started on this machine.

    Raises:
        UsageError: a value has a wrong type, or a number is too small.
        ConfigError: `engine`, `processes` or `address` is wrong.
    """

    processes: int | None = None
    engine: str = "local"
    address: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_engine(self.engine, self.processes, self.address)

    def run(self, recipe: Recipe) -> RunResult:
        """Execute a recipe, and return the result. When this method returns or raises, all its processes have ended.

        Raises:
            AtollError: the simulation could not start, or it failed.
        """
        folder, settings = self._prepared(recipe)
        settings = with_own_folder(settings, folder).changed(
            {"swarm.enabled": False, "swarm.aggregators": ()}
        )  # a swarm computes the same bits
        self._say(f"{settings.run.name}: {self.sites} simulated sites; files in {folder}")

        def on_round(summary: RoundSummary) -> None:
            if summary.fragment == 0:
                self._say(round_line(summary, settings.rounds.total))

        with _importable(Path.cwd(), Path(recipe.train_script).resolve().parent), ended_by_sigterm():
            from atoll.simulate.simulation import Simulation

            done = Simulation(
                settings=settings,
                arguments=recipe.argv[1:],
                sites=sites_of(self.sites),
                processes=self.processes,
                engine=self.engine,
                address=self.address,
                on_round=on_round,
                resume=True,  # the folder has a run of this very recipe, or none
            ).run()
        for site, why in sorted(done.failed.items()):
            self._say(f"{site} failed: {why}")
        again = "was already finished; nothing was trained" if not done.rounds else "is finished"
        self._say(f"{settings.run.name} {again}: {done.model}")
        return result_of(settings, folder, None)


@public_api
@dataclass(frozen=True)
class ServerEnv(Strict):
    """An environment that takes part as one site in the run of a running server.

    First start the server with the file that `recipe.write` writes. Then, at each site, execute the recipe in a
    `ServerEnv`. Since a server serves one run only, the environment first checks that this run has the settings of the
    recipe.

    Args:
        url: the server's address. Tokens and certificate authorities are taken from this program's ATOLL_* variables,
            as by the command `atoll worker`.
        site: this site's name; by default ATOLL_SITE, or a name made from host and process.
        threads: number of PyTorch threads in the script; 0: not set by Atoll.
        quiet: print nothing apart from the script's own output.

    Raises:
        UsageError: a value has a wrong type, or a number is too small.
        ConfigError: `site` is not a valid name.
    """

    url: str
    site: str | None = None
    threads: int = 0
    quiet: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.url, str):
            raise UsageError(f"ServerEnv: url is {self.url!r}.", "Use the form http://host:8512.")
        require_number(self, "threads", self.threads, 0)
        if self.site is not None:
            try:
                require_site(self.site)
            except ConfigError as error:
                raise ConfigError(f"ServerEnv: the site {error.message}", error.remedy) from None

    def run(self, recipe: Recipe) -> RunResult:
        """Run the recipe's script in the server's run, wait until the script has ended, and return the result.

        Raises:
            ConfigError: the server's run differs from the recipe. The message names each difference.
            UsageError: the run is finished.
            ServerUnreachable: no server answers.
            ServerFailed: the run had failed at the server before this call.
            RunFailed: the script ended with an error, or the run failed at the server.
        """
        info, status = ask(self.url, routes.RUN, RunInfo), ask(self.url, routes.STATUS, Status)
        if found := differences(recipe, info, status):
            raise ConfigError(
                f"The run at {self.url} differs from the recipe: {'; '.join(found)}.",
                "Change the recipe, or start another server with the file that recipe.write() writes.",
            )
        if status.finished:
            raise UsageError(
                f"The run at {self.url} is finished.", "For a new run, start the server with another disk.state_dir."
            )
        if not self.quiet:
            print(f"{info.name} at {self.url} matches the recipe; starting {recipe.train_script}", flush=True)
        swarm = {"ATOLL_SWARM": "1"} if info.placement == "swarm" else {}  # as the recipe says, too (`differences`)
        status = self._take_part(recipe, status, swarm)
        return RunResult(None, status.history, status.finished, state_dir=None, folder=None, status=status)

    def _take_part(self, recipe: Recipe, status: Status, more: dict[str, str]) -> Status:
        own = {key: value for key, value in os.environ.items() if key.startswith("ATOLL_")}  # as `atoll worker` does
        own |= {"ATOLL_SERVER": self.url} | ({"ATOLL_SITE": self.site} if self.site else {}) | more
        if path := own.get("ATOLL_TOKEN_FILE"):
            own["ATOLL_TOKEN_FILE"] = str(Path(path).resolve())
        with ended_by_sigterm(), Children() as children:
            process = children.spawn("script", recipe.argv, environment=environment(self.threads, **own))
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(SCRIPT_POLL_S)
                with contextlib.suppress(AtollError):  # the server may have ended; wait for the script
                    status = ask(self.url, routes.STATUS, Status)
                if process.returncode is not None:
                    break
        if status.failed or process.returncode == ServerFailed.exit_code:
            why = status.failed or "the reason is in the output of the script above."
            raise RunFailed(
                f"The run has failed at the server {self.url}: {why}",
                "When the cause is mended there and the server runs again, repeat the same call.",
            )
        if process.returncode:
            raise RunFailed(
                f"{recipe.train_script} ended with exit code {process.returncode}.",
                "See its output above. The run continues at the server; to take part again, repeat the same call.",
            )
        return status


def differences(recipe: Recipe, info: RunInfo, status: Status) -> list[str]:
    """Return the settings in which a server's run differs from a recipe, each as a text "KEY is … there, … here".

    Args:
        recipe: the recipe.
        info: the description of the server's run.
        status: the status of the server's run.
    """
    from atoll.server.coordinator.build_status import outer_in_words
    from atoll.server.coordinator.joining import run_info
    from atoll.server.startup import plan_of

    settings = recipe.settings()
    plan = plan_of(settings, recipe.initial_tensors(settings))
    mine: dict[str, Any] = run_info(plan, info.run).model_dump(exclude=NOT_COMPARED)
    theirs: dict[str, Any] = info.model_dump(exclude=NOT_COMPARED)
    mine |= {
        "policy": str(Rules.from_settings(settings).policy),
        "outer optimizer": outer_in_words(plan.algorithm, settings.algorithm.outer_lr_of),
    }
    theirs |= {"policy": status.policy, "outer optimizer": status.outer}

    def described(key: str, value: Any) -> str:
        return f"with digest {value[:12]}" if key == "schema_digest" else repr(value)

    return [
        f"{SETTING_OF.get(key, key)} is {described(key, theirs[key])} there, {described(key, mine[key])} here"
        for key in mine
        if mine[key] != theirs[key]
    ]


# -- the folder of a run


def require_sites(recipe: Recipe, sites: int) -> None:
    """Check that a number of sites is enough for a recipe.

    Raises:
        UsageError: there are fewer sites than `min_sites`, or an aggregator is not one of the sites.
    """
    if sites < recipe.min_sites:
        raise UsageError(
            f"sites is {sites}, but min_sites of {recipe.name} is {recipe.min_sites}, so no round could close.",
            f"Use at least {recipe.min_sites} sites.",
        )
    names = sites_of(sites)
    for site in recipe.settings(sites).swarm.aggregators:
        if site not in names:
            raise UsageError(
                f"aggregators of {recipe.name} contains {site!r}, but none of the run's "
                f"{number_of(sites, 'site')} has this name.",
                registry.nearest(site, names, "They are site-1, site-2 and so on."),
            )


def prepared(recipe: Recipe, run_dir: str | Path | None, sites: int) -> Path:
    """Write the run file into the run's folder, unless the folder has a run of the same recipe; return the folder.

    Args:
        recipe: the recipe.
        run_dir: the folder; None: a new one in `atoll-recipes`.
        sites: number of sites that round 1 waits for.

    Raises:
        UsageError: the folder has other files or another run, or cannot be created.
    """
    try:
        folder = _new_folder(recipe.name) if run_dir is None else Path(run_dir)
        is_new = _is_new(folder, recipe, sites)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"folder {str(error.filename if run_dir is None else run_dir)!r} cannot be used: {error}.",
            "Use another folder.",
        ) from None
    if is_new:
        try:
            recipe.write(folder / RUN_FILE, sites)
        except BaseException:
            with contextlib.suppress(OSError):
                folder.rmdir()  # if it is empty
            raise
    return folder


def _is_new(folder: Path, recipe: Recipe, sites: int) -> bool:
    """Return whether the folder needs a run file; False if the folder already has the same run file.

    Raises:
        UsageError: the folder has other files or another run file.
    """
    run_file = folder / RUN_FILE
    if run_file.exists():
        if read_named(run_file).decode(errors="replace") != recipe.text(run_file, sites):
            raise UsageError(
                f"folder {str(folder)!r} contains another run: {run_file} differs from the run file of this recipe.",
                "Use another folder, or leave folder out for a new one.",
            )
        return False
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"folder {str(folder)!r} is not empty, and contains no {RUN_FILE}.", "Use another folder.")
    return True


def _new_folder(name: str) -> Path:
    stem = Path("atoll-recipes") / f"{slug(name)}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, number = stem, 1
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(OWN_FOLDER, parents=True)
            return folder
        number += 1
        folder = stem.with_name(f"{stem.name}-{number}")


# -- results


def sites_of(count: int) -> list[str]:
    """Return the names of `count` sites: site-1, site-2 and so on."""
    return [f"site-{number}" for number in range(1, count + 1)]


def result_of(settings: Settings, folder: Path, status: Status | None) -> RunResult:
    """Return the result of a finished run, read from its folder.

    Args:
        settings: the run's settings.
        folder: the folder of the run file.
        status: the server's last status; None if there is none.
    """
    model, metrics = model_of(settings, folder), settings.exports / "metrics.jsonl"
    lines = read_named(metrics).decode().splitlines() if metrics.exists() else []
    rows = [{key: value for key, value in json.loads(line).items() if key not in ("at", "run")} for line in lines]
    return RunResult(
        model=model if model.exists() else None,
        history=[RoundSummary.model_validate(row) for row in rows],
        finished=True,
        state_dir=settings.disk.state_dir,
        folder=folder,
        status=status,
    )


def model_of(settings: Settings, folder: Path) -> Path:
    """Return the path of the trained model; in a swarm, its path at the first site that has it."""
    if settings.swarm.enabled:
        found = sorted((folder / SITES).glob("*/model.safetensors"))
        return found[0] if found else folder / SITES / "model.safetensors"
    return settings.exports / "model.safetensors"


def round_line(summary: RoundSummary, rounds: int) -> str:
    """Return one line about a round: its number, updates and metrics."""
    told = numbers(summary.metrics)
    return f"round {summary.round} of {rounds}, {summary.counted}{': ' if told else ''}{told}"


# -- processes


class _LocalRun(RunProcesses):
    """One execution of a recipe in real processes: starts them, watches the run, and waits until they have ended.

    The server's status is read from a file that the server writes into its state directory.
    """

    def __init__(self, env: LocalEnv, recipe: Recipe, folder: Path, settings: Settings) -> None:
        goes_on = f"To continue, repeat the call with folder={str(folder)!r}."
        super().__init__(folder, settings, sites_of(env.sites), goes_on)
        self._env, self._recipe = env, recipe

    def say(self, line: str) -> None:
        """Print a line, unless the environment is quiet."""
        self._env._say(line)

    def look(self) -> None:
        """Do nothing: what is worth a line is said as it happens."""

    def run(self) -> Status | None:
        """Start server and sites, and wait until all have ended; return the server's last status.

        Return None if the run was finished before this call.
        """
        name, threads = self.settings.run.name, self._env.threads
        self.say(f"{name}: starting a server and {number_of(len(self.sites), 'site')}; files and logs in {self.folder}")
        own, script_folder = environment(threads), Path(self._recipe.train_script).resolve().parent
        if script_folder != Path.cwd():  # the model's code may be beside the script
            own["PYTHONPATH"] = os.pathsep.join([str(script_folder), *filter(None, [own.get("PYTHONPATH")])])
        self.spawn_server(self.folder / RUN_FILE, 0, own)
        begun = self.wait_for_server()
        if begun.finished:
            self.say(f"{name} was already finished; nothing was trained")
        else:
            variables = self.variables_of_sites() | {"ATOLL_SERVER": begun.address}
            for site in self.sites:
                self.spawn(site, self._recipe.argv, environment(threads, **variables, ATOLL_SITE=site))
            self._watch()
        self.wait_for_ends()
        if begun.finished:
            return None
        self.say(f"{name} is finished: {model_of(self.settings, self.folder)}")
        return self.status()

    def _watch(self) -> None:
        """Print progress until the run is finished.

        Raises:
            RunFailed: fewer sites are left than a round needs.
            AtollError: the server ended before the run.
        """
        last_round = 0
        while True:
            ends = self.ends()
            time.sleep(POLL_S)  # so that the status which is read next knows of these ends
            status = self.status()
            for summary in status.history if status is not None else ():
                if summary.fragment == 0 and summary.round > last_round:
                    last_round = summary.round
                    self.say(round_line(summary, status.rounds if status is not None else 0))
            if status is not None and status.finished:
                return
            self.note_ends(status, ends)


@contextlib.contextmanager
def _importable(*folders: Path) -> Iterator[None]:
    """Add folders to `sys.path` inside the `with` block, so that the recipe's model can be imported."""
    before = list(sys.path)
    sys.path[:0] = [str(folder) for folder in folders if str(folder) not in sys.path]
    try:
        yield
    finally:
        sys.path[:] = before
