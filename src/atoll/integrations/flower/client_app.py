"""The ClientApp of a Flower app at a site: each task is a message to it, and its reply is the answer.

In a run with one of Atoll's algorithms, it takes part in the rounds.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict

from atoll import registry
from atoll.errors import UsageError
from atoll.integrations.flower import message_tasks as fm
from atoll.integrations.flower.app_folder import AppFolder, Config, RecordKeys
from atoll.integrations.flower.app_in_rounds import AppInRounds
from atoll.integrations.flower.kept_state import KeptState
from atoll.worker.tasks.answer_tasks import SUBMIT, VALIDATE, Task
from atoll.worker.training.federated_loop import join_any

LOG = logging.getLogger("atoll")


def answer_messages(folder: Path, run_config: Config, node_config: Config, record_keys: Config) -> None:
    """Answer the messages of a run until it has ended.

    Address and name of the site come from the environment, as for `atoll.join`.

    Args:
        folder: folder of the app.
        run_config: values that take the place of those in the app's configuration.
        node_config: what the app is told of this site, such as `partition-id`.
        record_keys: names in the app's records, where they are not the usual ones.

    Raises:
        ConfigError: there is no app in the folder, it has no ClientApp, or no such key. Or the run has rounds in which
            this ClientApp cannot take part, or in which it failed.
        UsageError, SchemaMismatch: in a round, its reply lacks what the run needs.
    """
    app, keys = AppFolder.read(folder), RecordKeys.of(record_keys)
    config = app.configured(run_config)
    client_app = app.component("clientapp")
    with join_any() as worker:
        node_id = fm.node_id_of(worker.site)
        fm.identify(node_id)
        context = Context(fm.RUN_ID, node_id, node_config, RecordDict(), config)
        base = Path(os.environ.get("ATOLL_DIR") or ".atoll")
        assert worker.info is not None  # it has a server
        kept = KeptState(base / worker.site / worker.info.run, base)

        @contextmanager
        def keeping(name: str) -> Iterator[None]:
            context.state = kept.begin(name)
            yield
            kept.end(context.state)

        def ask(message_id: str, kind: str, content: RecordDict) -> RecordDict:
            message = fm.received(message_id, kind, content, node_id)
            failed = f"The ClientApp failed at a message of type {kind!r}"
            reply = registry.construct(lambda: client_app(message, context), failed, "")
            if not isinstance(reply, Message) or reply.has_error():
                what = reply.error.reason if isinstance(reply, Message) else f"an object of type {type(reply).__name__}"
                raise UsageError(f"The ClientApp has replied to {kind!r} with {what}.", "Correct the app.")
            return reply.content

        def reply(task: str, payload: Any) -> dict[str, Any]:
            message = fm.from_task(task, payload, node_id)
            with keeping(task):
                return _answer(client_app, message, context)

        rounds = AppInRounds(worker, client_app, keys, ask, keeping)
        if worker.info.trains:
            rounds.require_trains(worker.info)
        for work in worker.work(answers_all=True):
            if not isinstance(work, Task):
                rounds.train(work)
            elif work.name == SUBMIT:
                worker.answer_with(work, worker.models.submit)
            else:
                worker.answer_with(work, partial(rounds.validate if work.name == VALIDATE else reply, work.id))


def _answer(client_app: Any, message: Message, context: Context) -> dict[str, Any]:
    try:
        return fm.to_answer(client_app(message, context))
    except Exception as error:
        LOG.exception("the ClientApp failed at a message of type %r", message.metadata.message_type)
        reason = f"{type(error).__name__}: {error}"
        return fm.to_answer(fm.failed(message, reason))
