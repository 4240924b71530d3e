"""The operations of the admin alone: pause, resume and stop the run, or let it go back to an earlier version."""

from __future__ import annotations

import logging

from atoll.errors import Busy, Conflict
from atoll.format_text import listed, number_of
from atoll.protocol import admin_messages as messages
from atoll.rounds import events
from atoll.server.coordinator.ports import RoundPlace, Tasks
from atoll.server.coordinator.run_core import RunCore

LOG = logging.getLogger("atoll.server")

RESUME = "To train further, wait until its server has ended; then `atoll resume`, and start it again."
STOPS = f"It ends with the present round. {RESUME}"


class AdminOperations:
    """Carries out the operations of `protocol/openapi.py` that only the admin may use. Each may be repeated.

    Args:
        run: the run.
        place: where the versions are made.
        tasks: the tasks that sites do beside the rounds.
    """

    def __init__(self, run: RunCore, place: RoundPlace, tasks: Tasks) -> None:
        self._run, self._place, self._tasks = run, place, tasks

    async def pause_run(self, message: messages.PauseRun) -> messages.Controlled:
        """Pause the run, or let it go on.

        Raises:
            Conflict: the run has ended or is being stopped, or it has no rounds.
        """
        what = "pause" if message.paused else "resume"
        self._require_rounds(what)
        if self._run.state.stopping:
            raise Conflict(f"The run is being stopped, so it cannot {what}.", STOPS)
        was = self._run.state.paused
        self._record(events.RunPaused() if message.paused else events.RunResumed())
        if not message.paused:
            return self._reply("the run goes on" if was else "the run was not paused; it goes on")
        return self._reply(f"the run is paused{' already' if was else ''}: no round begins{self._under_way()}")

    async def stop_run(self, message: messages.StopRun) -> messages.Controlled:
        """End the run after the present round; or at once, without the updates of an open round.

        Raises:
            Conflict: the run has ended, or it has no rounds.
        """
        if self._run.state.finished and self._run.state.stopping:
            return self._reply("the run is stopped already")
        self._require_rounds("stop")
        self._record(events.RunStopped(now=message.now))
        if self._run.state.finished:
            return self._reply("the run is stopped: its result is being saved, and its sites end")
        return self._reply(f"the run is being stopped{self._under_way()}; then its result is saved, and its sites end")

    async def roll_back(self, message: messages.RollBack) -> messages.Controlled:
        """Let the run go back to an earlier version: the server begins again from there, and so do its sites.

        Raises:
            Conflict: the run has ended or is being stopped, has no rounds, or cannot go back.
            Gone: the version is not among those that the server has with their whole state.
            Busy: the run begins again already.
        """
        run, version = self._run, message.version
        self._require_rounds("go back")
        if run.begins_again.is_set():
            raise Busy("The run begins again at this moment.", "Ask again when it serves.")
        why = (
            "is being stopped"
            if run.state.stopping
            else "is a swarm: earlier versions are at its sites"
            if not self._place.is_here
            else "keeps its versions in memory (disk.in_files = false)"
            if run.store.slots.in_memory
            else "has workflows, which would begin again, too"
            if run.has_workflows
            else ""
        )
        if why:
            remedy = "Stop the server, run `atoll rollback` for its directory, and start it again."
            remedy = STOPS if run.state.stopping else remedy if run.has_workflows else ""
            raise Conflict(f"The run {why}, so it cannot go back while it runs.", remedy)
        if all(round_.head == version for round_ in run.state.rounds):
            return self._reply(f"version {version} is the newest already")
        run.store.versions.require_whole(version)
        run.store.run_log.ask_back_to(version)
        LOG.warning("going back to version %d, as the admin asked", version)
        run.begins_again.set()
        return self._reply(f"the run goes back to version {version}")

    def _record(self, event: events.RunPaused | events.RunResumed | events.RunStopped) -> None:
        before = self._run.state
        self._run.ledger.record(event)
        after = self._run.state
        if (before.paused, before.stopping) != (after.paused, after.stopping):
            what = "stopped" if after.stopping else "paused" if after.paused else "resumed"
            LOG.info("the admin has %s the run%s", what, self._under_way() if what != "resumed" else "")

    def _require_rounds(self, what: str) -> None:
        if not self._tasks.trains:
            ended = "over" if self._tasks.rounds == "over" else "none"
            raise Conflict(f"The run cannot {what}: its rounds are {ended}.", "Only rounds can be controlled.")
        if self._run.state.finished and self._run.state.stopping:
            raise Conflict(f"The run was stopped by its admin, so it cannot {what}.", RESUME)
        if self._run.state.finished:
            more = "To train further, wait until its server has ended; then raise rounds.total, and start it again."
            raise Conflict(f"The run is finished, so it cannot {what}.", more)

    def _under_way(self) -> str:
        """Return a text about the rounds under way: "; round 4 is open, and …"; empty if there is none."""
        rounds = self._run.state.rounds
        numbers = sorted({round_.number for round_ in rounds if round_.phase in ("open", "closing")})
        if not numbers:
            return ""
        which = f"round {numbers[0]} is" if len(numbers) == 1 else f"rounds {listed(list(map(str, numbers)))} are"
        count = sum(ticket.state == "open" for round_ in rounds for ticket in round_.tickets.values())
        return f"; {which} under way, and {number_of(count, 'update')} of it may still come"

    def _reply(self, text: str) -> messages.Controlled:
        state = self._run.state
        return messages.Controlled(
            paused=state.paused,
            stopping=state.stopping,
            version=max(round_.head for round_ in state.rounds),
            epoch=self._run.store.run_log.epoch,
            text=text,
        )
