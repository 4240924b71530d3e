"""The server's filters of updates: they change a site's update before it is aggregated.

When all parts of an update are on disk, and before it is accepted, the filters read it tensor by tensor. The filtered
update is written to an unnamed file with the same layout and encoding. The server aggregates this file in place of the
original file, which stays unchanged. If a filter fails, the update is refused, and `rounds.min_sites` decides whether
the round goes on. A server that is killed loses the filtered file; its next start filters the original again.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.aggregation.check_arriving_parts import norm_of
from atoll.aggregation.make_version import UpdateInput
from atoll.aggregation.plan import FragmentPlan, Plan
from atoll.codecs.base import Codec
from atoll.errors import ConfigError, RunFailed, TicketClosed, UsageError
from atoll.filters.base import About, BadFilter, Chain, Filter
from atoll.posix import OwnedFile, file_error, read_at, write_at
from atoll.runtime import failpoint, single_thread
from atoll.server.coordinator.filter_table import SiteFilters
from atoll.server.coordinator.user_code import UserThreads, shared
from atoll.store.journal_tables import TicketRow
from atoll.store.store import Store
from atoll.tensors.chunks import CHUNK_ELEMENTS, bytes_of, is_sound
from atoll.tensors.dtypes import accumulate_dtype, torch_dtype
from atoll.tensors.layout import Piece
from atoll.tensors.schema import PARAMS, TensorSpec

LOG = logging.getLogger("atoll.server")

_Key = tuple[int, str | None]
"""(ticket, digest of its update). Until an update is accepted, the site may send another one under the same ticket."""

HOLDER = "filters"
"""Kind of hold (see `Slot.holds`) on the file of an update while filters read it."""


class FilterRefused(Exception):
    """Raised if a filter fails on an update, so that the update is refused. The text is the reason."""


@dataclass(eq=False)
class _Filtered(OwnedFile):
    """A filtered update in an open, unnamed file.

    Attributes:
        fd: descriptor of the file.
        norm: L2 norm of the filtered update's `params`.
    """

    fd: int
    norm: float = 0.0


class Filtering:
    """Runs the filters of updates, and keeps the filtered files. Call all methods but `source` on the event loop.

    Args:
        filters: the filters of each site.
        plan: plan of the run.
        store: store of the run.
        aside: threads that run the filters. A filter that hangs delays only the updates of its own site.
    """

    def __init__(self, filters: SiteFilters, plan: Plan, store: Store, aside: UserThreads) -> None:
        self.filters, self._plan, self._store, self._aside = filters, plan, store, aside
        self._done: dict[_Key, _Filtered] = {}
        self._running: dict[_Key, asyncio.Future[None]] = {}

    def has(self, site: str) -> bool:
        """Return whether the updates of a site are filtered."""
        return bool(self.filters) and bool(self.filters.of(site))

    async def prepare(self, row: TicketRow, number: int) -> None:
        """Filter an update and keep the filtered file. A second call for the same update waits for the first.

        Args:
            row: the update's ticket, with the update's digest, weight, steps and metrics.
            number: number of the round.

        Raises:
            FilterRefused: a filter failed, or its output is not finite; the message says why.
            DiskFull: no space for the file.
            TicketClosed, Gone: the round is over.
        """
        if _key(row) in self._done:
            return
        if not await shared(self._running, _key(row), lambda: self._prepare(row, number)):
            raise TicketClosed(
                f"Round {number} closed before the server's filters finished with the update of {row.site}.",
                "Ask for the next ticket.",
            )

    async def _prepare(self, row: TicketRow, number: int) -> None:
        what = f"The server's filters for the update of {row.site} in round {number}"
        work = functools.partial(self._filtered, row, number)
        self._done[_key(row)] = await self._aside.run(work, what, f"from {row.site}")

    async def refusal(self, row: TicketRow, number: int) -> str:
        """Filter an update as `prepare` does. If a filter fails, return the reason, else an empty text."""
        try:
            await self.prepare(row, number)
        except FilterRefused as error:
            return str(error)
        return ""

    async def prepare_accepted(self, rows: Sequence[TicketRow], number: int) -> None:
        """Filter accepted updates again if a restart of the server has lost their filtered files.

        Args:
            rows: tickets of the updates.
            number: number of the round.

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
                    "Correct the filter, and start the run again: it continues with the same updates.",
                ) from error.__cause__

    def source(self, row: TicketRow) -> UpdateInput:
        """Return the file to aggregate for an accepted update, and the update's norm.

        This is the filtered file or, if the site has no filters, the original file.

        Any thread may call this.
        """
        if not self.has(row.site):
            return UpdateInput(self._store.tickets.spool(row.ticket).fd, row.norm)
        filtered = self._done[_key(row)]
        return UpdateInput(filtered.fd, filtered.norm)

    def sweep(self) -> None:
        """For tickets that have ended, close the filtered files and cancel running filters."""
        for key in [*self._running, *self._done]:
            if not self._store.tickets.get(key[0]).is_live:
                self._forget(key)

    def _forget(self, key: _Key) -> None:
        running, done = self._running.get(key), self._done.pop(key, None)
        if running is not None:
            running.cancel()
        if done is not None:
            done.close()

    def close(self) -> None:
        """Close all filtered files, and cancel all running filters."""
        for key in [*self._running, *self._done]:
            self._forget(key)

    def _filtered(self, row: TicketRow, number: int) -> _Filtered:
        spool = self._store.tickets.spool(row.ticket)
        base = self._store.versions.pin(row.fragment, row.base_version)
        spool.pool.hold(spool.slot, HOLDER)
        filtered, done = _Filtered(-1), False
        try:
            planned = self._plan.fragments[row.fragment]
            filtered.fd = self._plan.new_file("filters", planned.update.nbytes)
            base_version, report, metrics = row.base_version, row.report, dict(row.report.metrics)
            about = About(row.site, number, base_version, report.weight, report.steps, metrics, fragment=row.fragment)
            model = [spec.name for spec in self._plan.schema.tensors] if self._plan.has_fragments else []
            filtered.norm = _Work(planned, self._plan.codecs, spool.fd, base.fd).write(
                filtered.fd, self.filters.of(row.site), about, model
            )
            done = True
            return filtered
        except BadFilter as error:
            if error.raised:
                LOG.error("the server's filter %r failed", error.filter, exc_info=error.__cause__)
            raise FilterRefused(f"the server's filter {error}") from error.__cause__
        except SystemExit as error:
            raise FilterRefused(f"a filter of the server called sys.exit({error.code!r})") from error
        except (UsageError, ConfigError) as error:  # Atoll's own filters raise these
            raise FilterRefused(f"a filter of the server reports: {error.message}") from error
        except OSError as error:
            raise file_error(error, self._plan.settings.disk.state_dir / "filters") from error
        finally:
            spool.pool.drop(spool.slot, HOLDER)
            base.release()
            if not done:
                filtered.close()  # otherwise the error's traceback would keep the file open for a while


def _key(row: TicketRow) -> _Key:
    return row.ticket, row.digest


class _Work:
    """Passes one update through the filters, at most `CHUNK_ELEMENTS` elements at a time."""

    def __init__(self, plan: FragmentPlan, codecs: Mapping[str, Codec], spool_fd: int, base_fd: int) -> None:
        self._spool_fd, self._base_fd, self._codecs = spool_fd, base_fd, codecs
        self._layout, self._version = plan.update, plan.version

    def write(self, fd: int, filters: Sequence[Filter], about: About, model: Collection[str]) -> float:
        """Write the filtered update to a file, and return the L2 norm of its `params`.

        Args:
            fd: descriptor of the file.
            filters: the filters, in order.
            about: facts about the update that filters may read.
            model: names of all tensors of the model, if the update has the tensors of one fragment only; else empty.
        """
        specs = {each.spec.name: each.spec for each in self._layout.segments if not each.spec.is_extra}
        squares = []
        with torch.no_grad(), single_thread():
            chain = Chain(filters, specs, about, self._change, model=model)
            for piece, start, stop in self._layout.chunks(CHUNK_ELEMENTS):
                run = self._layout.piece(piece.segment, start, stop)
                encoded, spec = self._run(chain, run), run.segment.spec
                if spec.is_float:
                    values = self._decoded(encoded, run).double()
                    if not is_sound(spec, values):
                        raise FilterRefused(
                            f"the values of {spec.name!r} after the server's {_names(filters)} are not finite"
                        )
                    if spec.group == PARAMS:
                        squares.append(float(values.square().sum()))
                failpoint("filters.write")
                write_at(fd, bytes_of(encoded), run.offset)
        return norm_of(squares)

    def _run(self, chain: Chain, run: Piece) -> Tensor:
        """Filter a range of elements of one tensor, and return them encoded."""
        spec, start, stop = run.segment.spec, run.start, run.stop
        if not spec.is_extra and not spec.is_float and not chain.sends(spec.name):
            return self._unchanged(spec, start, stop).view(torch.uint8)
        if spec.is_extra or not spec.is_float:
            return self._bytes(run)
        if spec.group == PARAMS:
            values = chain.change(spec.name, start, stop)
        elif not chain.sends(spec.name):
            values = self._unchanged(spec, start, stop)
        else:  # (change − filtered change) + the site's value: bit-exact if filters change nothing
            values = chain.removed(spec.name, start, stop).add_(self._decoded(self._bytes(run), run))
        encoded = torch.empty(run.nbytes, dtype=torch.uint8)
        self._codecs[run.segment.codec].encode_(values, encoded, spec.dtype)
        return encoded

    def _change(self, name: str, start: int, stop: int) -> Tensor:
        """Return base − local, as the site sent it, for elements [start, stop) of a tensor."""
        segment = self._layout.by_name[name]
        run = self._layout.piece(segment, start, stop)
        values, spec = self._decoded(self._bytes(run), run), segment.spec
        if spec.group == PARAMS:
            return values
        if spec.rule == "sum":  # the update has the buffer's change
            return values.neg_()
        return self._base(spec, start, stop).to(values.dtype).sub_(values).nan_to_num_(0, 0, 0)

    def _bytes(self, run: Piece) -> Tensor:
        encoded = torch.empty(run.nbytes, dtype=torch.uint8)
        read_at(self._spool_fd, bytes_of(encoded), run.offset)
        return encoded

    def _decoded(self, encoded: Tensor, run: Piece) -> Tensor:
        spec = run.segment.spec
        values = torch.empty(run.numel, dtype=accumulate_dtype(spec.dtype))
        self._codecs[run.segment.codec].decode_(encoded, values, spec.dtype)
        return values

    def _unchanged(self, spec: TensorSpec, start: int, stop: int) -> Tensor:
        """Return the elements of a buffer as a site sends them that has not changed the buffer."""
        base = self._base(spec, start, stop)
        return torch.zeros_like(base) if spec.rule == "sum" else base

    def _base(self, spec: TensorSpec, start: int, stop: int) -> Tensor:
        values = torch.empty(stop - start, dtype=torch_dtype(spec.dtype))
        read_at(self._base_fd, bytes_of(values), self._version.by_name[spec.name].offset + start * spec.item_bytes)
        return values


def _names(filters: Sequence[Filter]) -> str:
    return f"filter{'s' if len(filters) > 1 else ''} {', '.join(map(repr, filters))}"
