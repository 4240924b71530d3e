"""Hundreds of workers in one process: coroutines that speak the protocol as it is, and train nothing."""

from __future__ import annotations

import asyncio
import math
import random
import struct
from collections import Counter
from collections.abc import Callable
from typing import Any

import aiohttp
from blake3 import blake3
from kit.wire import TILE, cuts

HEADERS = {"Content-Type": "application/octet-stream"}


class Crowd:
    """Workers of one run. Each joins, asks for its ticket, pulls the version, "trains", sends its parts, completes.

    Every update is 1e-3 for every element of every parameter.

    Args:
        url: of a server whose models are of fp32 parameters alone, and whose updates are not encoded.
        train_s: how long a worker trains, give or take a fifth.

    Attributes:
        errors: what went wrong, and how often.
    """

    def __init__(self, url: str, run: dict[str, Any], schema: dict[str, Any], train_s: float) -> None:
        self.errors: Counter[str] = Counter()
        sizes = [(4 * math.prod(entry["shape"]), 4 * TILE) for entry in schema["tensors"]]
        self._url, self._model_bytes, self._train_s = url, sum(nbytes for nbytes, _ in sizes), train_s
        places = list(cuts(sizes, run["part_bytes"]))
        content = struct.pack("<f", 1e-3) * (places[-1][1] // 4)
        self._parts = [content[start:stop] for start, stop in places]
        self._digests = [blake3(part).digest() for part in self._parts]

    @classmethod
    async def at(cls, url: str, session: aiohttp.ClientSession, train_s: float) -> Crowd:
        """For the run that is served there."""
        async with session.get(f"{url}/v1/run") as run, session.get(f"{url}/v1/schema") as schema:
            return cls(url, await run.json(), await schema.json(), train_s)

    async def one(self, session: aiohttp.ClientSession, site: str, joined: Callable[[str], None] | None = None) -> None:
        """One worker, until the run is finished.

        Args:
            joined: called with its lease; then acts for the worker, and makes it leave. Else the worker leaves itself.
        """
        join = {"protocol": 1, "site": site, "process": site.replace("-", "")}
        lease = (await self._post(session, "/v1/workers", join, {}))["lease"]
        if joined is not None:
            joined(lease)
        headers = {"Atoll-Lease": lease}
        while True:
            reply = await self._post(session, "/v1/tickets", {"wait_s": 20.0}, headers)
            if reply["status"] == "finished":
                if joined is None:
                    await self._post(session, "/v1/workers/leave", {}, headers)
                return
            if reply["status"] == "ticket":
                await self._round(session, reply["ticket"], headers)

    async def _round(self, session: aiohttp.ClientSession, ticket: dict[str, Any], headers: dict[str, str]) -> None:
        path = "/v1/fragments/0/versions/{base_version}/{base_digest}".format(**ticket)
        async with session.get(self._url + path, headers=headers) as response:
            body = await response.read()
            if response.status != 200 or len(body) < self._model_bytes:
                self.errors[f"pull: {response.status}, {len(body)} bytes"] += 1
        await asyncio.sleep(self._train_s * random.uniform(0.8, 1.2))
        path = f"/v1/tickets/{ticket['id']}"
        for index, (data, check) in enumerate(zip(self._parts, self._digests, strict=True)):
            url = f"{self._url}{path}/parts/{index}"
            async with session.put(url, data=data + check, headers=headers | HEADERS) as response:
                if response.status != 204:
                    self.errors[f"part: {response.status} {(await response.text())[:200]}"] += 1
        digest = blake3(bytes.fromhex(ticket["layout_digest"]) + b"".join(self._digests)).hexdigest()
        complete = {"digest": digest, "base_digest": ticket["base_digest"], "steps": 1}
        await self._post(session, f"{path}/complete", complete, headers)

    async def _post(
        self, session: aiohttp.ClientSession, path: str, message: dict[str, Any], headers: dict[str, str]
    ) -> dict[str, Any]:
        async with session.post(self._url + path, json=message, headers=headers) as response:
            if response.status == 204:
                return {}
            if response.status != 200:
                text = await response.text()
                self.errors[f"{path}: {response.status} {text[:200]}"] += 1
                raise RuntimeError(f"{path}: {response.status} {text[:500]}")
            answer: dict[str, Any] = await response.json()
            return answer
