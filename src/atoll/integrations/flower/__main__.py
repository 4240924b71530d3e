"""`python -m atoll.integrations.flower APP`: the ClientApp of a Flower app as the worker of a site."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from atoll.integrations.flower.app_folder import read_pairs
from atoll.integrations.flower.client_app import answer_messages


def main() -> None:
    """Read the command line, and answer messages until the run has ended."""
    parser = argparse.ArgumentParser(prog="python -m atoll.integrations.flower", description=__doc__)
    parser.add_argument("app", type=Path, help="folder of the app")
    parser.add_argument("--run-config", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--node-config", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--record-keys", nargs="*", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    number, count = os.environ.get("ATOLL_SITE_NUMBER"), os.environ.get("ATOLL_SITES")
    of_run = {"partition-id": int(number) - 1, "num-partitions": int(count)} if number and count else {}
    node_config = of_run | read_pairs(given.node_config, "--node-config")
    record_keys = read_pairs(given.record_keys, "--record-keys")
    answer_messages(given.app, read_pairs(given.run_config, "--run-config"), node_config, record_keys)


if __name__ == "__main__":
    main()
