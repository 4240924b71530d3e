"""Small faults that the tests have to notice: tests/mutants.toml, each put into a copy of the tree, its tests run.

    make mutants                              all of them, two at a time
    python tools/mutants.py --only ID ID      some
    python tools/mutants.py --check           run no test: does each still apply, do its tests exist?
    python tools/mutants.py --histories 300   which faults in the heart do so many histories notice?

A mutant names a file, a text that is there exactly once, what takes its place, and the smallest set of tests that
notice it. It is an error if one no longer applies, if its tests fail without it, and if they pass with it.
"""

from __future__ import annotations

import argparse
import ast
import functools
import gc
import io
import logging
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

LIMIT_S = 300.0
"""Of the tests of one mutant; a mutant that only makes them hang needs another test."""
BASELINE_LIMIT_S = 1200.0
LEFT_OUT = ("build", "dist")
"""Folders that are not copied, besides hidden ones."""
HEART = ("rounds/", "store/", "aggregation/", "server/coordinator/", "worker/exchange/", "worker/session/")
"""Folders of the package whose faults random histories (tools/histories.py) are for."""
OUTCOME = re.compile(r"^(?:FAILED|ERROR) (\S+\.py(?:::.+?)?)(?: - .*)?$", re.MULTILINE)
"""A line of pytest's summary; a captured log may have lines that begin alike."""


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        meaning: what the program does wrongly with it, for people.
        file: below the root of the checkout.
        find: is in the file exactly once. replace: takes its place.
        tests: pytest ids; at least one of them fails with the fault, and all pass without.
    """

    id: str
    meaning: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """What a pytest process did.

    Attributes:
        code: its exit code; negative where a signal ended it.
        failed: ids of tests that failed.
        cpu_s: CPU time of the process and of what it waited for.
    """

    code: int
    failed: tuple[str, ...]
    output: str
    seconds: float
    cpu_s: float


def read(path: Path) -> list[Mutant]:
    """The mutants of a data file.

    Raises:
        ValueError: an entry has other keys than a mutant.
    """
    names = {field.name for field in fields(Mutant)}
    mutants = []
    for entry in tomllib.loads(path.read_text(encoding="utf-8")).get("mutants", []):
        if set(entry) != names:
            raise ValueError(f"{entry.get('id', '?')}: the keys are {sorted(entry)}, not {sorted(names)}")
        mutants.append(Mutant(**entry | {"tests": tuple(entry["tests"])}))
    return mutants


# -- checks that run no test


def problems(root: Path, mutants: Sequence[Mutant]) -> list[str]:
    """What is wrong with the data; empty where each mutant applies and its tests exist."""
    found, seen = [], set[str]()
    for mutant in mutants:
        if mutant.id in seen:
            found.append(f"{mutant.id}: the id is there twice")
        seen.add(mutant.id)
        found += [f"{mutant.id}: {text}" for text in _problems_of(root, mutant)]
    return found


def _problems_of(root: Path, mutant: Mutant) -> Iterator[str]:
    path = root / mutant.file
    if not mutant.file.startswith("src/") or not path.is_file():
        yield f"there is no {mutant.file} below src/"
        return
    text = path.read_text(encoding="utf-8")
    count = text.count(mutant.find) if mutant.find else 0
    if count != 1:
        yield f"the text to find is {count} times in {mutant.file}, not once"
        return
    try:
        mutated = ast.parse(_mutated(text, mutant))
    except SyntaxError as error:
        yield f"with it, {mutant.file} is no Python: {error}"
        return
    first = text[: text.index(mutant.find)].count("\n") + 1
    last, last_mutated = (first + lines.count("\n") for lines in (mutant.find, mutant.replace))
    if _dumps(mutated.body, first, last_mutated) == _dumps(_body(path), first, last):
        yield "it changes nothing but spaces and comments"
    if not mutant.tests:
        yield "it names no test"
    for test in mutant.tests:
        if not _exists(root, test):
            yield f"there is no test {test}"


def _mutated(text: str, mutant: Mutant) -> str:
    return text.replace(mutant.find, mutant.replace)


def _dumps(body: Sequence[ast.stmt], first: int, last: int) -> list[str]:
    """What the statements that have one of these lines say; the rest of a file is the same with a mutant."""

    def begins(node: ast.stmt) -> int:
        return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])

    return [ast.dump(node) for node in body if begins(node) <= last and first <= (node.end_lineno or last)]


def _exists(root: Path, test: str) -> bool:
    """Whether a file has the function or method that a pytest id names; its parameters are pytest's to look for."""
    file, *names = test.split("[", 1)[0].split("::")
    path = root / file
    if not names or not path.is_file():
        return False
    nodes: Sequence[ast.stmt] = _body(path)
    for at, name in enumerate(names):
        node = next((each for each in nodes if getattr(each, "name", None) == name), None)
        if isinstance(node, ast.ClassDef):
            nodes = node.body
            if (
                node.bases
                and at == len(names) - 2
                and not any(getattr(each, "name", "") == names[-1] for each in nodes)
            ):
                return names[-1] in _inherited(root)
        elif node is None or at < len(names) - 1:
            return False
    return names[-1].startswith(("test", "Test"))


@functools.cache
def _body(path: Path) -> list[ast.stmt]:
    return ast.parse(path.read_text(encoding="utf-8")).body


@functools.cache
def _inherited(root: Path) -> frozenset[str]:
    """Methods of the suites that tests inherit from."""
    suites = [*(root / "src").glob("*/testing/*.py"), *(root / "tests").rglob("*.py")]
    classes = [node for path in suites for node in _body(path) if isinstance(node, ast.ClassDef)]
    return frozenset(each.name for node in classes for each in node.body if isinstance(each, ast.FunctionDef))


# -- runs


class Copies:
    """Copies of the tree, each for one run at a time; removed at the end of the block."""

    def __init__(self, root: Path, count: int) -> None:
        self._root, self._count = root, count
        self._free: SimpleQueue[Path] = SimpleQueue()

    def __enter__(self) -> Copies:
        self._folder = tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True)
        for number in range(self._count):
            target = Path(self._folder.name) / str(number)
            shutil.copytree(self._root, target, ignore=self._left_out, symlinks=True)
            self._free.put(target)
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def _left_out(self, folder: str, names: list[str]) -> list[str]:
        at_root = Path(folder) == self._root
        return [name for name in names if at_root and (name.startswith(".") or name in LEFT_OUT)]

    @contextmanager
    def one(self, mutant: Mutant | None = None) -> Iterator[Path]:
        """A copy, with the mutant in it."""
        root = self._free.get()
        path = root / mutant.file if mutant else None
        text = path.read_text(encoding="utf-8") if path else ""
        try:
            if path and mutant:
                _write(path, _mutated(text, mutant))
            yield root
        finally:
            if path:
                _write(path, text)
            self._free.put(root)


def _write(path: Path, text: str) -> None:
    """Write a source; what is compiled of it is removed: the time of the file may be the same as before."""
    path.write_text(text, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def run_tests(root: Path, tests: Sequence[str], limit_s: float, *words: str) -> Run:
    """Run tests in a copy of the tree, on its sources; at the limit the process group is killed."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("ATOLL_", "PYTEST_"))}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # some take longer to import than most of these tests to run
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root / "src"), env.get("PYTHONPATH")]))
    options = ["-p", "no:cacheprovider", "-p", "pytest_timeout", "-q", "-rfE", "--no-header"]
    command = [sys.executable, "-m", "pytest", *options, *words, *tests]
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(command, cwd=root, env=env, stdout=log, stderr=log, start_new_session=True)
        timer = threading.Timer(limit_s, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        _, status, usage = os.wait4(process.pid, 0)
        timer.cancel()
        process.returncode = code = os.waitstatus_to_exitcode(status)
        log.seek(0)
        output = log.read()
    failed = tuple(OUTCOME.findall(output))
    return Run(code, failed, output, time.monotonic() - begin, usage.ru_utime + usage.ru_stime)


def baseline(copies: Copies, mutants: Sequence[Mutant], jobs: int) -> tuple[str, float]:
    """Run every named test once, as the tree is.

    Returns:
        What fails, empty where nothing does; and the CPU time.
    """
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    files = sorted({test.split("::")[0] for test in tests})
    shares = [[test for test in tests if files.index(test.split("::")[0]) % jobs == job] for job in range(jobs)]

    def run(share: list[str]) -> Run:
        with copies.one() as root:
            return run_tests(root, share, BASELINE_LIMIT_S)

    with ThreadPoolExecutor(jobs) as pool:
        runs = list(pool.map(run, filter(None, shares)))
    print(f"without a fault: {len(tests)} tests, {max((run.seconds for run in runs), default=0.0):.0f} s", flush=True)
    bad = "\n".join(run.output for run in runs if run.code)
    return bad, sum(run.cpu_s for run in runs)


def verdict(run: Run) -> str:
    """Empty where the fault was noticed, else why it was not."""
    if run.code == 0:
        return "no test notices it"
    if run.code == -signal.SIGKILL:
        return f"its tests did not end within {LIMIT_S:g} s"
    aborted = run.code == -signal.SIGABRT  # at the end of Python, by what a test that failed left behind
    if not run.failed or (run.code != 1 and not aborted):
        return f"pytest ended with {run.code}:\n{run.output[-3000:]}"
    return ""


def run_all(root: Path, mutants: Sequence[Mutant], jobs: int) -> int:
    """Run mutants, print the table and the sums; 0 where each was noticed."""
    begin = time.monotonic()
    with Copies(root, jobs) as copies:
        failed, cpu_s = baseline(copies, mutants, jobs)
        if failed:
            print(failed)
            print("The tests fail without a fault.")
            return 1

        def run(mutant: Mutant) -> Run:
            with copies.one(mutant) as copy:
                done = run_tests(copy, mutant.tests, LIMIT_S, "-x")
            print(f"{mutant.id}: {verdict(done).splitlines()[0] if verdict(done) else 'noticed'}", flush=True)
            return done

        with ThreadPoolExecutor(jobs) as pool:
            runs = dict(zip(mutants, pool.map(run, mutants), strict=True))
    print("\n| id | with the fault | noticed by | s |\n|---|---|---|---|")
    for mutant, done in runs.items():
        by = "**nothing**" if verdict(done) else done.failed[0].rpartition("/")[2]
        print(f"| {mutant.id} | {mutant.meaning} | {by} | {done.seconds:.1f} |")
    bad = {mutant.id: why for mutant, done in runs.items() if (why := verdict(done))}
    for name, why in bad.items():
        print(f"\n{name}: {why}")
    cpu_s += sum(done.cpu_s for done in runs.values())
    print(
        f"\n{len(runs) - len(bad)} of {len(runs)} faults noticed in {time.monotonic() - begin:.0f} s, "
        f"{jobs} at a time; {cpu_s:.0f} s of CPU."
    )
    return 1 if bad else 0


def in_heart(mutant: Mutant) -> bool:
    """Return whether a mutant is in a folder of `HEART`."""
    return mutant.file.removeprefix("src/atoll/").startswith(HEART)


def run_histories(root: Path, mutants: Sequence[Mutant], count: int, jobs: int, minutes: float) -> int:
    """Play histories with each mutant until an invariant breaks. Print the table; 0 where each mutant was noticed.

    The order is random, so that what was tried when the time is over is a fair sample.
    """
    _import_packages(root)
    context, end_s = multiprocessing.get_context("fork"), time.monotonic() + 60.0 * minutes

    def found_by(mutant: Mutant) -> str | None:
        if time.monotonic() > end_s:
            return None
        with copies.one(mutant) as copy:
            theirs, mine = context.Pipe()
            child = context.Process(target=_play_in, args=(copy, count, theirs))
            child.start()
            theirs.close()
            found = mine.recv() if mine.poll(LIMIT_S) else f"a history did not end within {LIMIT_S:g} s"
            child.kill()
            child.join()
        print(f"| {mutant.id} | {mutant.meaning} | {found or '**nothing**'} |", flush=True)
        return found

    print("| id | with the fault | noticed by |\n|---|---|---|", flush=True)
    order = random.Random(0).sample(list(mutants), len(mutants))
    with Copies(root, jobs) as copies, ThreadPoolExecutor(jobs) as pool:
        tried = [found for found in pool.map(found_by, order) if found is not None]
    noticed = sum(map(bool, tried))
    print(f"\nHistories alone notice {noticed} of {len(tried)} faults within {count}; {len(mutants)} are in the heart.")
    return 0 if noticed == len(mutants) else 1


def _import_packages(root: Path) -> None:
    """Import what histories use, and forget Atoll's own modules: a forked process then imports those with a fault."""
    sys.path[:0] = [str(root / folder) for folder in ("src", "tests", "tools")]
    import histories

    histories.torch.set_num_threads(1)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("atoll", "harness", "histories")]:
        del sys.modules[name]
    del sys.path[:3]


def _play_in(root: Path, count: int, sender: Connection) -> None:
    """Play histories in a copy of the tree, and send what is wrong with the first that fails; empty: with none."""
    sys.path[:0] = [str(root / folder) for folder in ("src", "tests", "tools", "spec")]
    sys.stdout = sys.stderr = io.StringIO()
    try:
        import histories

        logging.getLogger("atoll").setLevel(histories.LOG_LEVEL)
        histories.main(["--from", "0", "--count", str(count)])
        lines = sys.stdout.getvalue().splitlines()
        sender.send(next((line for line in lines if line.startswith("seed ")), ""))
    except BaseException as error:
        sender.send(f"ended with {error!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="run no test")
    parser.add_argument("--only", nargs="+", metavar="ID", default=[], help="these mutants alone")
    parser.add_argument("--histories", type=int, metavar="COUNT", help="play histories in place of the tests")
    parser.add_argument("--minutes", type=float, default=600.0, help="with --histories, begin no mutant later")
    parser.add_argument("--jobs", type=int, default=2, help="at a time (2)")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="of the checkout")
    arguments = parser.parse_args()
    root: Path = arguments.root.resolve()
    gc.disable()  # it would visit all trees again and again, which takes as long as all else
    try:
        mutants = read(root / "tests" / "mutants.toml")
    except (ValueError, TypeError) as error:
        print(error)
        return 2
    if unknown := set(arguments.only) - {mutant.id for mutant in mutants}:
        print(f"There is no mutant {', '.join(sorted(unknown))}.")
        return 2
    mutants = [mutant for mutant in mutants if not arguments.only or mutant.id in arguments.only]
    if wrong := problems(root, mutants):
        print("\n".join(wrong))
        return 2
    if arguments.check:
        print(f"{len(mutants)} mutants apply, and their tests exist.")
        return 0
    if arguments.histories:
        chosen = [mutant for mutant in mutants if arguments.only or in_heart(mutant)]
        return run_histories(root, chosen, arguments.histories, max(1, arguments.jobs), arguments.minutes)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return run_all(root, mutants, max(1, arguments.jobs))


if __name__ == "__main__":
    sys.exit(main())
