"""The grid of a Flower app: the ServerApp's messages are tasks of the workflow, and the answers are its replies."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterable
from typing import Any

from flwr.app import DEFAULT_TTL, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from atoll.errors import AtollError, UsageError
from atoll.format_text import listed
from atoll.integrations.flower import message_tasks as fm

LOG = logging.getLogger("atoll.server")


class TaskGrid(Grid):
    """Sends the messages of a ServerApp as tasks.

    Messages of one call that share their content are written once, and broadcast. A message is pending until its site
    has answered, or its time to live is over.

    Args:
        controller: the controller of the workflow in which the ServerApp runs.
    """

    def __init__(self, controller: Any) -> None:
        self._controller = controller
        self._run = Run.create_empty(fm.RUN_ID)
        self._news = threading.Condition()
        self._sites: dict[int, str] = {}
        self._pending: dict[str, Message] = {}
        self._replies: dict[str, Message] = {}
        self._failure: BaseException | None = None

    def set_run(self, run: Run) -> None:
        """Set what the app is told of its run."""
        self._run = run

    @property
    def run(self) -> Run:
        """What the app is told of its run."""
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Return a new message."""
        return Message(content, dst_node_id, message_type, ttl=ttl or DEFAULT_TTL, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        """Return the numbers of the sites that take part now."""
        sites = {fm.node_id_of(site): site for site in self._controller.sites()}
        self._sites |= sites
        return list(sites)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send messages, and return their ids.

        Raises:
            UsageError: a message is for a number that no site has.
        """
        self._raise_failure()
        site_of = self._sites | {fm.node_id_of(site): site for site in self._controller.run.roster}
        groups: dict[tuple[int, str, str, float], tuple[int, list[Message]]] = {}
        ids = list[str]()
        for message in messages:
            about = message.metadata
            if about.dst_node_id not in site_of:
                raise UsageError(
                    f"A message is for node {about.dst_node_id}, which has never joined.",
                    f"Use numbers from grid.get_node_ids(). Joined: {listed(sorted(site_of.values())) or 'none'}.",
                )
            key = id(message.content), about.message_type, about.group_id, about.ttl
            if key not in groups:  # the task of the group has its turn now, whatever its thread does when
                groups[key] = self._controller.journal.turn(), []
            turn, group = groups[key]
            ids.append(uuid.uuid4().hex if turn < 0 else f"{turn}.{len(group)}")
            group.append(fm.identified(message, ids[-1]))
        for turn, group in groups.values():
            to = {site_of[each.metadata.dst_node_id]: fm.without_content(each) for each in group}
            with self._news:
                self._pending |= {each.metadata.message_id: each for each in to.values()}
            threading.Thread(target=self._send, args=(to, [group[0]], turn), name="atoll-flower", daemon=True).start()
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies to messages that have come since the last call."""
        self._raise_failure()
        wanted = list(message_ids)
        found = self._controller.polled("replies", lambda: [each for each in wanted if each in self._replies])
        with self._news:  # after a restart, replies that the app had got come again in a moment
            self._news.wait_for(lambda: self._failure is not None or all(each in self._replies for each in found))
            self._raise_failure()
            return [self._replies.pop(each) for each in found]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send messages, and wait for the replies, for at most `timeout` seconds."""
        ids = self.push_messages(messages)
        del messages  # frees the memory of their records
        if not self._controller.journal.next_kind():  # else the app had waited before a restart
            with self._news:
                self._news.wait_for(
                    lambda: self._failure is not None or not any(each in self._pending for each in ids), timeout
                )
        return self.pull_messages(ids)

    def _send(self, to: dict[str, Message], content: list[Message], turn: int) -> None:
        """Send one content to several sites, and hear their replies.

        Args:
            to: site → its message, without the content.
            content: a message with this content; it is taken out of the list, so that its memory can be freed.
            turn: the turn of the task among the calls of the app.
        """
        about = content[0].metadata

        def heard(result: Any) -> None:
            message = to[result.site]
            self._reply(message, self._replied(message, result))

        try:
            self._controller.journal.lend(turn)
            self._controller.broadcast(
                about.message_type,
                fm.to_task(content.pop()),
                sites=list(to),
                timeout_s=about.ttl,
                on_result=heard,
            )
        except BaseException as error:  # also the one that ends a workflow's thread
            with self._news:
                self._failure = self._failure or error
        with self._news:  # those without a reply have come to the end of their time
            for message in to.values():
                self._pending.pop(message.metadata.message_id, None)
            self._news.notify_all()

    def _replied(self, message: Message, result: Any) -> Message:
        message_id = uuid.uuid4().hex
        if not result.ok:
            return fm.failed(message, result.error, message_id)
        try:
            return fm.from_answer(message, result.lazy, message_id)
        except AtollError as error:
            LOG.error("the answer of %s is no reply: %s", result.site, error)
            return fm.failed(message, str(error), message_id)

    def _reply(self, message: Message, reply: Message) -> None:
        with self._news:
            self._pending.pop(message.metadata.message_id, None)
            self._replies[message.metadata.message_id] = reply
            self._news.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
