"""A recipe at a server that runs already: this site's script takes part in its run, if it is the recipe's."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.child_processes import Children
from atoll.errors import AtollError, ConfigError, RunFailed, UsageError, public_api
from atoll.protocol import routes
from atoll.protocol.messages import RunInfo
from atoll.protocol.status_messages import Status
from atoll.recipes.local import environment
from atoll.recipes.recipe import Strict, require_number
from atoll.recipes.result import RunResult, ended_by_sigterm
from atoll.transport.http_client import ask
from atoll.worker.session import last_status
from atoll.worker.site_name import require_site

if TYPE_CHECKING:
    from atoll.recipes.recipe import Recipe

POLL_S = 1.0

NOT_COMPARED = {"protocol", "run", "schema_bytes", "trains", "sends_tasks", "keeps_local", "local_package"}
"""What a server says of a run that is no setting of it."""
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
"""What a server says → the setting that decides it, where the names differ."""


@public_api
@dataclass(frozen=True)
class ServerEnv(Strict):
    """A server that runs already, somewhere. It serves one run, its own: it takes no other model or algorithm.

    So this looks whether that run is the recipe's, and takes part in it as one site. The others do the same where they
    are; the server is started on the file that `recipe.write` writes.

    Args:
        url: the server's address; the script has the ATOLL_* variables of this program (a token, an
            authority of certificates), as under `atoll worker`.
        site: this site's name; by default ATOLL_SITE, or one made of host and process.
        threads: of PyTorch in the script; 0: as the environment says.
        quiet: say nothing; what the script says is said.

    Raises:
        UsageError: a value is of a wrong type.
        ConfigError: `site` is no name that a server takes.
    """

    url: str
    site: str | None = None
    threads: int = 0
    quiet: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.url, str):
            raise UsageError(f"ServerEnv: url is {self.url!r}.", "Write it as http://host:8512.")
        require_number(self, "threads", self.threads, 0)
        if self.site is not None:
            try:
                require_site(self.site)
            except ConfigError as error:
                raise ConfigError(f"ServerEnv, site: {error.message}", error.remedy) from None

    def run(self, recipe: Recipe) -> RunResult:
        """Take part; returns when the script has ended.

        Raises:
            ConfigError: the server's run is another one; each difference is named.
            UsageError: it is finished.
            ServerUnreachable: nobody answers.
            RunFailed: the script ended with an error.
        """
        info, status = ask(self.url, routes.RUN, RunInfo), ask(self.url, routes.STATUS, Status)
        if found := differences(recipe, info, status):
            raise ConfigError(
                f"The run at {self.url} is not that of the recipe: {'; '.join(found)}.",
                "Change the recipe, or start a server on the file that recipe.write() writes; one that runs takes no "
                "other run.",
            )
        if status.finished:
            raise UsageError(
                f"The run at {self.url} is finished.", "Start its server in another disk.state_dir for a new one."
            )
        if not self.quiet:
            print(f"{info.name} at {self.url} is the recipe's run; starting {recipe.train_script}", flush=True)
        status = self._take_part(recipe, status)
        return RunResult(
            model=None,
            history=status.history,
            finished=status.finished,
            state_dir=None,
            folder=None,
            status=status,
        )

    def _take_part(self, recipe: Recipe, status: Status) -> Status:
        own = {key: value for key, value in os.environ.items() if key.startswith("ATOLL_")}  # as `atoll worker` does
        own |= {"ATOLL_SERVER": self.url} | ({"ATOLL_SITE": self.site} if self.site else {})
        if path := own.get("ATOLL_TOKEN_FILE"):
            own["ATOLL_TOKEN_FILE"] = str(Path(path).resolve())
        with ended_by_sigterm(), Children() as children, tempfile.TemporaryDirectory() as folder:
            last = Path(folder) / "status.json"
            own |= {last_status.VARIABLE: str(last)}
            process = children.spawn("script", recipe.argv, environment=environment(self.threads, **own))
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_S)
                with contextlib.suppress(AtollError):  # it may have ended, which ends nothing here
                    status = ask(self.url, routes.STATUS, Status)
                if process.returncode is not None:
                    break
            if not status.finished and last.exists():  # what it said as the script left, if it has ended since
                status = Status.model_validate_json(last.read_text(encoding="utf-8"))
        if process.returncode:
            raise RunFailed(
                f"{recipe.train_script} ended with {process.returncode}.",
                "What it said is above; the run goes on at the server, and the same call takes part again.",
            )
        return status


def differences(recipe: Recipe, info: RunInfo, status: Status) -> list[str]:
    """What a server tells of its run that the recipe would have otherwise, each as `name is … there, … here`."""
    from atoll.rounds.state import Rules
    from atoll.server.coordinator.admission import run_info
    from atoll.server.coordinator.build_status import outer_in_words
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
    return [
        f"{SETTING_OF.get(key, key)} is {_shown(key, theirs[key])} there, {_shown(key, mine[key])} here"
        for key in mine
        if mine[key] != theirs[key]
    ]


def _shown(key: str, value: Any) -> str:
    return f"of schema {value[:12]}" if key == "schema_digest" else repr(value)
