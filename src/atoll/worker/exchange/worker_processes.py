"""The processes of one worker that exchange a fragment together: one process, or the ranks of a sharded model."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

from atoll.protocol.messages import Receipt, VersionManifest, VersionRef
from atoll.protocol.values import Lost, require
from atoll.tensors.chunks import AnyTensors
from atoll.tensors.fsdp_shards import Shards
from atoll.tensors.layout import Layout
from atoll.tensors.module_tensors import Tensors
from atoll.worker.exchange import apply_version
from atoll.worker.exchange.encode_update import Formed
from atoll.worker.exchange.pull_version import WAITS, Patience, Puller
from atoll.worker.session.session import Session

T = TypeVar("T")


class WorkerProcesses(Protocol):
    """The processes of one worker: which of them talks to the server, and which tensors each of them exchanges.

    Every process calls each method at the same place of its program.

    Attributes:
        label: what names this process in log lines, after the site's name; empty if there is only one.
        has_whole_model: whether a process has whole tensors, so that it can know their shapes and make a base of them.
    """

    label: str
    has_whole_model: bool

    def from_first(self, ask: Callable[[], T], kind: Any = Any) -> T:
        """Call `ask` in the first process alone, and return its result, or raise its error, in every process.

        Args:
            ask: the function to call.
            kind: the type of the result if it is not plain JSON.
        """

    def from_all(self, work: Callable[[], T]) -> list[T]:
        """Call `work` in every process, and return all results, or raise one of the errors, in every process.

        Args:
            work: the function; its result must consist of JSON values.
        """

    def own(self, tensors: Tensors) -> AnyTensors:
        """Return what this process exchanges of the model, with current values.

        Args:
            tensors: the model's own tensors, by name.
        """

    def share(self) -> None:
        """After the result of `own` was changed in every process, give each process the values that others have."""

    def form(self, write: Callable[[], Formed], layout: Layout) -> Formed:
        """Form an update: each process writes its own parts. Return the digests of all parts.

        Args:
            write: writes the parts of this process into its outbox.
            layout: layout of the update.
        """

    def upload(self, push: Callable[[], None], complete: Callable[[], Receipt], retries: int | None) -> Receipt | Lost:
        """Let every process send its parts, then tell the server once that the update is complete.

        Args:
            push: sends the parts of this process.
            complete: sends the message that the update is complete.
            retries: retries after a network error; None: retry for as long as `ATOLL_GIVE_UP_S` says.

        Returns:
            The server's receipt; `Lost` if the last retry failed.
        """

    def pull(
        self, puller: Puller, version: VersionRef, into: Tensors | None, patience: Patience, *, to_next: bool
    ) -> None:
        """Download a version: each process downloads its own parts, and loads its own tensors.

        The arguments are those of `Puller.pull`, and so are the errors.
        """


class OneProcess:
    """One process that exchanges the whole model of its worker.

    Args:
        session: the worker's session.
    """

    label, has_whole_model = "", True

    def __init__(self, session: Session) -> None:
        self._session = session

    def from_first(self, ask: Callable[[], T], kind: Any = Any) -> T:
        """Return the result of `ask`."""
        return ask()

    def from_all(self, work: Callable[[], T]) -> list[T]:
        """Return the result of `work` as a list."""
        return [work()]

    def own(self, tensors: Tensors) -> AnyTensors:
        """Return the model's own tensors."""
        return tensors

    def share(self) -> None:
        """Do nothing: there is no other process."""

    def form(self, write: Callable[[], Formed], layout: Layout) -> Formed:
        """Write the update of the whole model."""
        return write()

    def upload(self, push: Callable[[], None], complete: Callable[[], Receipt], retries: int | None) -> Receipt | Lost:
        """Send the parts and the message in one call: after an error of either, both are repeated."""

        def both() -> Receipt:
            push()
            return complete()

        return self._session.call(both, "submit", retries=retries, kind=Receipt)

    def pull(
        self, puller: Puller, version: VersionRef, into: Tensors | None, patience: Patience, *, to_next: bool
    ) -> None:
        """Download the version into the base file and the tensors."""
        puller.pull(version, into, patience, to_next=to_next)


class ShardedRanks:
    """The ranks of a model that FSDP2 has sharded. Rank 0 talks to the server, and each rank moves its own parts.

    Args:
        session: the worker's session, with all ranks.
        shards: returns this rank's shards of the model.
    """

    has_whole_model = False

    def __init__(self, session: Session, shards: Callable[[], Shards]) -> None:
        self._session, self._ranks, self._shards = session, session.ranks, shards
        self.label = f": rank {session.ranks.rank}"
        self.from_first, self.from_all = session.ranks.from_rank0, session.ranks.gather

    def own(self, tensors: Tensors) -> AnyTensors:
        """Return this rank's shards, with the tails that are in the rows of other ranks."""
        shards = self._shards()
        shards.gather_(self._ranks.swap)
        return shards

    def share(self) -> None:
        """Send the tails to the ranks that have them in their rows, and tensors that are not sharded to all ranks."""
        self._shards().scatter_(self._ranks.swap, self._ranks.from_rank)

    def form(self, write: Callable[[], Formed], layout: Layout) -> Formed:
        """Write this rank's parts, and learn the digests of the other ranks' parts."""

        def own() -> dict[str, Any]:
            formed = write()
            digests = [(part.index, each.hex()) for part, each in zip(layout.parts, formed.part_digests, strict=True)]
            return {"digests": digests, "is_zero": formed.is_zero, "lost": formed.lost, "norm": formed.norm}

        shares = self._ranks.gather(own)
        digests = dict(pair for each in shares for pair in each["digests"])
        every = [bytes.fromhex(digests[part.index]) for part in layout.all_parts]
        is_zero, lost = all(each["is_zero"] for each in shares), min(each["lost"] for each in shares)
        norm = math.hypot(*(each["norm"] for each in shares))
        return Formed(every, layout.blob_id(every), is_zero, lost, norm)

    def upload(self, push: Callable[[], None], complete: Callable[[], Receipt], retries: int | None) -> Receipt | Lost:
        """Repeat `push` until every rank has sent its parts. Then send the message at rank 0."""
        lost = self._session.move(push, "submit", retries=retries)
        if lost is not None:
            return lost
        return self._session.call(complete, "submit", retries=retries, kind=Receipt)

    def pull(
        self, puller: Puller, version: VersionRef, into: Tensors | None, patience: Patience, *, to_next: bool
    ) -> None:
        """Download this rank's parts into the base file. Unless `into` is None, load this rank's shards.

        The number of retries limits only the first request. After that request, the ranks wait for the server for as
        long as ATOLL_GIVE_UP_S says, since all ranks have to continue from the same version.
        """
        session, what = self._session, f"pull version {version.number}"
        ask = partial(session.manifest, puller.fragment, version.number)
        require(session.call(ask, what, retries=patience.before, kind=VersionManifest))
        require(session.move(partial(puller.pull, version, None, WAITS, to_next=to_next), what))
        if into is not None:
            shards, files = self._shards(), puller.files
            self._ranks.gather(lambda: apply_version.load_(shards, files.next_base() if to_next else files.base))
            self.share()
