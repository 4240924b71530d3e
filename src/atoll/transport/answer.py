"""The answer to an HTTP request, read within limits: of bytes, of time, and of what its head may say.

A server may be broken or hostile, and another program may answer at its address. All clients read answers with the
class `Response`, so each limit is checked here and nowhere else:

- The head has at most `HEAD_BYTES` bytes, with all the interim answers (status 100) before it.
- The body has at most as many bytes as the caller allows. A longer one is refused before it is read, if the head
  tells its length, and else as soon as it is too long.
- In each period as long as the socket's timeout, at least `LEAST_BYTES_PER_S` bytes arrive per second. Without this
  limit, an answer of one byte a second would hold a call for days, although no single read times out.
- The body has one length, which is a number, or is chunked. It is not compressed: no request asks for that.
- Redirects are not followed, because the address that a user gave is the only one that the user trusts.
"""

from __future__ import annotations

import http.client
import io
import math
import re
import socket
import time
from typing import Any

from atoll.format_text import visible
from atoll.protocol.routes import LEAST_BYTES_PER_S

HEAD_BYTES = 64 * 2**10
"""Maximum size of the head of an answer, in bytes. http.client allows at most 100 headers."""
MALFORMED = (ValueError, LookupError, AttributeError, RecursionError)
"""What http.client raises for some malformed answers, besides its own errors."""
SHOWN_CHARS = 200
"""Maximum length of a text from a server that is shown in an error."""

_PIECE_BYTES = 64 * 2**10
_HTTP = b"HTTP/"
_LENGTH = re.compile(r"[0-9]{1,18}")


class BadAnswer(http.client.HTTPException):
    """An answer that no server of Atoll sends.

    Args:
        text: what the server does, to complete a sentence that begins with its address.
        remedy: what to do about it.
        is_damaged: whether the answer may have been damaged on the way, so that a further attempt may succeed.
    """

    def __init__(self, text: str, remedy: str = "", *, is_damaged: bool = True) -> None:
        super().__init__(text)
        self.text, self.is_damaged = text, is_damaged
        self.remedy = remedy or "Check which program answers at this address, and any proxy in between."


class NoHttp(BadAnswer):
    """An answer that is not HTTP: another program answers at the address, or a bit was flipped on the way.

    Args:
        first_line: beginning of the answer.
    """

    def __init__(self, first_line: str) -> None:
        super().__init__(
            f"does not answer in HTTP, but with {_shown(first_line.rstrip())}",
            "Check the address and the port, and that the Atoll server runs.",
        )
        self.first_line = first_line


class TooSlow(TimeoutError):
    """So few bytes were received or sent in a period that the connection is given up."""


class Pace:
    """Raises `TooSlow` if fewer than `LEAST_BYTES_PER_S` bytes per second move in a period.

    Args:
        period_s: length of the period in seconds.
    """

    def __init__(self, period_s: float | None) -> None:
        self._period_s = period_s or math.inf
        self._begin_s, self._count = time.monotonic(), 0

    def moved(self, nbytes: int) -> None:
        """Count bytes that have moved now."""
        self._count += nbytes
        seconds = time.monotonic() - self._begin_s
        if seconds >= self._period_s:
            if self._count < LEAST_BYTES_PER_S * seconds:
                raise TooSlow(f"only {self._count} bytes moved in {seconds:.1f} s")
            self._begin_s, self._count = time.monotonic(), 0


class _Arriving(io.RawIOBase):
    """The bytes of one answer as they arrive from a socket.

    Attributes:
        room: number of bytes that may still arrive.
    """

    def __init__(self, raw: io.RawIOBase, timeout_s: float | None) -> None:
        self._raw, self._pace, self.room = raw, Pace(timeout_s), HEAD_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        count: int = self._raw.readinto(buffer) or 0
        self.room -= count
        if self.room < 0:
            raise BadAnswer("sends an answer that is too long, or in very small chunks")
        self._pace.moved(count)
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class Response(http.client.HTTPResponse):
    """An HTTP response that is read within limits. Use this class as the `response_class` of a connection.

    If a connection ends within the headers, the standard library treats that as the end of the headers. A response that
    is cut off then looks like a response without a body. This class raises `IncompleteRead` instead.
    """

    def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self._arriving = _Arriving(self.fp.detach(), sock.gettimeout())
        self.fp = io.BufferedReader(self._arriving)

    def begin(self) -> None:
        """Read the status line and the headers.

        Raises:
            IncompleteRead: the headers are cut off.
            RemoteDisconnected: there is no answer.
            NoHttp: the answer is not HTTP.
            BadAnswer: no server of Atoll sends this head.
        """
        stream = self.fp
        lines: Any = _HeaderLines(stream)
        self.fp = lines
        try:
            super().begin()
        except http.client.IncompleteRead as error:
            if not isinstance(self.status, int) and not error.partial.startswith(_HTTP[: len(error.partial)]):
                raise NoHttp(error.partial.decode("latin-1")) from error
            raise
        except (BadAnswer, http.client.RemoteDisconnected):
            raise
        except (http.client.BadStatusLine, http.client.UnknownProtocol) as error:
            raise NoHttp(str(error.args[0])) from error
        except (http.client.HTTPException, *MALFORMED) as error:
            raise BadAnswer(f"sends an answer with a malformed head ({_shown(str(error))})") from error
        finally:
            if self.fp is lines:  # else http.client has closed the stream
                self.fp = stream
        self._require_plain_head()

    def allow(self, most_bytes: int) -> None:
        """Allow a body of known length, and of at most this size, to arrive.

        Raises:
            BadAnswer: the head announces a longer body.
        """
        self._require_length(most_bytes)
        self._arriving.room += most_bytes

    def body(self, most_bytes: int) -> bytearray:
        """Read and return the whole body.

        Raises:
            BadAnswer: the body has more than `most_bytes` bytes, or very small chunks.
            IncompleteRead: the connection ended within the body.
        """
        self._require_length(most_bytes)
        if self.length is not None:
            return self._whole(self.length)
        body = bytearray()
        try:
            # Each chunk costs time, whatever its size: a piece in chunks of a byte needs more room than it gets.
            self._arriving.room = 2 * _PIECE_BYTES
            while piece := self.read(_PIECE_BYTES):
                self._arriving.room = 2 * _PIECE_BYTES
                body += piece
                if len(body) > most_bytes:
                    raise BadAnswer(f"sends an answer of more than {most_bytes} bytes")
        except (http.client.LineTooLong, *MALFORMED) as error:
            raise BadAnswer(f"sends an answer with malformed chunks ({_shown(str(error))})") from error
        return body

    def _whole(self, nbytes: int) -> bytearray:
        """Read a body of known length, as much at a time as has arrived.

        Raises:
            IncompleteRead: the connection ended within the body.
        """
        body = bytearray(nbytes)
        rest = memoryview(body)
        self._arriving.room = nbytes
        while rest:
            if not (count := self.readinto(rest)):
                raise http.client.IncompleteRead(b"", len(rest))
            rest = rest[count:]
        self.close()
        return body

    def _require_length(self, most_bytes: int) -> None:
        if (self.length or 0) > most_bytes:
            raise BadAnswer(f"sends an answer of {self.length} bytes, where at most {most_bytes} are allowed")

    def _require_plain_head(self) -> None:
        headers = self.headers
        lengths, codings = headers.get_all("Content-Length", []), headers.get_all("Transfer-Encoding", [])
        if self.status < 200 or headers.defects or headers.get_payload():
            raise BadAnswer("sends an answer with a malformed head")
        if any(not _LENGTH.fullmatch(each.strip()) for each in lengths) or len(lengths) + len(codings) > 1:
            raise BadAnswer(f"sends an answer of unclear length ({_shown(', '.join([*lengths, *codings]))})")
        if codings and codings[0].strip().lower() != "chunked":
            raise BadAnswer(f"sends an answer in the transfer encoding {_shown(codings[0])}")
        encoding = headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise BadAnswer(
                f"sends an answer in the encoding {_shown(encoding)}, which was not asked for",
                "Switch off compression in the proxy in front of the server.",
                is_damaged=False,
            )
        if 300 <= self.status < 400:
            target = headers.get("Location")
            raise BadAnswer(
                f"redirects to {_shown(target)}" if target else f"answers with a redirect (HTTP status {self.status})",
                "Atoll follows no redirects. If you trust the other address, use it as the server's address.",
                is_damaged=False,
            )


def _shown(text: str) -> str:
    return f"'{visible(text, SHOWN_CHARS)}'"


class _HeaderLines:
    """A stream of header lines that raises `IncompleteRead` if it ends before the blank line that ends the headers.

    If the stream is empty, it raises no error and returns b"", as other streams do.
    """

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
