"""The status of a run as its state directory has it, for `atoll status --dir`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from atoll.cli.which_run import is_of_atoll_run, is_served, noted_failure, start_command
from atoll.cli.which_run import state_directory as state_directory
from atoll.errors import StoreError
from atoll.protocol import routes, status_messages
from atoll.protocol.status_headline import Trouble, headline_of
from atoll.store.caller_tokens import stored_tokens
from atoll.store.journal_tables import MemberRow
from atoll.store.reader import StateReader, open_state, saved_status
from atoll.tensors.schema import Schema
from atoll.transport.tls import Token

AUTHORITY = "authority.pem"
"""Name of the file with the certificate of a run's own authority, in its state directory."""
AS_STORED = "as read from this directory; if no server runs, `atoll server` continues the run"
UNDER_WAY = "was under way; if no server runs, `atoll server` "
PHASES = {"open": "open", "frozen": "closing"}


def admin_token(state_dir: Path) -> Token | None:
    """Return the admin's token in a state directory; None if there is none, or this user may not read it."""
    with suppress(StoreError):
        if (text := stored_tokens(state_dir).get("admin")) is not None:
            return Token(text, str(state_dir / "admin.token"))
    return None


def environ_of(state_dir: Path | None) -> Mapping[str, str]:
    """Return the environment for requests to the server of a run: with the run's own authority, if it has one.

    Args:
        state_dir: state directory of the run; None: it is not known.
    """
    authority = None if state_dir is None else state_dir / AUTHORITY
    if authority is None or not authority.exists():
        return os.environ
    return {**os.environ, "ATOLL_TLS_CA": str(authority)}


def stored_status(state_dir: Path) -> tuple[status_messages.Status, float]:
    """Return the status that the server saved last, and when (Unix time).

    The status is updated from the journal (a database), which may be newer. The time since a site's last request is
    counted up to now.

    Raises:
        UsageError: the directory contains no run.
        StoreError: this user has no permission to read the directory.
        StateCorrupt: the journal is damaged. Its rows are checked only if the saved status cannot be read.
    """
    served = is_served(state_dir)  # before the journal: a server that ends meanwhile has written it
    with open_state(state_dir) as state:
        last, saved_at = _last_status(state, state_dir)
        status = _status(state, last, max(0.0, time.time() - saved_at))
    when = f"{datetime.fromtimestamp(saved_at):%Y-%m-%d %H:%M:%S}"
    status = status.model_copy(update={"stored": f"stored in {state_dir} at {when}", "state_dir": str(state_dir)})
    if not (served or status.finished or status.failed) and is_of_atoll_run(state_dir):
        status = status.model_copy(update={"failed": noted_failure(state_dir.parent)})
    trouble = Trouble(stored="" if served else str(state_dir), start=start_command(state_dir))
    headline = headline_of(status, trouble)
    return status.model_copy(update={"headline": headline}), saved_at


def _last_status(state: StateReader, state_dir: Path) -> tuple[status_messages.Status, float]:
    """Return the saved status, and when it was saved. If it cannot be read, return one with only the model's size."""
    run, saved = state.run(), saved_status(state_dir)
    if saved is not None and saved[0].run == run.run_id:
        return saved
    state.require_unchanged()
    schema, path = Schema.from_json(json.loads(run.schema_json)), state_dir / status_messages.KEPT
    status = status_messages.Status(
        run=run.run_id,
        protocol=routes.PROTOCOL,
        model_bytes=0 if schema.is_nothing else schema.model.nbytes,
        warnings=[f"{path} is missing or damaged, so the run's settings are not shown."],
    )
    return status, state.path.stat().st_mtime


def _status(state: StateReader, last: status_messages.Status, age_s: float) -> status_messages.Status:
    epoch, ended, failed = state.meta()
    workflows = _workflows(state.ended_workflows(), last.workflows)
    # the journal marks a run as finished with its last round, but other workflows may follow
    is_over = all(each.state == "done" for each in workflows) if workflows else ended
    controls = state.controls()
    idle = "paused" if controls.paused else "gathering"
    is_resumed = last.stopping and not controls.stopping  # since it ended, and no server has served it since
    finished = is_over or (last.finished and last.epoch == epoch and not is_resumed)
    before, heads, phases = {worker.site: worker for worker in last.workers}, state.heads(), state.round_states()
    history = [
        status_messages.RoundSummary.model_validate_json(each.summary_json)
        for each in state.summaries(status_messages.HISTORY)
    ]
    ended_rounds = {each.fragment: each.round for each in history}
    return last.model_copy(
        update={
            "epoch": epoch,
            "finished": finished,
            "stopped": last.stopped if finished else "",
            "failed": failed or last.failed,
            "paused": controls.paused,
            "stopping": controls.stopping,
            "left_s": None,
            "fragments": [
                status_messages.FragmentStatus(
                    fragment=head.fragment,
                    version=head.version or 0,
                    round=ended_rounds.get(head.fragment, 0) + (not (finished or ended)),
                    phase="finished" if finished or ended else PHASES.get(phases.get(head.fragment, ""), idle),
                    waiting_for=[],
                    reason="" if finished or ended else AS_STORED,
                )
                for head in heads
            ],
            "workflows": workflows,
            "workers": [
                _worker(each, before.get(each.site), age_s, has_failed=failed != "") for each in state.members()
            ],
            "history": history,
            "first": state.first_values(),
            "kept_versions": _kept_versions(state),
            "deaths": state.counter("deaths"),
            "refused": state.counter("refused"),
            "durable_version": min((head.durable for head in heads if head.durable is not None), default=None),
        }
    )


def _kept_versions(state: StateReader) -> list[int]:
    """Return the versions of the whole model that can be read from the directory."""
    run, heads = state.run(), state.heads()
    settings = json.loads(run.settings_json)
    if Schema.from_json(json.loads(run.schema_json)).is_nothing or not heads:
        return []
    if settings["swarm.enabled"] or not settings["disk.in_files"]:
        return []
    has_masters = settings["aggregation.download_codec.name"] != "none"
    rows = [row for row in state.versions() if not has_masters or row.has_state]
    return sorted(set.intersection(*({row.version for row in rows if row.fragment == head.fragment} for head in heads)))


def _workflows(ended: set[int], last: list[status_messages.WorkflowStatus]) -> list[status_messages.WorkflowStatus]:
    """Return the workflows of a run. The first one that has not ended gets the state `running`."""
    found = [each.model_copy(update={"state": "done"}) if place in ended else each for place, each in enumerate(last)]
    place = next((place for place, each in enumerate(found) if each.state != "done"), None)
    if place is not None and found[place].state != "failed":
        words = {"train": "continues its rounds", "cross_site_evaluation": "begins it again"}
        how = words.get(found[place].kind, "goes on with it")
        update = {"state": "running", "quiet_s": 0.0, "detail": UNDER_WAY + how}
        found[place] = found[place].model_copy(update=update)
    return found


def _worker(
    row: MemberRow, last: status_messages.WorkerStatus | None, age_s: float, *, has_failed: bool
) -> status_messages.WorkerStatus:
    """Return a worker's status. In a failed run, none is alive: each has ended, or was not told of the failure."""
    worker = last or status_messages.WorkerStatus(site=row.site)
    untold = "ended" if worker.state == "ended" else "not told"
    return worker.model_copy(
        update={
            "host": row.host,
            "state": untold if has_failed and row.state == "alive" else row.state,
            "joined_at": row.joined_at,
            "labels": json.loads(row.labels_json),
            "rounds": row.rounds_counted,
            "error": row.detail if row.state != "left" else "",
            "last_heartbeat_s": worker.last_heartbeat_s + age_s,
        }
    )
