"""Signatures of receipts: Ed25519 (RFC 8032) over `CONTEXT` and the receipt's other fields as JSON with sorted keys.

With its receipts, a site can prove which of its updates a server has accepted, and which version contains them.
"""

from __future__ import annotations

import json
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from atoll.protocol.messages import SignedReceipt

CONTEXT = b"atoll receipt 1\n"


def signed_receipt(key: Ed25519PrivateKey, **fields: Any) -> SignedReceipt:
    """Return a receipt with these fields, signed with `key`."""
    unsigned = SignedReceipt(**fields, signature="0" * 128)
    return unsigned.model_copy(update={"signature": key.sign(_signed_bytes(unsigned)).hex()})


def is_genuine(receipt: SignedReceipt, public_key: str) -> bool:
    """Return whether a receipt is signed with the key that has the public half `public_key`, in hex."""
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key))
        key.verify(bytes.fromhex(receipt.signature), _signed_bytes(receipt))
    except (InvalidSignature, ValueError):
        return False
    return True


def public_hex(key: Ed25519PrivateKey) -> str:
    """Return the public half of a key, in hex."""
    return key.public_key().public_bytes_raw().hex()


def _signed_bytes(receipt: SignedReceipt) -> bytes:
    fields = receipt.model_dump(exclude={"signature"})
    return CONTEXT + json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
