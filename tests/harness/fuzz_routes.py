"""Requests to every operation of a server, as every kind of caller, with what is right and what is wrong in them.

A finding is an answer with a status of 500 or more, no answer, one after more than `MOST_S` seconds, a traceback in
the log, a process that has grown by more than `MOST_MB`, or a journal that a refused request has changed.
"""

from __future__ import annotations

import http.client
import json
import logging
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from kit.credentials import Trusted, trusted
from pydantic import BaseModel

from atoll.protocol import routes
from atoll.protocol.openapi import HEX_DIGITS, OPERATIONS, Operation
from harness.fuzzed import Findings, Values, damaged, damages
from harness.hostile_answers import example
from harness.hostile_runs import place_of
from harness.hostile_site import status_kb

MOST_S, MOST_MB = 5.0, 300.0
CALLERS = ("stranger", "site", "another site", "revoked", "peer", "reader", "admin", "wrong token")
ENDS = ("stop_run", "roll_back")
"""Operations after which another server is begun, if it does what they ask."""
LIVES = 400
"""Requests to one server."""
RECORDED = {"update_refused"}
"""Codes of refusals that the journal is there to record."""


@dataclass(frozen=True)
class Case:
    """A request.

    Attributes:
        shown: which fields of the message are wrong.
    """

    caller: str
    operation: str
    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes | None
    shown: str = ""

    def __str__(self) -> str:
        body = self.shown or repr((self.body or b"")[:300])
        return f"{self.caller}: {self.operation} {self.method} {self.target[:200]!r} {dict(self.headers)} {body}"


class Tracebacks(logging.Handler):
    """Keeps what the log says of errors with a traceback."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[0] is not None:
            self.found.append(logging.Formatter().formatException(record.exc_info))


class Connection(http.client.HTTPConnection):
    """Sends paths that are not ASCII, too."""

    def _encode_request(self, request: str) -> bytes:
        return request.encode()


class Routes:
    """A server with sites that take part, and requests to it.

    Args:
        folder: where its state directories are; removed by the caller.
        values: wrong values for the fields of messages.
    """

    def __init__(self, folder: Path, values: Values, findings: Findings) -> None:
        self._folder, self._values, self._findings = folder, values, findings
        self._stack, self._number, self._left = ExitStack(), 0, 0
        self._log = Tracebacks()
        self._at: Trusted
        self._before: dict[str, Any] = {}

    def __enter__(self) -> Routes:
        logging.getLogger("atoll").addHandler(self._log)
        logging.getLogger("aiohttp").addHandler(self._log)
        logging.getLogger("asyncio").addHandler(self._log)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        for name in ("atoll", "aiohttp", "asyncio"):
            logging.getLogger(name).removeHandler(self._log)

    def _begin(self) -> None:
        self._stack.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._number, self._left = self._number + 1, LIVES
        folder = self._folder / str(self._number)
        folder.mkdir(parents=True)
        options = {"rounds.sites": 5, "rounds.total": 3, "trust.address": "https://example.org"}
        self._at = self._stack.enter_context(trusted(folder, **options))
        at = self._at
        for site in ("a", "b", "revoked"):
            at.tokens[site] = at.use(at.invite(site))[1]["token"]
        at.revoke("revoked")
        self._refresh()
        self._kilobytes = status_kb("VmRSS")

    def _refresh(self) -> None:
        """Let both sites take part, with a ticket and an object, whatever earlier requests have ended."""
        at = self._at
        self._leases = {site: at.join(site) for site in ("a", "b")}
        ticket = at.ok("POST", routes.TICKETS, {"fragment": 0}, site="a", Atoll_Lease=self._leases["a"])["ticket"]
        sizes = {"head_bytes": 64, "nbytes": 128, "part_bytes": 65536, "expires_s": 3600.0}
        opened = at.ok("POST", routes.OBJECTS, sizes, site="a")
        self._live = {
            "ticket": str((ticket or {"id": 1})["id"]),
            "object": opened["object"],
            "secret": opened["secret"],
            "digest": (ticket or {"base_digest": "0" * 64})["base_digest"],
        }
        self._part = self._at.server._require_served().run.plan.fragments[0].update.parts[0].nbytes
        self._before = at.dump()

    def case(self, chance: Random) -> Case:
        """Return a request. Most of it is right, so that it gets far."""
        if not self._left:
            self._begin()
        elif self._left % 40 == 0:
            try:
                self._refresh()
            except AssertionError:  # the site was revoked, or has a newer credential, as a request has asked
                self._begin()
        self._left -= 1
        operation = chance.choice(OPERATIONS)
        callers = [each for each in CALLERS if each in operation.callers] or ["site"]
        caller = chance.choice(callers) if chance.random() < 0.6 else chance.choice(CALLERS)
        body, shown = self._body(operation, chance)
        headers = {"Content-Type": "application/json", **self._credential(caller, operation)}
        if operation.lease and chance.random() < 0.9:
            headers[routes.LEASE_HEADER] = self._leases["b" if caller == "another site" else "a"]
        if operation.secret or caller == "peer":
            headers[routes.SECRET_HEADER] = self._live["secret"]
        if chance.random() < 0.15:
            name = chance.choice([*headers, routes.PROTOCOL_HEADER, "Range", "If-None-Match", "Accept", "If-Range"])
            headers[name] = chance.choice(
                ["", "bytes=0-", "bytes=5-2", "bytes=0-0,2-3", "x" * 3000, "text/event-stream", "é", "1", '"*"', "\t"]
            )
        target = re.sub(r"{(\w+)}", lambda found: self._parameter(found[1], chance), operation.path)
        if operation.query is not None and chance.random() < 0.8:
            target += "?" + "&".join(self._query(operation.query, chance))
        sent = tuple((name, value) for name, value in headers.items())
        return Case(caller, operation.name, operation.method, target, sent, body, shown)

    def _credential(self, caller: str, operation: Operation) -> dict[str, str]:
        tokens = {
            "site": self._at.tokens["a"],
            "another site": self._at.tokens["b"],
            "revoked": self._at.tokens["revoked"],
            "reader": self._at.token_in("reader"),
            "admin": self._at.admin,
            "wrong token": "x" * 43,
        }
        return {"Authorization": f"Bearer {tokens[caller]}"} if caller in tokens else {}

    def _parameter(self, name: str, chance: Random) -> str:
        if chance.random() < 0.7:
            return self._live.get(name, "0" * HEX_DIGITS[name] if name in HEX_DIGITS else "0")
        wrong = ("0", "1", "-1", "9" * 18, "9" * 40, "%00", "..", "a", "%2e%2e", "f" * 64, "0" * 32, "é%ff")
        return chance.choice(wrong)

    def _query(self, kind: type[BaseModel], chance: Random) -> list[str]:
        names = [name for name in kind.model_fields if name != "wait_s"]
        wrong = ["", "-1", "1e400", "NaN", "null", "[", "1" * 50, "%ff", "true", "a", "0", "1", "0.5", "[" * 60]
        return [f"{chance.choice([*names, 'x'])}={chance.choice(wrong)}" for _ in range(chance.randint(0, 3))]

    def _body(self, operation: Operation, chance: Random) -> tuple[bytes | None, str]:
        kind = operation.request
        if kind is None:
            return (b"{}" if chance.random() < 0.1 else None), ""
        if kind is bytes:
            size = chance.choice([0, 1, 31, 32, self._part, self._part + 32, self._part + 33, 128, 160, 5000])
            return chance.choice([bytes(size), chance.randbytes(size)]), ""
        assert issubclass(kind, BaseModel)
        base = example(kind)
        known = {"site": "a", "protocol": routes.PROTOCOL, "digest": self._live["digest"], "version": 0}
        base |= {name: value for name, value in known.items() if name in base}
        data, shown = self._values.message(kind, base, chance)
        if chance.random() < 0.15:
            data, shown = damaged(json.dumps(base).encode(), damages(chance)), ""
        return data, shown

    def send(self, case: Case) -> None:
        """Send a request, and add what is wrong with the answer to the findings."""
        self._findings.tried[f"route {case.operation}"] += 1
        self._log.found.clear()
        begin_s, wrong = time.monotonic(), ""
        status, body = self._answer(case)
        if seconds := max(0.0, time.monotonic() - begin_s - MOST_S):
            wrong = f"an answer after {seconds + MOST_S:.0f} s"
        if status >= 500 and status not in (503, 507):
            wrong = f"status {status}"
        if status == 0 and case.method != "PUT" and len(case.body or b"") <= routes.CONTROL_BODY_BYTES:
            wrong = f"no answer ({body[:60].decode(errors='replace')})"
        if self._log.found:
            wrong = f"traceback: {place_of(self._log.found[0])}"
        self._findings.tried[f"status {status // 100}xx"] += 1
        after = self._at.dump()
        if status >= 400 and after != self._before and not any(code.encode() in body for code in RECORDED):
            changed = [name for name in after if after[name] != self._before.get(name)]
            wrong = wrong or f"refused with {status}, but the journal has changed: {changed}"
        self._before = after
        grown = (status_kb("VmRSS") - self._kilobytes) / 1000
        if grown > MOST_MB:
            wrong = wrong or f"the process has grown by {grown:.0f} MB"
            self._left = 0
        if wrong:
            text = "".join(self._log.found) + body.decode(errors="replace")
            self._findings.add(f"{case.operation}: {wrong}", case, text)
        if status < 300 and case.operation in ENDS:
            self._left = 0

    def _answer(self, case: Case) -> tuple[int, bytes]:
        """Return status and body of the answer; 0 and why, if there is none."""
        connection = Connection("127.0.0.1", self._at.server.port, timeout=30)
        try:
            connection.putrequest(case.method, case.target)
            for name, value in case.headers:
                connection.putheader(name, value.encode("utf-8"))
            if case.body is not None:
                connection.putheader("Content-Length", str(len(case.body)))
            connection.endheaders(case.body)
            answer = connection.getresponse()
            if answer.headers.get("Content-Type", "").startswith("text/event-stream"):
                return answer.status, b""
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException, ValueError) as error:
            return 0, f"{type(error).__name__}: {error}".encode()
        finally:
            connection.close()


def operations_tried(findings: Findings) -> Mapping[str, int]:
    """Return operation → number of requests."""
    return {name.removeprefix("route "): count for name, count in findings.tried.items() if name.startswith("route ")}
