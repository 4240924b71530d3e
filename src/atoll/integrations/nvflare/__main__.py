"""`python -m atoll.integrations.nvflare client.py`: run a script on NVFlare's Client API, unchanged, as a site.

NVFlare takes the object that implements its Client API from its data bus, where NVFlare's own executor puts one. Here
it is Atoll's. No file of NVFlare is changed.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

from atoll.errors import ConfigError, UsageError, end_with_one_line
from atoll.integrations import nvflare


def provide() -> None:
    """Let `nvflare.client` in this process take part in runs of Atoll.

    Raises:
        ConfigError: NVFlare is not installed, or is of another version.
    """
    try:
        from nvflare.app_common.abstract.fl_model import FLModel
        from nvflare.client.api_spec import CLIENT_API_KEY, CLIENT_API_TYPE_KEY
        from nvflare.client.in_process.api import InProcessClientAPI
        from nvflare.fuel.data_event.data_bus import DataBus
    except ImportError as error:
        raise ConfigError(
            f"NVFlare's Client API cannot be imported by {sys.executable}: {error}.",
            "Install it: pip install 'atoll[nvflare]' (tested with 2.9). Or let the script import "
            "atoll.integrations.nvflare as flare, in place of nvflare.client.",
        ) from None
    calls = [name for name in nvflare.__all__ if hasattr(InProcessClientAPI, name)]
    own: dict[str, Any] = {name: staticmethod(getattr(nvflare, name)) for name in calls}
    nvflare.api.model_class = FLModel
    os.environ[CLIENT_API_TYPE_KEY] = "IN_PROCESS_API"
    DataBus().put_data(CLIENT_API_KEY, type("ClientAPI", (InProcessClientAPI,), own)({}))


def main() -> None:
    """Run the script of the command line, or with `-m` the module, as `python` would."""
    end_with_one_line()
    words = sys.argv[1:]
    if not words or words == ["-m"]:
        raise UsageError("No script was given.", "Give one: python -m atoll.integrations.nvflare client.py")
    provide()
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    if not os.path.isfile(words[0]):
        raise UsageError(f"There is no script {words[0]!r} in {os.getcwd()}.", "Correct its path.")
    sys.argv, sys.path[0] = words, os.path.dirname(os.path.abspath(words[0]))
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
