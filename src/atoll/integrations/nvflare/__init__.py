"""NVFlare's Client API on Atoll, for scripts written for NVFlare: each `receive` and `send` is a round of the run.

    import atoll.integrations.nvflare as flare          # in place of: import nvflare.client as flare

    flare.init()
    while flare.is_running():
        input_model = flare.receive()
        ...
        flare.send(flare.FLModel(params=model.state_dict(), meta={"NUM_STEPS_CURRENT_ROUND": steps}))

NVFlare need not be installed. Where it is, `atoll worker --flare -- python client.py` runs such a script unchanged.
"""

from __future__ import annotations

from typing import Any

from atoll.errors import UsageError
from atoll.integrations.nvflare.client_api import ClientAPI
from atoll.integrations.nvflare.decorators import evaluate, train
from atoll.integrations.nvflare.fl_model import AnalyticsDataType, FLModel, ParamsType

__all__ = [
    "AnalyticsDataType",
    "FLModel",
    "ParamsType",
    "clear",
    "evaluate",
    "get_config",
    "get_job_id",
    "get_site_name",
    "get_task_name",
    "init",
    "is_evaluate",
    "is_running",
    "is_submit_model",
    "is_train",
    "log",
    "receive",
    "send",
    "shutdown",
    "system_info",
    "train",
]

api = ClientAPI(FLModel)
"""How this process takes part in a run."""

init, shutdown, clear = api.init, api.shutdown, api.clear
is_running, receive, send, log = api.is_running, api.receive, api.send, api.log
is_train, is_evaluate, is_submit_model = api.is_train, api.is_evaluate, api.is_submit_model
system_info, get_config = api.system_info, api.get_config
get_job_id, get_site_name, get_task_name = api.get_job_id, api.get_site_name, api.get_task_name

_ELSEWHERE = {
    "patch": "Use atoll.integrations.lightning.patch or atoll.integrations.transformers.AtollCallback; or install "
    "NVFlare, and run the script unchanged: atoll worker --flare -- python client.py",
    "FLCallback": "Use atoll.integrations.lightning.AtollCallback.",
    "IPCAgent": "Train in the script's own process: flare.receive() and flare.send() need no agent.",
}
"""What NVFlare's module has besides, but this one has not → what to use."""


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:
        raise UsageError(f"atoll.integrations.nvflare has no {name!r}.", _ELSEWHERE[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
