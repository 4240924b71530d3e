"""The pages say what is: links, commands, flags, settings, variables, names, metrics and messages exist."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
import subprocess
import sys
import tomllib
import urllib.request
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pages import PAGES, ROOT, Commands, anchors, command_lines, inline_code, links, prose, require_command, table_rows
from torch import nn
from typer.testing import CliRunner

import atoll
from atoll import registry
from atoll.aggregation.user_aggregator import Update
from atoll.cli.main import app
from atoll.config import FIELDS, GROUPS, NOT_SETTINGS, Settings
from atoll.protocol.openapi import OPERATIONS
from atoll.recipes import Recipe, RunResult
from atoll.server.http.run_metrics import OF_RUN
from atoll.server.tasks.workflow_controller import Controller
from atoll.worker.training.federated_loop import Round, Worker

DOCS = ROOT / "docs"
SETTINGS = atoll.Settings().by_key()
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)

LEFTOVERS = re.compile(r"(?<![\w.])/(?:root|home|Users|mnt)/|\bTODO\b|\bFIXME\b|lorem ipsum", re.IGNORECASE)
"""Paths of a writer's own machine, and what should have been finished or left out."""


@pytest.fixture(scope="module")
def commands() -> Commands:
    """What `--help` says of each command."""
    found: dict[str, frozenset[str]] = {}

    def look(path: str) -> None:
        text = CliRunner().invoke(app, [*path.split(), "--help"], env={"COLUMNS": "300"}).stdout
        options = re.findall(r"^│[ *]+((?:--?[\w-]+[ /]+)+)", text, re.MULTILINE)
        found[path] = frozenset(flag for line in options for flag in re.findall(r"--[\w-]+", line)) | {"--help"}
        for below in re.findall(r"^│ (\w+) ", text.partition("─ Commands ─")[2], re.MULTILINE):
            look(f"{path} {below}".strip())

    look("")
    return found


@by_page
def test_every_link_in_the_docs_has_a_target(page: Path) -> None:
    """Each relative link of a page leads to a file in the repository and to a heading that exists."""
    for link in links(page):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: there is no such file"
        assert target.is_relative_to(ROOT), link
        assert not anchor or anchor in anchors(target), f"{link}: there is no such heading"


def test_the_index_links_to_every_page() -> None:
    """Links lead from the documentation's index to every page, directly or through other pages."""
    seen, todo = set[Path](), [DOCS / "index.md"]
    while todo:
        page = todo.pop()
        if page not in seen and page.suffix == ".md":
            seen.add(page)
            todo += [(page.parent / link.partition("#")[0]).resolve() for link in links(page) if "://" not in link]
    assert set(PAGES) <= seen


@by_page
def test_every_documented_command_and_flag_exists(page: Path, commands: Commands) -> None:
    anywhere = flags_of_script("bench/round.py").union(*commands.values())
    for line in command_lines(page):
        for script, rest in re.findall(r"(?:^|[\s(])python ((?:bench|examples)/\S+\.py)([^\n]*)", line):
            flags = {word.partition("=")[0] for word in shlex.split(rest, comments=True) if re.match(r"--\S+$", word)}
            assert flags <= flags_of_script(script), f"{line!r}: no such flag"
        if re.match(r"--[a-z]", line):
            words = shlex.split(line, comments=True)
            assert {word.partition("=")[0] for word in words if word.startswith("--")} <= anywhere, line
        for called in re.findall(r"(?:^|[\s(])atoll ([a-z][^\n]*)", line):
            require_command(commands, called, line)


@cache
def flags_of_script(script: str) -> set[str]:
    """What its source names as `--flag`, and the parameters of its `main`, which typer makes flags of."""
    source = (ROOT / script).read_text(encoding="utf-8")
    mains = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    names = [argument.arg.replace("_", "-") for main in mains for argument in main.args.args]
    return {
        "--help",
        *re.findall(r"[\"'](--[a-z_-]+)[\"']", source),
        *(f"--{no}{name}" for name in names for no in ("", "no-")),
    }


@by_page
def test_every_documented_make_target_exists(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for line in command_lines(page):
        for target in re.findall(r"(?:^|[\s(])make ([a-z]+)", line):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


@by_page
def test_every_documented_variable_exists(page: Path) -> None:
    known = {f"ATOLL_{key.upper().replace('.', '__')}" for key in SETTINGS}
    known.add("ATOLL_LEASES")  # `atoll worker` and its script tell each other by it
    known |= set(re.findall(r"ATOLL_\w+", (DOCS / "reference" / "settings.md").read_text(encoding="utf-8")))
    written = set(re.findall(r"\bATOLL_[A-Z][A-Z_]*[A-Z]\b", page.read_text(encoding="utf-8")))
    if page.parent.name != "reference" and page.name != "behaviours.md":
        assert written <= known, written - known


OPTIONS = ("algorithm.mu", "algorithm.outer_optimizer.lr", "algorithm.outer_optimizer.momentum", "on_missed")
"""Options of a choice, and a field of an algorithm."""
ARGUMENTS = (
    "idle_timeout_s",
    "max_sync_retries",
    "min_clients",
    "min_responses",
    "min_sites",
    "num_clients",
    "num_rounds",
    "round_s",
)
"""Names that look like settings, and are arguments, or a field of a bench's result."""


def test_every_documented_setting_exists() -> None:
    """Code on the pages that looks like a setting with a unit, or that assigns a value, is an existing setting."""
    for page in [ROOT / "README.md", *DOCS.glob("*.md")]:
        others = page.name in ("behaviours.md", "layout.md") or page.name.startswith("from-")  # have other names, too
        for code in [] if others else inline_code(page):
            if found := re.fullmatch(r"([a-z_.]+) = .+", code):
                assert found.group(1) in {*SETTINGS, *OPTIONS}, f"{page.name}: {code}"
            if re.fullmatch(r"(heartbeat|idle|round|min|max|keep|num)_[a-z_]+", code):
                assert code in {*SETTINGS, *ARGUMENTS}, f"{page.name}: {code}"


@by_page
def test_pages_have_no_leftovers(page: Path) -> None:
    """No page contains `TODO`, `FIXME`, filler text or a path of one particular machine."""
    found = LEFTOVERS.search(page.read_text(encoding="utf-8"))
    assert found is None, f"{page.name}: {found}"


def test_the_diagrams_match_the_transition_tables(tmp_path: Path) -> None:
    """The diagrams in `concepts.md` equal those that `tools/diagrams.py` draws from the transition tables."""
    page = tmp_path / "concepts.md"
    page.write_text((DOCS / "concepts.md").read_text(encoding="utf-8"), encoding="utf-8")
    subprocess.run([sys.executable, ROOT / "tools" / "diagrams.py", "--page", page], check=True)
    assert page.read_text(encoding="utf-8") == (DOCS / "concepts.md").read_text(encoding="utf-8"), (
        "run tools/diagrams.py: the transition tables have changed"
    )


def test_the_readme_has_one_table_of_figures() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("<!-- figures -->") == text.count("<!-- /figures -->") == 1
    assert len(table_rows(ROOT / "README.md", "Measured")) == 9


@pytest.fixture(scope="module")
def texts() -> str:
    """Every piece of text in the package's source: constants, and what stands between the values of f-strings."""
    pieces = [
        node.value
        for path in (ROOT / "src" / "atoll").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return "\x00".join(pieces)


def rows_of(page: Path) -> list[list[str]]:
    """Cells of every table of a page, without the first rows."""
    headings = re.findall(r"^## (.+)$", prose(page), re.MULTILINE)
    return [row for heading in headings for row in table_rows(page, heading)]


def require_said(rows: list[list[str]], texts: str, at_least: int) -> None:
    """What stands in back quotes at the begin of rows is said by the code."""
    quoted = [cells[0][1:].partition("`")[0] for cells in rows if cells[0].startswith("`")]
    assert len(quoted) > at_least
    for message in quoted:
        for piece in filter(None, message.split("…")):
            assert piece in texts, f"{message!r}: {piece!r} is said nowhere"


@pytest.mark.covers("L26", "X3")
def test_quoted_messages_exist_in_the_code(texts: str) -> None:
    """Each message quoted in the operations and troubleshooting pages is a text in the code."""
    require_said(table_rows(DOCS / "operations.md", "Common errors"), texts, 20)
    rows = rows_of(DOCS / "troubleshooting.md")
    require_said(rows, texts, 35)
    assert len(rows) > 40
    assert {len(row) for row in rows} == {4}, [row for row in rows if len(row) != 4]
    assert all(symptom and cause and remedy for symptom, cause, _, remedy in rows)


@pytest.mark.covers("L26")
def test_the_staleness_warning_refers_to_its_section(texts: str) -> None:
    """The warning about stale updates refers to the section of the troubleshooting page that explains this warning."""
    named = re.search(r"See (docs/troubleshooting\.md), (.+)", texts)
    heading = named[2].partition("\x00")[0]
    assert any("its update would be … behind" in row[0] for row in table_rows(ROOT / named[1], heading))


def test_documented_metrics_equal_the_servers_metrics(tmp_path: Path) -> None:
    """The operations page lists exactly the metrics that a server serves."""
    written = set(re.findall(r"`(atoll_\w+)", prose(DOCS / "operations.md")))
    with atoll.Server(
        nn.Linear(2, 2), settings={"algorithm.name": "diloco", "network.port": 0, "disk.state_dir": tmp_path / "state"}
    ) as server:
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as response:
            served = set(re.findall(r"^# TYPE (\w+)", response.read().decode(), re.MULTILINE))
    later = {name for name in OF_RUN if name not in served}  # those that rounds have to end for
    assert written == served | later


# -- for people who move over from another framework

WORDS = {
    "from-nvflare": "client, controller, task data, aggregator, decomposer, tensor downloader, persistor, executor, "
    "DXO, Shareable, FLModel, SimEnv, task_data_filters, tensor_download_chunk_size, LazyTensorDict",
    "from-flower": "SuperLink, SuperNode, ClientApp, ServerApp, strategy, run_config, mods, workers manager, "
    "ClientManager, Grid, ArrayRecord, fit, evaluate",
    "from-diloco": "HealthMonitor, FragmentManager, sync round, DiLoCoServer, DiLoCoWorker, DiLoCoClient, LocalSGD, "
    "Manager, Lighthouse, DiLoCoOptimizer, DHT, DyLU, dn_buffer_size",
}
"""Page → what people look for on it."""


@pytest.mark.covers("X7")
@pytest.mark.parametrize("page", WORDS)
def test_migration_pages_use_the_other_frameworks_terms(page: str) -> None:
    """Each page for users of another framework contains the terms of this framework that they search for."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    assert [word for word in WORDS[page].split(", ") if word not in text] == []


STAND_FOR: dict[str, Any] = {
    "atoll": atoll,
    "controller": Controller,
    "diloco": atoll.DiLoCo,
    "received": Round,
    "recipe": Recipe,
    "result": RunResult,
    "fl_round": Round,
    "server": atoll.Server,
    "update": Update,
    "worker": Worker,
}
"""First word of a name with dots → what it is of."""

FILES = {"run.toml", "model.safetensors", "metrics.jsonl"}
ARGUMENT_OF = {
    "filters": atoll.join,
    "max_sync_retries": atoll.DiLoCo,
    "metrics": Round.submit,
    "site": Controller.send,
    "weight": Round.submit,
}
"""Names that are arguments → of what."""


def exists(name: str, commands: Commands) -> bool:
    """Whether a name of ours is a public one, a setting, a value of one, a command, a variable, a route or a file."""
    if name in FILES or name in FIELDS or name in GROUPS or name.startswith("algorithm.") or name in NOT_SETTINGS:
        return True
    if name in ARGUMENT_OF:
        return name in inspect.signature(ARGUMENT_OF[name]).parameters
    if found := re.fullmatch(r"([\w.]+) = (\S.*)", name):
        Settings.build({"rounds.sites": 2, found[1]: tomllib.loads(f"value = {found[2]}")["value"]})
        return True
    if found := re.fullmatch(r"(GET|POST|PUT|DELETE) (/\S+)", name):
        return any((each.method, each.path) == found.groups() for each in OPERATIONS)
    if name.startswith("atoll "):
        require_command(commands, name.removeprefix("atoll "), name)
        return True
    if name.startswith("--"):
        return name in commands["worker"]
    if name in {each for kind in registry.TABLES for each in registry.TABLES[kind]}:
        return True
    if name.startswith("with "):
        name = re.sub(r"^with (.+?)\(.*$", r"\1", name)
    first, *rest = name.split(".")
    found_at: Any = STAND_FOR.get(first)
    return found_at is not None and bool(rest) and has(found_at, rest)


def has(of: Any, names: list[str]) -> bool:
    for name in names:
        annotated = {key for kind in getattr(of, "__mro__", ()) for key in vars(kind).get("__annotations__", {})}
        if not hasattr(of, name) and name not in annotated:
            return False
        of = getattr(of, name, None)
    return True


def our_names(page: str) -> list[str]:
    """What stands in back quotes in the second column of the tables whose second column is Atoll's."""
    found: list[str] = []
    for table in re.findall(r"(?:^\|.*\n)+", prose(ROOT / "docs" / f"{page}.md"), re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()]
        if head[1:2] == ["Atoll"]:
            found += [name for row in rows if len(row) > 1 for name in re.findall(r"`([^`]+)`", row[1])]
    return found


@pytest.mark.covers("X7")
@pytest.mark.parametrize("page", WORDS)
def test_every_atoll_name_on_migration_pages_exists(page: str, commands: Commands) -> None:
    """In the tables of the pages for users of other frameworks, each name of Atoll exists."""
    names = our_names(page)
    assert len(names) > 50
    missing = [name for name in names if not exists(name, commands)]
    assert missing == []


NO_NAMES = ["atoll.joyn", "round.submitt", "sync_evry", "POST /v1/worker", "result.modle", "reducer_of_mine", "--sight"]


@pytest.mark.parametrize("name", NO_NAMES)
def test_the_name_check_rejects_wrong_names(name: str, commands: Commands) -> None:
    """The check used for the names on the pages rejects misspelled and unknown names."""
    assert not exists(name, commands)


@pytest.mark.parametrize("path", sorted(DOCS.glob("results/*.json")), ids=lambda path: path.stem)
def test_every_result_describes_its_machine(path: Path) -> None:
    """Each stored measurement names the commit, the versions of Atoll and PyTorch, and the machine's CPU."""
    assert json.loads(path.read_text())["machine"].keys() >= {"commit", "atoll", "torch", "capability", "cpu"}
