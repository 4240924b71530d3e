"""TLS of a server: its certificate, of the settings or its own, and the client certificates that it accepts."""

from __future__ import annotations

import contextlib
import secrets
import socket
import ssl
from urllib.parse import urlsplit

from atoll.config import Settings
from atoll.server.http.gate import has_tls, makes_tls, needs_credentials
from atoll.tensors.reference import address_of
from atoll.transport.authority_files import accept_clients_of, keep_authority, keep_server_certificate
from atoll.transport.certificates import Keyed, common_name
from atoll.transport.tls import server_context

ANY_HOST = ("0.0.0.0", "::")
"""Values of `network.host` with which the server listens on all addresses of the machine."""


class ServerTls:
    """TLS of a server.

    Args:
        settings: the settings of the run.

    Attributes:
        is_used: whether the server uses TLS.
        authority: the run's own authority; None if it has none, or before `context` was called.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings, self.is_used = settings, has_tls(settings)
        self.authority: Keyed | None = None
        self._context: ssl.SSLContext | None = None

    @property
    def authority_name(self) -> str:
        """The common name of the run's own authority; empty if it has none."""
        return "" if self.authority is None else common_name(self.authority.certificate)

    def issues(self, port: int) -> tuple[str, Keyed | None, bool]:
        """Return how the server issues credentials: the arguments of `Issuing`. Call it after `context`."""
        trust, address = self._settings.trust, (self._settings.trust.address or "").rstrip("/")
        authority = None if address else self.authority  # the proxy in front does not pass certificates on
        if not address and trust.names and self._settings.network.host in ANY_HOST:
            address = address_of(trust.names[0], port, secure=self.is_used)
        return address, authority, makes_tls(self._settings)

    def read_settings(self) -> None:
        """Read the files that the settings name. A wrong one is found before a run begins.

        Raises:
            ConfigError: a certificate, key or authority cannot be used.
        """
        network, trust = self._settings.network, self._settings.trust
        if network.tls_cert is not None and network.tls_key is not None:
            self._context = server_context(network.tls_cert, network.tls_key)
        if trust.authority is not None:
            accept_clients_of(self._context or ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), None, trust.authority)

    def context(self) -> ssl.SSLContext | None:
        """Return the TLS context, None without TLS. Make the files of the run's authority if they are missing.

        Only the server that has locked the state directory may call this. Call it again from time to time: it replaces
        the server's own certificate before that expires, for new connections.

        Raises:
            StoreError, DiskFull: the run's own files cannot be read or written.
        """
        if not self.is_used:
            return None
        settings, folder = self._settings, self._settings.disk.state_dir
        if self.authority is None and (makes_tls(settings) or needs_credentials(settings)):
            self.authority = keep_authority(folder, f"atoll {secrets.token_hex(8)} {settings.run.name}")
        if self.authority is not None and makes_tls(settings):
            path = keep_server_certificate(folder, self.authority, _names_of(settings))
            if self._context is None:
                self._context = server_context(path, path)
            else:
                self._context.load_cert_chain(path)
        if self._context is not None and (self.authority is not None or settings.trust.authority is not None):
            accept_clients_of(self._context, self.authority, settings.trust.authority)
        return self._context


def _names_of(settings: Settings) -> list[str]:
    """Return the host names and addresses at which clients reach a server, for its certificate."""
    host, names = settings.network.host, {"localhost", "127.0.0.1", socket.gethostname(), *settings.trust.names}
    if host not in ANY_HOST:
        names.add(host)
    else:
        with contextlib.suppress(OSError):
            names |= {str(each[4][0]) for each in socket.getaddrinfo(socket.gethostname(), None)}
    if settings.trust.address:
        names.add(urlsplit(settings.trust.address).hostname or host)
    return sorted(name.strip("[]") for name in names)
