"""The option `--flare` of `atoll worker`: a script on NVFlare's Client API as it is."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path

from atoll.errors import UsageError

LAUNCHER = ("-m", "atoll.integrations.nvflare")


def flare_command(script: list[str]) -> list[str]:
    """Return the command that runs a script on NVFlare's Client API.

    Args:
        script: the command for the script as it is: `python client.py …`.

    Raises:
        UsageError: it is no Python script.
    """
    flags = list(takewhile(re.compile("-[bBdEOsSuv]+").fullmatch, script[1:]))
    rest = script[1 + len(flags) :]
    if not Path(script[0]).name.startswith("python") or not rest or (rest[0].startswith("-") and rest[0] != "-m"):
        raise UsageError(
            f"--flare was given with the command {' '.join(script[:3])!r}, which is no Python script.",
            "Give the script after `--`: atoll worker --flare -- python client.py",
        )
    return [script[0], *flags, *LAUNCHER, *rest]
