"""The command `atoll`. Each subcommand has its own file and imports slow modules (PyTorch) only when it runs."""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
from collections.abc import Callable
from typing import Any

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes after a signal: 128 + SIGINT and 128 + SIGTERM, as in shells."""

try:
    import typer
    from typer.core import TyperGroup

    from atoll.child_processes import Terminated
    from atoll.cli import audit, config, evaluate, export, new, page, server, simulate, status, worker
    from atoll.cli.text import print_line
    from atoll.errors import AtollError, DiskFull, UsageError, error_lines
    from atoll.posix import FULL
except KeyboardInterrupt:  # the imports take a while
    raise SystemExit(INTERRUPTED) from None

_CommandLineError: Any = typer.BadParameter.__base__
"""The base class of errors of a command line, in click or in typer's copy of click."""


class Commands(TyperGroup):
    """The subcommands. An unknown option is an error of one line that names the nearest option or setting."""

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand of a command line.

        Raises:
            UsageError: the subcommand does not have an option that was given.
        """
        try:
            return super().invoke(ctx)
        except _CommandLineError as error:
            option = getattr(error, "option_name", None)
            if option is None:
                raise
            raise _unknown_option(option, error.ctx) from None


def _unknown_option(option: str, ctx: Any) -> UsageError:
    """Return the error for an option that a command does not have."""
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
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("server", context_settings=server.CONTEXT)(server.command)
app.command("worker", context_settings=worker.CONTEXT)(worker.command)
app.command("simulate")(simulate.command)
app.command("status")(status.command)
app.command("page")(page.command)
app.command("export")(export.command)
app.command("evaluate")(evaluate.command)
app.command("audit")(audit.command)
app.command("new")(new.command)
app.add_typer(config.app, name="config")


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
    """Run the command line `atoll`: the entry point of the package."""
    run_command(app)


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
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except Terminated:
        raise SystemExit(TERMINATED) from None
    except OSError as error:
        if error.errno not in FULL:
            raise
        full = DiskFull(f"The command's output cannot be written ({error.strerror}).", "Free disk space.")
        print_line(error_lines(full))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python writes the rest of the output as it ends
        raise SystemExit(full.exit_code) from None


if __name__ == "__main__":
    main()
