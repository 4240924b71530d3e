"""What a ClientApp keeps at its site between messages (`context.state`), on disk: a killed site goes on with it.

The file has the state before the newest message and after it. A site that was killed before its reply arrived gets that
message again, and begins it with the state before: no message changes the state twice.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flwr.app import RecordDict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from atoll.errors import AtollError, StoreError
from atoll.integrations.flower.records import from_payload, to_payload
from atoll.posix import file_error, own_folder, replace_file
from atoll.runtime import failpoint
from atoll.tensors.payload import pack, unpack

FILE = "flower-state.safetensors"
_SKELETON = "atoll.payload"


class KeptState:
    """The state of a ClientApp at one site in one run.

    Args:
        folder: the site's folder for this run; made if it is missing.
        within: the folder above it that the user has named.

    Raises:
        StoreError: the folder cannot be made, or the file cannot be read or is damaged.
    """

    def __init__(self, folder: Path, within: Path) -> None:
        try:
            own_folder(folder, within)
        except OSError as error:
            raise file_error(error, folder) from error
        self._file = folder / FILE
        self._task, self._before, self._after = "", list[Any](), list[Any]()
        if self._file.exists():
            self._task, self._before, self._after = self._read()

    def begin(self, task: str) -> RecordDict:
        """Return the state with which the ClientApp begins a message.

        Args:
            task: id of the message's task.
        """
        if task != self._task:
            self._task, self._before = task, self._after
        return from_payload(self._before)

    def end(self, state: RecordDict) -> None:
        """Keep the state with which the ClientApp has ended the message. Call it before the reply is sent.

        Raises:
            UsageError: the state has a record that cannot be stored.
            StoreError: the disk is full, or fails.
        """
        self._after = to_payload(state)
        if not self._before and not self._after:
            return
        packed = pack([self._task, self._before, self._after])
        tensors = {
            str(number): tensor.contiguous()
            for number, tensor in enumerate(packed.tensors)
            if isinstance(tensor, Tensor)  # records have no streams
        }
        try:
            replace_file(self._file, [save(tensors, {_SKELETON: json.dumps(packed.skeleton)})])
        except OSError as error:
            raise file_error(error, self._file) from error
        failpoint("flower.kept")

    def _read(self) -> tuple[str, list[Any], list[Any]]:
        try:
            with safe_open(self._file, "pt") as file:
                tensors = [file.get_tensor(str(number)) for number in range(len(file.keys()))]
                task, before, after = unpack(json.loads(file.metadata()[_SKELETON]), tensors)
            from_payload(after)
            from_payload(before)
        except OSError as error:
            raise file_error(error, self._file) from error
        except (AtollError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise StoreError(
                f"{self._file}, the state of the Flower app at this site, is damaged: {error}",
                "Remove it: the app begins with an empty state.",
            ) from error
        return str(task), before, after
