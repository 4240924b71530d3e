"""What each tracker's own library, or its files, say of a run: tag → (step, value) of every point, in order."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Points = dict[str, list[tuple[int, float]]]


def of_tensorboard(folder: Path) -> Points:
    """As TensorBoard itself reads the folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(each.step, round(each.value, 4)) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def runs_of_mlflow(uri: str) -> dict[str, Any]:
    """Name of each MLflow run → the run."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    ids = [each.experiment_id for each in client.search_experiments()]
    return {each.info.run_name: each for each in client.search_runs(ids)}


def of_mlflow(uri: str) -> dict[str, Points]:
    """Name of each MLflow run → its points."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    return {
        name: {
            key: [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, key)]
            for key in run.data.metrics
        }
        for name, run in runs_of_mlflow(uri).items()
    }


def of_trackio(project: str) -> Points:
    """As trackio's dashboard reads its database."""
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    found: Points = {}
    for run in trackio.Api().runs(project):
        for row in SQLiteStorage.get_logs(project, run.name, run_id=run.id):
            for key, value in row.items():
                if isinstance(value, int | float) and key != "step":
                    found.setdefault(key, []).append((row["step"], value))
    return found


def of_wandb(folder: Path) -> Points:
    """What `wandb sync` would send of all offline runs: of several points at a step, W&B keeps one."""
    from wandb.proto import wandb_internal_pb2

    found: dict[str, dict[int, float]] = {}
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in _records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            for item in record.history.item:
                key = item.key or ".".join(item.nested_key)
                if not key.startswith("_"):
                    found.setdefault(key, {})[record.history.step.num] = float(item.value_json)
    return {key: sorted(points.items()) for key, points in found.items()}


BLOCK, HEAD, RECORD = 2**15, 7, 7


def _records(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format, as W&B writes it: crc, length, whole (1) or first … last piece (4)."""
    place, pieces = HEAD, b""
    while place + RECORD <= len(data):
        if BLOCK - place % BLOCK < RECORD:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        pieces += data[place + RECORD : place + RECORD + length]
        place += RECORD + length
        if kind in (1, 4):
            yield pieces
            pieces = b""
