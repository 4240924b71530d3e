"""`atoll server`: one flag for every setting, made from `Settings`, so that there is one list of them."""

from __future__ import annotations

import gc
import inspect
import logging
import os
import shlex
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from atoll.child_processes import Terminated, raise_on_sigterm
from atoll.cli.memory import end_without_memory
from atoll.cli.status import WATCH_S, live_table
from atoll.cli.text import (
    against_data_parallel,
    awaited,
    best_line,
    codecs,
    counted,
    duration,
    log_lines,
    numbers,
    optimizer,
    size,
    staleness,
    streaming,
)
from atoll.config import TRAIN, Settings, entries_of
from atoll.errors import ConfigError
from atoll.rounds.closing_policy import listed

if TYPE_CHECKING:
    from atoll.protocol import status_messages
    from atoll.server.serve import Server

LOG = logging.getLogger("atoll.cli")

CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"]}

PANELS = {
    "name": "The model",
    "algorithm": "The algorithm",
    "outer_optimizer": "What the server does with updates",
    "host": "Network",
    "state_dir": "Disk",
}
"""First setting of a panel of `--help` → its title."""

REMIND_S = 15.0
"""How long somebody is awaited before the server says so; the first pause until it says so again."""
LONGEST_REMIND_S = 600.0


def serve(run_file: Path | None, **flags: Any) -> None:
    """Coordinate a run: from a run file, from flags, or both (a flag wins)."""
    for folder in filter(None, [os.getcwd(), str(run_file.parent.resolve()) if run_file else None]):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    given = {key: _parsed(key, value) for key, value in _spelt_out(flags).items() if value is not None}
    try:
        run_until_finished(Settings.read(run_file, given))
    except ConfigError as error:
        if run_file is not None or not Path("run.toml").is_file():
            raise
        raise ConfigError(error.message, f"{error.remedy} Did you mean: atoll server run.toml?".strip()) from error


def run_until_finished(settings: Settings) -> None:
    """Serve a run, and say what happens; a signal ends it and the next start goes on.

    Raises:
        AtollError: it cannot start, or the run failed.
        KeyboardInterrupt: Ctrl-C, after everything was put away.
    """
    log_lines()
    raise_on_sigterm()
    threading.Thread(target=end_without_memory, name="memory", daemon=True).start()
    LOG.info("%s starts; loading PyTorch takes a few seconds", settings.name)
    from atoll.server.serve import Server

    server = Server(settings=settings)
    begin = time.monotonic()
    so_far = ""
    try:
        server.start()
        if settings.model is not None:
            folder = shlex.quote(str(settings.state_dir))
            so_far = f"; the model so far: atoll export model.safetensors --state-dir {folder}"
        gc.freeze()  # a full collection would look at all that torch has imported, and hold everybody up for 0.2 s
        _announce(server, settings)
        _watch(server)
        seconds = time.monotonic() - begin
        server.run()  # stays for workers that have not taken the result yet, whose bytes count, too
        LOG.info("%s", _summary(server, seconds))
    except (KeyboardInterrupt, Terminated) as asked:
        server.stop()
        if server.finished:
            LOG.info("%s", _summary(server, time.monotonic() - begin))
            LOG.info("stopping; who has not taken the result yet gets it when the same command is started again")
            return
        LOG.info("stopping; the same command goes on from where the run is%s", so_far)
        if isinstance(asked, KeyboardInterrupt):
            raise
    finally:
        server.stop()


def _announce(server: Server, settings: Settings) -> None:
    status = server.status()
    LOG.info("listening on %s", server.url)
    if not _has_rounds(settings):
        LOG.info("run %s (%s): a workflow; files in %s", status.name, status.run[:8], settings.state_dir)
        name = settings.workflow or " → ".join(each.name for each in status.workflows)
        LOG.info("the workflow %s begins; start workers that take part with atoll.tasks", name)
        return
    if status.workflows:
        LOG.info("workflows: %s", " → ".join(each.name for each in status.workflows))
    LOG.info(
        "run %s (%s): %s, %s, model of %s, %s%s, %s; files in %s",
        status.name,
        status.run[:8],
        status.algorithm,
        status.policy,
        size(status.model_bytes),
        codecs(status),
        f", sync every {status.sync_every}" if status.sync_every else "",
        f"{status.rounds} rounds" if status.rounds else "until it is stopped",
        settings.exports,
    )
    dylu = "DyLU: slower workers take fewer steps" if status.dylu else ""
    LOG.info("%s", "; ".join(filter(None, [streaming(status), dylu, optimizer(status)])))
    version = status.version
    if version:
        LOG.info("going on at version %d", version)
    if not status.finished:
        LOG.info("start a worker: atoll worker --server %s --site NAME -- python train.py", server.url)


def _watch(server: Server) -> None:
    """Until the run is finished: on a terminal what `atoll status --watch` shows, else a line about who is awaited."""
    if sys.stdout.isatty():
        with live_table(server.status(), server.url) as show:
            while not server.wait(WATCH_S):
                show(server.status())
            show(server.status())
        return
    reminder = Reminder(time.monotonic())
    while not server.wait(WATCH_S):
        status = server.status()
        trains = not status.workflows or any(
            each.kind == TRAIN and each.state == "running" for each in status.workflows
        )
        if trains and (waiting := reminder.line(status.fragments, time.monotonic())):
            LOG.info("%s", waiting)


def _has_rounds(settings: Settings) -> bool:
    trains = any(entry.kind == TRAIN for entry in entries_of(settings.workflows))
    return settings.workflow is None and (trains or not settings.workflows)


class Reminder:
    """When to say whom the run waits for: the same again after twice the pause, up to `LONGEST_REMIND_S`."""

    def __init__(self, now_s: float) -> None:
        self._said_s, self._pause_s = now_s, REMIND_S
        self._said: object = None

    def line(self, fragments: Sequence[status_messages.FragmentStatus], now_s: float) -> str:
        """What is to be said at `now_s`; empty for nothing."""
        late = []
        over = all(fragment.phase == "finished" for fragment in fragments)
        for fragment in fragments:
            if fragment.phase == "finished" and not over:
                continue
            missing = [each for each in fragment.waiting_for if each.for_s >= REMIND_S]
            if missing or not fragment.waiting_for:
                late.append(fragment.model_copy(update={"waiting_for": missing}))
        text = _together({each.fragment: told for each in late if (told := awaited(each))}, len(fragments))
        # the same but for the seconds
        now = [(each.fragment, each.reason, [missing.site for missing in each.waiting_for]) for each in late]
        if not text:
            self._said = None
            return ""
        pause_s = self._pause_s if now == self._said else REMIND_S
        if now_s - self._said_s < pause_s:
            return ""
        self._said_s, self._said, self._pause_s = now_s, now, min(2 * pause_s, LONGEST_REMIND_S)
        return text


def _together(told: Mapping[int, str], count: int) -> str:
    """What each of `count` fragments waits for: once where it is the same for all, else by fragment."""
    if count == 1 or (len(told) == count and len(set(told.values())) == 1):
        return next(iter(told.values()), "")
    return "; ".join(f"fragment {fragment} {text}" for fragment, text in told.items())


def _summary(server: Server, seconds: float) -> str:
    status = server.status()
    last = status.history[-1].metrics if status.history else {}
    rounds = _has_rounds(server.settings)
    at, refused = (
        (f" at version {status.version}", f", {counted(status.refused, 'update')} refused") if rounds else ("", "")
    )
    parts = [
        f"finished{at} after {duration(seconds)}",
        f"{size(status.bytes_up)} received, {size(status.bytes_down)} sent",
        against_data_parallel(status),
        f"{counted(len(status.workers), 'worker')}, {counted(status.deaths, 'death')}{_failed(status)}{refused}",
        _missed(status) if rounds else "",
        _troubles(status),
        staleness(status.staleness),
        numbers(last),
        best_line(status.best) if status.best else "",
        status.stopped,
    ]
    return "; ".join(filter(None, parts))


def _failed(status: status_messages.Status) -> str:
    failed = sum(worker.state == "failed" for worker in status.workers)
    return f", {failed} failed" if failed else ""


def _missed(status: status_messages.Status) -> str:
    """Sites that were not in every round of a run of whole models that waits; nothing where all were."""
    if len(status.fragments) > 1 or not status.history or not status.history[-1].expected:
        return ""
    done = status.history[-1].round
    missed = [f"{each.site} was in {each.rounds} of {done} rounds" for each in status.workers if each.rounds < done]
    return listed(missed) if missed else ""


def _troubles(status: status_messages.Status) -> str:
    """Retries and reconnections of all workers; nothing where there were none."""
    retries = sum(worker.retries for worker in status.workers)
    joins = sum(worker.reconnections for worker in status.workers)
    return f"{retries} retries, {joins} reconnections" if retries or joins else ""


# -- flags

SHORT = {"--async": ("mode", "async"), "--no-bf16": ("codec", "none")}
"""Flags that stand for a setting with a value."""


def _spelt_out(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags with `SHORT` ones as the settings that they stand for.

    Raises:
        ConfigError: another flag gives that setting another value.
    """
    out = {key: value for key, value in flags.items() if not key.startswith("short_")}
    for flag, (key, value) in SHORT.items():
        if flags.get(f"short_{key}"):
            if out.get(key) not in (None, value):
                raise ConfigError(f"{flag} says {key} = {value!r}, and --{key} says {out[key]!r}.", "Give one of them.")
            out[key] = value
    return out


def _parsed(key: str, value: Any) -> Any:
    """What a flag's text means, where it is more than pydantic reads by itself."""
    if not isinstance(value, str):
        return value
    kind = _kind(Settings.model_fields[key])
    if kind in ("table", "tables"):
        try:
            return tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            flag = f"--{key.replace('_', '-')}"
            raise ConfigError(
                f"{flag} is {value!r}.",
                f"Write TOML: {flag} '{{key = 1}}'{', or a list of such tables' if kind == 'tables' else ''}.",
            ) from None
    if kind == "list":
        return tuple(filter(None, (item.strip() for item in value.split(","))))
    return value


def _kind(field: FieldInfo) -> str:
    """The word that `--help` shows for a setting's type."""
    annotation: Any = field.annotation
    options = [option for option in get_args(annotation) if option is not type(None)]
    if get_origin(annotation) in (Union, UnionType) and len(options) == 1:
        annotation = options[0]
    if any(get_origin(option) is dict for option in options):
        return "tables"
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    names: dict[Any, str] = {
        bool: "flag",
        int: "integer",
        float: "number",
        str: "text",
        Path: "path",
        dict: "table",
        tuple: "list",
    }
    return names[get_origin(annotation) or annotation]


def _flag(key: str, field: FieldInfo, panel: str) -> inspect.Parameter:
    name, kind = f"--{key.replace('_', '-')}", _kind(field)
    default = field.default if field.default is not PydanticUndefined else None
    shown = "" if default in (None, (), False) else f" \\[{default}]"
    option = typer.Option(
        f"{name}/--no-{name[2:]}" if kind == "flag" else name,
        *([name.removesuffix("-s")] if name.endswith("-s") else []),  # seconds go without saying, too
        help=f"{field.description}{shown}",
        metavar=None if kind == "flag" else kind,
        show_default=False,
        rich_help_panel=panel,
    )
    accepted: Any = bool | None if kind == "flag" else str | None
    return inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[accepted, option])


def _short(flag: str, key: str, value: str, panel: str) -> inspect.Parameter:
    option = typer.Option(flag, help=f"As --{key} {value}.", show_default=False, rich_help_panel=panel)
    name = f"short_{key}"
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, option])


def with_setting_flags(function: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters are a run file and every setting; typer reads the signature that is made here."""

    def command(**values: Any) -> None:
        function(**values)

    argument = typer.Argument(help="Run file (TOML); `atoll new` writes one.", show_default=False, metavar="[RUN.TOML]")
    parameters = [
        inspect.Parameter(
            "run_file", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, argument]
        )
    ]
    panel = ""
    for key, field in Settings.model_fields.items():
        panel = PANELS.get(key, panel)
        parameters.append(_flag(key, field, panel))
        for flag, (setting, value) in SHORT.items():
            if setting == key:
                parameters.append(_short(flag, setting, value, panel))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = function.__doc__
    return command


command = with_setting_flags(serve)
