"""An HTTP response whose headers must be complete.

The standard library takes the end of a connection for the end of the headers. A response that is cut off inside them
then looks like one without a body, and a part of a status line like a shorter one.
"""

from __future__ import annotations

import http.client
from typing import Any


class Response(http.client.HTTPResponse):
    """Raises `IncompleteRead` where the connection ends before the blank line after the headers.

    Use it as `response_class` of a connection.
    """

    def begin(self) -> None:
        stream = self.fp
        lines: Any = _HeaderLines(stream)
        self.fp = lines
        try:
            super().begin()
        finally:
            self.fp = stream


class _HeaderLines:
    """Gives whole lines only. An end before the first byte is left to the caller: nothing was answered."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._begun = stream, False

    def readline(self, limit: int) -> bytes:
        line: bytes = self._stream.readline(limit)
        if len(line) < limit and not line.endswith(b"\n") and (line or self._begun):
            raise http.client.IncompleteRead(line)
        self._begun = True
        return line

    def close(self) -> None:
        self._stream.close()
