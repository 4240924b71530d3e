"""Certificates of tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import trustme


def write_certificate(
    folder: Path, name: str = "localhost", authority: trustme.CA | None = None, **options: Any
) -> dict[str, Any]:
    """Write `cert.pem`, `key.pem` and the authority's `ca.pem`; the settings of a server that has them."""
    authority = authority or trustme.CA()
    cert = authority.issue_cert(name, **options)
    chain, key = folder / "cert.pem", folder / "key.pem"
    chain.write_bytes(b"".join(blob.bytes() for blob in cert.cert_chain_pems))
    key.touch(mode=0o600)
    key.write_bytes(cert.private_key_pem.bytes())
    authority.cert_pem.write_to_path(folder / "ca.pem")
    return {"network.tls_cert": chain, "network.tls_key": key}
