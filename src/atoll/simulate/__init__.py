"""Many simulated sites on one machine, or on Ray: the round machine, store and arithmetic of a real run, no sockets.

Simulation             what users start: settings, sites, an engine                        simulation.py
  Conductor            joins sites, gives out rounds, takes updates, on the server's run   schedule_sites.py
    Engine             hands jobs to processes, and replaces those that end                engine.py
      LocalHost        processes of this machine                                           local_processes.py
      RayHost          actors of Ray                                                       ray_actors.py
        Station        in such a process: trains one site at a time                        site_process.py
          SimulatedWorker  a site in one round: its base is the version's file itself,
                       and its outbox is the spool                                         simulated_worker.py
          Script       what the user wrote                                                 script.py

A site's memory between its rounds is files in the state directory, or what `kept_state.py` sends along with a job.
"""

from __future__ import annotations

from pathlib import Path

from atoll.config import Settings, default_of
from atoll.errors import ConfigError
from atoll.registry import nearest

STATE_DIR = "atoll-simulation"
"""Where a simulation lies, beside the run file: not where the run itself would."""

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


def apart(settings: Settings, folder: Path) -> Settings:
    """Return the settings with a state directory of the simulation's own, unless the run file in `folder` names one."""
    if settings.disk.state_dir != folder / default_of("disk.state_dir"):
        return settings
    return settings.changed({"disk.state_dir": folder / STATE_DIR})
