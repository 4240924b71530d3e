"""The files in deploy/: their command lines, variables, paths and exit codes are Atoll's, and the scripts run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.processes import free_port, wait_until
from kit.helm import render
from kit.servers import serve
from pages import ROOT

import atoll
from atoll.cli.config import read_settings
from atoll.cli.main import loaded
from atoll.config import DEFAULT_PORT, FIELDS, NOT_SETTINGS
from atoll.errors import BY_CODE, PortInUse, TransferError
from atoll.protocol import routes
from atoll.server.coordinator import extension, tracker_threads
from atoll.server.http.webhook import TIMEOUT_S
from atoll.server.serve import GRACE_S
from atoll.transport import authority_files, credential_store

DEPLOY = ROOT / "deploy"
DOCKER, CHART, SLURM = DEPLOY / "docker", DEPLOY / "helm" / "atoll", DEPLOY / "slurm" / "site.sbatch"
UNITS = sorted((DEPLOY / "systemd").iterdir())
TEXTS = sorted(path for path in DEPLOY.rglob("*") if path.is_file())
SCRIPTS = [*sorted(DOCKER.glob("*.sh")), SLURM]

SITES: list[dict[str, Any]] = [
    {"name": "site-a", "invitation": "text"},
    {"name": "site-b", "invitationSecret": "mine", "command": ["python", "other.py"], "resources": {"limits": {}}},
]


def parsed(words: list[str]) -> dict[str, Any]:
    """The arguments that a command of Atoll gets from a command line; its own parser reads it."""
    values: dict[str, Any] = loaded(words[0]).make_context(words[0], words[1:]).params
    return values


def dockerfile() -> dict[str, list[str]]:
    """Instruction → its arguments, in order."""
    text = (DOCKER / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            found.setdefault(line.partition(" ")[0], []).append(line.partition(" ")[2].strip())
    return found


def unit(path: Path) -> dict[str, str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and line[0] != "#")


def of_kind(kind: str, **values: Any) -> list[dict[str, Any]]:
    return [each for each in render(CHART, values) if each["kind"] == kind]


def pod(stateful_set: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = stateful_set["spec"]["template"]["spec"]
    return spec


# -- what the files name is Atoll's


def written_commands() -> Iterator[list[str]]:
    """Words of each command of Atoll that a file gives, in lines and in comments."""
    for path in TEXTS:
        for line in path.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
            for called in re.findall(r"(?:^|(?<!-u)[\s/`])atoll ([a-z][^`]*)", line):
                words = shlex.split(re.split(r" [<>]| &$", called)[0])
                yield words


def test_every_command_line_is_one_of_atoll() -> None:
    """Atoll's own parser reads each command line of the files in deploy/."""
    given = [
        *written_commands(),
        json.loads(dockerfile()["CMD"][0]),
        *(pod(each)["containers"][0]["args"] for each in of_kind("StatefulSet")),
    ]
    commands = {words[0] for words in given if parsed(words) is not None}
    assert commands == {"server", "worker", "enrol", "invite", "new"}
    assert len(given) >= 12


def test_every_variable_and_file_name_is_one_of_atoll() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in TEXTS)
    known = NOT_SETTINGS | {f"ATOLL_{key.upper().replace('.', '__')}" for key in FIELDS}
    assert set(re.findall(r"\bATOLL_\w+", text)) <= known
    assert set(re.findall(r"(?<=[/\" ])(?:health|ready)z\b", text)) == {"healthz", "readyz"}
    assert {routes.HEALTH, routes.READY} == {"/healthz", "/readyz"}
    assert f'$ATOLL_CREDENTIAL/{credential_store.NOTE}"' in (DOCKER / "site.sh").read_text(encoding="utf-8")
    authority = authority_files.authority_file(Path()).name
    assert f'"{authority}"' in (DOCKER / "ready.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_units_restart_only_what_may_succeed(path: Path) -> None:
    """systemd starts a server or a site again after a crash or a lost network, and after no other error of Atoll's."""
    found = unit(path)
    assert found["Restart"] == "on-failure"
    left = {each.exit_code for each in BY_CODE.values()} - {
        int(code) for code in found["RestartPreventExitStatus"].split()
    }
    assert left == {1, PortInUse.exit_code, TransferError.exit_code}
    assert found["KillMode"] == "mixed"
    words = shlex.split(found["ExecStart"])
    assert words[0] == "/opt/atoll/bin/atoll"
    assert parsed(words[1:])["directory"].startswith(f"/var/lib/{found['StateDirectory']}/")
    for hardened in ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "RestrictNamespaces"):
        assert found[hardened] == "yes"


def test_the_grace_periods_fit_the_servers_end() -> None:
    """A server that is told to stop, or serves its result, ends before it would be killed."""
    needed_s = GRACE_S + max(tracker_threads.CLOSE_S, extension.CLOSE_S, 2 * TIMEOUT_S)
    (server,) = of_kind("StatefulSet")
    assert pod(server)["terminationGracePeriodSeconds"] > needed_s
    assert int(unit(DEPLOY / "systemd" / "atoll-server@.service")["TimeoutStopSec"]) > needed_s
    assert yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["server"]["stop_grace_period"] == "1m"


# -- the image and compose


def test_the_image_is_that_of_a_server_without_root() -> None:
    found = dockerfile()
    assert set(found) <= {
        *("ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL"),
        *("HEALTHCHECK", "ENTRYPOINT", "CMD"),
    }
    assert all(re.fullmatch(r"python:\$\{PYTHON\}-slim( AS build)?", image) for image in found["FROM"])
    assert "whl/cpu" in "".join(found["ARG"])
    assert int(found["USER"][-1].split(":")[0]) > 0
    assert found["ENTRYPOINT"] == ['["atoll"]']
    values = parsed(json.loads(found["CMD"][0]))
    assert values["directory"].startswith(f"{found['VOLUME'][0]}/")
    healthcheck = json.loads(found["HEALTHCHECK"][0].partition(" CMD ")[2])
    assert healthcheck == ["ready.py", str(values["directory"])]
    assert found["EXPOSE"] == [str(DEFAULT_PORT)]


def test_what_the_image_copies_is_sent_to_the_builder() -> None:
    """Each source of a COPY exists, .dockerignore lets it through, and scripts that are called can be run."""
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    let_through = [line[1:] for line in ignored if line.startswith("!")]
    sources = [
        word for line in dockerfile()["COPY"] if "--from" not in line for word in line.split()[:-1] if word[0] != "-"
    ]
    assert len(sources) == 7
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(fnmatch(source, f"{each}*") for each in let_through), source
        if source.endswith((".sh", "ready.py")):
            assert os.stat(ROOT / source).st_mode & stat.S_IXUSR


def test_compose_has_a_server_and_two_sites_that_enrol() -> None:
    text = (DOCKER / "compose.yaml").read_text(encoding="utf-8")
    file = yaml.safe_load(text)
    services = file["services"]
    assert set(services) == {"server", "invite", "site-a", "site-b"}
    assert services["server"]["build"]["dockerfile"] == str((DOCKER / "Dockerfile").relative_to(ROOT))
    assert (DOCKER / services["server"]["build"]["context"]).resolve() == ROOT
    state, invitations, *invited = services["invite"]["command"]
    assert state == str(parsed(json.loads(dockerfile()["CMD"][0]))["directory"])
    assert invited == ["site-a", "site-b"]
    for name in invited:
        site = services[name]
        assert set(site["depends_on"]) <= set(services)
        assert site["environment"]["INVITATION_FILE"] == f"{invitations}/{name}"
        folders = [Path(site["environment"][key]) for key in ("ATOLL_CREDENTIAL", "ATOLL_DIR")]
        assert all(folder.is_relative_to("/state") for folder in folders)
        assert f"{name}:/state" in site["volumes"]
    used = {volume.partition(":")[0] for each in services.values() for volume in each["volumes"] if volume[0] != "$"}
    assert used == set(file["volumes"])


# -- Kubernetes


def test_the_chart_renders_a_server_with_its_volume_and_probes() -> None:
    (server,), (service,) = of_kind("StatefulSet", set=["rounds.total=3"], address="fl.example"), of_kind("Service")
    container = pod(server)["containers"][0]
    values = parsed(container["args"])
    assert values["sets"] == ('trust.names=["fl.example"]', "rounds.total=3")
    assert read_settings(None, ["algorithm.name=fedavg", *values["sets"]]).trust.names == ("fl.example",)
    for probe, path in (
        ("startupProbe", routes.HEALTH),
        ("livenessProbe", routes.HEALTH),
        ("readinessProbe", routes.READY),
    ):
        assert container[probe]["httpGet"] == {"path": path, "port": "atoll", "scheme": "HTTPS"}
    assert container["ports"] == [{"name": "atoll", "containerPort": values["port"]}]
    assert service["spec"]["publishNotReadyAddresses"]  # else a run that is over has no address for its result
    assert service["spec"]["selector"].items() <= server["spec"]["template"]["metadata"]["labels"].items()
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    (claim,) = server["spec"]["volumeClaimTemplates"]
    assert mounts["/state"] == claim["metadata"]["name"]
    assert {*mounts.values()} == {"state", *(volume["name"] for volume in pod(server)["volumes"])}


def test_sites_in_the_chart_have_their_invitations_in_secrets() -> None:
    _, *sites = of_kind("StatefulSet", sites=SITES)
    (secret,) = of_kind("Secret", sites=SITES)
    assert secret["stringData"] == {"invitation": "text"}
    named = []
    for site in sites:
        environment = {each["name"]: each for each in pod(site)["containers"][0]["env"]}
        named.append(environment["ATOLL_INVITATION"]["valueFrom"]["secretKeyRef"]["name"])
        assert not pod(site)["enableServiceLinks"]
        assert pod(site)["securityContext"]["runAsNonRoot"]
    assert named == [secret["metadata"]["name"], "mine"]
    assert [pod(site)["containers"][0]["args"][1] for site in sites] == ["train.py", "other.py"]


def test_the_variables_of_services_do_not_reach_atoll() -> None:
    """Kubernetes would set variables such as ATOLL_PORT for a Service with the name atoll, and Atoll refuses them."""
    assert "ATOLL_PORT" not in NOT_SETTINGS
    assert [pod(each)["enableServiceLinks"] for each in of_kind("StatefulSet", sites=SITES)] == [False] * 3


def test_every_value_that_the_chart_uses_is_in_its_values() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    text = "".join(path.read_text(encoding="utf-8") for path in (CHART / "templates").iterdir())
    used = set(re.findall(r"\.Values\.([\w.]+)", text))
    assert {name.partition(".")[0] for name in used} == set(values)
    for name in used:
        found = values
        for key in name.split("."):
            assert key in found, name
            found = found[key]


@pytest.mark.skipif(shutil.which("helm") is None, reason="the command helm is not installed")
def test_helm_renders_the_same_objects(tmp_path: Path) -> None:
    """Helm itself makes the objects that the tests have seen."""
    values = {"sites": SITES, "set": ["rounds.total=3"]}
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    subprocess.run(["helm", "lint", CHART, "--strict"], check=True)
    argv = ["helm", "template", "run", CHART, "--namespace", "lab", "--values", tmp_path / "values.yaml"]
    made = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    assert _in_order(filter(None, yaml.safe_load_all(made))) == _in_order(render(CHART, values))


def _in_order(objects: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(objects, key=lambda each: (each["kind"], each["metadata"]["name"]))


# -- linters, where they are


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_valid(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", path], check=True)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_systemd_accepts_the_unit(path: Path, tmp_path: Path) -> None:
    here = tmp_path / path.name
    here.write_text(path.read_text(encoding="utf-8").replace("/opt/atoll/bin", str(Path(sys.executable).parent)))
    done = subprocess.run(["systemd-analyze", "verify", here], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# -- the scripts run

TRAIN = """
import os
import signal
import atoll
from kit.models import build_model

model = build_model()
with atoll.join() as worker:
    for each in worker:
        each.load_into(model)
        print("began", each.number, flush=True)
        if each.number == 2 and os.path.exists("wait"):
            signal.pause()
        each.submit(model, weight=1.0)
"""


def environment(folder: Path, **more: str) -> dict[str, str]:
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | {"PATH": path, "HOME": str(folder), **more}


def write_command(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.mark.slow
@pytest.mark.covers("P6")
def test_a_slurm_job_that_is_ended_goes_on_when_it_is_queued_again(tmp_path: Path) -> None:
    """Slurm's signal ends the site in its round and queues the job again. The next job trains this round, and the run
    ends with each round counted once.
    """
    write_command(tmp_path, "srun", 'exec "$@"')
    write_command(tmp_path, "scontrol", 'echo "$@" >>requeued')
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "wait").touch()
    with serve(tmp_path, sites=1, **{"rounds.deadline_s": None}) as server:
        given = {"ATOLL_SERVER": server.url, "ATOLL_SITE": "a", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "17"}
        log = tmp_path / "log"

        def job() -> subprocess.Popen[bytes]:
            with log.open("ab") as out:
                return subprocess.Popen(["bash", SLURM], env=environment(tmp_path, **given), stdout=out, stderr=out)

        first = job()
        wait_until(lambda: "began 2" in log.read_text(), "the second round", 60)
        first.send_signal(signal.SIGTERM)
        assert first.wait(60) == 128 + signal.SIGTERM, log.read_text()
        assert (tmp_path / "requeued").read_text() == "requeue 17\n"
        assert server.status().version == 1
        (tmp_path / "wait").unlink()
        assert job().wait(60) == 0, log.read_text()
        assert server.wait(30)
        assert [each.round for each in server.status().history] == [1, 2, 3]
    assert re.findall(r"began (\d)", log.read_text()) == ["1", "2", "2", "3"]
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"


@pytest.mark.slow
@pytest.mark.covers("P6")
def test_containers_invite_enrol_and_take_part(tmp_path: Path) -> None:
    """The scripts of the image invite a site once, enrol it once, and take part; ready.py follows the server."""
    folder = tmp_path / "invitations"
    folder.mkdir()
    (tmp_path / "train.py").write_text(TRAIN)

    def run(*words: object, **more: str) -> str:
        argv = [DOCKER / str(words[0]), *map(str, words[1:])]
        done = subprocess.run(argv, cwd=tmp_path, env=environment(tmp_path, **more), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with serve(tmp_path, sites=1, **{"trust.required": True}) as server:
        ready = ("ready.py", tmp_path / "state", server.port)
        assert run(*ready) == "ready\n\n"
        run("invite.sh", tmp_path / "state", folder, "a")
        invitation = (folder / "a").read_text()
        run("invite.sh", tmp_path / "state", folder, "a")
        assert [each.name for each in folder.iterdir()] == ["a"]
        assert (folder / "a").read_text() == invitation
        site = {"ATOLL_CREDENTIAL": str(tmp_path / "credential"), "ATOLL_DIR": str(tmp_path / "work")}
        assert "Site a is enrolled" in run("site.sh", "true", INVITATION_FILE=str(folder / "a"), **site)
        assert "began 3" in run("site.sh", "python", "train.py", INVITATION_FILE=str(folder / "a"), **site)
        assert server.wait(30)
    with pytest.raises(AssertionError, match="refused"):
        run(*ready)


@pytest.mark.slow
@pytest.mark.covers("F42")
def test_a_restored_server_has_the_sites_of_the_dead_one(tmp_path: Path) -> None:
    """A server's machine is lost with the rounds since its backup. The restored directory at the same address gets the
    site back, which has not enrolled again, and the run ends.
    """
    wait = 'while os.path.exists(f"wait{each.number}"):\n            time.sleep(0.05)'
    script = re.sub(r"if each.number == 2 .*\n.*signal.pause\(\)", wait, TRAIN)
    (tmp_path / "train.py").write_text(f"import time\n{script}")
    (tmp_path / "invitations").mkdir()
    for number in (2, 3):
        (tmp_path / f"wait{number}").touch()
    settings: dict[str, Any] = {"sites": 1, "network.port": free_port(), "trust.required": True}
    old, backup, new, log = tmp_path / "old", tmp_path / "backup", tmp_path / "new", tmp_path / "log"
    given = {
        "ATOLL_CREDENTIAL": str(tmp_path / "credential"),
        "ATOLL_DIR": str(tmp_path / "work"),
        "INVITATION_FILE": str(tmp_path / "invitations" / "a"),
    }
    with serve(old, **settings):
        invite = [DOCKER / "invite.sh", old / "state", tmp_path / "invitations", "a"]
        subprocess.run(invite, env=environment(tmp_path), check=True)
        with log.open("wb") as out:
            argv = [DOCKER / "site.sh", "python", "train.py"]
            site = subprocess.Popen(argv, cwd=tmp_path, env=environment(tmp_path, **given), stdout=out, stderr=out)
        wait_until(lambda: "began 2" in log.read_text(), "the second round", 60)
    shutil.copytree(old / "state", backup)
    with serve(old, **settings) as server:
        (tmp_path / "wait2").unlink()
        wait_until(lambda: "began 3" in log.read_text(), "a round after one that the backup lacks", 60)
        assert server.status().version == 2
    shutil.rmtree(old)
    (tmp_path / "wait3").unlink()
    shutil.copytree(backup, new / "state")
    with serve(new, **settings) as server:
        assert server.wait(60), log.read_text()
        assert [each.round for each in server.status().history] == [1, 2, 3]
        assert site.wait(60) == 0, log.read_text()
    assert log.read_text().count("is enrolled") == 1


def test_a_site_takes_its_invitation_from_the_environment(tmp_path: Path) -> None:
    """Without a file, the site script uses ATOLL_INVITATION, and ends with Atoll's exit code if that is wrong."""
    given = {"ATOLL_CREDENTIAL": str(tmp_path / "credential"), "ATOLL_INVITATION": "half an invitation"}
    done = subprocess.run(
        [DOCKER / "site.sh", "true"], env=environment(tmp_path, **given), capture_output=True, text=True
    )
    assert done.returncode == atoll.errors.UsageError.exit_code
    assert "invitation" in done.stderr
