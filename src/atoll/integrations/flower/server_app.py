"""A workflow that runs the ServerApp of a Flower app.

In a run file:

[[workflow.steps]]
kind = "flower"
app = "my-app"                              # its folder
run_config = {num-server-rounds = 5}        # changes of its configuration
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID

from atoll.errors import ConfigError
from atoll.integrations.flower import message_tasks as fm
from atoll.integrations.flower.app_folder import AppFolder
from atoll.integrations.flower.grid import TaskGrid


def serve(controller: Any, *, app: str, run_config: Mapping[str, Any] | None = None) -> None:
    """Run a ServerApp to its end.

    Args:
        controller: the controller of the workflow.
        app: folder of the app.
        run_config: values that take the place of those in the app's configuration.

    Raises:
        ConfigError: there is no app in the folder, it has no ServerApp, or no such key.
    """
    folder = AppFolder.read(Path(app))
    config = folder.configured(run_config or {})
    fm.identify(SUPERLINK_NODE_ID)
    server_app = folder.component("serverapp")
    if not callable(server_app):
        raise ConfigError(
            f"{folder.components['serverapp']!r} of the app in {folder.path} is no ServerApp.", "Name its ServerApp."
        )
    context = Context(fm.RUN_ID, SUPERLINK_NODE_ID, {}, RecordDict(), config)
    server_app(TaskGrid(controller), context)
