"""`atoll invite`, `sites` and `revoke`, with a running server and without one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from harness.processes import Nursery
from kit.credentials import trusted
from kit.processes import command

from atoll.protocol import routes
from atoll.protocol.invitation import Invitation
from atoll.transport.certificates import new_key

INVITED = re.compile(r"Site (\S+) can enrol once, within 24 h 0 min\. .*\n\n    atoll enrol (atoll1_\S+)\n", re.DOTALL)


def test_site_commands_work_with_and_without_a_server(nursery: Nursery, tmp_path: Path) -> None:
    """`atoll invite`, `sites` and `revoke` ask the server of a run, or work on the journal if no server runs.

    A site that was invited without a server can enrol once the server has started, and a revoked one is refused then.
    """

    def ask(*words: str) -> str:
        outcome = command(nursery, tmp_path, *words)
        assert outcome.returncode == 0, outcome.stderr
        return outcome.stdout

    def invited(text: str) -> Invitation:
        found = INVITED.fullmatch(text)
        assert found is not None, text
        return Invitation.parse(found[2])

    port = {"network.port": None}
    with trusted(tmp_path, **port) as at:
        key = new_key()
        at.keep("a", key, at.use(invited(ask("invite", "a", "state")), key)[1])
        assert at.send("GET", routes.RUN, site="a")[0] == 200
        lines = ask("sites", "state").splitlines()
        for words in (("status", "state"), ("logs", "state")):
            outcome = command(nursery, tmp_path, *words)  # over TLS, with the run's own authority
            assert (outcome.returncode, "refuses to answer" in outcome.stderr) == (0, False), outcome.stderr
        assert lines[0].split()[:3] == ["site", "state", "credential"]
        assert lines[1].split()[:3] == ["a", "enrolled", "certificate"]
        outcome = command(nursery, tmp_path, "invite", "a", "state")
        assert outcome.returncode == 6
        assert "Site 'a' is enrolled since" in outcome.stderr
        assert ask("revoke", "a", "--dir", "state") == (
            "Site a is revoked. To let it take part again: atoll invite a state\n"
        )
        assert at.send("GET", routes.RUN, site="a")[0] == 401
        at.enrol("b")
        before = at.certificates
    offline = invited(ask("invite", "c", "state"))
    assert json.loads(ask("revoke", "b", "state", "--json"))["state"] == "revoked"
    found = json.loads(ask("sites", "state", "--json"))["sites"]
    assert {each["site"]: each["state"] for each in found} == {"a": "revoked", "b": "revoked", "c": "invited"}
    with trusted(tmp_path, **port) as at:
        at.certificates = before
        assert offline.server == at.server.url
        assert at.use(offline, new_key())[0] == 200
        assert at.send("GET", routes.RUN, site="b")[0] == 401


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("invite", "ä", "state"), 2, "'ä' cannot be the name of a site"),
        (("revoke", "a/b", "state"), 2, "'a/b' cannot be the name of a site"),
        (("invite", "a", "state", "--lasts", "0"), 2, "--lasts: Input should be greater than 0"),
        (("invite", "a", "nowhere"), 2, "There is no run in 'nowhere'"),
    ],
)
def test_a_wrong_command_changes_nothing(
    nursery: Nursery, tmp_path: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    with trusted(tmp_path) as at:
        before = at.dump()
        outcome = command(nursery, tmp_path, *words)
        assert (outcome.returncode, said in outcome.stderr) == (code, True), outcome.stderr
        assert at.dump() == before
