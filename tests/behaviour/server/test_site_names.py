"""A site's name becomes part of file names, leases, logs and tables: the server and the site refuse any other form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kit import serve
from kit.client import Client
from kit.requests import post
from torch import nn

import atoll
from atoll.errors import ConfigError

HOSTILE = {
    "slash": "a/b",
    "parent": "../a",
    "absolute": "/tmp/a",
    "backslash": "a\\b",
    "dot": ".",
    "dots": "..",
    "hidden": ".a",
    "option": "-a",
    "underscore": "_a",
    "space": "a b",
    "padded": " a",
    "newline": "a\n",
    "line within": "a\nb",
    "return": "a\r",
    "nul": "a\x00b",
    "escape": "a\x1b[31m",
    "colon": "a:1",
    "percent": "a%2fb",
    "quote": "a'b",
    "markup": "<b>a",
    "pipe": "a|b",
    "letter of Latin-1": "klinikä",
    "full-width letter": "\uff41",
    "Arabic digit": "\u0663",
    "zero width": "a\u200bb",
    "65 letters": "a" * 65,
}
FINE = ["a", "0", "A-1_b.c", "a..b", "a-", "a" * 64]


@pytest.mark.covers("F39")
def test_the_server_admits_no_site_of_a_hostile_name(tmp_path: Path) -> None:
    with serve(tmp_path) as server:

        def join(site: str) -> int:
            """As a program that checks nothing would."""
            return post(server.url, "/v1/workers", {"protocol": 1, "site": site})[0]

        answers = {case: join(site) for case, site in {"empty": "", **HOSTILE}.items()}
        assert answers == dict.fromkeys(answers, 400)
        assert server.status().workers == []
        assert [join(site) for site in FINE] == [200] * len(FINE)
        assert [worker.site for worker in server.status().workers] == sorted(FINE)


@pytest.mark.covers("F39")
@pytest.mark.parametrize("site", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_site_of_a_hostile_name_does_not_start(tmp_path: Path, site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before anything is asked or written: no server is at this address."""
    nowhere, folder = "http://127.0.0.1:1", tmp_path / "workers"
    monkeypatch.setenv("ATOLL_GIVE_UP_S", "1")
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    starts: list[Callable[[], object]] = [
        lambda: atoll.join(nowhere, site=site, folder=folder),
        lambda: atoll.DiLoCo(model, optimizer, server=nowhere, site=site, folder=folder).start(),
        lambda: Client(nowhere, site=site, folder=folder).register(),
        lambda: atoll.tasks(nowhere, site),
    ]
    if "\x00" not in site:  # no environment can hold it
        monkeypatch.setenv("ATOLL_SITE", site)
        starts.append(lambda: atoll.join(nowhere, folder=folder))
    for start in starts:
        with pytest.raises(ConfigError) as refused:
            start()
        assert repr(site) in str(refused.value)
    assert list(tmp_path.iterdir()) == []
