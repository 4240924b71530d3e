"""Simulate many sites on one machine or on Ray, without a network: a few processes train the sites in turn.

Rounds, storage and arithmetic are those of a real server. The parts, from outside to inside, and their files:

Simulation             the public class: settings, sites, an engine                        simulation.py
  SiteScheduler        lets sites join, gives them rounds, takes their updates             schedule_sites.py
    Engine             gives jobs to processes, and replaces processes that end            engine.py
      LocalHost        starts processes on this machine                                    local_processes.py
      RayHost          starts actors of Ray                                                ray_actors.py
        SiteTrainer    inside a process: trains one site at a time                         simulated_site.py
          SimulatedSite  one site in one round: its base is the server's version file,
                       and its update goes to the server's spool                           simulated_site.py
          Script       the user's training code                                            script.py

A worker in the process of a server, in another thread, is made of the same parts (embedded_site.py).

State that a site keeps between rounds is stored in the run's state directory. With Ray, the state is sent to the actor
(a Ray process) with each job.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.errors import ConfigError
from atoll.registry import nearest
from atoll.system_calls import cores

if TYPE_CHECKING:
    from atoll.config import Settings

STATE_DIR = "atoll-simulation"
"""Default state directory of a simulation, beside the run file. A real run has another one (`disk.state_dir`)."""

INPUTS_FILE = "begun-with.json"
"""Name of the note in the folder of a run that says what it was begun with."""
ENGINES = ("local", "ray")


def require_engine(engine: str, processes: int | None, address: str | None) -> None:
    """Check the options `engine`, `processes` and `address` of a simulation.

    Raises:
        ConfigError: an option has a wrong value. The message names the option.
    """
    if processes is not None and (type(processes) is not int or processes < 1):
        raise ConfigError(f"processes is {processes!r}.", "Give a number of at least 1.")
    if engine not in ENGINES:
        raise ConfigError(f"engine is {engine!r}.", nearest(str(engine), ENGINES, f"Use one of {', '.join(ENGINES)}."))
    if engine == "local" and address is not None:
        raise ConfigError(f"address is {address!r}, but the engine is 'local'.", "Leave it out, or use engine 'ray'.")


def with_own_folder(settings: Settings, folder: Path) -> Settings:
    """Return the settings with the state directory `folder / STATE_DIR`; unchanged if another one was set."""
    from atoll.config import default_of  # a slow import

    if settings.disk.state_dir != folder / default_of("disk.state_dir"):
        return settings
    return settings.changed({"disk.state_dir": folder / STATE_DIR})


def threads_of(processes: int) -> int:
    """Return the number of PyTorch threads for each process: `OMP_NUM_THREADS`, else cores divided by processes."""
    value = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if value.isdecimal() and int(value):
        return int(value)
    return max(1, cores() // processes)
