"""`atoll egress`: check a site's egress log and its receipts, show or export it, compare it with a server's log.

The log is kept while the site has a policy (`atoll.config.site_policy`).
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from atoll.config.site_policy import VARIABLE, policy_path, read_policy
from atoll.errors import StateCorrupt, UsageError
from atoll.format_text import number_of, size, visible
from atoll.posix import read_named
from atoll.protocol.messages import SignedReceipt
from atoll.protocol.receipts import is_genuine
from atoll.transport.egress_log import NAME, Entry, read_log

COLUMNS = (
    "seq",
    "at",
    "what",
    "run",
    "site",
    "ticket",
    "object",
    "task",
    "bytes",
    "digest",
    "norm",
    "weight",
    "detail",
)
FIRST_CHARS = ("=", "+", "-", "@", "\t", "\r")
"""With one of these, a spreadsheet takes a text for a formula."""


def command(
    log: Annotated[
        Path | None, typer.Option(help="The log. Default: the one that the site's policy names.", show_default=False)
    ] = None,
    last: Annotated[int, typer.Option(min=0, help="How many of the last entries to print.")] = 20,
    export: Annotated[
        Literal["jsonl", "csv"] | None,
        typer.Option(help="Print all entries in this format.", show_default=False),
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(
            help="Compare with the server's log: what `atoll audit --json --last 1000000` has printed.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Check the egress log of this site: the chain of hashes, and the server's signature of each receipt."""
    entries, damage = list[Entry](), None
    try:
        for entry in read_log(log or _log_of_policy()):
            entries.append(entry)
    except StateCorrupt as error:
        if compare is None or not entries:
            raise
        damage = error  # first, compare what can be read
    require_genuine_receipts(entries)
    if compare is not None:
        try:
            matched = require_agreement(entries, compare)
        except StateCorrupt as error:
            if damage is not None:
                raise StateCorrupt(f"{damage.message} {error.message}", damage.remedy) from error
            raise
        if damage is not None:
            raise damage
        print(f"{number_of(matched, 'update')} of this site in both logs, with the same digests; none in only one")
        return
    if export is not None:
        for text in csv_lines(entries) if export == "csv" else (each.line.decode() for each in entries):
            print(text, end="")
        return
    for each in entries[max(0, len(entries) - last) :]:
        detail = ", ".join(f"{key} {value}" for key, value in each.detail.items() if key != "signature")
        print(visible(f"{each.seq:>6}  {each.at}  {each.what:<8} {detail}"))
    left = sum(each.detail["bytes"] for each in entries if each.what in ("part", "answer", "served"))
    counted = sum(each.what == "receipt" and each.detail["state"] == "counted" for each in entries)
    print(
        f"{number_of(len(entries), 'entry')} checked, none changed or removed; {size(left)} of tensors and answers "
        f"have left; receipts show that {number_of(counted, 'update')} counted; the last hash is "
        f"{entries[-1].hash if entries else 'that of an empty log'}"
    )


def _log_of_policy() -> Path:
    path = policy_path(os.environ)
    if path is None:
        raise UsageError("This site has no policy, so it keeps no egress log.", f"Set {VARIABLE}, or give --log.")
    return read_policy(path).log_folder / NAME


def require_genuine_receipts(entries: Iterable[Entry]) -> None:
    """Check that each receipt is signed with its run's key, and is of an update that the log has before it.

    Raises:
        StateCorrupt: a receipt is not; the message names its entry.
    """
    keys, digests = dict[str, str](), set[tuple[str, int, str]]()
    for each in entries:
        detail = each.detail
        if each.what == "run":
            keys.setdefault(detail["run"], detail["receipt_key"])
        elif each.what == "update":
            digests.add((detail["run"], detail["ticket"], detail["digest"]))
        elif each.what == "receipt":
            receipt = SignedReceipt.model_validate(detail)
            if not is_genuine(receipt, keys.get(receipt.run, "")):
                raise StateCorrupt(f"The signature of the receipt in entry {each.seq} is wrong.", "Ask for a backup.")
            if (receipt.run, receipt.ticket, receipt.digest) not in digests:
                raise StateCorrupt(
                    f"The receipt in entry {each.seq} is of an update that this log does not have.",
                    "Check whether another log was in use, such as that of another user.",
                )


def require_agreement(entries: Iterable[Entry], audit: Path) -> int:
    """Compare the updates of this site with those in a server's audit log, by run, site, ticket and digest.

    Args:
        entries: the site's log.
        audit: file with the output of `atoll audit --json`, with all entries.

    Returns:
        The number of updates that both have.

    Raises:
        UsageError: the file is not such an output, or lacks entries.
        StateCorrupt: an update is in one log only, or has another digest. The message names it.
    """
    try:
        document = json.loads(read_named(audit))
        run, theirs = str(document["run"]), [each for each in document["last"] if each["what"] == "accepted"]
        accepted = {(str(each["site"]), int(each["ticket"])): str(each["digest"]) for each in theirs}
        is_whole = len(document["last"]) == document["entries"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{audit} is not the output of `atoll audit --json`: {error}.", "Write it anew.") from None
    if not is_whole:
        raise UsageError(f"{audit} lacks entries of the audit log.", "Use `atoll audit --json --last 1000000`.")
    sent: dict[tuple[str, int], set[str]] = {}
    receipts: dict[tuple[str, int], str] = {}
    for each in entries:
        detail = each.detail
        if each.what in ("update", "receipt") and detail["run"] == run:
            place = detail["site"], detail["ticket"]
            sent.setdefault(place, set()).add(detail["digest"])
            if each.what == "receipt":
                receipts[place] = detail["digest"]
    if not sent:
        raise UsageError(f"This site's log has no update for the run {run} of {audit}.", "Compare the right run.")
    sites = {site for site, _ in sent}
    mine = {place: digest for place, digest in accepted.items() if place[0] in sites}
    for (site, ticket), digest in mine.items():
        if digest not in sent.get((site, ticket), set()):
            raise StateCorrupt(
                f"The server has an update of {site} for ticket {ticket} with the digest {digest[:16]}, which this "
                "site's log does not have.",
                "Find out which process sent it: perhaps another machine under this site's name.",
            )
    for (site, ticket), digest in receipts.items():
        if mine.get((site, ticket)) != digest:
            raise StateCorrupt(
                f"The server signed that it has the update of {site} for ticket {ticket} with the digest "
                f"{digest[:16]}, but its audit log does not have it.",
                "Show the receipt to the server's operator: `atoll egress --export jsonl`.",
            )
    return len(mine)


def csv_lines(entries: Iterable[Entry]) -> Iterator[str]:
    """Yield the entries as CSV with a head. What has no column of its own is in `detail`, as JSON."""

    def line(values: Iterable[Any]) -> str:
        out = io.StringIO()
        texts = ("" if value is None else str(value) for value in values)
        csv.writer(out, lineterminator="\n").writerow(
            f"'{each}" if each.startswith(FIRST_CHARS) else each for each in texts
        )
        return out.getvalue()

    yield line(COLUMNS)
    for each in entries:
        rest = {key: value for key, value in each.detail.items() if key not in COLUMNS}
        own = [each.detail.get(key) for key in COLUMNS[3:-1]]
        yield line([each.seq, each.at, each.what, *own, json.dumps(rest, sort_keys=True)])
