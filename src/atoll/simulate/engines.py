"""The engines, and which of their options go together; loads no torch."""

from __future__ import annotations

from atoll.errors import ConfigError
from atoll.registry import nearest

ENGINES = ("local", "ray")


def require_engine(engine: str, processes: int | None, address: str | None) -> None:
    """Refuse options that no engine has.

    Raises:
        ConfigError: the argument is named.
    """
    if processes is not None and (type(processes) is not int or processes < 1):
        raise ConfigError(f"processes is {processes!r}.", "Give at least 1.")
    if engine not in ENGINES:
        raise ConfigError(f"engine is {engine!r}.", nearest(str(engine), ENGINES, f"Take one of {', '.join(ENGINES)}."))
    if engine == "local" and address is not None:
        raise ConfigError(f"address is {address!r}, and the engine is 'local'.", "Leave it out, or take engine ray.")
