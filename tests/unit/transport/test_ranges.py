"""`Range` and `If-Range` by RFC 9110, sections 13.1.5 and 14: the bytes, the status and the headers of each answer."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import closing

import pytest
from kit import serve
from kit.requests import get

import atoll

pytestmark = pytest.mark.covers("P2")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[atoll.Server]:
    with serve(tmp_path_factory.mktemp("ranges")) as server:
        yield server


class Version:
    """The initial version of a run, as the server sends it to a plain HTTP client."""

    def __init__(self, server: atoll.Server) -> None:
        self._port = server.port
        digest = get(server.url, "/v1/fragments/0/versions/0")[1]["digest"]
        self._path = f"/v1/fragments/0/versions/0/{digest}"
        self.etag = f'"{digest}"'
        _, self.content, _ = self.get()

    def get(self, **headers: str) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers of an answer; `If_Range` stands for If-Range."""
        with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)) as connection:
            connection.request(
                "GET", self._path, headers={name.replace("_", "-"): text for name, text in headers.items()}
            )
            answer = connection.getresponse()
            return answer.status, answer.read(), dict(answer.getheaders())


@pytest.fixture(scope="module")
def version(server: atoll.Server) -> Version:
    return Version(server)


SATISFIED: dict[str, tuple[str, int, int | None]] = {  # header, first byte, end; None: the end of the file
    "first": ("bytes=0-0", 0, 1),
    "within": ("bytes=5-9", 5, 10),
    "whole": ("bytes=0-{last}", 0, None),
    "last": ("bytes={last}-{last}", -1, None),
    "open": ("bytes=100-", 100, None),
    "open from the first": ("bytes=0-", 0, None),
    "open from the last": ("bytes={last}-", -1, None),
    "suffix": ("bytes=-7", -7, None),
    "suffix of one": ("bytes=-1", -1, None),
    "suffix of all": ("bytes=-{size}", 0, None),
    "suffix above the file": ("bytes=-{beyond}", 0, None),
    "end beyond the file": ("bytes=10-{beyond}", 10, None),
    "huge end": (f"bytes=10-{10**18}", 10, None),
    "huge suffix": (f"bytes=-{10**18}", 0, None),
    "end of 5,000 digits": (f"bytes=10-{'9' * 5000}", 10, None),
    "suffix of 5,000 digits": (f"bytes=-{'9' * 5000}", 0, None),
    "leading zeros": ("bytes=0005-0009", 5, 10),
    "5,000 leading zeros": (f"bytes={'0' * 5000}5-9", 5, 10),
    "space behind": ("bytes=5-9 ", 5, 10),
}
IGNORED = {
    "reversed": "bytes=9-5",
    "several": "bytes=0-1,5-9",
    "several, suffix": "bytes=0-1,-5",
    "no bounds": "bytes=-",
    "no range": "bytes=",
    "no unit": "0-5",
    "another unit": "items=0-5",
    "negative": "bytes=-5-9",
    "negative end": "bytes=5--9",
    "two signs": "bytes=--5",
    "hexadecimal": "bytes=0x0-0x5",
    "fraction": "bytes=0.0-5.0",
    "letters": "bytes=a-b",
    "space within a number": "bytes=1 0-20",
    "space within the unit": "by tes=0-5",
    "space before a number": "bytes= 0-5",
    "digits of another script": "bytes=\u0660-\u0665",
}
UNSATISFIABLE = {
    "behind the end": "bytes={size}-",
    "behind the end, closed": "bytes={size}-{beyond}",
    "far behind": f"bytes={10**18}-",
    "behind by 5,000 digits": f"bytes={'9' * 5000}-",
    "suffix of nothing": "bytes=-0",
}


def written(text: str, size: int) -> str:
    return text.format(last=size - 1, size=size, beyond=size + 1000)


@pytest.mark.parametrize("case", SATISFIED)
def test_a_requested_range_is_sent(version: Version, case: str) -> None:
    """For a valid range, the server answers 206 with exactly these bytes and the headers that describe them."""
    text, start, stop = SATISFIED[case]
    size = len(version.content)
    status, body, headers = version.get(Range=written(text, size))
    start, stop = start % size, size if stop is None else stop
    assert (status, body == version.content[start:stop]) == (206, True)
    assert headers["Content-Range"] == f"bytes {start}-{stop - 1}/{size}"
    assert headers["Content-Length"] == str(stop - start)
    assert (headers["ETag"], headers["Accept-Ranges"]) == (version.etag, "bytes")


@pytest.mark.parametrize("case", IGNORED)
def test_odd_ranges_get_the_whole_file(version: Version, case: str) -> None:
    """If a `Range` header is malformed or has several ranges, the server answers 200 with the whole file."""
    text = IGNORED[case].encode("utf-8").decode("latin-1")  # as bytes on the wire
    status, body, headers = version.get(Range=text)
    assert (status, body == version.content) == (200, True)
    assert "Content-Range" not in headers


@pytest.mark.parametrize("case", UNSATISFIABLE)
def test_an_empty_range_is_refused(version: Version, case: str) -> None:
    """If a range has no byte of the file, the server answers 416 with the size of the file."""
    size = len(version.content)
    status, _, headers = version.get(Range=written(UNSATISFIABLE[case], size))
    assert (status, headers["Content-Range"]) == (416, f"bytes */{size}")


def test_if_range_for_another_file_ignores_the_range(version: Version) -> None:
    """If `If-Range` has another validator than the file's digest, the server sends the whole file. A weak validator or
    a date never matches.
    """

    def status(condition: str, text: str = "bytes=0-9") -> int:
        found, body, _ = version.get(Range=text, If_Range=condition)
        assert body == (version.content[:10] if found == 206 else version.content)
        return found

    assert status(version.etag) == 206
    assert status('"' + "0" * 64 + '"') == 200
    assert status(f"W/{version.etag}") == 200  # a weak validator matches nothing here
    assert status(version.etag.strip('"')) == 200
    assert status("Wed, 21 Oct 2015 07:28:00 GMT") == 200
    assert status('"other"', f"bytes={10**18}-") == 200  # where the condition fails, the range does not count


@pytest.mark.parametrize("text", ["bytes=0-", "bytes=0-0", "bytes=-5", "bytes=-0", "bytes=1-"])
def test_an_empty_file_has_no_range(text: str) -> None:
    """Every requested range of an empty file raises `RangeNotSatisfiable`."""
    from atoll.transport.serve_range import RangeNotSatisfiable, parse_range

    assert parse_range(None, 0) is None
    with pytest.raises(RangeNotSatisfiable):
        parse_range(text, 0)
