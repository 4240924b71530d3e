"""The ClientApp of a Flower app at a site: each task is a message to it, and its reply is the answer."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict

from atoll.integrations.flower import message_tasks as fm
from atoll.integrations.flower.app_folder import AppFolder, Config
from atoll.integrations.flower.kept_state import KeptState
from atoll.worker.tasks.answer_tasks import tasks

LOG = logging.getLogger("atoll")


def answer_messages(folder: Path, run_config: Config, node_config: Config) -> None:
    """Answer the messages of a ServerApp until it has ended.

    Address and name of the site come from the environment, as for `atoll.tasks`.

    Args:
        folder: folder of the app.
        run_config: values that take the place of those in the app's configuration.
        node_config: what the app is told of this site, such as `partition-id`.

    Raises:
        ConfigError: there is no app in the folder, it has no ClientApp, or no such key.
    """
    app = AppFolder.read(folder)
    config = app.configured(run_config)
    client_app = app.component("clientapp")
    with tasks() as worker:
        node_id = fm.node_id_of(worker.site)
        fm.identify(node_id)
        context = Context(fm.RUN_ID, node_id, node_config, RecordDict(), config)
        base = Path(os.environ.get("ATOLL_DIR") or ".atoll")
        assert worker.info is not None  # `tasks` always has a server
        kept = KeptState(base / worker.site / worker.info.run, base)

        def reply(task: str, payload: Any) -> dict[str, Any]:
            message = fm.from_task(task, payload, node_id)
            context.state = kept.begin(task)
            answer = _answer(client_app, message, context)
            kept.end(context.state)
            return answer

        for task in worker.tasks():
            worker.answer_with(task, partial(reply, task.id))


def _answer(client_app: Any, message: Message, context: Context) -> dict[str, Any]:
    try:
        return fm.to_answer(client_app(message, context))
    except Exception as error:
        LOG.exception("the ClientApp failed at a message of type %r", message.metadata.message_type)
        reason = f"{type(error).__name__}: {error}"
        return fm.to_answer(fm.failed(message, reason))
