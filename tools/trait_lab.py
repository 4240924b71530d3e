"""What `tools/traits.py` looks at: commands, a server with sites, its page, and tests of the page in a browser."""

from __future__ import annotations

import functools
import gzip
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))
ATOLL = [sys.executable, "-m", "atoll.cli.main"]
MOST_S = 120.0

TRAIN = """
import torch
from torch import nn

import atoll


def build():
    torch.manual_seed(0)
    return nn.Linear(2, 1)


def train(worker):
    model, data = build(), torch.randn(64, 2)
    for fl_round in worker:
        fl_round.load_into(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loss = ((model(data) - data.sum(1, keepdim=True)) ** 2).mean()
        loss.backward()
        optimizer.step()
        fl_round.submit(model, weight=len(data), metrics={"loss": loss.item()})


if __name__ == "__main__":
    with atoll.join() as worker:
        train(worker)
"""

RUN = """
model.source = "train.py:build"
algorithm.name = "fedavg"
rounds.total = 3
rounds.sites = 2
network.port = 0
run.script = "train.py:train"
disk.min_free_bytes = 0
"""


class Verdict(NamedTuple):
    """holds, half, not or "by hand", and what was seen."""

    state: str
    seen: str


Check = Callable[[], Verdict]
CHECKS: dict[str, list[tuple[str, Check]]] = {"command": [], "page": [], "api": []}


def trait(group: str, text: str) -> Callable[[Check], Check]:
    """Add a check, in the order of the traits."""

    def add(check: Check) -> Check:
        CHECKS[group].append((text, check))
        return check

    return add


def verdict(holds: bool, seen: str, half: bool = False) -> Verdict:
    return Verdict("holds" if holds else "half" if half else "not", seen)


class Done(NamedTuple):
    """How a command ended, what it printed, and its longest silence."""

    code: int
    out: str
    err: str
    seconds: float
    silence_s: float


@functools.cache
def lab() -> Path:
    """A folder with a training script and a run file."""
    folder = Path(tempfile.mkdtemp(prefix="atoll-traits-"))
    (folder / "train.py").write_text(TRAIN)
    (folder / "run.toml").write_text(RUN)
    return folder


def environment(**more: str) -> dict[str, str]:
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("ATOLL_", "NO_COLOR", "FORCE_COLOR"))
    }
    return kept | {"COLUMNS": "120", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")} | more


def atoll(*words: str, folder: Path | None = None, most_s: float = MOST_S, **env: str) -> Done:
    """Run `atoll WORDS` to its end."""
    return ended(subprocess_of([*ATOLL, *words], folder, **env), most_s)


def subprocess_of(words: list[str], folder: Path | None = None, **env: str) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        words, cwd=folder or lab(), env=environment(**env), stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe
    )


def ended(process: subprocess.Popen[bytes], most_s: float) -> Done:
    assert process.stdout is not None
    assert process.stderr is not None
    begin_s = said_s = time.monotonic()
    texts, silence_s = {process.stdout: b"", process.stderr: b""}, 0.0
    open_ones = list(texts)
    while open_ones and time.monotonic() - begin_s < most_s:
        for each in select.select(open_ones, [], [], 0.2)[0]:
            data = os.read(each.fileno(), 2**16)
            silence_s, said_s = max(silence_s, time.monotonic() - said_s), time.monotonic()
            texts[each] += data
            if not data:
                open_ones.remove(each)
    if open_ones:
        process.kill()
    out, err = (text.decode(errors="replace") for text in texts.values())
    return Done(process.wait(), out, err, time.monotonic() - begin_s, silence_s)


@functools.cache
def commands() -> dict[str, str]:
    """Command → what its `--help` says; only commands that exist."""
    text = atoll("--help").out
    names = re.findall(r"^[│|]? *(\w+)  +\S", text.partition("Commands")[2], re.MULTILINE)
    return {name: atoll(name, "--help").out for name in dict.fromkeys(names)}


@contextmanager
def server(state: str, **env: str) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    """A server of the lab's run file. Yield its process, address and log; kill it in the end."""
    log = lab() / f"{state}.log"
    with log.open("ab") as file:
        words = [*ATOLL, "server", "run.toml", "--set", f"disk.state_dir={state}"]
        process = subprocess.Popen(words, cwd=lab(), env=environment(**env), stdout=file, stderr=file)
    try:
        begin = log.stat().st_size if log.exists() else 0
        until(lambda: re.search(r"listening on (http\S+)", log.read_text()) or process.poll() is not None)
        yield process, re.findall(r"listening on (http\S+)", log.read_text() or str(begin))[-1], log
    finally:
        process.kill()
        process.wait()


def until(condition: Callable[[], object], most_s: float = 60.0) -> object:
    end_s = time.monotonic() + most_s
    while not (found := condition()) and time.monotonic() < end_s:
        time.sleep(0.05)
    return found


def site(url: str, name: str) -> subprocess.Popen[bytes]:
    return subprocess_of([sys.executable, "train.py"], ATOLL_SERVER=url, ATOLL_SITE=name, ATOLL_DIR=f"site-{name}")


@functools.cache
def finished_state() -> Path:
    """The state directory of a finished run of two sites."""
    with server("finished") as (process, url, _):
        sites = [site(url, name) for name in "ab"]
        assert [ended(each, MOST_S).code for each in sites] == [0, 0]
        process.wait(60)
    return lab() / "finished"


def got(url: str) -> tuple[int, dict[str, str], bytes]:
    request = urllib.request.Request(url, headers={"Accept-Encoding": "gzip"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, {key.lower(): value for key, value in answer.headers.items()}, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, {}, b""


class Page(NamedTuple):
    """The page of a waiting server: status, headers, text, names of its files, bytes on the wire, seconds."""

    code: int
    headers: dict[str, str]
    text: str
    files: dict[str, str]
    nbytes: int
    seconds: float
    status: dict[str, object]
    log: str


def plain(data: bytes, headers: dict[str, str]) -> str:
    return (gzip.decompress(data) if headers.get("content-encoding") == "gzip" else data).decode(errors="replace")


@functools.cache
def page() -> Page:
    with server("page") as (_, url, log):
        one = site(url, "a")
        until(lambda: b'"alive"' in got(f"{url}/v1/status")[2])
        begin_s = time.monotonic()
        code, headers, data = got(f"{url}/")
        text, nbytes, files = plain(data, headers), len(data), dict[str, str]()
        todo = re.findall(r"(?:src|href)=\"([^\"#]+)\"", text)
        while todo:
            name = todo.pop().lstrip("./")
            if name in files or "://" in name:
                continue
            _, its_headers, body = got(f"{url}/{name}")
            files[name], nbytes = plain(body, its_headers), nbytes + len(body)
            folder = name.rpartition("/")[0]
            todo += [f"{folder}/{each}" for each in re.findall(r"from \"\./([^\"]+)\"", files[name])]
        seconds, status = time.monotonic() - begin_s, json.loads(got(f"{url}/v1/status")[2])
        one.kill()
        return Page(code, headers, text, files, nbytes, seconds, status, log.read_text())


BROWSER: dict[str, str] = {}
"""Test of the page → its outcome, if the tests have run."""


def by_tests(words: str, what: str) -> Verdict:
    """What tests in a browser with one of these words in their names have shown."""
    paths = browser_tests()
    names = {
        name for path in paths for name in re.findall(r"^def (test_\w*(?:" + words + r")\w*)", path.read_text(), re.M)
    }
    if not names:
        return Verdict("not", f"{what}: no test shows it")
    if not BROWSER:
        return Verdict("by hand", f"{what}: {', '.join(sorted(names))} show it in a browser; run with --browser")
    outcomes = {name: BROWSER.get(name, "not run") for name in sorted(names)}
    if all(each == "SKIPPED" for each in outcomes.values()):
        return Verdict("by hand", f"{what}: there is no browser here")
    return verdict(all(each == "PASSED" for each in outcomes.values()), f"{what}: {outcomes}")


def browser_tests() -> list[Path]:
    paths = [path for path in (ROOT / "tests").rglob("test_*.py") if "page" in str(path.relative_to(ROOT))]
    return [path for path in paths if "docs" not in path.parts and path.name != "test_api_pages.py"]


def run_browser_tests() -> None:
    paths = list(map(str, browser_tests()))
    words = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *paths]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True) if paths else None
    for state, name in re.findall(r"^(PASSED|FAILED|SKIPPED|ERROR) \S+::(test_\w+)", done.stdout if done else "", re.M):
        BROWSER[name] = state if BROWSER.get(name) in (None, "PASSED") else BROWSER[name]
