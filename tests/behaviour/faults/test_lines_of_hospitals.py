"""Two lines on which runs of hospitals have failed, each between two machines: see `bench/hospital_lines.py`.

Bytes, times and the size of a part are a twentieth of those of the hospitals here; the rate of the line is theirs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.hospital_lines import run_over_a_line

pytestmark = pytest.mark.slow

PART_BYTES = 2**20
PARTS = {"network.part_bytes": PART_BYTES}
ROUNDS = 2


@pytest.mark.covers("F17")
def test_an_update_is_sent_once_though_its_acknowledgement_is_lost(tmp_path: Path) -> None:
    """The acknowledgement of each update of 38 MB is lost after its bytes have arrived (NVIDIA/FLIP, issue 684).

    Each update counts once. Nothing is sent twice but the last part, of which the site cannot know that it arrived.
    """
    nbytes = 36 * PART_BYTES
    outcome = run_over_a_line(tmp_path / "run", nbytes=nbytes, rounds=ROUNDS, mbit_per_s=200, settings=PARTS, lose=True)
    assert (outcome.lost, outcome.deaths, outcome.value) == (ROUNDS, 0, float(ROUNDS))
    assert outcome.again <= ROUNDS
    assert outcome.sent_bytes <= ROUNDS * (nbytes + PART_BYTES)


@pytest.mark.covers("F14", "F15", "F22")
def test_a_run_passes_a_relay_that_drops_its_connections(tmp_path: Path) -> None:
    """A run goes on without a death through a relay that drops each connection after 3 s, stalled for the last 1.5 s.

    Only parts under way are sent again: at most one a connection and drop (MediSwarm, issue 466).
    """
    nbytes = 36 * PART_BYTES
    outcome = run_over_a_line(
        tmp_path / "run", nbytes=nbytes, rounds=ROUNDS, mbit_per_s=100, settings=PARTS, disturb=(1.5, 1.5)
    )
    drops, connections = round(outcome.silent_s / 1.5), 2
    assert drops >= 3
    assert (outcome.deaths, outcome.value) == (0, float(ROUNDS))
    assert outcome.again <= drops * connections
    for moved_bytes in (outcome.sent_bytes, outcome.received_bytes):
        assert ROUNDS * nbytes <= moved_bytes <= ROUNDS * nbytes + (drops * connections + ROUNDS) * PART_BYTES


@pytest.mark.long
@pytest.mark.covers("F21")
def test_a_run_completes_over_a_long_lossy_line(tmp_path: Path) -> None:
    """50 Mbit/s, a round trip of 200 ms, 1 % of loss, CUBIC, over a tun line: no false death, nothing sent twice."""
    settings = {"network.part_bytes": 2**19, "network.connections": 8}
    outcome = run_over_a_line(tmp_path / "run", nbytes=8 * 2**20, rounds=1, mbit_per_s=None, settings=settings)
    assert (outcome.deaths, outcome.value, outcome.again) == (0, 1.0, 0)
    assert outcome.sent_bytes == 8 * 2**20
