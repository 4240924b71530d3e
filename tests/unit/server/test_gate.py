"""Which servers need credentials of their sites, and which make a certificate of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atoll.config import Settings
from atoll.server.http.gate import has_tls, makes_tls, needs_credentials

OPEN = {"network.host": "0.0.0.0"}
GIVEN = {"network.tls_cert": Path("c.pem"), "network.tls_key": Path("k.pem")}
PROXY = {"trust.address": "https://fl.example/run"}


@pytest.mark.parametrize(
    ("given", "credentials", "own_certificate", "tls"),
    [
        ({}, False, False, False),
        (OPEN, True, True, True),
        (OPEN | GIVEN, True, False, True),
        (OPEN | {"network.insecure": True}, False, False, False),
        (OPEN | {"network.insecure": True, "trust.required": True}, True, False, False),
        (OPEN | {"trust.required": False}, False, True, True),
        ({"trust.required": True}, True, True, True),
        (GIVEN, False, False, True),
        (PROXY, True, False, False),
        (PROXY | OPEN, True, True, True),
        (PROXY | {"trust.required": False}, False, False, False),
        ({"trust.authority": Path("ca.pem")}, True, True, True),
    ],
)
def test_which_servers_need_credentials_and_make_a_certificate(
    given: dict[str, Any], credentials: bool, own_certificate: bool, tls: bool
) -> None:
    """A server that other machines can reach needs credentials and uses TLS, unless a setting says otherwise."""
    settings = Settings.build(given)
    found = needs_credentials(settings), makes_tls(settings), has_tls(settings)
    assert found == (credentials, own_certificate, tls)
