"""The command `atoll`. Each subcommand has its own file and imports slow modules (PyTorch) only when it runs."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import io
import os
import sys
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from atoll.cli import EndsAtOnce
from atoll.cli.text import FIRST_S, is_told, print_line, still
from atoll.errors import AtollError, DiskFull, Terminated, UsageError, error_lines

HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
INTERRUPTED, TERMINATED = 130, 143
"""Exit codes after a signal: 128 + SIGINT and 128 + SIGTERM, as in shells."""
COMMANDS = {
    "run": "Run a server and its sites on this machine.",
    "runs": "List the runs of `atoll run`: state, round, metrics, when and where.",
    "server": "Serve a run. Its settings come from a run file and from options; options take precedence.",
    "enrol": "Enrol a site at a server: make a key here, get a certificate, and store both for workers of this user.",
    "worker": "Run a training script as a worker.",
    "simulate": "Train with many simulated sites, without a network.",
    "status": "Show the workers and rounds of a run, and for which sites a round waits, how long and why.",
    "logs": "Print what happened in a run, one line an event: joins, rounds and their results, refusals, warnings.",
    "pause": "Pause a run: no round begins, and its sites wait. Updates that they are training still count.",
    "resume": "Let a paused run go on. With RUN, while no server runs, also a run that was stopped.",
    "stop": "End a run in good order: after the present round its result is saved, and its sites and its server end.",
    "rollback": "Let a run go back to an earlier version that its server still has.",
    "invite": "Invite a site: it enrols once with what this prints, and then has a credential of its own.",
    "sites": "List the sites that were invited, enrolled or revoked, and until when their credentials are valid.",
    "revoke": "Revoke a site's credential and invitation, at once: its connections are closed.",
    "compare": "Compare runs: their metrics at the end and at best, rounds, bytes, and seconds by round.",
    "page": "Show the page of a run: of one that runs from its server, of any other from its state directory.",
    "export": "Write the model of a run to OUT.safetensors, with tied tensors under each of their names.",
    "evaluate": "Evaluate models of a run on the data of each site: metrics and weight of each site, and the mean.",
    "audit": "Check the audit log of a run, compare the server's journal with it, and show the last entries.",
    "verify": "Compare every file of a run with its journal, and compute again the rounds with kept updates.",
    "egress": "Check the egress log of this site: the chain of hashes, and the server's signature of each receipt.",
    "new": "Write run.toml and train.py: a complete run that works as it is, for you to change.",
    "config": "Settings of a run.",
    "doctor": "Check Python, torch, GPU, disk, clock and port, and with a server: proxy, TLS, token and clock there.",
}
"""Each subcommand, and what `atoll --help` says of it. Its module in this folder has its name, or is in `MODULES`."""
MODULES = {"run": "run_command", "runs": "run_folders"} | dict.fromkeys(
    ("pause", "resume", "stop", "rollback"), "control"
)
MODULES |= {"invite": "sites", "revoke": "sites"}
LONG = ("run", "server", "worker", "simulate", "evaluate")
"""Subcommands that import much, and say so early on a slow machine."""

_CommandLineError: Any = typer.BadParameter.__base__
"""The base class of errors of a command line, in click or in typer's copy of click."""
_MEANT = " Did you mean"
"""How both of them begin to name the nearest word."""


class Commands(TyperGroup):
    """The subcommands, each imported when it is run: `atoll --help` has to be quick.

    An unknown option is an error of one line that names the nearest option or setting.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the subcommands, in their order."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a subcommand with its help text alone; None if there is none of this name."""
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return name, subcommand and further words of a command line.

        Raises:
            UsageError: there is no such subcommand. The message names the nearest one.
        """
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            advice = f"Did you mean atoll {close[0]}?" if close else "`atoll --help` lists all commands."
            raise UsageError(f"There is no command {args[0]!r}.", advice)
        name, found, rest = super().resolve_command(ctx, args)
        return name, found and loaded(found.name or ""), rest

    def make_context(self, *args: Any, **options: Any) -> Any:
        """Read the options that come before a subcommand.

        Raises:
            UsageError: one is unknown.
        """
        with _one_line():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand of a command line.

        Raises:
            UsageError: the subcommand does not take these options or arguments.
        """
        with _one_line(ctx):
            return super().invoke(ctx)


def loaded(name: str) -> Any:
    """Import a subcommand, and return it."""
    words = sys.argv[: sys.argv.index("--")] if "--" in sys.argv else sys.argv
    first_s = FIRST_S if name in LONG and not {"-q", "--quiet"} & {*words} else None
    completes = "_ATOLL_COMPLETE" in os.environ  # a shell asks while its user types: a line would be in between
    with EndsAtOnce(), contextlib.nullcontext() if completes else still(f"loading atoll {name}", first_s):
        module = importlib.import_module(f"atoll.cli.{MODULES.get(name, name)}")
    own = getattr(module, "app", None)
    if own is None:
        own = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        function = getattr(module, "command", None) or getattr(module, name)
        text = (function.__doc__ or "").partition("Raises:")[0]  # the rest is for readers of the code
        own.command(name, help=text, context_settings=HELP | getattr(module, "CONTEXT", {}))(function)
    command = typer.main.get_command(own)
    for each in (command, *getattr(command, "commands", {}).values()):
        _restore_help(each)
    return command


def _restore_help(command: Any) -> None:
    """Give arguments the help that they lose with typer before 0.21, which Flower wants, and click from 8.5 on."""
    lost = {each.name: each for each in command.params if getattr(each, "help", "") is None}
    hints = get_type_hints(command.callback, include_extras=True) if lost else {}
    for name in lost.keys() & hints.keys():
        for each in get_args(hints[name])[1:]:
            lost[name].help = getattr(each, "help", None)


@contextlib.contextmanager
def _one_line(outer: Any = None) -> Iterator[None]:
    """Within the block, let a wrong command line be an error of one line.

    Args:
        outer: the context of `atoll` itself, for an error that does not say which subcommand it is about.

    Raises:
        UsageError: the command line is wrong.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        raise _interrupted(error) from None  # typer would end without a line
    except _CommandLineError as error:
        kind, ctx = type(error).__name__, error.ctx
        if kind == "NoArgsIsHelpError":  # the help is printed
            raise
        if kind == "NoSuchOption" and ctx is not None:
            raise _unknown_option(error.option_name, ctx) from None
        text = _MEANT.join(error.format_message().split(_MEANT)[:2])  # the nearest word once
        path = ctx.command_path if ctx else f"atoll {outer.invoked_subcommand}" if outer else "atoll"
        raise UsageError(text, f"`{path} --help` shows how to use it.") from None


def _unknown_option(option: str, ctx: Any) -> UsageError:
    """Return the error for an option that a command does not have."""
    from atoll.cli import config

    known = [each for parameter in ctx.command.params for each in parameter.opts if each.startswith("--")]
    close = difflib.get_close_matches(option, known, n=1)
    key = "" if close or "--set" not in known else config.setting_meant_by(option.lstrip("-"))
    advice = f"Did you mean {close[0]}?" if close else f"Use --set {key}=VALUE." if key else ""
    return UsageError(
        f"{ctx.command_path} has no option {option}.",
        f"{advice} `{ctx.command_path} --help` lists all options.".strip(),
    )


app = typer.Typer(
    cls=Commands,
    name="atoll",
    help="Train one PyTorch model at several sites that keep their data and are connected by slow networks.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=HELP,
)


def _version(wanted: bool) -> None:
    if wanted:
        import atoll

        typer.echo(f"atoll {atoll.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version.", callback=_version, is_eager=True),
) -> None:
    """The options that come before a subcommand: `atoll --version`."""


def main() -> None:
    """Run the command line `atoll`."""
    if os.environ.get("_ATOLL_COMPLETE") == "complete_bash" and (part := _join_setting(os.environ)) is not None:
        with contextlib.redirect_stdout(io.StringIO()) as found, contextlib.suppress(SystemExit):
            app()
        values = [line.partition("=")[2] for line in found.getvalue().splitlines()]
        print("\n".join(each for each in values if each.startswith(part)))
        return
    run_command(app)


def _join_setting(environ: MutableMapping[str, str]) -> str | None:
    """Join the words of `--set KEY=VALUE` that bash has separated at the equals sign; it wants only the value back.

    Args:
        environ: has the words, a line each, and the number of the one at the cursor, as bash sets them.

    Returns:
        The begun value; None if the cursor is not at one.
    """
    words, at = environ["COMP_WORDS"].splitlines(), int(environ["COMP_CWORD"])
    until = words[: at + 1]
    if until[-1:] == ["="]:  # nothing follows it
        until.append("")
    if until[-4:-3] != ["--set"] or until[-2] != "=":
        return None
    part = until[-1]
    environ["COMP_WORDS"], environ["COMP_CWORD"] = "\n".join([*until[:-3], f"{until[-3]}={part}"]), str(len(until) - 3)
    return part


def run_command(command: Callable[[], object]) -> None:
    """Run a subcommand. If it raises an Atoll error, print the error in one line, and exit with the error's exit code.

    If the user's code raised the error, print its traceback before that line.
    """
    try:
        try:
            command()
        finally:
            if sys.stdout is not None:  # closed by the shell: `>&-`
                with contextlib.suppress(BrokenPipeError):
                    sys.stdout.flush()
    except AtollError as error:
        print_line(error_lines(error))
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt as error:
        raise _interrupted(error) from None
    except Terminated:
        raise SystemExit(TERMINATED) from None
    except OSError as error:
        from atoll.posix import FULL

        if error.errno not in FULL:
            raise
        full = DiskFull(f"The command's output cannot be written ({error.strerror}).", "Free disk space.")
        print_line(error_lines(full))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python writes the rest of the output as it ends
        raise SystemExit(full.exit_code) from None


def _interrupted(error: KeyboardInterrupt) -> SystemExit:
    """Return what ends a command after Ctrl-C. Say so in a line, unless the command has said it."""
    if not is_told(error):
        print_line("atoll: interrupted")
    return SystemExit(INTERRUPTED)


if __name__ == "__main__":
    main()
