"""Traits of the Python API."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
import tomllib

from trait_lab import (
    MOST_S,
    ROOT,
    TRAIN,
    Done,
    Verdict,
    atoll,
    commands,
    ended,
    environment,
    finished_state,
    lab,
    subprocess_of,
    trait,
    verdict,
)


def python(code: str, **env: str) -> Done:
    return ended(fed(code, **env), MOST_S)


def fed(code: str, **env: str) -> subprocess.Popen[bytes]:
    """A process of Python that reads code from its standard input: as in a notebook, the code has no file."""
    (lab() / "code.txt").write_text(code)
    pipe = subprocess.PIPE
    with (lab() / "code.txt").open() as file:
        return subprocess.Popen(
            [sys.executable, "-"], cwd=lab(), env=environment(**env), stdin=file, stdout=pipe, stderr=pipe
        )


@trait("api", "at most 5 lines into an existing loop")
def _() -> Verdict:
    count = len(re.findall(r"^.*(?:import atoll|atoll\.|in worker|fl_round\.).*$", TRAIN, re.MULTILINE))
    done = ended(subprocess_of([sys.executable, "train.py"], ATOLL_DIR="alone"), MOST_S)
    return verdict(
        count <= 5 and done.code == 0,
        f"{count} lines of this tool's script name Atoll's objects; it ran: {done.code == 0}",
    )


@trait("api", "works alone without a server")
def _() -> Verdict:
    done = ended(subprocess_of([sys.executable, "train.py"], ATOLL_DIR="alone-again"), MOST_S)
    return verdict(done.code == 0, f"python train.py: exit code {done.code}")


@trait("api", "a small __all__")
def _() -> Verdict:
    import atoll as package

    return verdict(len(package.__all__) <= 13, f"{len(package.__all__)} names")


@trait("api", "import under 0.2 s")
def _() -> Verdict:
    code = "import time; t = time.perf_counter(); import atoll; print(time.perf_counter() - t)"
    least_s = min(float(python(code).out) for _ in range(5))
    return verdict(least_s < 0.2, f"{least_s:.3f} s")


@trait("api", "typed, py.typed, strict")
def _() -> Verdict:
    strict = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"].get("strict", False)
    (lab() / "typed.py").write_text("import atoll\n\nserver = atoll.Server({})\nreveal_type(server.url)\n")
    words = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(lab() / "mypy"), "typed.py"]
    done = ended(subprocess_of(words), 300)
    fits = (ROOT / "src" / "atoll" / "py.typed").exists() and strict
    return verdict(
        fits and re.search(r'"(?:builtins\.)?str"', done.out) is not None,
        f"py.typed and strict: {fits}; mypy of a user's file: {done.out.strip()[:70]!r}",
        half=fits,
    )


@trait("api", "a function of a notebook cell")
def _() -> Verdict:
    settings = '{"algorithm.name": "fedavg", "rounds.total": 1, "disk.min_free_bytes": 0, "disk.state_dir": "cell"}'
    call = f'atoll.Simulation("train.py:build", {settings}, script=train, sites=2, processes=1).run()'
    done = python(f"{TRAIN.partition('if __name__')[0]}\nprint({call}.version)")
    return verdict(
        done.code == 0 and "1" in done.out,
        f"a simulation of a function without a file: {(done.err or done.out).strip()[-110:]!r}",
    )


@trait("api", "a dry run of one batch")
def _() -> Verdict:
    there = [name for name, text in commands().items() if re.search(r"--(?:dry-run|one-batch|fast-dev-run)", text)]
    return verdict(bool(there), f"an option of {', '.join(there) or 'no command'}")


@trait("api", "callbacks")
def _() -> Verdict:
    import atoll as package

    found = [hasattr(package.Server, "follow"), "on_round" in inspect.signature(package.Simulation.__init__).parameters]
    found.append(importlib.util.find_spec("atoll.integrations.transformers") is not None)
    return verdict(
        all(found), f"Server.follow, Simulation(on_round=…), a callback of each trainer: {found}", half=any(found)
    )


@trait("api", "state_dict() of every stateful object")
def _() -> Verdict:
    names = (
        "atoll:DiLoCo",
        "atoll.integrations.lightning:AtollCallback",
        "atoll.integrations.transformers:AtollCallback",
    )
    lacking = []
    for name in names:
        module, _, attribute = name.partition(":")
        try:
            kind = getattr(importlib.import_module(module), attribute)
        except ImportError:
            lacking.append(f"{name} (not installed)")
            continue
        lacking += [] if hasattr(kind, "state_dict") or hasattr(kind, "state") else [name]
    return verdict(not lacking, f"without: {lacking or 'none'} of {len(names)}", half=len(lacking) < len(names))


@trait("api", "plug-ins by entry point with contract tests")
def _() -> Verdict:
    from atoll.testing import contracts

    suites = sorted(name for name in vars(contracts) if name.endswith("Contract"))
    groups = sorted(set(re.findall(r"atoll\.[a-z_]+", (ROOT / "docs" / "testing.md").read_text())))
    return verdict(len(suites) >= 4, f"suites: {', '.join(suites)}; named in docs/testing.md: {len(groups)}")


@trait("api", "the result as an object with a history that pandas takes")
def _() -> Verdict:
    code = f"""{TRAIN.partition("if __name__")[0]}
settings = {{"algorithm.name": "fedavg", "rounds.total": 2, "disk.min_free_bytes": 0, "disk.state_dir": "history"}}
result = atoll.Simulation("train.py:build", settings, script="train.py:train", sites=2, processes=1).run()
rows = [each if isinstance(each, dict) else each.model_dump() for each in result.history]
try:
    import pandas
    print("rows", len(pandas.DataFrame(rows)))
except ImportError:
    print("rows", len(rows), "without pandas; equal keys:", len({{tuple(each) for each in rows}}) == 1)
"""
    done = python(code)
    return verdict("rows 2" in done.out and "False" not in done.out, (done.out or done.err).strip()[-100:])


@trait("api", "a deprecation policy, an API promise")
def _() -> Verdict:
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path.name != "behaviours.md"]
    named = [
        path.name
        for path in pages
        if re.search(r"^#+ .*(?:deprecat|promise|stability|compatib)", path.read_text(), re.I | re.M)
    ]
    return verdict(bool(named), f"pages with a heading of it: {named or 'none'}")


@trait("api", "errors are classes with codes")
def _() -> Verdict:
    from atoll.errors import BY_CODE

    codes = [kind.exit_code for kind in BY_CODE.values()]
    return verdict(len(BY_CODE) > 10 and all(codes), f"{len(BY_CODE)} classes, {len(set(codes))} exit codes")


@trait("api", "one script: real, simulated, distributed")
def _() -> Verdict:
    simulated = atoll("simulate", "run.toml", "--set", "disk.state_dir=same").code
    real = (finished_state() / "journal.sqlite").exists()
    ray = "ray" in commands().get("simulate", "") + commands().get("run", "")
    return verdict(
        simulated == 0 and real and ray,
        f"train.py: real {real}, simulated {simulated == 0}, an engine for a cluster {ray}",
    )


@trait("api", "Windows and macOS import and join")
def _() -> Verdict:
    files = [path.read_text() for path in ROOT.rglob(".github/workflows/*.yml")]
    shown = any("macos" in text and "windows" in text for text in files)
    return verdict(
        shown, "no workflow runs the tests there; by hand on such machines" if not shown else "by a workflow"
    )
