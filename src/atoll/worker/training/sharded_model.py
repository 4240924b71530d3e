"""A worker whose model is sharded over its ranks (FSDP2): each has files and connections of its own, for its own parts.

Rank 0 is the worker that the server knows: it joins, holds the lease, asks for tickets and says that an update is
complete. For everything that moves tensors it gives an order, which all ranks carry out at once, and hears from each
what came of it: so they go on together, or end together. No rank has another's parts; what a tile has of a neighbour's
rows is exchanged between them (`atoll.tensors.fsdp_shards`).

    order           at every rank
    pull            its parts of a version, into its base file (or the file beside it)
    load, spread    from there into its rows; then tails to whose rows they are
    form            tails from whose rows they are; then its parts of the update into its outbox, and on their way
    send            those of its parts that the server lacks
    acknowledged    the server has all of it
    rebase          the base beside takes the place of the base, and local progress is carried over
    advance         what is in the outbox counts: the base becomes what was submitted
    settle          what an update has left is kept, where that update was counted
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from atoll.errors import Gone, LeaseLost, UpdateRefused
from atoll.protocol import messages, routes
from atoll.tensors.fsdp_shards import Shards
from atoll.tensors.module_tensors import Tensors
from atoll.worker.exchange import encode_update
from atoll.worker.exchange.base_and_outbox import BaseFile, OutboxNote
from atoll.worker.exchange.exchange import Exchange, Finish, Sending, completed, note_of
from atoll.worker.log_lines import progress
from atoll.worker.session.ranks import Ranks, Said
from atoll.worker.session.server_checks import is_answered
from atoll.worker.session.session import Session


class Share(Session):
    """What one rank does of a sharded worker's part in a run.

    Args:
        shards: what it has of the model, asked for whenever it is needed.
        options: as `Session`.
    """

    def __init__(self, server: str, site: str, *, shards: Callable[[], Shards], ranks: Ranks, **options: Any) -> None:
        self._shards, self._ranks = shards, ranks
        self._submitting = f"{site}: rank {ranks.rank}: submitting"
        self._beside: BaseFile | None = None
        self._pushed: tuple[int, set[int], BaseException | None] | None = None
        """Ticket, parts that were sent while they were formed, and what ended that."""
        super().__init__(server, site, share=(ranks.rank, ranks.count), **options)
        self._cleanup.callback(self._close_beside)

    def carry_out(self, name: str, given: Said) -> Any:
        """Do what an order says; one of those at the head of this file."""
        orders: dict[str, Callable[..., Any]] = {
            "pull": self._pull_own,
            "load": lambda: encode_update.load_(self._shards(), self.base),
            "spread": lambda: self._shards().scatter_(self._ranks.swap, self._ranks.from_rank),
            "form": self._form_own,
            "send": self._send_own,
            "acknowledged": self._acknowledged,
            "rebase": self._rebase_own,
            "advance": partial(Exchange.advance_base, self),
            "settle": self._turns.settle,
        }
        return orders[name](**given)

    def _pull_own(self, version: int, digest: str, beside: bool) -> None:
        if beside and self._beside is None:
            self._beside = self.following()
        target = self._beside if beside else self.base
        assert target is not None
        self._puller.pull(version, digest, None, target, self.base)

    def _rebase_own(self) -> None:
        assert self._beside is not None
        self._shards().gather_(self._ranks.swap)
        encode_update.rebase_(self._shards(), self.base, self._beside)
        self.base.replace_with(self._beside)
        self._beside = None

    def _form_own(self, ticket: dict[str, Any]) -> Said:
        """Its parts, which are on their way while the later ones are formed."""
        given, shards, layout = messages.Ticket.model_validate(ticket), self._shards(), self.outbox.layout
        shards.gather_(self._ranks.swap)
        self._pushed = None
        with progress(self._submitting, layout.own_nbytes) as bar, self._pushing(given, bar) as pushing:
            formed = self._write(given, shards, pushing.add)
        self._pushed = given.ticket, pushing.sent, pushing.error
        digests = {part.index: digest.hex() for part, digest in zip(layout.parts, formed.part_digests, strict=True)}
        return {"digests": digests, "is_zero": formed.is_zero}

    def _send_own(self, note: dict[str, Any], resuming: bool) -> None:
        """One attempt; who orders it tries again."""
        self._take_note(OutboxNote(**note), resuming)
        sent, failure = None, None
        if self._pushed is not None:
            (_, sent, failure), self._pushed = self._pushed, None
        with progress(self._submitting, self.outbox.layout.own_nbytes) as bar:
            Sending(self, self.parts, self.outbox, bar, sent, failure).push()

    def _take_note(self, note: OutboxNote, resuming: bool) -> None:
        """Have the outbox say what rank 0's says.

        Raises:
            Gone: it does not hold that.
        """
        held = self.outbox.note
        if held is None and self._pushed is not None and self._pushed[0] == note.ticket:
            self.outbox.seal(note)
        elif held is None or held.digest != note.digest or (resuming and self.outbox.is_damaged()):
            raise Gone(f"{self.outbox.path} does not hold the update of round {note.round}.", "It is trained again.")
        elif held.ticket != note.ticket:
            self._turns.moves_to(note.ticket, note.base_version, held.ticket)
            self.outbox.seal(note)

    def _close_beside(self) -> None:
        if self._beside is not None:
            self._beside.close()


class Lead(Share):
    """Rank 0 of a sharded worker: a `Session` whose every move is made by all ranks."""

    def begin(self) -> None:
        """Have the other ranks take their places."""
        self._all("open", site=self.site)

    def carry_out(self, name: str, given: Said) -> Any:
        return None if name == "open" else super().carry_out(name, given)

    def pull(
        self,
        version: int,
        digest: str,
        into: Tensors | None,
        base: BaseFile | None = None,
        *,
        max_retries: int | None = None,
        waits: bool = True,
    ) -> None:
        """As `Exchange.pull`. Once the server was reached, every rank waits for it: they go on from one version."""
        self._puller.manifest(version, max_retries)
        self._all("pull", version=version, digest=digest, beside=base is not None)
        if into is not None:
            self._all("load")
            self._all("spread")

    def rebase(self, version: int, digest: str, tensors: Tensors, *, max_retries: int | None = None) -> None:
        self._puller.manifest(version, max_retries)
        self._all("pull", version=version, digest=digest, beside=True)
        self._all("rebase")
        self._all("spread")

    def submit(
        self,
        ticket: messages.Ticket,
        tensors: Tensors,
        *,
        weight: float,
        steps: int,
        metrics: dict[str, float],
        finish: Finish | None = None,
        max_retries: int | None = None,
    ) -> encode_update.Formed:
        self._tell_submitting(ticket.round)
        formed = self._all("form", ticket=ticket.model_dump(mode="json"))
        digests = {int(index): text for each in formed for index, text in each["digests"].items()}
        every = [bytes.fromhex(digests[part.index]) for part in self.outbox.layout.all_parts]
        whole = encode_update.Formed(every, self.outbox.layout.blob_id(every), all(each["is_zero"] for each in formed))
        self._formed(whole.is_zero, steps)
        texts = [digest.hex() for digest in every]
        self.outbox.seal(note_of(self, ticket, whole.digest, texts, weight, steps, metrics))
        self.send(max_retries)
        return whole

    def send(self, max_retries: int | None = None) -> messages.Receipt:
        note = self.outbox.note
        assert note is not None
        self._tell_submitting(note.round)
        order = partial(self._all, "send", note=asdict(note), resuming=self.resuming)
        receipt = completed(self, note, order, max_retries)
        self._all("acknowledged")
        return receipt

    def advance_base(self) -> None:
        self._all("advance")

    def next_round(self, *, wait_s: float | None = None, max_retries: int | None = None) -> messages.TicketReply:
        reply = super().next_round(wait_s=wait_s, max_retries=max_retries)
        if self.residuals is not None and reply.ticket is not None:
            self._all("settle")
        return reply

    def _all(self, name: str, **given: Any) -> list[Any]:
        """Give an order; returns what came of it at each rank.

        Raises:
            AtollError: what went wrong at one of them; a refusal is told before what else did.
        """
        results = self._ranks.order(
            name, {"lease": self.http.lease, "given": given}, lambda: self.carry_out(name, given)
        )
        errors = [each for each in results if isinstance(each, Exception)]
        if errors:
            raise min(errors, key=lambda error: (not isinstance(error, UpdateRefused), isinstance(error, LeaseLost)))
        return results


class Follow(Share):
    """Another rank of a sharded worker: it does what rank 0 orders, under the lease that rank 0 has."""

    def obey(self, name: str, order: Said) -> Any:
        """Carry out an order."""
        self.http.lease = order["lease"]
        return self.carry_out(name, order["given"])

    def join(
        self, max_retries: int | None = None, *, sync_every: int | None = None, num_fragments: int | None = None
    ) -> None:
        """Rank 0 has joined for all, and sends the heartbeats; this rank watches its own calls."""
        self.watch_calls()

    def watch_calls(self) -> None:
        every_s = self.info.waiting_heartbeat_s
        ask = partial(self.http.reach, routes.HEALTH, timeout_s=every_s)
        self.http.watch.begin(lambda: is_answered(self.http, ask), every_s)

    def rejoin(self, lost: str) -> None:
        """Rank 0 has to.

        Raises:
            LeaseLost: always; rank 0 hears of it.
        """
        raise LeaseLost(f"The server no longer knows {self.site}.")

    def leave(self, error: str | None = None) -> None:
        """Close the files and connections; rank 0 tells the server."""
        self._closing.set()
        self._cleanup.close()
        self.http.close()
