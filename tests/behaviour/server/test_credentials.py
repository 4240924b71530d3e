"""Credentials of sites: which caller may act for which site, and how credentials begin, are renewed and end."""

from __future__ import annotations

import contextlib
import re
import ssl
import stat
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme
from kit.credentials import QUIET, Trusted, trusted
from kit.requests import begin_request
from kit.servers import plain_server
from torch import nn

from atoll.errors import ConfigError
from atoll.protocol import routes
from atoll.protocol.openapi import OPERATIONS, Operation
from atoll.testing.run import wait_until
from atoll.transport.certificates import fingerprint, new_key, signing_request

RUN_TOKEN = "the-token-of-this-run"
DAY_S = 86_400.0


class Asked:
    """A server with the site a, which takes part, and every wrong caller.

    Attributes:
        named: what a request for the site a states: its lease, its ticket and its object.
    """

    def __init__(self, at: Trusted, foreign: Path) -> None:
        self.at, self.foreign = at, foreign
        at.enrol("a", "b", "revoked")
        at.join("revoked")
        lease = at.join("a")
        at.join("b")
        at.revoke("revoked")
        ticket = at.ok("POST", routes.TICKETS, {"fragment": 0}, site="a", Atoll_Lease=lease)["ticket"]["id"]
        sizes = {"head_bytes": 64, "nbytes": 128, "part_bytes": 65536, "expires_s": 3600.0}
        opened = at.ok("POST", routes.OBJECTS, sizes, site="a")
        self.named = {"Atoll_Lease": lease, "Atoll_Secret": opened["secret"]}
        self.values = {"ticket": ticket, "object": opened["object"], "digest": "0" * 64, "task": "0" * 32}
        self.callers: dict[str, dict[str, Any]] = {
            "a": {"site": "a"},
            "another site": {"site": "b"},
            "no site": {},
            "revoked": {"site": "revoked"},
            "expired": {"certificate": at.signed("a", timedelta(seconds=-1))},
            "foreign authority": {"certificate": foreign},
            "unknown serial": {"certificate": at.signed("a")},
            "run's token": {"token": RUN_TOKEN},
            "reader": {"token": at.token_in("reader")},
        }

    def path(self, operation: Operation) -> str:
        return re.sub(r"{(\w+)}", lambda name: str(self.values.get(name[1], "0")), operation.path)

    def ask(self, caller: str, operation: Operation) -> int:
        """Status of the answer to a request for the site a; 0: the TLS connection was refused."""
        body: Any = {"protocol": routes.PROTOCOL, "site": "a"} if operation.name == "join" else {}
        body = b"x" * 100 if operation.request is bytes else body
        body = None if operation.request is None else body
        try:
            return self.at.send(operation.method, self.path(operation), body, **self.callers[caller], **self.named)[0]
        except (ssl.SSLError, ConnectionError):
            return 0


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    folder, other = tmp_path_factory.mktemp("credentials"), tmp_path_factory.mktemp("other")
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ATOLL_TOKEN", RUN_TOKEN)
            settings = {"rounds.sites": 3, "limits.wrong_credentials": 10_000}
            settings["network.idle_timeout_s"] = 3600  # for so long, the site's object is there, though it stays empty
            at = stack.enter_context(trusted(folder, **settings))
        elsewhere = stack.enter_context(trusted(other))
        elsewhere.enrol("a")
        yield Asked(at, elsewhere.certificates["a"])


def names_site(operation: Operation) -> bool:
    """Whether each request of an operation is for one site."""
    changes_object = "{object}" in operation.path and operation.method != "GET"
    return operation.lease or operation.name == "join" or "{ticket}" in operation.path or changes_object


def must_refuse(caller: str, operation: Operation) -> bool:
    if caller == "a":
        return operation.callers == ("admin",)
    if caller == "another site":
        return operation.callers == ("admin",) or names_site(operation)
    if caller == "reader":
        return "reader" not in operation.callers
    if "peer" in operation.callers and operation.method == "GET" and caller in ("no site", "run's token"):
        return False  # whoever has the reference of an object may read it
    return "stranger" not in operation.callers


WRONG = [
    "another site",
    "no site",
    "revoked",
    "expired",
    "foreign authority",
    "unknown serial",
    "run's token",
    "reader",
]


@pytest.mark.covers("F40")
@pytest.mark.parametrize("caller", WRONG)
def test_every_operation_refuses_every_wrong_caller(asked: Asked, caller: str) -> None:
    """Each operation refuses a request for a site that the caller's credential does not prove, and nothing changes."""
    roster = asked.at.server._require_served().run.roster
    before, heard_s = asked.at.dump(), roster["a"].heard_s
    refused = [each for each in OPERATIONS if must_refuse(caller, each)]
    answers = {each.name: asked.ask(caller, each) for each in refused}
    assert len(refused) >= 20
    assert {name: status for name, status in answers.items() if status not in (0, 401, 403)} == {}
    is_cut = caller in ("expired", "foreign authority")
    assert {status == 0 for status in answers.values()} == {is_cut}
    assert asked.at.dump() == before
    assert roster["a"].heard_s == heard_s


def test_an_answer_cannot_take_the_object_of_another_site(asked: Asked) -> None:
    """A site cannot answer a task with an object that another site has opened, even if it knows the secret."""
    at, opened = asked.at, asked.values["object"]
    lease, before = at.join("b"), at.dump()
    key = {"object": opened, "secret": asked.named["Atoll_Secret"], "digest": "0" * 64, "expires_at": 1}
    path = routes.TASK_ANSWER.format(task="0" * 32)
    status, body = at.send("POST", path, {"body": {"object": key}}, site="b", Atoll_Lease=lease)
    assert (status, body["code"]) == (403, "forbidden"), body
    assert at.dump() == before
    assert at.server._require_served().objects.store.owners_of(opened) == ["a"]


def test_the_site_itself_is_refused_nowhere(asked: Asked) -> None:
    """With its own credential, a site may send each request that is not for the admin alone."""
    last = {"leave", "remove_object"}
    allowed = sorted((each for each in OPERATIONS if not must_refuse("a", each)), key=lambda each: each.name in last)
    answers = {each.name: asked.ask("a", each) for each in allowed if each.name not in ("enrol", "get_events")}
    assert {name: status for name, status in answers.items() if status in (0, 401, 403)} == {}
    assert {each.name for each in OPERATIONS} - {each.name for each in allowed} == {
        *("pause_run", "stop_run", "roll_back", "invite", "revoke", "get_sites"),
    }


# -- revocation


@pytest.mark.covers("F40")
def test_revocation_closes_connections_and_ends_an_upload(tmp_path: Path) -> None:
    """The revocation of a site closes its connections at once, with a part under way, and ends its lease. No byte of
    the part counts, and other sites go on.
    """
    with trusted(tmp_path, nn.Linear(300, 300), **{"rounds.sites": 2, "network.part_bytes": 2**16}) as at:
        at.enrol("a", "b")
        lease, other = at.join("a"), at.join("b")
        ticket = at.ok("POST", routes.TICKETS, {"fragment": 0}, site="a", Atoll_Lease=lease)["ticket"]["id"]
        idle, busy = at.connect("a"), at.connect("a")
        assert at.ok("GET", routes.RUN, over=idle)["name"] == "atoll"
        run = at.server._require_served().run
        nbytes = run.plan.fragments[0].update.parts[0].nbytes
        busy.putrequest("PUT", routes.PART.format(ticket=ticket, part=0))
        busy.putheader("Atoll-Lease", lease)
        busy.putheader("Content-Length", str(nbytes + routes.DIGEST_BYTES))
        busy.endheaders(b"x" * 1000)
        wait_until(lambda: run.bytes_up > 0, "the first bytes of the part")
        at.revoke("a")
        for each in (idle, busy):
            assert each.sock.recv(1) == b""
        assert at.sites() == {"a": "revoked", "b": "enrolled"}
        assert not run.state.members["a"].alive
        assert run.store.tickets.parts(ticket) == {}
        assert at.send("GET", routes.RUN, site="a")[0] == 401
        assert at.send("POST", routes.HEARTBEAT, {}, site="b", Atoll_Lease=other)[0] == 200


def test_revocation_ends_an_upload_with_a_token(tmp_path: Path) -> None:
    """Behind a proxy, where connections carry requests of several sites, only a request under way ends."""
    proxy = {"trust.address": "https://fl.example/run", "network.part_bytes": 2**16}
    with trusted(tmp_path, nn.Linear(300, 300), **proxy) as at:
        for site in ("a", "b"):
            at.keep(site, b"", at.use(at.invite(site))[1])
        lease = at.join("a")
        ticket = at.ok("POST", routes.TICKETS, {"fragment": 0}, site="a", Atoll_Lease=lease)["ticket"]["id"]
        shared, run = at.connect(), at.server._require_served().run
        assert at.ok("GET", routes.RUN, site="a", over=shared)["name"] == "atoll"
        nbytes = run.plan.fragments[0].update.parts[0].nbytes
        head = {"Authorization": f"Bearer {at.tokens['a']}", "Atoll_Lease": lease}
        line = f"PUT {routes.PART.format(ticket=ticket, part=0)}"
        length = nbytes + routes.DIGEST_BYTES
        with begin_request(at.server.port, line, b"x" * 1000, Content_Length=length, **head) as busy:
            wait_until(lambda: run.bytes_up > 0, "the first bytes of the part")
            at.revoke("a")
            assert busy.recv(1) == b""
        assert run.store.tickets.parts(ticket) == {}
        assert at.send("GET", routes.RUN, site="a", over=shared)[0] == 401
        assert at.send("GET", routes.RUN, site="b", over=shared)[0] == 200


def test_a_revocation_outlives_the_server(tmp_path: Path) -> None:
    """A revoked site stays revoked after a restart, until it enrols by a new invitation. The authority stays, too."""
    with trusted(tmp_path) as at:
        at.enrol("a")
        at.revoke("a")
        at.revoke("a")
        authority, certificates = at.ok("GET", routes.AUTHORITY), at.certificates
    with trusted(tmp_path) as at:
        at.certificates = certificates
        assert at.ok("GET", routes.AUTHORITY) == authority
        status, body = at.send("GET", routes.RUN, site="a")
        assert (status, body["code"]) == (401, "auth")
        assert "The credential of site 'a' was revoked on" in body["message"]
        at.enrol("a")
        assert at.send("GET", routes.RUN, site="a")[0] == 200
        for path in ("authority.key", "server.key"):
            assert stat.S_IMODE((at.state / path).stat().st_mode) == 0o600


# -- invitations


def test_an_invitation_can_be_used_once(tmp_path: Path) -> None:
    """An invitation is used once; after a lost answer, the same signing request gets another certificate. Each wrong
    use says why.
    """
    with trusted(tmp_path) as at, trusted(tmp_path / "other") as other:
        first, key = at.invite("a"), new_key()
        newer = at.invite("a")
        assert first.fingerprint == fingerprint(at.ok("GET", routes.AUTHORITY).encode())
        assert first.server == at.server.url
        before = at.dump()
        for unknown in (first, other.invite("a")):
            status, body = at.use(unknown, key)
            assert status == 401
            assert "one of another run, was replaced by a newer one, or was revoked" in body["message"]
        at.set_clock(DAY_S + 1)
        status, body = at.use(newer, key)
        assert status == 401
        assert re.search(r"invitation of site 'a' expired on .*by the server's clock it is", body["message"])
        at.set_clock(0.0)
        assert at.dump() == before
        request = {"secret": newer.secret, "request": signing_request(key, "a").decode()}
        certificates = [at.ok("POST", routes.ENROL, request)["certificate"] for _ in range(2)]
        assert certificates[0] != certificates[1]
        at.certificates["a"] = at.write("a", key, certificates[0].encode())
        assert "is not its newest one" in at.send("GET", routes.RUN, site="a")[1]["message"]
        at.certificates["a"] = at.write("a", key, certificates[1].encode())
        assert at.send("GET", routes.RUN, site="a")[0] == 200
        for again in (at.use(newer, new_key()), at.use(newer)):
            assert again[0] == 401
            assert re.search(r"was used on .*: it can be used once", again[1]["message"])


def test_an_enrolled_site_enrols_again_only_if_asked(tmp_path: Path) -> None:
    """A name that has enrolled is invited again only with `again`; when the invitation is used, the credential before
    it ends, with its connections and its lease.
    """
    with trusted(tmp_path) as at:
        at.enrol("a")
        at.join("a")
        status, body = at.send("POST", routes.INVITE, {"site": "a"}, token=at.admin)
        assert (status, body["code"]) == (409, "conflict")
        assert "Site 'a' is enrolled since" in body["message"]
        invitation, old = at.invite("a", again=True), at.connect("a")
        assert at.send("GET", routes.RUN, over=old)[0] == 200
        key = new_key()
        at.keep("a", key, at.use(invitation, key)[1])
        assert old.sock.recv(1) == b""
        assert not at.server._require_served().run.state.members["a"].alive
        assert at.send("GET", routes.RUN, site="a")[0] == 200


@pytest.mark.parametrize("request_text", ["", "no request", "-----BEGIN CERTIFICATE REQUEST-----\n"])
def test_a_wrong_signing_request_does_not_use_up_the_invitation(tmp_path: Path, request_text: str) -> None:
    with trusted(tmp_path) as at:
        invitation = at.invite("a")
        body = {"secret": invitation.secret, "request": request_text}
        status, answer = at.send("POST", routes.ENROL, body)
        assert (status, answer.get("kind")) == ((200, "token") if not request_text else (400, None))
        assert at.use(invitation, new_key())[0] == (200 if request_text else 401)


# -- renewal


def test_the_old_credential_lasts_until_the_new_one_is_used(tmp_path: Path) -> None:
    """A renewal keeps the credential before it valid; the first use of the new one ends it ten minutes later."""
    with trusted(tmp_path, **{"trust.certificate_s": 7 * DAY_S}) as at:
        at.enrol("a")
        old, key = at.certificates["a"], new_key()
        request = {"request": signing_request(key, "a").decode()}
        for _ in range(2):  # the first answer was lost
            renewed = at.ok("POST", routes.RENEW, request, certificate=old)
        assert renewed["renew_after_s"] == 3.5 * DAY_S
        at.keep("a", key, renewed)
        at.set_clock(6 * DAY_S)
        assert at.send("GET", routes.RUN, certificate=old)[0] == 200
        assert at.send("GET", routes.RUN, site="a")[0] == 200
        at.set_clock(6 * DAY_S + 599)
        assert at.send("GET", routes.RUN, certificate=old)[0] == 200
        at.set_clock(6 * DAY_S + 602)
        status, body = at.send("GET", routes.RUN, certificate=old)
        assert status == 401
        assert "expired on" in body["message"]
        assert at.send("GET", routes.RUN, site="a")[0] == 200


@pytest.mark.covers("F40")
def test_an_open_connection_ends_with_its_certificate(tmp_path: Path) -> None:
    """A certificate that expires while its connection is open is refused with the date and the server's clock."""
    with trusted(tmp_path) as at:
        at.enrol("a")
        connection = at.connect("a")
        assert at.send("GET", routes.RUN, over=connection)[0] == 200
        at.set_clock(7 * DAY_S + 60)
        status, body = at.send("GET", routes.RUN, over=connection)
        assert status == 401
        assert "The certificate of site 'a' expired on" in body["message"]
        assert "clock of one of the machines is wrong" in body["remedy"]


# -- names, tokens, other authorities


def test_a_name_outside_of_trust_sites_is_refused(tmp_path: Path) -> None:
    """With `trust.sites`, another name is neither invited nor joins, and the refusal names the nearest."""
    sites = {"trust.sites": ["berlin", "paris"], "trust.required": False}
    with trusted(tmp_path, **sites) as at:
        status, body = at.send("POST", routes.INVITE, {"site": "pariss"}, token=at.admin)
        assert (status, body["code"], body["remedy"]) == (400, "config", "Did you mean 'paris'?")
        status, body = at.send("POST", routes.WORKERS, {"protocol": routes.PROTOCOL, "site": "berlim"})
        assert (status, body["message"]) == (403, "Site 'berlim' is not in trust.sites.")
        assert body["remedy"] == "Did you mean 'berlin'?"
        assert at.send("POST", routes.WORKERS, {"protocol": routes.PROTOCOL, "site": "berlin"})[0] == 200
        assert at.sites() == {"berlin": "external", "paris": "external"}


def test_an_enrolled_name_needs_its_credential_at_an_open_server(tmp_path: Path) -> None:
    """At a server that requires no credentials, a name that has enrolled is its site's alone."""
    with trusted(tmp_path, **{"trust.required": False}) as at:
        at.keep("a", b"", at.use(at.invite("a"))[1])
        body = {"protocol": routes.PROTOCOL, "site": "a"}
        assert at.send("POST", routes.WORKERS, body)[0] == 403
        assert at.send("POST", routes.WORKERS, body, site="a")[0] == 200
        assert at.send("POST", routes.WORKERS, body | {"site": "b"})[0] == 200
        at.revoke("a")
        assert at.send("POST", routes.WORKERS, body)[0] == 403
        assert at.send("POST", routes.WORKERS, body, site="a")[0] == 401


@pytest.mark.covers("F40")
def test_a_token_of_a_site_is_refused_for_another(tmp_path: Path) -> None:
    """Behind a proxy that ends TLS, sites get tokens, which the server keeps as hashes, and which prove one name."""
    with trusted(tmp_path, **{"trust.address": "https://fl.example/run/"}) as at:
        invitation = at.invite("a")
        assert (invitation.server, invitation.fingerprint) == ("https://fl.example/run", "")
        at.keep("a", b"", at.use(invitation, new_key())[1])
        at.keep("b", b"", at.use(at.invite("b"))[1])
        assert at.send("GET", routes.AUTHORITY)[0] == 410
        lease = at.join("a")
        assert at.send("POST", routes.HEARTBEAT, {}, site="b", Atoll_Lease=lease)[0] == 403
        assert at.send("POST", routes.HEARTBEAT, {}, Atoll_Lease=lease)[0] == 401
        assert at.send("POST", routes.HEARTBEAT, {}, site="a", Atoll_Lease=lease)[0] == 200
        renewed = at.ok("POST", routes.RENEW, {}, site="a")
        assert at.tokens["a"] not in str(at.dump())
        assert at.send("GET", routes.RUN, token=renewed["token"])[0] == 200


def test_another_authority_vouches_for_its_sites(tmp_path: Path) -> None:
    """With `trust.authority`, a certificate of that authority proves the name in its SPIFFE URI, else its common name.
    Such a site can be revoked by its name.
    """
    outside = trustme.CA()
    outside.cert_pem.write_to_path(tmp_path / "outside.pem")
    with trusted(tmp_path, **{"trust.authority": tmp_path / "outside.pem"}) as at:
        issued = outside.issue_cert("ignored.example", common_name="clinic")
        chain = b"".join(each.bytes() for each in issued.cert_chain_pems)
        at.certificates["clinic"] = at.write("clinic", issued.private_key_pem.bytes(), chain)
        at.join("clinic")
        assert at.sites() == {"clinic": "external"}
        assert at.send("POST", routes.RENEW, {}, site="clinic")[0] == 403
        body = {"protocol": routes.PROTOCOL, "site": "other"}
        assert at.send("POST", routes.WORKERS, body, site="clinic")[0] == 403
        at.revoke("clinic")
        assert at.send("GET", routes.RUN, site="clinic")[0] == 401
        assert at.sites() == {"clinic": "revoked"}


@pytest.mark.covers("F40")
def test_an_enrolled_site_needs_no_other_authority(tmp_path: Path) -> None:
    """A revoked certificate of another authority stays refused after the site has enrolled by invitation; workers of a
    swarm are told so.
    """
    outside = trustme.CA()
    outside.cert_pem.write_to_path(tmp_path / "outside.pem")
    with trusted(tmp_path, **{"trust.authority": tmp_path / "outside.pem"}) as at:
        issued = outside.issue_cert("ignored.example", common_name="clinic")
        chain = b"".join(each.bytes() for each in issued.cert_chain_pems)
        stolen = at.write("stolen", issued.private_key_pem.bytes(), chain)
        assert at.send("GET", routes.RUN, certificate=stolen)[0] == 200
        at.revoke("clinic")
        at.enrol("clinic")
        assert at.send("GET", routes.RUN, site="clinic")[0] == 200
        status, body = at.send("GET", routes.RUN, certificate=stolen)
        assert status == 401
        assert "Site 'clinic' has a credential of this run" in body["message"]
        assert [*at.store.identities.known.ended(10)] == ["clinic"]


@pytest.mark.parametrize("content", [b"", b"no certificate"])
def test_a_wrong_authority_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "ca.pem").write_bytes(content)
    settings = {"trust.authority": tmp_path / "ca.pem", "trust.required": True}
    with pytest.raises(ConfigError, match=r"trust\.authority .* cannot be used"):
        plain_server(tmp_path, nn.Linear(2, 1), **QUIET, **settings).start()


def test_credentials_conflict_or_race_without_harm(tmp_path: Path) -> None:
    """Of eight machines that use one invitation at the same time, one enrols."""
    with trusted(tmp_path) as at:
        invitation, answers = at.invite("a"), []
        threads = [threading.Thread(target=lambda: answers.append(at.use(invitation, new_key())[0])) for _ in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert sorted(answers) == [200] + [401] * 7


def test_invitations_name_the_public_host(tmp_path: Path) -> None:
    """Invitations of a server on all addresses have the first of its public names, and its port."""
    names = {"trust.names": ["fl.example", "10.0.0.5"]}
    with trusted(tmp_path, **names, **{"network.host": "0.0.0.0"}) as at:
        assert at.invite("a").server == f"https://fl.example:{at.server.port}"
    with trusted(tmp_path, **names) as at:
        assert at.invite("b").server == at.server.url


def test_the_servers_certificate_follows_its_names(tmp_path: Path) -> None:
    """The server's own certificate is made anew if its names change, and stays otherwise."""
    with trusted(tmp_path) as at:
        first = (at.state / "server.key").read_bytes()
    with trusted(tmp_path) as at:
        assert (at.state / "server.key").read_bytes() == first
    with trusted(tmp_path, **{"trust.names": ["fl.example"]}) as at:
        assert (at.state / "server.key").read_bytes() != first
        context = at.context()
        context.check_hostname = True
        assert at.ok("GET", routes.HEALTH) == "ok\n"
