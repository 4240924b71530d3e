"""The server's filters: they change a site's update before it is aggregated.

When the last part has arrived, and before the update is accepted, the filters read the spool tensor by tensor. The
filtered update goes to a nameless file with the update's layout and encoding; the spool stays unchanged. The reducers,
or the user's aggregator, read that file instead of the spool. If a filter fails, the update is refused, and
`rounds.min_sites` decides whether the round goes on. A killed server loses the file, and makes the file again from the
spool.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.aggregation.make_version import UpdateInput
from atoll.aggregation.plan import FragmentPlan, Plan
from atoll.codecs.base import Codec
from atoll.errors import ConfigError, RunFailed, TicketClosed, UsageError
from atoll.filters.base import About, BadFilter, Chain, Filter
from atoll.posix import OwnedFile, read_at, write_at
from atoll.runtime import failpoint, single_thread
from atoll.server.filter_table import SiteFilters
from atoll.server.tasks.user_code import UserThreads, shared
from atoll.store.file_slots import disk_error
from atoll.store.journal_tables import TicketRow
from atoll.store.store import Store
from atoll.tensors.chunks import CHUNK_ELEMENTS, bytes_of
from atoll.tensors.dtypes import accumulate_dtype, torch_dtype
from atoll.tensors.layout import Piece, chunks
from atoll.tensors.schema import PARAMS, TensorSpec

LOG = logging.getLogger("atoll.server")

_Key = tuple[int, str | None]
"""A ticket and the digest of its update: until an update is accepted, the site may send another one."""

HOLDER = "filters"
"""Name under which the filters hold a spool."""


class FilterRefused(Exception):
    """The failure of a filter on an update; the text completes "The update is refused: "."""


@dataclass(eq=False)
class _Left(OwnedFile):
    """A filtered update in an open nameless file.

    Attributes:
        norm: L2 norm of the update's `params`.
    """

    fd: int
    norm: float = 0.0


class Filtering:
    """The filters of a run with the files that they have written. Use all but `source` on the server's event loop.

    Args:
        aside: threads that run the filters, so that a hanging filter delays only its own site.
    """

    def __init__(self, filters: SiteFilters, plan: Plan, store: Store, aside: UserThreads) -> None:
        self.filters, self._plan, self._store, self._aside = filters, plan, store, aside
        self._kept: dict[_Key, _Left] = {}
        self._going: dict[_Key, asyncio.Future[None]] = {}

    def has(self, site: str) -> bool:
        """Return whether the updates of a site are filtered."""
        return bool(self.filters) and bool(self.filters.of(site))

    async def prepare(self, row: TicketRow, number: int) -> None:
        """Filter a complete update and keep the filtered file. A second call for the same update waits for the first.

        Args:
            row: the update's ticket, with the update's digest, weight, steps and metrics.
            number: number of the round.

        Raises:
            FilterRefused: a filter failed, or its output is not finite; the message names the filter and the tensor.
            DiskFull: no space for the file.
            TicketClosed, Gone: the round is over.
        """
        if _key(row) in self._kept:
            return
        if not await shared(self._going, _key(row), lambda: self._prepare(row, number)):
            raise TicketClosed(
                f"Round {number} closed before the server's filters finished with the update of {row.site}.",
                "Ask for the next ticket.",
            )

    async def _prepare(self, row: TicketRow, number: int) -> None:
        what = f"The server's filters for the update of {row.site} in round {number}"
        work = functools.partial(self._filtered, row, number)
        self._kept[_key(row)] = await self._aside.run(work, what, f"from {row.site}")

    async def refusal(self, row: TicketRow, number: int) -> str:
        """Filter an update as `prepare` does; return why the update is refused, or an empty text."""
        try:
            await self.prepare(row, number)
        except FilterRefused as error:
            return str(error)
        return ""

    async def prepare_accepted(self, rows: Sequence[TicketRow], number: int) -> None:
        """Filter accepted updates as `prepare` does, because a restart has lost their filtered files.

        Raises:
            RunFailed: a filter that succeeded before the restart now fails.
        """
        for row in rows:
            if not self.has(row.site):
                continue
            try:
                await self.prepare(row, number)
            except FilterRefused as error:
                raise RunFailed(
                    f"The accepted update of {row.site} for round {number} cannot be used: {error}.",
                    "Correct the filter, and start the server again: it continues with the same updates.",
                ) from error.__cause__

    def source(self, row: TicketRow) -> UpdateInput:
        """Return the file to aggregate for an accepted update: the filtered file, or the spool. Thread-safe."""
        if not self.has(row.site):
            return UpdateInput(self._store.tickets.spool(row.ticket).fd, row.norm)
        left = self._kept[_key(row)]
        return UpdateInput(left.fd, left.norm)

    def sweep(self) -> None:
        """Close the filtered files, and cancel the filtering, of tickets that have ended."""
        for key in [*self._going, *self._kept]:
            if not self._store.tickets.get(key[0]).is_live:
                self._forget(key)

    def _forget(self, key: _Key) -> None:
        going, kept = self._going.get(key), self._kept.pop(key, None)
        if going is not None:
            going.cancel()
        if kept is not None:
            kept.close()

    def close(self) -> None:
        """Close all filtered files, and cancel the filtering that is under way."""
        for key in [*self._going, *self._kept]:
            self._forget(key)

    def _filtered(self, row: TicketRow, number: int) -> _Left:
        spool = self._store.tickets.spool(row.ticket)
        base = self._store.versions.pin(row.fragment, row.base_version)
        spool.pool.hold(spool.slot, HOLDER)
        left, done = _Left(-1), False
        try:
            planned = self._plan.fragments[row.fragment]
            left.fd = self._plan.new_file("filters", planned.update.nbytes)
            about = About(
                row.site,
                number,
                row.base_version,
                row.weight,
                row.steps,
                dict(row.metrics),
                fragment=row.fragment,
            )
            model = [spec.name for spec in self._plan.schema.tensors] if self._plan.streams else []
            left.norm = _Work(planned, self._plan.codecs, spool.fd, base.fd).write(
                left.fd, self.filters.of(row.site), about, model
            )
            done = True
            return left
        except BadFilter as error:
            if error.raised:
                LOG.error("the filter %r failed", error.filter, exc_info=error.__cause__)
            raise FilterRefused(f"the server's filter {error}") from error.__cause__
        except SystemExit as error:
            raise FilterRefused(f"a filter of the server called sys.exit({error.code!r})") from error
        except (UsageError, ConfigError) as error:  # Atoll's own filters raise these
            raise FilterRefused(f"a filter of the server reports: {error.message}") from error
        except OSError as error:
            raise disk_error(error, self._plan.settings.disk.state_dir / "filters") from error
        finally:
            spool.pool.drop(spool.slot, HOLDER)
            base.release()
            if not done:
                left.close()  # else the traceback would keep the file open for a while


def _key(row: TicketRow) -> _Key:
    return row.ticket, row.digest


class _Work:
    """One pass of an update through the filters, a range of elements at a time."""

    def __init__(self, plan: FragmentPlan, codecs: Mapping[str, Codec], spool_fd: int, base_fd: int) -> None:
        self._spool_fd, self._base_fd, self._codecs = spool_fd, base_fd, codecs
        self._layout, self._version = plan.update, plan.version

    def write(self, fd: int, filters: Sequence[Filter], about: About, model: Collection[str]) -> float:
        """Write the filtered update to `fd`; return the L2 norm of its `params`."""
        specs = {each.spec.name: each.spec for each in self._layout.segments if not each.spec.is_beside}
        squares = []
        with torch.no_grad(), single_thread():
            chain = Chain(filters, specs, about, self._change, model=model)
            for part in self._layout.parts:
                for piece, start, stop in chunks(part, CHUNK_ELEMENTS):
                    run = self._layout.piece(piece.segment, start, stop)
                    encoded, spec = self._run(chain, run), run.segment.spec
                    if spec.is_float:
                        values = self._decoded(encoded, run).double()
                        if not bool(torch.isfinite(values).all()):
                            raise FilterRefused(
                                f"the values of {spec.name!r} after the server's {_names(filters)} are not finite"
                            )
                        if spec.group == PARAMS:
                            squares.append(float(values.square().sum()))
                    failpoint("filters.write")
                    write_at(fd, bytes_of(encoded), run.offset)
        return math.sqrt(math.fsum(squares))

    def _run(self, chain: Chain, run: Piece) -> Tensor:
        """Return the filtered values of a range of elements, encoded."""
        spec, start, stop = run.segment.spec, run.start, run.stop
        if not spec.is_beside and not spec.is_float and not chain.sends(spec.name):
            return self._base(spec, start, stop).view(torch.uint8)
        if spec.is_beside or not spec.is_float:
            return self._bytes(run)
        if spec.group == PARAMS:
            values = chain.change(spec.name, start, stop)
        elif not chain.sends(spec.name):
            values = self._base(spec, start, stop)
        else:  # what filters removed + the site's value: bit-exact if unchanged
            values = chain.taken(spec.name, start, stop).add_(self._decoded(self._bytes(run), run))
        encoded = torch.empty(run.nbytes, dtype=torch.uint8)
        self._codecs[run.segment.codec].encode_(values, encoded, spec.dtype)
        return encoded

    def _change(self, name: str, start: int, stop: int) -> Tensor:
        """Return base version − local value for a range of elements, as the site sent it."""
        segment = self._layout.by_name[name]
        run = self._layout.piece(segment, start, stop)
        values = self._decoded(self._bytes(run), run)
        if segment.spec.group == PARAMS:
            return values
        return self._base(segment.spec, start, stop).to(values.dtype).sub_(values)

    def _bytes(self, run: Piece) -> Tensor:
        encoded = torch.empty(run.nbytes, dtype=torch.uint8)
        read_at(self._spool_fd, bytes_of(encoded), run.offset)
        return encoded

    def _decoded(self, encoded: Tensor, run: Piece) -> Tensor:
        spec = run.segment.spec
        values = torch.empty(run.numel, dtype=accumulate_dtype(spec.dtype))
        self._codecs[run.segment.codec].decode_(encoded, values, spec.dtype)
        return values

    def _base(self, spec: TensorSpec, start: int, stop: int) -> Tensor:
        values = torch.empty(stop - start, dtype=torch_dtype(spec.dtype))
        read_at(self._base_fd, bytes_of(values), self._version.by_name[spec.name].offset + start * spec.item_bytes)
        return values


def _names(filters: Sequence[Filter]) -> str:
    return f"filter{'s' if len(filters) > 1 else ''} {', '.join(map(repr, filters))}"
