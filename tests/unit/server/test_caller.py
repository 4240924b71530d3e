"""What makes a request that of a site, a peer, a reader or the admin; and which callers are refused, in which words."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atoll.errors import AuthError, BadRequest, Forbidden, StoreError
from atoll.protocol import messages, routes
from atoll.protocol.openapi import EVERYONE, CallerKind, Operation, openapi
from atoll.server.coordinator.roster import Presence
from atoll.server.http.caller import Caller, Tokens, caller_of, require_caller
from atoll.store.caller_tokens import keep_tokens, stored_tokens
from atoll.store.receipt_key import ReceiptKey
from atoll.tensors.reference import hash_of_secret
from atoll.transport.authority_files import keep_authority

LEASE_SECRET, OBJECT_SECRET = "1" * 32, "2" * 32
ROSTER = {"a": Presence("a", sealed=hash_of_secret(LEASE_SECRET))}
LEASE = {routes.LEASE_HEADER: f"a:3:p:{LEASE_SECRET}"}
FORGED = {routes.LEASE_HEADER: f"a:3:p:{'0' * 32}"}
SECRET = {routes.SECRET_HEADER: OBJECT_SECRET}


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def caller(headers: dict[str, str], token: str | None = "of-sites") -> Caller:
    tokens = Tokens(token)
    tokens.accept({"reader": "of-readers", "admin": "of-admin"})
    return caller_of("10.0.0.1", headers, tokens, ROSTER)


@pytest.mark.parametrize(
    ("headers", "kind", "open_kind"),
    [
        ({}, "stranger", "stranger"),
        (LEASE, "stranger", "site"),
        (FORGED, "stranger", "stranger"),
        (SECRET, "peer", "peer"),
        (SECRET | LEASE, "peer", "site"),
        ({routes.SECRET_HEADER: "2" * 31 + "X"}, "stranger", "stranger"),
        (bearer("of-sites"), "site", "stranger"),
        (bearer("of-sites") | FORGED | SECRET, "site", "peer"),
        (bearer("of-readers") | LEASE | SECRET, "reader", "reader"),
        (bearer("of-admin"), "admin", "admin"),
        ({"Authorization": "bEARER of-admin"}, "admin", "admin"),
        ({"Authorization": "Basic of-admin"}, "stranger", "stranger"),
        (bearer("of-admi"), "stranger", "stranger"),
        (bearer("x" * 5000), "stranger", "stranger"),
        (bearer("\udcff"), "stranger", "stranger"),
    ],
)
def test_the_strongest_credential_decides_the_callers_kind(headers: dict[str, str], kind: str, open_kind: str) -> None:
    """A token decides first what kind of caller sends a request. At a server without a token, a lease with its secret
    comes next, and then an object's secret.
    """
    assert (caller(headers).kind, caller(headers, None).kind) == (kind, open_kind)


def test_a_site_must_prove_its_lease() -> None:
    """A caller counts as a certain site only with the secret of its lease. A missing or malformed lease or object
    secret is a bad request.
    """
    proven, forged = (caller(bearer("of-sites") | headers) for headers in (LEASE, FORGED))
    assert (proven.site, forged.site, proven.address) == ("a", "", "10.0.0.1")
    assert (proven.stated_lease().number, forged.stated_lease().number) == (3, 3)
    assert caller(SECRET).stated_secret() == OBJECT_SECRET
    for each in (caller({}), caller({routes.LEASE_HEADER: "a:x", routes.SECRET_HEADER: "2"})):
        with pytest.raises(BadRequest, match="Atoll-Lease header is missing or malformed"):
            each.stated_lease()
        with pytest.raises(BadRequest, match="secret is not from this server"):
            each.stated_secret()


def test_the_repr_of_a_caller_shows_no_secret() -> None:
    """The repr of a caller, as in a log or a traceback, shows neither the secret of its lease nor that of an object."""
    shown = repr(caller(LEASE | SECRET))
    assert LEASE_SECRET not in shown
    assert OBJECT_SECRET not in shown


TOKEN = "the-token-of-the-sites"


def operation(*callers: CallerKind) -> Operation:
    return Operation("stop", "POST", "/v1/stop", "Stop the server.", callers=callers)


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("kind", EVERYONE)
def test_only_the_admin_may_use_admin_operations(kind: CallerKind, is_open: bool) -> None:
    """Only the admin may use an operation of the admin, at a server with a token and at one without.

    A user that may read the state directory is the admin.
    """
    asked = Caller(kind)
    if kind == "admin":
        require_caller(asked, operation("admin"), Tokens(None if is_open else TOKEN))
        return
    with pytest.raises(AuthError) as refused:
        require_caller(asked, operation("admin"), Tokens(None if is_open else TOKEN))
    assert isinstance(refused.value, Forbidden) == (kind != "stranger")
    assert ("only the admin may send it" in refused.value.message) == (kind != "stranger")


@pytest.mark.parametrize("kind", ["stranger", "peer"])
def test_a_wrong_token_is_reported_as_wrong(kind: CallerKind) -> None:
    """If a caller has a wrong token, the error says that the token is wrong, even if the caller also shows an object's
    secret.

    Such a caller believes that its token is that of the server.
    """
    with pytest.raises(AuthError, match=messages.WRONG_TOKEN) as refused:
        require_caller(Caller(kind, has_token=True), operation("site"), Tokens(TOKEN))
    assert not isinstance(refused.value, Forbidden)


def test_a_refusal_says_which_tokens_help() -> None:
    """If a caller may not use an operation, the error names the tokens with which it may be used."""
    with pytest.raises(Forbidden) as refused:
        require_caller(Caller("site"), operation("reader", "admin"), Tokens(None))
    assert str(refused.value) == (
        "The request is that of a site, but only a reader or the admin may send it. Send the token in reader.token of "
        "the server's state directory, or the token in admin.token of the server's state directory."
    )


@pytest.mark.parametrize("is_open", [False, True])
def test_openapi_requires_the_admin_for_admin_operations(monkeypatch: pytest.MonkeyPatch, is_open: bool) -> None:
    """The OpenAPI document requires the admin's token for an operation of the admin, at a server with tokens and at an
    open one.
    """
    monkeypatch.setattr("atoll.protocol.openapi.OPERATIONS", (operation("admin"),))
    assert openapi("1", is_open=is_open)["paths"]["/v1/stop"]["post"]["security"] == [{"admin": []}]


KEEPERS = {
    "reader.token": keep_tokens,
    "authority.key": lambda folder: keep_authority(folder, "atoll x"),
    "receipts.key": ReceiptKey,
}
"""File with a secret → what a server's start calls, which writes it at first."""


@pytest.mark.parametrize("name", KEEPERS)
def test_secrets_of_another_user_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder like /tmp, another user may have put the file there before the first start."""
    KEEPERS[name](tmp_path)
    user = os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: user + 1)
    with pytest.raises(StoreError, match=rf"{name} belongs to another user"):
        KEEPERS[name](tmp_path)


@pytest.mark.parametrize("name", KEEPERS)
def test_secrets_are_for_their_owner_alone(name: str, tmp_path: Path) -> None:
    KEEPERS[name](tmp_path)
    (tmp_path / name).chmod(0o644)
    KEEPERS[name](tmp_path)
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o600


def test_stored_tokens_are_those_that_the_server_keeps(tmp_path: Path) -> None:
    assert stored_tokens(tmp_path) == {}
    kept = keep_tokens(tmp_path)
    assert stored_tokens(tmp_path) == kept


@pytest.mark.parametrize(
    "content", [b"", b"x" * 42, b"x" * 44, b"\xff" * 43, b"x" * 21 + b"\n" + b"x" * 21, b"x" * 10**6]
)
def test_a_damaged_token_is_replaced(tmp_path: Path, content: bytes) -> None:
    """A damaged token file does not count as a token, and the next start replaces it. The temporary file of a killed
    server is removed.
    """
    kept = keep_tokens(tmp_path)
    (tmp_path / "admin.token").write_bytes(content)
    assert stored_tokens(tmp_path) == {"reader": kept["reader"]}
    (tmp_path / "admin.token.tmp").write_text("left by a killed server")
    assert keep_tokens(tmp_path)["admin"] not in (kept["admin"], content.decode("latin-1"))
    assert {path.name for path in tmp_path.iterdir()} == {"admin.token", "reader.token"}
