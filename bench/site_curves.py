"""What a chart of all sites costs in a long run: time, bytes and the server's peak memory of answers with curves.

A server runs; one SQL statement fills its journal with the rows of so many sites and rounds. Then clients ask for all
pages of a curve of each site. Last, what the rows cost a start of the server is measured: opening the journal, with and
without them.

    python bench/site_curves.py                    # 500 sites × 10,000 rounds: 1.2 GB in the folder of temporary files
    python bench/site_curves.py --rounds 400
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from subprocess import DEVNULL, Popen
from sys import executable, path

path.insert(0, str(Path(__file__).parents[1] / "tests"))
from harness.processes import free_port, wait_until
from many_workers import MODEL

from atoll.protocol import routes
from atoll.store.journal import BUSY_S, JOURNAL, Journal
from atoll.store.journal_tables import register_row_check, write_checksums

ROW = (
    "json_object('weight', 1.0, 'steps', 100, 'metrics', json_object('loss', 3.0 / (v.n + s.n), 'accuracy', 0.5), "
    "'train_seconds', 1.5 + s.n / 7.0, 'wait_seconds', 0.5, 'site', printf('site-%03d', s.n), 'staleness', 0, "
    "'nbytes', 1000000)"
)
COUNT = "RECURSIVE v(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM v WHERE n < :rounds)"
SITES = "s(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM s WHERE n < :sites - 1)"
FILL = (
    f"WITH {COUNT}, {SITES} INSERT INTO site_rounds SELECT 0, version, site, row, row_check(0, version, site, row) "
    f"FROM (SELECT v.n AS version, printf('site-%03d', s.n) AS site, {ROW} AS row FROM v CROSS JOIN s)"
)
HISTORY = (
    f"WITH {COUNT} INSERT INTO history (fragment, version, digest, summary_json, created_at) "
    "SELECT 0, n, printf('%064d', n), json_object('round', n, 'version', n), '' FROM v"
)
MEMBERS = (
    f"WITH RECURSIVE {SITES} INSERT INTO members (site, lease, state, joined_at, host, labels_json, detail, "
    "rounds_counted, process) SELECT printf('site-%03d', n), n, 'left', '', '', '{}', '', 0, '' FROM s"
)


def peak_mb(pid: int) -> float:
    """The largest resident memory that a process has had."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith("VmHWM"))


def asked(url: str, query: str) -> tuple[list[float], list[int], int]:
    """All pages of an answer: seconds and bytes of each, and the number of curves in all."""
    seconds, sizes, curves, after = list[float](), list[int](), 0, ""
    while True:
        begin_s = time.perf_counter()
        with urllib.request.urlopen(f"{url}{routes.SITE_CURVES}?{query}&after={after}") as answer:
            body = answer.read()
        seconds.append(time.perf_counter() - begin_s)
        sizes.append(len(body))
        page = json.loads(body)
        curves, after = curves + len(page["curves"]), page["after"]
        if not after:
            return seconds, sizes, curves


def timed(do: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    do()
    return time.perf_counter() - begin_s


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sites", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=10_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        url, journal = f"http://127.0.0.1:{port}", folder / "atoll-run" / JOURNAL
        (folder / "their_model.py").write_text(MODEL.format(width=32))
        flags = [
            word for each in ("model.source=their_model:build", "algorithm.name=fedavg") for word in ("--set", each)
        ]
        command = [executable, "-m", "atoll.cli.main", "server", *flags, "--rounds", "9", "--port", str(port)]
        server = Popen(command, cwd=folder, stdout=DEVNULL, stderr=DEVNULL)
        try:
            wait_until(lambda: _answers(url), "the server", 120)
            with closing(sqlite3.connect(journal, BUSY_S, isolation_level=None)) as db:
                register_row_check(db)
                filled_s = timed(lambda: db.execute(FILL, vars(options)))
                write_checksums(db)
                for sql in (MEMBERS, HISTORY):
                    db.execute(sql, vars(options))
                print(f"{options.sites * options.rounds:,} rows in {filled_s:.0f} s")
            before_mb = peak_mb(server.pid)
            for query in ("points=200", "points=1000", "points=200&value=train_seconds", "points=200&site=site-007"):
                seconds, sizes, curves = asked(url, query)
                print(
                    f"{query}: {curves} curves in {len(sizes)} answers; at most {max(sizes) / 2**20:.2f} MiB and "
                    f"{max(seconds):.2f} s, median {statistics.median(seconds):.2f} s, in all {sum(seconds):.2f} s"
                )
            print(f"peak memory of the server: {before_mb:.0f} MB before, {peak_mb(server.pid):.0f} MB after")
        finally:
            server.terminate()
            server.wait(60)
        full_s = timed(lambda: Journal(journal, "process").close())
        with closing(sqlite3.connect(journal, isolation_level=None)) as db:
            db.execute("DELETE FROM site_rounds")
        empty_s = timed(lambda: Journal(journal, "process").close())
        print(f"opening the journal: {full_s:.3f} s with the rows, {empty_s:.3f} s without")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + routes.HEALTH) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    main()
