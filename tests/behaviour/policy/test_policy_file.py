"""The file of a policy: where it is, who may change it, and what an error says."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.config import site_policy
from atoll.config.site_policy import policy_path, read_policy
from atoll.errors import ConfigError


def test_first_of_three_places_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ATOLL_POLICY, then the user's folder, then the system's; a missing file that is named is an error."""
    monkeypatch.setattr(site_policy, "SYSTEM_FOLDER", tmp_path / "etc")
    user = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    assert policy_path(user) is None
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "policy.toml").touch()
    assert policy_path(user) == tmp_path / "etc" / "policy.toml"
    (tmp_path / "config" / "atoll").mkdir(parents=True)
    (tmp_path / "config" / "atoll" / "policy.toml").touch()
    assert policy_path(user) == tmp_path / "config" / "atoll" / "policy.toml"
    with pytest.raises(ConfigError, match="does not exist, so nothing is sent"):
        policy_path(user | {"ATOLL_POLICY": str(tmp_path / "none.toml")})


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("[runs]\nmax_round = 3", 2, ["no key 'runs.max_round'", "'max_rounds'"]),
        ("\n[metadat]\nerrors = false", 2, ["no key 'metadat'", "'metadata'"]),
        ('[runs]\nservers = "https://a"', 2, ["runs.servers"]),
        ("[runs]\nmax_rounds = 0", 2, ["greater than or equal to 1"]),
        ("[runs]\n\nmax_bytes = true", 3, ["runs.max_bytes"]),
        ("[tensors]\nnoise = 1.0", 1, ["set max_norm, too"]),
        ("[tensors]\nmax_norm = nan", 2, ["finite"]),
    ],
)
def test_wrong_key_or_value_names_its_line(tmp_path: Path, text: str, line: int, words: list[str]) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_policy(path)
    for word in (f"{path}:{line}:", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("value", ["1" * 5000, "[" * 3000, "\xff"])
def test_policy_that_no_parser_takes_is_no_traceback(tmp_path: Path, value: str) -> None:
    """A number of 5,000 digits, 3,000 brackets and wrong UTF-8 are errors of the policy."""
    path = tmp_path / "policy.toml"
    path.write_bytes(f"[runs]\nmax_rounds = {value}".encode("latin-1"))
    with pytest.raises(ConfigError, match="is not TOML"):
        read_policy(path)


def test_policy_that_others_may_change_is_refused(tmp_path: Path) -> None:
    """A file that its group or all may write, and a folder that all may write, protect nothing."""
    path = tmp_path / "own" / "policy.toml"
    path.parent.mkdir()
    path.touch()
    for where, mode in ((path, 0o620), (path, 0o602), (path.parent, 0o707)):
        before = where.stat().st_mode
        where.chmod(mode)
        with pytest.raises(ConfigError, match=f"Other users may change {where} "):
            read_policy(path)
        where.chmod(before)
    assert read_policy(path).runs.servers == ("*",)


def test_broken_policy_stops_every_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script does not join with a policy that is no TOML, at a server that does not exist: no request is made."""
    import atoll

    path = tmp_path / "policy.toml"
    path.write_text("[runs\n")
    monkeypatch.setenv("ATOLL_POLICY", str(path))
    with pytest.raises(ConfigError, match="is not TOML"):
        atoll.join("http://127.0.0.1:1", site="a", folder=tmp_path / "site")
