"""`atoll evaluate`: evaluate models of a run on the data of every site.

atoll evaluate run.toml --versions latest,12,best        start a server that only evaluates, then print the results
atoll evaluate runs/digits-1                             the same for a run of `atoll run`
atoll evaluate --server http://host:8512                 print the results that a running server has so far
"""

from __future__ import annotations

import logging
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.child_processes import Terminated, raise_on_sigterm
from atoll.cli import EndsAtOnce
from atoll.cli.config import Port, Sets, read_settings
from atoll.cli.run_folders import RUN_FILE
from atoll.cli.text import (
    aligned,
    fitting,
    log_lines,
    next_step,
    number_of,
    require_file,
    say_stopping,
    still,
    telling_what_is_awaited,
    width_of_output,
)
from atoll.cli.which_run import is_of_atoll_run, state_directory
from atoll.config import Settings
from atoll.config.workflow_settings import EVALUATES
from atoll.errors import AtollError, UsageError
from atoll.format_text import visible
from atoll.protocol import routes
from atoll.protocol.task_messages import Evaluation, markdown, plain
from atoll.store.reader import has_run, require_run
from atoll.transport.http_client import ask, server_address

if TYPE_CHECKING:
    from atoll.server.serve import Server

LOG = logging.getLogger("atoll.cli")


def command(
    run_file: Annotated[
        Path | None,
        typer.Argument(
            help="Run file, or the name or folder of a run of `atoll run`: it has the models to evaluate.",
            show_default=False,
            metavar="[RUN.TOML|RUN]",
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(help="Show the results of the server at this address instead.", show_default=False),
    ] = None,
    versions: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated models: latest, best, version numbers, .safetensors files. Default: latest.",
            show_default=False,
        ),
    ] = None,
    site_models: Annotated[
        bool | None,
        typer.Option(
            "--site-models/--no-site-models",
            help="Also evaluate the sites' own models. Default: if workflow.steps do, so that sites keep them.",
            show_default=False,
        ),
    ] = None,
    sites: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated names of the sites that evaluate. Default: all that ever joined.", show_default=False
        ),
    ] = None,
    evaluation_timeout_s: Annotated[
        float, typer.Option("--evaluation-timeout-s", min=0, help="Skip a site that makes no progress for this long.")
    ] = 3600.0,
    sets: Sets = None,
    port: Port = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Also write the results to this file: JSON if *.json, else Markdown.", show_default=False),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Evaluate models of a run on the data of each site: metrics and weight of each site, and the mean."""
    if (run_file is None) == (server is None):
        raise UsageError(
            "Give either a run file or --server.",
            "A run file starts an evaluation of stored models; --server shows the results of a running server.",
        )
    given = {"--versions": versions, "--sites": sites, "--set": sets, "--port": port}
    if server is not None and (surplus := [name for name, value in given.items() if value]):
        raise UsageError(
            f"{', '.join(surplus)}: only for an evaluation that this command starts, not with --server.",
            "Give a run file in place of --server, or leave this out.",
        )
    if out is not None:  # now, not after the evaluation
        require_file(out, "evaluation.md")
    if server is not None:
        with still("still waiting for the answer of the server"):
            evaluation = ask(server_address(server), routes.EVALUATION, Evaluation)
    else:
        assert run_file is not None
        settings = read_settings(_run_file(run_file), sets, port=port)
        if site_models is None:
            site_models = any(step.get("kind") == EVALUATES for step in settings.workflow.steps)
        arguments: dict[str, Any] = {"site_models": site_models, "evaluation_timeout_s": evaluation_timeout_s}
        if versions is not None:
            arguments["versions"] = [int(each) if each.isdecimal() else each for each in _listed(versions)]
        if sites is not None:
            arguments["sites"] = _listed(sites)
        evaluation = _evaluated(settings, arguments)
    show(evaluation, as_json=json)
    if out is not None:  # after the tables, which are then not lost if the disk is full
        text = evaluation.model_dump_json(indent=2) + "\n" if out.suffix == ".json" else markdown(evaluation)
        out.write_text(text, encoding="utf-8")


def _run_file(named: Path) -> Path:
    """Return the run file that a command line names, or that of the run which it names.

    Raises:
        UsageError: the run is none of `atoll run`.
    """
    state_dir = state_directory(named)
    if named.is_file() or not (named.is_dir() or has_run(state_dir)):
        return named
    if not is_of_atoll_run(state_dir):
        raise UsageError(f"{visible(str(named))!r} has no run file.", "Give the run file: atoll evaluate run.toml.")
    return state_dir.parent / RUN_FILE


def _listed(text: str) -> list[str]:
    return [item for item in (each.strip() for each in text.split(",")) if item]


def _evaluated(settings: Settings, arguments: dict[str, Any]) -> Evaluation:
    """Start a server that only evaluates models. Return the results, for each model and site, when all have arrived.

    Args:
        settings: the run's settings; its state directory has the models.
        arguments: the options of the evaluation: models, sites and timeout.

    Raises:
        UsageError: no run was begun in the state directory.
        AtollError: the server cannot start, or no model was evaluated.
    """
    require_run(settings.disk.state_dir)
    log_lines(sys.stderr)
    raise_on_sigterm()
    started: list[Server] = []
    LOG.info("starting the evaluation of %s; loading PyTorch takes a few seconds", settings.run.name)
    try:
        with telling_what_is_awaited(lambda: _awaited(started)):
            return _serve(settings, arguments, started)
    except (KeyboardInterrupt, Terminated) as asked:
        say_stopping(asked, "the evaluation was stopped; the run and its models are unchanged")
        raise
    finally:
        for server in started:
            server.stop()


def _serve(settings: Settings, arguments: dict[str, Any], started: list[Server]) -> Evaluation:
    with EndsAtOnce():
        from atoll.server.serve import Server
        from atoll.server.tasks.cross_site_evaluation import is_file

    server = Server(settings=settings, evaluation=arguments)
    started.append(server)
    server.start()
    LOG.info("on each site, start a script that calls worker.evaluates(function)")
    for name in arguments.get("versions", ()):
        if isinstance(name, str) and is_file(name) and not Path(name).is_file():
            LOG.warning("the model file %s is not in %s: put it there before the sites join", name, Path.cwd())
    LOG.info("waiting for %s; to change the number: --set rounds.sites=N", number_of(settings.rounds.sites, "site"))
    server.run()
    assert server.evaluation is not None
    return server.evaluation


def _awaited(started: Sequence[Server]) -> str:
    """Return what the evaluation waits for."""
    with suppress(AtollError):  # it has no status yet, or no more
        for server in started:
            status = server.status()
            if status.finished:
                return "the evaluation is over; its sites end"
            return next((each.detail for each in status.workflows if each.detail), "the evaluation begins")
    return "the server starts" if started else "PyTorch is loaded"


def show(evaluation: Evaluation, *, as_json: bool) -> None:
    """Print the results of an evaluation: as JSON if `as_json`, as tables on a terminal, else as lines of text."""
    if as_json:
        print(evaluation.model_dump_json(indent=2))
    else:
        lines = lines_of(evaluation, width_of_output()) if sys.stdout.isatty() else plain(evaluation)
        print("\n".join(map(visible, lines)) or "no site has sent results yet")
    if not as_json:
        next_step("atoll export OUT.safetensors --version N, for the version that you choose")


def lines_of(evaluation: Evaluation, width: int) -> list[str]:
    """Return the results as lines of text that fit into a width. No name and no number is cut.

    Each table has a row a model; where that is too wide, a row a site, and else a block of lines a site.
    """
    lines = list[str]()
    for metric in evaluation.metrics:
        rows = [[visible(cell) for cell in row] for row in evaluation.rows(metric)]
        turned = [list(row) for row in zip(*rows, strict=True)]
        turned[0][0] = "site"
        how, table = "rows: models, columns: sites", aligned(rows)
        if max(map(len, table)) > width:
            how, table = "rows: sites, columns: models", fitting(turned[0], turned[1:], width)
        lines += [*textwrap.wrap(f"{visible(metric)} ({how})", width), *table, ""]
    return lines + [part for line in evaluation.empty() for part in textwrap.wrap(visible(f"empty: {line}"), width)]
