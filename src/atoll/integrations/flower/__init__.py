"""Flower apps on Atoll, unchanged: their ServerApp is a workflow of the server, their ClientApp answers its tasks.

    atoll run --flower APP --sites 3            an app with its sites on this machine
    atoll worker --flower APP                   the ClientApp at one site

A Flower message is a task, and a reply is its answer. Arrays travel as tensors, from disk to disk; the server reads
one when the ServerApp asks for its values.
"""

import os

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # Flower reads it when it is imported, which comes next
