"""Trackers: what shows a run in TensorBoard, MLflow, W&B, trackio or OpenTelemetry, from the run's events.

The run file names them (`server.trackers`). A package brings another one by an entry point of the group
`atoll.trackers`: a subclass of `Tracker`, or of `PointTracker` if it draws curves.
"""

from atoll.trackers.base import PointTracker as PointTracker
from atoll.trackers.base import TrackedRun as TrackedRun
from atoll.trackers.base import Tracker as Tracker
