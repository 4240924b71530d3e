"""A site stores the certificate that its own authority has issued: what is checked, and a run with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from harness.processes import Nursery
from kit.processes import command
from kit.servers import serve
from kit.sites import FederatedSites, run_to_end
from kit.tls import write_certificate

from atoll.errors import ConfigError, ServerUnreachable, UsageError
from atoll.transport.authority_files import authority_file
from atoll.transport.credential_store import ISSUED_ANEW, credential_at
from atoll.transport.enrolment import store_issued
from atoll.transport.http_client import http_to

SERVER = "https://fl.example:8512"


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def issue(folder: Path, authority: trustme.CA, name: str = "berlin", **options: object) -> tuple[Path, Path]:
    """Files with a certificate with this common name, with its chain, and with its key of mode 0600."""
    issued = authority.issue_cert("host.example", common_name=name, **options)  # type: ignore[arg-type]
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    certificate.write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
    key.touch(mode=0o600)
    key.write_bytes(issued.private_key_pem.bytes())
    return certificate, key


def test_site_with_a_certificate_of_another_authority_takes_part(nursery: Nursery, tmp_path: Path) -> None:
    """A site with a certificate of another authority enrols with `atoll enrol --certificate`, and takes part to the
    end.
    """
    top = trustme.CA()
    outside = top.create_child_ca()
    certificate, key = issue(tmp_path, outside, "a")
    root = tmp_path / "root.pem"
    top.cert_pem.write_to_path(root)
    settings = write_certificate(tmp_path, "127.0.0.1") | {"trust.authority": root, "rounds.sites": 1}
    with serve(tmp_path, **settings) as server:
        enrolled = command(
            nursery, tmp_path, "enrol", "--certificate", str(certificate), "--key", str(key), "--server", server.url,
            "--ca", str(tmp_path / "ca.pem"), XDG_DATA_HOME=str(tmp_path / "data"),
        )  # fmt: skip
        assert enrolled.returncode == 0, enrolled.stderr
        assert enrolled.stdout.startswith(f"Site a is enrolled at {server.url}.")
        sites = FederatedSites(server.url, tmp_path, ["a"])
        run_to_end(server, sites)
    assert len(sites.trained) == 3
    found = credential_at(server.url, "a")
    assert found is not None
    assert {each.stat().st_mode & 0o777 for each in found.folder.iterdir()} == {0o600}
    assert not found.is_due()  # its own authority renews it
    assert found.note.anew == ISSUED_ANEW


def unfit_key(folder: Path, authority: trustme.CA) -> tuple[Path, Path]:
    return issue(folder, authority)[0], issue(folder, authority, "paris")[1]


def expired(folder: Path, authority: trustme.CA) -> tuple[Path, Path]:
    return issue(folder, authority, not_after=datetime.now(UTC) - timedelta(days=1))


def open_key(folder: Path, authority: trustme.CA) -> tuple[Path, Path]:
    certificate, key = issue(folder, authority)
    key.chmod(0o644)
    return certificate, key


def broken_chain(folder: Path, authority: trustme.CA) -> tuple[Path, Path]:
    certificate, key = issue(folder, authority)
    certificate.write_bytes(certificate.read_bytes() + trustme.CA().cert_pem.bytes())
    return certificate, key


def no_name(folder: Path, authority: trustme.CA) -> tuple[Path, Path]:
    return issue(folder, authority, "St. Mary's")


def no_pem(folder: Path, authority: trustme.CA) -> tuple[Path, Path]:
    certificate, key = issue(folder, authority)
    certificate.write_bytes(b"no certificate")
    return certificate, key


def not_yet(folder: Path, authority: trustme.CA) -> tuple[Path, Path]:
    begin = datetime.now(UTC) + timedelta(days=1)
    return issue(folder, authority, not_before=begin, not_after=begin + timedelta(days=7))


def absent(folder: Path, authority: trustme.CA) -> tuple[Path, Path]:
    return folder / "absent.pem", issue(folder, authority)[1]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (unfit_key, "the key is another one's"),
        (expired, r"valid from .* and by the clock of this machine it is "),
        (not_yet, r"valid from .* and by the clock of this machine it is "),
        (open_key, "has mode 0644: others can read it"),
        (broken_chain, "the chain is broken"),
        (no_name, 'it names no site, but "St. Mary\'s"'),
        (no_pem, "cannot be a site's"),
        (absent, "cannot be read: No such file"),
    ],
)
def test_unfit_certificate_is_not_stored(
    tmp_path: Path, files: Callable[[Path, trustme.CA], tuple[Path, Path]], said: str
) -> None:
    """A certificate that a server would refuse is refused here, with the reason; nothing is stored."""
    certificate, key = files(tmp_path, trustme.CA())
    with pytest.raises(ConfigError, match=said):
        store_issued(SERVER, certificate, key)
    assert credential_at(SERVER, "berlin") is None


def test_certificate_needs_a_server_with_tls(nursery: Nursery, tmp_path: Path) -> None:
    """A certificate can be stored only for the address of a server with TLS, because it is shown only there."""
    certificate, key = issue(tmp_path, trustme.CA())
    with pytest.raises(UsageError, match="has no TLS"):
        store_issued("http://127.0.0.1:8512", certificate, key)
    outcome = command(nursery, tmp_path, "enrol", "--certificate", str(certificate))
    assert outcome.returncode == UsageError.exit_code
    assert "needs --server" in outcome.stderr


def test_next_certificate_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    """A credential that is in use follows the files."""
    authority = trustme.CA()
    credential = store_issued(SERVER, *issue(tmp_path, authority))
    before = credential.client_context(None)
    (tmp_path / "later").mkdir()
    store_issued(SERVER, *issue(tmp_path / "later", authority))
    assert credential.client_context(None) is not before


def test_without_ca_the_system_vouches_for_the_server(tmp_path: Path) -> None:
    """A certificate that is stored without `--ca` does not keep the authority that was stored before."""
    certificate, key = issue(tmp_path, trustme.CA())
    trustme.CA().cert_pem.write_to_path(tmp_path / "ca.pem")
    folder = store_issued(SERVER, certificate, key, tmp_path / "ca.pem").folder
    assert (folder / "authority.pem").exists()
    store_issued(SERVER, certificate, key)
    assert not (folder / "authority.pem").exists()


def test_certificate_of_a_foreign_authority_is_refused_with_the_reason(tmp_path: Path) -> None:
    """A server tells a site in the handshake that it does not know the authority; a worker does not try for a day."""
    with serve(tmp_path, **{"trust.required": True}) as server:
        own = authority_file(tmp_path / "state")
        store_issued(server.url, *issue(tmp_path, trustme.CA(), "a"), own)
        with contextlib.closing(http_to(server.url, site="a")) as http, pytest.raises(ServerUnreachable) as raised:
            http.reach("/v1/run", timeout_s=10)
    assert raised.value.is_other
    assert "refuses the certificate of site a: its own authority has not signed it" in raised.value.message
    assert raised.value.remedy == ISSUED_ANEW
