"""Why a server cannot be reached, and what to do; for commands, too, that answer before torch is loaded."""

from __future__ import annotations

import json

from atoll.errors import PeerError, ServerUnreachable

_NO_AUTHORITY = "Set ATOLL_TLS_CA to a PEM file with the authority of its certificate."
_CERTIFICATES = {
    "has expired": "Its certificate has to be renewed at the server; or look at the clock of this machine.",
    "not yet valid": "Look at the clocks of this machine and of the server.",
    "ostname mismatch": "Use a name that is in its certificate, or look whether this is the right server.",
    "IP address mismatch": "Use a name that is in its certificate, or look whether this is the right server.",
}
"""Part of what OpenSSL says of a certificate that it refuses → what to do; else the authority is not known."""


def no_atoll(server: str, status: int, body: bytes) -> PeerError | None:
    """The error where another web server answers at an address; None where it may be Atoll's, or one in front of it."""
    if status in (502, 503, 504) or (status < 400 and not body):  # a proxy whose server is away; an answer cut off
        return None
    try:
        said = json.loads(body)
    except ValueError:
        said = None
    if isinstance(said, dict) and (status < 400 or {"code", "message"} <= said.keys()):
        return None
    return PeerError(
        f"There is no Atoll server at {server}: what answers there sends HTTP status {status}, and nothing that Atoll "
        "knows.",
        "Look at the address and its port, and whether the server runs.",
    )


def unreachable(server: str, text: str, why: str, given_by: str = "") -> ServerUnreachable:
    """The error, in Atoll's words.

    Args:
        text: all that the failed connection said.
        why: the same in a few words, for people.
        given_by: where the address comes from, behind the word.
    """
    if "CERTIFICATE_VERIFY_FAILED" in text:
        remedy = next((remedy for part, remedy in _CERTIFICATES.items() if part in text), _NO_AUTHORITY)
        return _other(f"{server} cannot prove who it is: {why}.", remedy)
    if "WRONG_VERSION_NUMBER" in text:
        return _other(
            f"{server} does not speak TLS.",
            "Write its address with http:// if the network is your own, or give the server tls_cert and tls_key.",
        )
    return ServerUnreachable(
        f"{server} does not answer ({why}).",
        f"Look whether the server runs and whether the address is right{given_by}."
        + (" One with TLS wants https://." if server.startswith("http://") and "Remote end closed" in text else ""),
    )


def _other(message: str, remedy: str) -> ServerUnreachable:
    error = ServerUnreachable(message, remedy)
    error.is_other = True
    return error
