"""Keys and certificates of a run: its own authority, the server's certificate, and one for each enrolled site.

The authority is made with the state directory of a server that other machines can reach. It signs the certificate of
the server and those of the sites (TLS 1.3 in both directions). A site's certificate names the site in a URI as SPIFFE
has it (`spiffe://atoll/site/NAME`). A site makes its key itself, and sends only a signing request.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import re
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from atoll.errors import BadRequest

AUTHORITY_DAYS = 3650
SERVER_DAYS = 90
SITE_DAYS = 7
CLOCK_SLACK = timedelta(minutes=10)
"""A certificate is valid from this long before it is made: clocks of two machines differ."""
REQUEST_CHARS = 4096
"""Maximum length of a signing request."""
_NAMES = ("subject", "issuer")
SITE_URI = "spiffe://atoll/site/"
_SITE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63})")
_URI = re.compile(r"spiffe://[A-Za-z0-9._-]{1,255}/(?:[A-Za-z0-9._-]+/)*" + _SITE.pattern)


@dataclass(frozen=True)
class Keyed:
    """A certificate and its private key, both as PEM."""

    certificate: bytes
    key: bytes


@dataclass(frozen=True)
class SiteIdentity:
    """What a client's certificate says.

    Attributes:
        site: name of the site.
        serial: number of the certificate, in hex without leading zeros.
        issuer: common name of the authority that has signed it; empty if it states none.
    """

    site: str
    serial: str
    issuer: str = ""


def new_key() -> bytes:
    """Return a new private key (P-256) as PEM."""
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def new_authority(name: str) -> Keyed:
    """Return a new certificate authority.

    Args:
        name: its common name, such as the run's.
    """
    key = new_key()
    builder = _builder(_name(name), _name(name), _private(key).public_key(), timedelta(days=AUTHORITY_DAYS))
    usage = _usage(signs_certificates=True)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return Keyed(_pem(builder.add_extension(usage, critical=True).sign(_private(key), hashes.SHA256())), key)


def server_certificate(authority: Keyed, hosts: Iterable[str]) -> Keyed:
    """Return a new certificate of a server, followed by that of its authority, with a new key.

    Args:
        authority: the authority that signs it.
        hosts: names and IP addresses at which clients reach the server.
    """
    key = new_key()
    names: list[x509.GeneralName] = []
    for host in dict.fromkeys(hosts):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    issuer = x509.load_pem_x509_certificate(authority.certificate)
    builder = _builder(_name("atoll server"), issuer.subject, _private(key).public_key(), timedelta(days=SERVER_DAYS))
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    usages = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)  # it connects to workers of a swarm
    return Keyed(_signed(builder, authority, usages) + authority.certificate, key)


def signing_request(key: bytes, site: str) -> bytes:
    """Return the request (PEM) with which a site asks for a certificate for its key.

    Args:
        key: private key of the site, PEM.
        site: name of the site. The authority takes the name from the invitation, not from the request.
    """
    request = x509.CertificateSigningRequestBuilder().subject_name(_name(site))
    return request.sign(_private(key), hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def site_certificate(authority: Keyed, request: str, site: str, lasts: timedelta) -> tuple[bytes, SiteIdentity]:
    """Return a certificate (PEM) for the key of a signing request, and what it says.

    A swarm's workers also serve: so it is good for both ends of a connection.

    Args:
        authority: the authority that signs it.
        request: signing request, PEM.
        site: name of the site; whatever name the request has is ignored.
        lasts: how long it is valid.

    Raises:
        BadRequest: the request is malformed, its signature is wrong, or its key is not of P-256.
    """
    remedy = "Run `atoll enrol` again: it makes a key and a request."
    try:
        found = x509.load_pem_x509_csr(request[:REQUEST_CHARS].encode())
        is_signed = found.is_signature_valid
        public = found.public_key()
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm) as error:
        raise BadRequest(f"The signing request cannot be read: {error}.", remedy) from error
    if not is_signed:
        raise BadRequest("The signing request is not signed with its key.", remedy)
    if not isinstance(public, ec.EllipticCurvePublicKey) or public.curve.name != "secp256r1":
        raise BadRequest("The signing request has a key of another kind than P-256.", remedy)
    issuer = x509.load_pem_x509_certificate(authority.certificate)
    builder = _builder(_name(site), issuer.subject, public, lasts)
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(SITE_URI + site)])
    builder = builder.add_extension(names, critical=False)
    usages = (ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH)
    certificate = _signed(builder, authority, usages)
    serial = x509.load_pem_x509_certificate(certificate).serial_number
    return certificate, SiteIdentity(site, f"{serial:x}")


def identity_in(peer: Mapping[str, Any]) -> SiteIdentity | None:
    """Return what the certificate of a connection says, of which TLS has checked signature and dates.

    The site's name is in a SPIFFE URI; without one, it is the common name. None: it names no site.

    Args:
        peer: the certificate, as `ssl.SSLSocket.getpeercert` returns it.
    """
    uris = [text for kind, text in peer.get("subjectAltName", ()) if kind == "URI"]
    found = [match[1] for match in map(_URI.fullmatch, uris) if match is not None]
    names = {of: [text for part in peer.get(of, ()) for kind, text in part if kind == "commonName"] for of in _NAMES}
    found = found if uris else names["subject"]
    serial = str(peer.get("serialNumber", "")).lower().lstrip("0")
    return SiteIdentity(found[0], serial, "".join(names["issuer"][:1])) if len(found) == 1 else None


def issued_at_s(peer: Mapping[str, Any]) -> float:
    """Return the Unix time at which the run's authority has issued a certificate, as `identity_in` takes it."""
    return ssl.cert_time_to_seconds(str(peer["notBefore"])) + CLOCK_SLACK.total_seconds()


def ends_at_s(peer: Mapping[str, Any]) -> float:
    """Return the Unix time at which a certificate expires, as `identity_in` takes it."""
    return ssl.cert_time_to_seconds(str(peer["notAfter"]))


def first_certificate(text: bytes) -> bytes:
    """Return the first certificate of a PEM text alone: a fingerprint says nothing of those behind it.

    Raises:
        ValueError: there is none.
    """
    return _pem(x509.load_pem_x509_certificate(text))


def why_unfit(certificate: bytes, key: bytes, site: str) -> str:
    """Return why a certificate (PEM) is not one of a site for its key; empty if it is."""
    try:
        found = x509.load_pem_x509_certificate(certificate)
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except (ValueError, x509.ExtensionNotFound) as error:
        return f"it cannot be read: {error}"
    if found.public_key() != _private(key).public_key():
        return "it is for another key"
    return "" if uris == [SITE_URI + site] else f"it names {', '.join(uris) or 'no site'}, not {site}"


def issued_elsewhere(chain: bytes, key: bytes, now: datetime) -> tuple[str, datetime, bytes]:
    """Check a site's certificate that another authority has issued.

    Args:
        chain: the certificate, followed by those of intermediate authorities, PEM.
        key: its private key, PEM.
        now: the time.

    Returns:
        The site that it names; until when it is valid; and key and certificates as PEM.

    Raises:
        ValueError: it cannot be used; `str()` gives the reason.
    """
    found = x509.load_pem_x509_certificates(chain)
    own = found[0]
    try:
        private = serialization.load_pem_private_key(key, None)
    except TypeError:
        raise ValueError("its key is encrypted: write it without a passphrase, with mode 0600") from None
    if private.public_key() != own.public_key():
        raise ValueError("the key is another one's")
    for each, issuer in itertools.pairwise(found):
        try:
            each.verify_directly_issued_by(issuer)
        except (ValueError, TypeError, InvalidSignature):
            raise ValueError(
                f"the chain is broken: {each.subject.rfc4514_string()} is not issued by "
                f"{issuer.subject.rfc4514_string()}"
            ) from None
    for each in found:
        begin, end = each.not_valid_before_utc, each.not_valid_after_utc
        if not begin <= now < end:
            raise ValueError(
                f"{each.subject.rfc4514_string()} is valid from {begin:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC, "
                f"and by the clock of this machine it is {now:%Y-%m-%d %H:%M} UTC"
            )
    with contextlib.suppress(x509.ExtensionNotFound):
        usage = own.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        if ExtendedKeyUsageOID.CLIENT_AUTH not in usage:
            raise ValueError("it is not for clients (its extended key usage lacks clientAuth)")
    uris = list[str]()
    with contextlib.suppress(x509.ExtensionNotFound):
        names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    stated = {"subjectAltName": [("URI", uri) for uri in uris], "subject": [[("commonName", common_name(chain))]]}
    identity = identity_in(stated)
    if identity is None or not _SITE.fullmatch(identity.site):
        raise ValueError(f"it names no site, but {', '.join(uris) or repr(common_name(chain))}")
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return identity.site, own.not_valid_after_utc, b"".join([private.private_bytes(*form), *map(_pem, found)])


def common_name(certificate: bytes) -> str:
    """Return the common name in the subject of a certificate (PEM); empty if it has none.

    Raises:
        ValueError: it cannot be read.
    """
    found = x509.load_pem_x509_certificate(certificate).subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if found else ""


def fingerprint(certificate: bytes) -> str:
    """Return the SHA-256 of a certificate (PEM; of the first one in it), in hex."""
    return x509.load_pem_x509_certificate(certificate).fingerprint(hashes.SHA256()).hex()


def validity(certificate: bytes) -> tuple[datetime, datetime]:
    """Return from when until when a certificate (PEM) is valid, in UTC."""
    found = x509.load_pem_x509_certificate(certificate)
    return found.not_valid_before_utc, found.not_valid_after_utc


def _private(key: bytes) -> ec.EllipticCurvePrivateKey:
    found = serialization.load_pem_private_key(key, None)
    if not isinstance(found, ec.EllipticCurvePrivateKey):
        raise ValueError("the key is not of an elliptic curve")
    return found


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, lasts: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SLACK)
        .not_valid_after(now + lasts)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _signed(builder: x509.CertificateBuilder, authority: Keyed, usages: Iterable[x509.ObjectIdentifier]) -> bytes:
    """Return the certificate (PEM) that a builder makes, signed by an authority, for these usages."""
    private = _private(authority.key)
    of_issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(private.public_key())
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    return _pem(builder.add_extension(of_issuer, critical=False).sign(private, hashes.SHA256()))


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
