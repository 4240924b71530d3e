"""`atoll verify`: compare every file of a state directory with its journal, and compute the kept rounds again."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict
from typing import Annotated

import typer

from atoll.cli.text import next_step, print_line, telling_what_is_awaited
from atoll.cli.which_run import HERE, RunArgument, RunDir, quoted, run_folder, run_to_read
from atoll.errors import StateCorrupt
from atoll.format_text import number_of, visible

RESULTS = {"same": "the same digest", "differs": "ANOTHER RESULT"}


def command(
    run: RunArgument = None,
    state_dir: RunDir = None,
    json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Compare every file of a run with its journal, and compute again the rounds with kept updates.

    It needs no server and changes nothing. Exit code 7: a byte was changed, or a round gets another result; the lines
    name the file, the part and the tensors.
    """
    folder, doing = run_to_read(run, state_dir, has_server=False) or HERE, ["the journal"]
    with telling_what_is_awaited(lambda: f"still checking {doing[-1]}", lambda line: print_line(f"atoll: {line}")):
        from atoll.server.verify_state import verify_state
        from atoll.transport.listener import raise_files_limit

        raise_files_limit()  # a round has one file for each of its updates
        found = verify_state(folder, doing.append)
    bad = [each for each in found.rounds if each.result == "differs"]
    if json:
        changed, rounds = [each._asdict() for each in found.changed], [each._asdict() for each in found.rounds]
        print(json_module.dumps(asdict(found) | {"changed": changed, "rounds": rounds}, indent=2))
    else:
        for change in found.changed:
            print(visible(f"changed: {change}"))
        for each in found.rounds:
            said = "not computed again"
            if each.result in RESULTS:
                said = f"computed again from {number_of(each.updates, 'update')}, {RESULTS[each.result]}"
            print(visible(f"round {each.round}, version {each.version}: {said}{f': {each.why}' if each.why else ''}"))
        for text in found.unchecked:
            print(visible(f"not checked: {text}"))
        print(
            f"{number_of(found.files, 'file')} and {number_of(found.entries, 'entry')} of the audit log compared; "
            f"{number_of(len(found.changed), 'change')}; the last hash is {found.last_hash or 'unknown'}"
        )
    if found.changed or bad:
        raise StateCorrupt(
            f"{folder} is not as its server wrote it: {number_of(len(found.changed), 'change')}, "
            f"{number_of(len(bad), 'round')} with another result.",
            "Check the disk and memory of this machine. A server that starts there falls back to an undamaged version; "
            "else restore the whole directory from a backup.",
        )
    if not json:
        next_step(f"keep this hash elsewhere; atoll audit {quoted(run_folder(folder))} shows the entries")
