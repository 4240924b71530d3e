"""`atoll audit`: check that nothing in a run's audit log was changed later, and show its last entries.

The log records what each site submitted, what the server decided, and which versions the server made.
"""

from __future__ import annotations

import json as json_module
from typing import Annotated

import typer

from atoll.cli.text import next_step, still
from atoll.cli.which_run import HERE, RunArgument, RunDir, quoted, run_folder, run_to_read
from atoll.format_text import number_of, visible
from atoll.store.reader import checked_audit


def command(
    run: RunArgument = None,
    state_dir: RunDir = None,
    last: Annotated[int, typer.Option(min=0, help="How many of the last entries to print.")] = 20,
    json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Check the audit log of a run, compare the server's journal with it, and show the last entries.

    Keep the printed hash of the last entry in another place: it changes if this entry or an earlier one is changed.
    """
    folder = run_to_read(run, state_dir, has_server=False) or HERE
    with still("still checking the entries"):
        audit = checked_audit(folder, last)
    if json:
        found = [
            {"seq": each.seq, "at": each.at, "what": each.what} | json_module.loads(each.detail_json)
            for each in audit.last
        ]
        print(
            json_module.dumps(
                {"run": audit.run, "entries": audit.entries, "last_hash": audit.last_hash, "last": found}, indent=2
            )
        )
        return
    for each in audit.last:
        text = ", ".join(f"{key} {value}" for key, value in json_module.loads(each.detail_json).items())
        print(visible(f"{each.seq:>6}  {each.at}  {each.what:<10} {text}"))
    print(f"{number_of(audit.entries, 'entry')} checked, none changed or removed; the last hash is {audit.last_hash}")
    next_step(f"keep this hash elsewhere; atoll status {quoted(run_folder(folder))} shows the run")
