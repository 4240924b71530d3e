"""A site that reads hostile texts, and watches its imports, opened files and processes with an audit hook.

The hook cannot be removed, so the site needs a process of its own, with `kit.planting.planting` before its server.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

import atoll
from atoll.config import FIELDS
from atoll.config.settings import Choice
from atoll.errors import AtollError
from atoll.protocol.messages import Message
from atoll.registry import REGISTRABLE, ReceivedName, resolve_received
from atoll.tensors.payload import unpack
from kit.planting import PLAN, Place, plant

RAN = "planted_ran"
PLANTED = f"open({RAN!r}, 'w').close()\nclass Thing: pass\n"
"""A module that says that it was imported."""


def hostile(folder: Path) -> list[str]:
    """Texts that import, open or start something, each in another way, if they are used as a name or a path."""
    return [
        "planted:Thing",
        f"{folder}/planted.py:Thing",
        "subprocess:getoutput",
        "planted.py:Thing",
        "../home/planted.py:Thing",
        "json.py:JSONDecoder",
        f"{folder}/planted.safetensors",
        "http://127.0.0.1:9/planted.py",
        f"file://{folder}/planted.py",
        f"$(touch {RAN})",
        "fedavg\nforged: a line of the log",
    ]


BEGINS = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "os.forkpty",
    "pty.spawn",
)
RUNS = ("import", "exec", "compile", "ctypes.dlopen")


class Watch:
    """Notes each import, opened file and process while it is on. A site may open its own folder's files, and the lists
    of entry points of installed packages."""

    def __init__(self, own: Path) -> None:
        self.is_on, self.seen = False, list[str]()
        self._may = (str(own), *(folder for folder in sys.path if folder.endswith(".zip")))
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on or event not in (*BEGINS, *RUNS, "open") or arguments[0] is None:
            return  # dlopen(None) opens nothing
        what = str(arguments[0])
        opened = event == "open"
        if opened and (isinstance(arguments[0], int) or what.startswith(self._may) or ".dist-info/" in what):
            return
        self.seen.append(f"{event} {what[:200]}")


def a_round(url: str, own: Path) -> None:
    with atoll.join(url, site="a", folder=own) as worker:
        if (fl_round := worker.next_round(5.0)) is not None:
            model = fl_round.load_into({"w": torch.zeros(3)})
            worker._backend.participation.session.beat()
            fl_round.submit({"w": model["w"] + 1})


def a_task(url: str, own: Path) -> None:
    with atoll.tasks(url, site="a") as worker:
        assert next(iter(worker.tasks())).payload["note"]  # not answered: the server sends it again


WARMS = "not a\nname"
"""Is no hostile text; the first at each place: it imports what an error needs."""

Trial = tuple[str, Callable[[], object]]
"""The text, and a function that lets the site read it."""


def trials_of_answers(url: str, folder: Path, take_part: Callable[[str, Path], None]) -> Iterator[Trial]:
    """Each place of each answer with each text; where the site is in a round or task already, with four in turn."""
    for _ in range(3):
        take_part(url, folder / "sites")
    texts = hostile(folder / "home")
    found = plant(url, None)
    if take_part is a_task:
        found = [each for each in found if each[0] in ("request_task", "get_object")]  # the others are those of a round
    for turn, (operation, where, is_text) in enumerate(found):
        first = 4 * turn % len(texts)
        some = (texts[first:] + texts[:first])[: 4 if is_text else 1]
        for text in [WARMS, *(texts if is_text and operation in ("get_run", "get_schema", "join") else some)]:
            yield text, partial(with_planted, take_part, url, folder, (operation, where, text))


def with_planted(take_part: Callable[[str, Path], None], url: str, folder: Path, what: tuple[str, Place, Any]) -> None:
    plant(url, what)
    take_part(url, folder / "sites")


def trials_of_settings(url: str, folder: Path) -> Iterator[Trial]:
    """Each setting in the plan of a swarm that switches itself off, for a site that may take part in a swarm."""
    for key, field in FIELDS.items():
        group, _, name = key.partition(".")
        is_choice = isinstance(field.annotation, type) and issubclass(field.annotation, Choice)
        for text in [WARMS, *hostile(folder / "home")[:3]]:
            for value in [{"path": text, "cmd": f"touch {RAN}"}, {"name": text}] if is_choice else [text]:
                settings: dict[str, Any] = {"swarm": {"enabled": False}, "algorithm": {"name": "fedavg"}}
                settings["rounds"] = {"total": 1}
                settings[group] = {**settings.get(group, {}), name: value}
                yield text, partial(with_planted, a_round, url, folder, (PLAN, [], {"settings": settings}))


def trials_of_lookups(_: str, folder: Path) -> Iterator[Trial]:
    """What reads a name alone: each kind of registered object, and each text in the skeleton of a payload."""
    for text in [WARMS, *hostile(folder / "home")]:
        for kind in REGISTRABLE:
            yield text, partial(looked_up, kind, text)
        for node in (
            {"$": text},
            {"$": "registered", "type": text, "as": None},
            {"$": "ref", "text": text},
            {"$": "bytes", "base64": text},
            {"$": "float", "value": text},
            {"$": "dict", "items": [[text, text]]},
            {text: text},
        ):
            yield text, partial(unpack, node, [])


class _Named(Message):
    name: ReceivedName


def looked_up(kind: str, text: str) -> None:
    with contextlib.suppress(ValidationError):
        resolve_received(kind, _Named.model_validate_json(json.dumps({"name": text})).name)


TRIALS: dict[str, Callable[[str, Path], Iterator[Trial]]] = {
    "rounds": partial(trials_of_answers, take_part=a_round),
    "tasks": partial(trials_of_answers, take_part=a_task),
    "settings": trials_of_settings,
    "lookups": trials_of_lookups,
}


def site(which: str, url: str, folder: Path) -> None:
    """Try everything, and print what the hook has seen, and the errors that are not of Atoll, as JSON."""
    watch, count, failed = Watch(folder / "sites"), 0, list[str]()
    for text, attempt in TRIALS[which](url, folder):
        watch.is_on = text != WARMS
        count += watch.is_on
        try:
            attempt()
        except AtollError:
            pass
        except Exception as error:
            watch.is_on = False
            failed.append(repr(error))
        watch.is_on = False
    print("\n" + json.dumps({"count": count, "seen": watch.seen, "failed": failed}), flush=True)
