"""Traits of the command line."""

from __future__ import annotations

import functools
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

from trait_lab import (
    ATOLL,
    MOST_S,
    ROOT,
    Done,
    Verdict,
    atoll,
    commands,
    ended,
    environment,
    finished_state,
    got,
    lab,
    server,
    site,
    subprocess_of,
    trait,
    until,
    verdict,
)


@functools.cache
def example() -> Done | None:
    """`atoll run --example digits`, two rounds, in an empty folder; None if there is no such command."""
    if "run" not in commands():
        return None
    folder = lab() / "nothing"
    folder.mkdir()
    return atoll("run", "--example", "digits", "--set", "rounds.total=2", folder=folder)


@trait("command", "one command from nothing to a running thing")
def _() -> Verdict:
    done = example()
    return verdict(
        done is not None and done.code == 0, f"atoll run --example digits: {done and (done.code, done.err[-90:])}"
    )


@trait("command", "--help under 0.3 s, torch never imported")
def _() -> Verdict:
    least_s = min(atoll("--help").seconds for _ in range(5))
    code = (
        "import sys; sys.argv = ['atoll', '--help']\nfrom atoll.cli.main import main\n"
        "try: main()\nfinally: print('torch' in sys.modules)"
    )
    torch_free = ended(subprocess_of([sys.executable, "-c", code]), 30).out.rstrip().endswith("False")
    return verdict(
        torch_free and least_s < 0.3, f"{least_s:.2f} s; torch {'not ' * torch_free}imported", half=torch_free
    )


@trait("command", "a typo gets the nearest command or option, once")
def _() -> Verdict:
    one, two = atoll("statsu"), atoll("status", "--jsn")
    fits = ["status" in one.err and one.code == 2, two.err.count("--json") == 1 and two.code == 2]
    once = one.err.lower().count("did you mean") == 1 and len(one.err.strip().splitlines()) == 1
    return verdict(all(fits) and once, f"{one.err.strip()[-80:]!r}, {two.err.strip()[:80]!r}", half=any(fits))


@trait("command", "errors: cause, value, remedy, one line, stderr")
def _() -> Verdict:
    asked = [
        ("status", "--dir", "nothing-here"),
        ("server", "missing.toml"),
        ("export", "x.safetensors", "--dir", "no"),
    ]
    found = [atoll(*words) for words in asked]
    loading = "atoll: loading "  # a line of a slow machine, before the error
    errors = [[line for line in each.err.strip().splitlines() if not line.startswith(loading)] for each in found]
    fits = [
        each.code and not each.out and len(lines) == 1 and ". " in lines[0]
        for each, lines in zip(found, errors, strict=True)
    ]
    return verdict(all(fits), f"{sum(map(bool, fits))} of {len(fits)}; {found[0].err.strip()[:90]!r}", half=any(fits))


@trait("command", "stable, documented exit codes")
def _() -> Verdict:
    from atoll.errors import BY_CODE

    text = (ROOT / "docs" / "reference" / "exit-codes.md").read_text()
    missing = {kind.exit_code for kind in BY_CODE.values() if f"| {kind.exit_code} |" not in text}
    got_ones = (atoll("status", "--nope").code, atoll("status", "--server", "http://127.0.0.1:9").code)
    return verdict(not missing and got_ones == (2, 5), f"undocumented: {missing or 'none'}; usage, network: {got_ones}")


READING = ("status", "runs", "logs", "compare", "doctor", "audit", "verify", "evaluate")


@trait("command", "--json on every reading command")
def _() -> Verdict:
    there = [name for name in READING if name in commands()]
    lacking = [name for name in there if "--json" not in commands()[name]]
    lacking += [] if "--json" in atoll("config", "show", "--help").out else ["config show"]
    return verdict(
        not lacking, f"of {', '.join(there)}, config show; without: {lacking or 'none'}", half=len(lacking) < 3
    )


def in_terminal(*words: str, seconds: float = 30.0, **env: str) -> str:
    """What `atoll WORDS` prints on a terminal; a program that reads its output gets no next step, for example."""
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [*ATOLL, *words], cwd=lab(), env=environment(TERM="xterm", **env), stdout=child, stderr=child
    )
    os.close(child)
    text, end_s = b"", time.monotonic() + seconds
    with suppress(OSError):
        while time.monotonic() < end_s and (select.select([parent], [], [], 0.5)[0] or process.poll() is None):
            if select.select([parent], [], [], 0)[0]:
                data = os.read(parent, 2**16)
                text += data
                if not data:
                    break
    process.kill()
    process.wait()
    os.close(parent)
    return text.decode(errors="replace")


@trait("command", "live progress on a terminal, plain lines off it, NO_COLOR")
def _() -> Verdict:
    live = ("run", "--example", "digits", "--set", "rounds.total=2") if "run" in commands() else None
    words = live or ("status", "--dir", str(finished_state()))
    colour = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-7]|9[0-7])m")
    shown, without = in_terminal(*words), in_terminal(*words, NO_COLOR="1")
    off: Done | None = example() if live else atoll(*words)
    assert off is not None
    parts = {
        "drawn again": bool(re.search(r"\x1b\[\d*[AFJKH]", shown)) and bool(live),
        "coloured": bool(colour.search(shown)),
        "NO_COLOR": not colour.search(without),
        "plain off a terminal": "\x1b" not in off.out + off.err,
    }
    return verdict(all(parts.values()), str(parts), half=parts["NO_COLOR"] and parts["plain off a terminal"])


@trait("command", "never silent for 2 s")
def _() -> Verdict:
    found = {"simulate": atoll("simulate", "run.toml", "--set", "disk.state_dir=silent").silence_s}
    found |= {"run": done.silence_s} if (done := example()) else {}
    shown = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in found.items())
    return verdict(max(found.values()) <= 2, f"longest silence: {shown}", half=max(found.values()) <= 4)


@trait("command", "shell completion")
def _() -> Verdict:
    tries = [atoll("--show-completion", "bash"), atoll("completion", "bash"), atoll("completion", "show", "bash")]
    tries.append(atoll("--help", _ATOLL_COMPLETE="source_bash"))
    return verdict(
        any(each.code == 0 and "COMP_WORDS" in each.out for each in tries), "a script for bash is printed, or not"
    )


@trait("command", "-q, -v")
def _() -> Verdict:
    there = [name for name in ("run", "server", "simulate", "worker") if name in commands()]
    with_both = [
        name for name in there if re.search(r"-q\b", commands()[name]) and re.search(r"-v\b", commands()[name])
    ]
    return verdict(with_both == there, f"{with_both or 'none'} of {there}", half=bool(with_both))


def interrupted(times: int) -> tuple[float, str, int]:
    with server(f"interrupted-{times}") as (process, url, log):
        one = site(url, "a")
        until(lambda: b'"alive"' in got(f"{url}/v1/status")[2])
        begin_s = time.monotonic()
        for _ in range(times):
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        one.kill()
        code = process.poll()
        return time.monotonic() - begin_s, log.read_text(), -1 if code is None else code


@trait("command", "Ctrl-C once is orderly, twice is at once")
def _() -> Verdict:
    (one_s, one, code), (two_s, two, _) = interrupted(1), interrupted(2)
    fits = "Traceback" not in one + two and code in (0, 130) and one_s < 10 and two_s < 3
    return verdict(
        fits,
        f"once: {one_s:.1f} s, exit code {code}; twice: {two_s:.1f} s; no traceback: {'Traceback' not in one + two}",
    )


@trait("command", "the effective configuration with its sources, and a schema")
def _() -> Verdict:
    shown, schema = atoll("config", "show", "run.toml"), atoll("config", "schema")
    fits = [shown.code == 0 and "run.toml" in shown.out and "default" in shown.out, schema.out[:1] == "{"]
    return verdict(
        all(fits) and bool(json.loads(schema.out)["properties"]), "config show names sources; config schema is JSON"
    )


@trait("command", "the same command again resumes")
def _() -> Verdict:
    with server("again") as (process, url, _):
        one, two = site(url, "a"), site(url, "b")
        until(lambda: b'"version":1' in got(f"{url}/v1/status")[2].replace(b" ", b""))
        process.kill()
        process.wait()
        with server("again", ATOLL_NETWORK__PORT=url.rpartition(":")[2]) as (second, _, log):
            codes = [ended(each, MOST_S).code for each in (one, two)]
            with suppress(subprocess.TimeoutExpired):
                second.wait(60)
            return verdict(codes == [0, 0] and second.poll() == 0, f"after kill -9: {log.read_text().strip()[-90:]!r}")


@trait("command", "logs, runs, stop, pause, doctor")
def _() -> Verdict:
    wanted = ("logs", "runs", "stop", "pause", "doctor")
    there = [name for name in wanted if name in commands()]
    return verdict(len(there) == len(wanted), f"there: {', '.join(there) or 'none'}", half=bool(there))


def _names_a_step(text: str) -> bool:
    return bool(re.search(r"\batoll \w+|[Nn]ext: |python \w", "\n".join(text.splitlines()[-4:])))


@trait("command", "the next step after every command")
def _() -> Verdict:
    state = str(finished_state())
    asked = [
        ("new", "fresh"),
        ("status", "--dir", state),
        ("export", "out.safetensors", "--dir", state),
        ("config", "show"),
    ]
    asked += [("audit", "--dir", state), ("simulate", "run.toml", "--set", "disk.state_dir=next")]
    said = {}
    for words in asked:
        if words[0] in commands() or words[0] == "config":
            said[words[0]] = _names_a_step(in_terminal(*words))
    if of_example := example():
        said["run"] = _names_a_step(of_example.out + of_example.err)
    named = [name for name, each in said.items() if each]
    return verdict(
        len(named) == len(said),
        f"named by {', '.join(named) or 'none'} of {len(said)}",
        half=len(named) * 2 >= len(said),
    )
