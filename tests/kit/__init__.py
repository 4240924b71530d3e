"""What tests of runs share: a small model, a server, sites as threads or processes, copies of folders, digests.

    with serve(tmp_path, rounds=3) as server:           # a server in this process, on any free port
        sites = FederatedSites(server.url, tmp_path)    # two sites as threads
        sites.join()
        server.run()
    assert tensors_digest(exported(tmp_path)) == ...

Runs are reached through public names, the command line and the environment. `damage`, `halfway` and `requests` also
know the files on disk and the HTTP interface.
"""

from __future__ import annotations

from kit.damage import columns, flip_bit, flip_column, log_frames, rewrite_note
from kit.digests import exported, tensors_digest
from kit.folders import copy_folder
from kit.halfway import Halfway, ask_journal, halfway_run, ticket_states
from kit.models import SITES, build_model, local_step, train_
from kit.processes import ForkedServer, ForkedSite, atoll_worker, write_run_file
from kit.requests import joined, post
from kit.servers import SETTINGS, serve
from kit.sites import DiLoCoSites, FederatedSites, Gate, Threads, diloco, run_to_end, take_steps, together

__all__ = [
    "SETTINGS",
    "SITES",
    "DiLoCoSites",
    "FederatedSites",
    "ForkedServer",
    "ForkedSite",
    "Gate",
    "Halfway",
    "Threads",
    "ask_journal",
    "atoll_worker",
    "build_model",
    "columns",
    "copy_folder",
    "diloco",
    "exported",
    "flip_bit",
    "flip_column",
    "halfway_run",
    "joined",
    "local_step",
    "log_frames",
    "post",
    "rewrite_note",
    "run_to_end",
    "serve",
    "take_steps",
    "tensors_digest",
    "ticket_states",
    "together",
    "train_",
    "write_run_file",
]
