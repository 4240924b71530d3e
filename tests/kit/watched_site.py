"""A site that reads hostile texts, and watches its imports, opened files and processes with an audit hook.

The hook cannot be removed, so the site needs a process of its own, with `kit.planting.planting` before its server.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

import atoll
from atoll.config import FIELDS
from atoll.errors import AtollError
from atoll.protocol import routes
from atoll.protocol.messages import Message, SchemaMessage
from atoll.protocol.swarm_messages import SwarmPlan
from atoll.registry import REGISTRABLE, ReceivedName, resolve_received
from atoll.tensors.payload import unpack
from atoll.transport.http_client import Http
from atoll.worker.peer.agent import plan_of
from kit.planting import Place, places, plant, planted

RAN, TEXTS = "planted_ran", "texts.json"
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
        is_metadata = ".dist-info/" in what or ".egg-info/" in what
        if event == "open" and (isinstance(arguments[0], int) or what.startswith(self._may) or is_metadata):
            return
        self.seen.append(f"{event} {what[:200]}")


class Joined:
    """A site that trains, or answers tasks. It joins again only if it has to: most of a trial is the join."""

    def __init__(self, url: str, own: Path) -> None:
        self._url, self._own, self._exit = url, own, contextlib.ExitStack()
        self._worker: Any = None

    def leave(self) -> None:
        """Let the next call join again."""
        self._worker = None
        self._exit.close()

    def _join(self, join: Callable[..., Any], **options: Any) -> Any:
        if self._worker is None:
            self._worker = self._exit.enter_context(join(self._url, site="a", **options))
        return self._worker

    def a_round(self) -> None:
        worker = self._join(atoll.join, folder=self._own)
        if (fl_round := worker.next_round(5.0)) is not None:
            model = fl_round.load_into({"w": torch.zeros(3)})
            worker._backend.participation.session.beat()
            fl_round.submit({"w": model["w"] + 1})

    def a_task(self) -> None:
        worker = self._join(atoll.tasks)
        assert next(iter(worker.tasks())).payload["note"]  # not answered: the server sends it again


WARMS = "not a\nname"
"""Is no hostile text; the first in each operation, where a text may be right and where not: errors import things."""
AT_THE_JOIN = ("get_run", "get_schema", "join", "get_ticket")

Trial = tuple[str, Callable[[], object]]
"""The text, and a function that lets the site read it."""


def trials_of_answers(url: str, folder: Path, *, tasks: bool) -> Iterator[Trial]:
    """Each place of each answer with two texts in turn, or with one where no text can be right."""
    joined = Joined(url, folder / "sites")
    take_part = joined.a_task if tasks else joined.a_round
    for _ in range(3):
        take_part()
        joined.leave()
    texts = hostile(folder / "home")
    found = plant(url, None)
    if tasks:
        found = [each for each in found if each[0] in ("request_task", "get_object")]  # the others are those of a round
    warm: set[tuple[str, bool]] = set()
    for turn, (operation, where, is_text) in enumerate(found):
        first = 2 * turn % len(texts)
        warms = [] if (operation, is_text) in warm else [WARMS]
        warm.add((operation, is_text))
        for text in [*warms, *(texts + texts)[first : first + (2 if is_text else 1)]]:
            yield text, partial(with_planted, joined, take_part, url, (operation, where, text))
    joined.leave()


def with_planted(joined: Joined, take_part: Callable[[], None], url: str, what: tuple[str, Place, Any]) -> None:
    if what[0] in AT_THE_JOIN:
        joined.leave()
    plant(url, what)
    try:
        take_part()
    except Exception:
        joined.leave()
        raise


def changed_plans(plan: dict[str, Any], texts: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The text, and a plan with it: each key of the settings is a further key once, alone and in its table, and each
    place of the plan has each text."""
    for turn, key in enumerate(FIELDS):
        group, _, name = key.partition(".")
        for text in [texts[turn % len(texts)], texts[(turn + 1) % len(texts)]]:
            code = {"path": text, "cmd": f"touch {RAN}"}
            yield text, plan | {group: {name: text}, "swarm": {"enabled": False}}
            yield text, plan | {group: {name: code}}
            yield text, {"settings": {group: {name: code}, "swarm": {"enabled": False}}}
    for where, _ in places(plan):
        for text in texts:
            yield text, planted(plan, where, text)


def trials_of_plans(url: str, folder: Path) -> Iterator[Trial]:
    """What a worker of a swarm makes of each plan that the server has: the texts in them are in a file."""
    http = Http(url)
    split = http.fetch(routes.SCHEMA, SchemaMessage.split_in, "SchemaMessage")
    for text in json.loads((folder / TEXTS).read_text()):
        yield text, lambda: plan_of(http.get(routes.SWARM_PLAN, SwarmPlan), split)
    http.close()


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
    "rounds": partial(trials_of_answers, tasks=False),
    "tasks": partial(trials_of_answers, tasks=True),
    "plans": trials_of_plans,
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
