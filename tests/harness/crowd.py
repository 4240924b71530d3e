"""Hundreds of workers in one process: coroutines that speak the protocol as it is, and train nothing."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import aiohttp
import torch
from blake3 import blake3

from atoll.codecs import build_codecs
from atoll.codecs.encoded_layout import encoded_layout
from atoll.protocol import messages, routes
from atoll.tensors.chunks import bytes_of

HEADERS = {"Content-Type": "application/octet-stream"}


class Crowd:
    """Workers of one run. Each joins, asks for its ticket, pulls the version, "trains", sends its parts, completes.

    Every update is 1e-3 for every element of every parameter.

    Args:
        url: of a server whose models are of fp32 parameters alone.
        train_s: how long a worker trains, give or take a fifth.

    Attributes:
        errors: what went wrong, and how often.
    """

    def __init__(self, url: str, info: messages.RunInfo, schema: messages.SchemaMessage, train_s: float) -> None:
        self.errors: Counter[str] = Counter()
        self._url, self._info, self._train_s = url, info, train_s
        codecs = build_codecs(info.codec, info.codec_options)
        self._layout = encoded_layout(schema.to_split().schema, info.codec, codecs, info.part_bytes)
        content = bytes_of(torch.full((-(-self._layout.nbytes // 4),), 1e-3))
        self._parts = [bytes(content[part.start : part.stop]) for part in self._layout.parts]
        self._digests = [blake3(part).digest() for part in self._parts]

    @classmethod
    async def at(cls, url: str, session: aiohttp.ClientSession, train_s: float) -> Crowd:
        """For the run that is served there."""
        async with session.get(url + routes.RUN) as response:
            info = messages.RunInfo.model_validate_json(await response.text())
        async with session.get(url + routes.SCHEMA) as response:
            schema = messages.SchemaMessage.model_validate_json(await response.text())
        return cls(url, info, schema, train_s)

    async def one(self, session: aiohttp.ClientSession, site: str, joined: Callable[[str], None] | None = None) -> None:
        """One worker, until the run is finished.

        Args:
            joined: told its lease; who takes it speaks for the worker then, and lets it leave. Else it leaves itself.
        """
        join = messages.Join(protocol=routes.PROTOCOL, site=site, process=site.replace("-", ""))
        lease = (await self._post(session, routes.WORKERS, join, {}))["lease"]
        if joined is not None:
            joined(lease)
        headers = {routes.LEASE_HEADER: lease}
        while True:
            asked = messages.TicketRequest(wait_s=routes.LONG_POLL_S)
            reply = await self._post(session, routes.TICKETS, asked, headers)
            if reply["status"] == "finished":
                if joined is None:
                    await self._post(session, routes.LEAVE, messages.Leave(), headers)
                return
            if reply["status"] == "ticket":
                await self._round(session, reply["ticket"], headers)

    async def _round(self, session: aiohttp.ClientSession, ticket: dict[str, Any], headers: dict[str, str]) -> None:
        version, digest = ticket["base_version"], ticket["base_digest"]
        path = routes.VERSION_DATA.format(fragment=0, version=version, digest=digest)
        async with session.get(self._url + path, headers=headers) as response:
            body = await response.read()
            if response.status != 200 or len(body) < self._info.schema_bytes:
                self.errors[f"pull: {response.status}, {len(body)} bytes"] += 1
        await asyncio.sleep(self._train_s * random.uniform(0.8, 1.2))
        for part, data, check in zip(self._layout.parts, self._parts, self._digests, strict=True):
            url = self._url + routes.PART.format(ticket=ticket["id"], part=part.index)
            async with session.put(url, data=data + check, headers=headers | HEADERS) as response:
                if response.status != 204:
                    self.errors[f"part: {response.status} {(await response.text())[:200]}"] += 1
        complete = messages.Complete(
            digest=self._layout.blob_id(self._digests), base_digest=digest, weight=1.0, steps=1, metrics={}
        )
        await self._post(session, routes.COMPLETE.format(ticket=ticket["id"]), complete, headers)

    async def _post(
        self, session: aiohttp.ClientSession, path: str, message: messages.Message, headers: dict[str, str]
    ) -> dict[str, Any]:
        sent = {"Content-Type": "application/json"} | headers
        async with session.post(self._url + path, data=message.model_dump_json(), headers=sent) as response:
            text = await response.text()
            if response.status == 204:
                return {}
            if response.status != 200:
                self.errors[f"{path}: {response.status} {text[:200]}"] += 1
                raise RuntimeError(f"{path}: {response.status} {text[:500]}")
            answer: dict[str, Any] = json.loads(text)
            return answer
