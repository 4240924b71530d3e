"""`atoll run`: a server and its sites on this machine, in one terminal."""

from __future__ import annotations

import json as jsons
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from atoll import registry
from atoll.child_processes import raise_on_sigterm
from atoll.cli import EndsAtOnce
from atoll.cli.config import Rounds, Sets, read_settings, require_names, site_names
from atoll.cli.flower import Flower, GivenKeys, RunConfig, folder_of_app, of_flower_app
from atoll.cli.run_folders import RUN_FILE, Place, finished_twin, place
from atoll.cli.text import FIRST_S, after_run, still
from atoll.cli.which_run import RUNS, STATE, no_such_run, quoted, run_folder, state_directory
from atoll.errors import ConfigError, RunFailed, UsageError

EXAMPLES = Path(__file__).with_name("examples")
ENGINES = ("process", "simulate", "ray")


def command(
    run_file: Annotated[
        Path | None,
        typer.Argument(help="Run file (TOML), or the folder or name of a run to go on with.", metavar="[RUN.TOML]"),
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script (its sys.argv), after `--`.", metavar="-- ARGS")
    ] = None,
    example: Annotated[
        str | None,
        typer.Option(
            help="Run an example of Atoll instead: digits.",
            metavar="NAME",
            show_default=False,
            autocompletion=lambda: _examples(),
        ),
    ] = None,
    flower: Flower = None,
    run_config: RunConfig = None,
    record_keys: GivenKeys = None,
    sites: Annotated[
        str | None,
        typer.Option(help="Number of sites, or their names: a,b,c. Default: rounds.sites.", show_default=False),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="process (default): a server, and a process for each site; simulate or ray: a simulation.",
            show_default=False,
            autocompletion=lambda: ENGINES,
        ),
    ] = None,
    rounds: Rounds = None,
    sets: Sets = None,
    port: Annotated[int, typer.Option(help="Port of the server; 0: any free one.", min=0, max=65535)] = 0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin a new run, also if the last one has stopped.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the last run, whatever it was begun with.")
    ] = False,
    kill_server: Annotated[
        bool, typer.Option("--kill-server", help="Kill the server halfway, resume, and compare with a whole run.")
    ] = False,
    open_page: Annotated[bool, typer.Option("--open", help="Open the run's page in a browser.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the path of the trained model.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print what all processes print, too.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON; lines go to standard error.")
    ] = False,
) -> None:
    """Run a server and its sites on this machine. Each run has its own folder: runs/NAME-1, runs/NAME-2 and so on."""
    raise_on_sigterm()
    with EndsAtOnce(), still("loading what runs a server and its sites", None if quiet else FIRST_S):
        from atoll.cli.run_here import Chosen, RunHere, Shown
        from atoll.recipes.recipe import slug
        from atoll.simulate import INPUTS_FILE
        from atoll.simulate.inputs import Inputs, earlier_run
        from atoll.simulate.script import name_of

    before = None
    if example is None and run_file is not None and run_file.suffix != ".toml" and not run_file.is_file():
        own = run_folder(state_directory(run_file)) if not (run_file / INPUTS_FILE).exists() else run_file
        before, run_file = Inputs.read(own), own
        if before is None:
            raise no_such_run(run_file)
        sites, engine = sites or ",".join(before.sites) + ",", engine or before.settings.get("--engine")
        arguments = arguments or before.arguments
        run_file = run_file / RUN_FILE
    elif example is not None:
        if run_file is not None and run_file.suffix != ".toml":  # all words after `--` are the script's
            run_file, arguments = None, [str(run_file), *(arguments or ())]
        run_file = _example(example, run_file)
    elif run_file is None and flower is None:
        near = "Did you mean: atoll run run.toml?" if Path(RUN_FILE).is_file() else "`atoll new` writes one."
        raise UsageError("No run file was given.", f"{near} To see a run at once: atoll run --example digits")
    given = site_names(sites) if sites else []
    count = [f"rounds.sites={len(given)}"] if given else []
    settings = read_settings(run_file, [*(sets or ()), *count], rounds=rounds)
    if flower is not None:
        settings, arguments = of_flower_app(settings, flower, run_config or [], record_keys or [])
    is_app = flower is not None and settings.algorithm.target is None
    names = given or site_names(str(settings.rounds.sites))
    require_names(settings)
    engine = _engine(engine or "process", needs_server=kill_server or open_page)
    if settings.run.script is None:
        raise ConfigError("The run file names no script for the sites.", 'Set run.script = "train.py", or another.')
    script, words = name_of(settings.run.script), list(arguments or ())
    inputs = Inputs.of(settings, script, words, names)
    inputs = replace(inputs, settings=inputs.settings | {"--engine": engine})
    stem = RUNS / slug(settings.run.name)
    sources = [run_file.parent if run_file else Path(), *folder_of_app(script, words)]
    chosen = Chosen(settings, script, words, names, engine, sources, stem, inputs)
    shown = Shown(open_page, quiet, verbose, json)
    twin = None
    if kill_server and not (twin := finished_twin(stem, inputs)):
        whole = RunHere(chosen, place(stem, inputs, fresh=True, resume=False), shown, port=port)
        whole.to_end()
        twin = whole.folder
    if before is not None and not kill_server:
        where = Place(own, earlier_run(own / STATE, own, inputs), "")
    else:
        where = place(stem, inputs, fresh=fresh or kill_server, resume=resume)
    run = RunHere(chosen, where, shown, port=port, kills=kill_server)
    run.to_end()
    compared = _compared(run, twin) if twin is not None else {}
    if json:
        print(jsons.dumps(run.summary | compared, indent=2))
    elif quiet:
        print(run.folder if is_app else run.model)
    else:
        of = "app" if is_app else "workflow" if settings.model.source is None else ""
        run.view.say(f"next: {run.next or _next(example, run.folder, of=of)}")


def _example(name: str, run_file: Path | None) -> Path:
    """Return the run file of an example."""
    if run_file is not None:
        raise UsageError(f"Both --example {name} and {run_file} are given.", "Use one of them.")
    known = _examples()
    if name not in known:
        raise UsageError(
            f"There is no example {name!r}.", registry.nearest(name, known, f"The examples are {', '.join(known)}.")
        )
    return EXAMPLES / name / RUN_FILE


def _examples() -> list[str]:
    return sorted(each.name for each in EXAMPLES.iterdir() if (each / RUN_FILE).is_file())


def _engine(engine: str, *, needs_server: bool) -> str:
    if engine not in ENGINES:
        raise UsageError(
            f"--engine is {engine!r}.", registry.nearest(engine, ENGINES, f"Use one of {', '.join(ENGINES)}.")
        )
    if needs_server and engine != "process":
        raise UsageError(
            f"--kill-server and --open need a server, which --engine {engine} does not have.", "Leave --engine out."
        )
    return engine


def _compared(run: Any, twin: Path) -> dict[str, str]:
    """Compare the model of a run with a killed server with that of a whole run, and say both digests.

    Raises:
        RunFailed: the models differ.
    """
    from atoll.cli.run_folders import model_digest
    from atoll.recipes.environments import model_of

    whole = model_of(run.settings.changed({"disk.state_dir": twin / STATE}), twin)
    digests = {"undisturbed": model_digest(whole), "killed": model_digest(run.model)}
    run.view.say(f"{digests['undisturbed']}  {twin}, undisturbed")
    run.view.say(f"{digests['killed']}  {run.folder}, with its server killed and resumed")
    if digests["undisturbed"] != digests["killed"]:
        raise RunFailed(
            "The two models differ.",
            "Nothing was lost if the script draws numbers that Atoll does not seed, or keeps state between rounds.",
        )
    run.view.say("the same bits: the killed server has lost nothing")
    return {"undisturbed": str(twin), "undisturbed_digest": digests["undisturbed"]}


def _next(example: str | None, folder: Path, *, of: str = "") -> str:
    if of:  # a ServerApp or a workflow writes the model where it likes
        return f"{folder / 'server.log'} has what the {of} printed; atoll page {quoted(folder)} shows the run"
    own = f"; for data of your own, copy {EXAMPLES / example} and change load_data in train.py" if example else ""
    return f"{after_run(quoted(folder))}; all runs: atoll runs{own}"
