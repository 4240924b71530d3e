"""The page of a run in Chromium, during real runs: live, numbers of the status, hostile text, tokens, keyboard."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.admin import pause
from kit.browser import AXE_PACKAGE, Browser, browser, needs_browser
from kit.prepared_runs import START, prepared
from kit.requests import get
from kit.world import World
from safetensors.torch import load_file

from atoll.format_text import size
from atoll.testing.run import wait_until

pytestmark = [pytest.mark.slow, needs_browser]


@pytest.fixture(scope="module")
def shared_browser() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture
def chrome(shared_browser: Browser) -> Iterator[Browser]:
    """The browser, in the light and on a laptop; a test fails if a script has failed or a style was refused."""
    shared_browser.set_look()
    shared_browser.log()
    yield shared_browser
    assert [line for line in shared_browser.log() if "Failed to load resource" not in line] == []
    shared_browser.driver.get("about:blank")


def play(world: World, number: int, loss: float) -> None:
    """A round of all sites."""
    world.pull(number=number)
    for place, name in enumerate(world.sites.all()):
        world.submit(name, 0.5, steps=2, metrics={"loss": loss + place / 100})
    world.wait(number)


def test_the_page_follows_a_run_without_reload(tmp_path: Path, chrome: Browser) -> None:
    """The page of a run shows each round and the end within seconds, without a reload. An open server asks for no
    token.
    """
    with World(tmp_path, START, "ab", rounds=3, **{"run.name": "triage"}) as world:
        chrome.open(world.url)
        chrome.wait("#sentence", "waits for 2 sites to join")
        chrome.js("window.stays = true")
        play(world, 1, 0.9)
        chrome.wait("#sentence", "Loss 0.905 in round 1")
        chrome.wait("figcaption", "mean 0.905 in round 1")
        play(world, 2, 0.5)
        chrome.wait("#sentence", "Loss 0.505 in round 2, down from 0.905 in round 1.")
        chrome.wait("figcaption", "mean 0.505 in round 2, down from 0.905 in round 1")
        chrome.wait("#event-list li", "round 3")
        play_last(world)
        chrome.wait("#sentence", "The run is finished after 3 rounds.")
    chrome.wait("#link", "the run is over")
    assert chrome.js("return window.stays") is True
    assert [chrome.texts(f"#row-{name} td")[4] for name in "ab"] == ["–", "–"]  # no site is behind a run that is over


def play_last(world: World) -> None:
    """The last round, after which the server waits for its sites; they leave."""
    world.pull(number=3)
    for name in world.sites.all():
        world.submit(name, 0.5, metrics={"loss": 0.4})
    wait_until(lambda: world.status.finished, "the end of the run")


def test_the_page_shows_the_numbers_of_the_status(tmp_path: Path, chrome: Browser) -> None:
    """The page of a run shows the same version, sites and metrics as the status."""
    with World(tmp_path, START, "abc", rounds=9, **{"rounds.best_metric": "loss"}) as world:
        for number in (1, 2, 3):
            play(world, number, 1 / number)
        world.pull()
        chrome.open(world.url)
        chrome.wait("#version", "3")
        status = get(world.url, "/v1/status")[1]
        shown = {
            css: chrome.text(css)
            for css in ("#round-number", "#version", "#alive", "#up", "#down", "#deaths", "#bytes-up", "#bytes-down")
        }
        assert shown == {
            "#round-number": "4 of 9",
            "#version": str(status["fragments"][0]["version"]),
            "#alive": "3 of 3",
            "#up": size(status["bytes_up"]),
            "#down": size(status["bytes_down"]),
            "#deaths": "0",
            "#bytes-up": size(status["bytes_up"]),
            "#bytes-down": size(status["bytes_down"]),
        }
        assert chrome.texts("#table tbody th") == [each["site"] for each in status["workers"]]
        cells = chrome.texts("#row-b td")
        last = next(each["last"] for each in status["workers"] if each["site"] == "b")
        # rounds, behind, weight, loss, norm: 1/3 + 0.01, and 256 × 64 + 64 elements that have each moved by 0.5
        assert cells[3:8] == ["3", "0", "1", "0.3433", "64.12"]
        assert last["norm"] == pytest.approx(0.5 * 16448**0.5)
        rounds = [row["version"] for row in status["history"]][::-1]
        assert [text.split(" ")[0] for text in chrome.texts("#version-table tbody th")] == [
            str(each) for each in rounds
        ]
        assert "(best" in chrome.text("#version-table")


def test_the_page_shows_hostile_text_as_text(tmp_path: Path, chrome: Browser) -> None:
    """If names of metrics, hosts, labels or runs contain HTML, the page shows them as text and runs no script."""
    with prepared("hostile", tmp_path) as world:
        chrome.open(f"{world.url}/#site=evil")
        chrome.wait("#detail", "<img src=x onerror=")
        chrome.wait("figcaption select", "<script>document.title='taken'</script>")
        assert chrome.text("#name") == "<b>bold</b>"
        assert "taken" not in chrome.driver.title
        assert chrome.js("return document.querySelectorAll('img, #name b, #detail i').length") == 0
        assert "\\u202e</script>" in chrome.text("#detail")


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[World, str]]:
    """A run whose server needs a token, and the reader's token."""
    monkeypatch.setenv("ATOLL_TOKEN", "the-token-of-the-sites")
    with World(tmp_path, START, "a", rounds=3) as world:
        yield world, (tmp_path / "state" / "reader.token").read_text().strip()


def test_the_page_asks_for_the_readers_token(guarded: tuple[World, str], chrome: Browser) -> None:
    """Without the reader's token, the page shows no data. It refuses a wrong token, and keeps the right one only for
    this tab.
    """
    world, token = guarded
    chrome.open(world.url)
    chrome.wait("#ask", "reader.token")
    assert chrome.text("#main") == ""
    enter(chrome, "wrong")
    chrome.wait("#why", "The request has no valid token.")
    enter(chrome, token)
    chrome.wait("#sentence", "waits for 1 site to join")
    assert token not in chrome.driver.current_url
    chrome.driver.refresh()
    chrome.wait("#sentence", "waits for 1 site to join")
    chrome.forget()


def enter(chrome: Browser, token: str) -> None:
    field = chrome.driver.find_element("id", "token")
    field.send_keys(token, "\n")


def test_the_page_removes_the_token_from_its_address(guarded: tuple[World, str], chrome: Browser) -> None:
    """The page removes the token, which `atoll run --open` puts behind the `#`, from the address bar at once."""
    world, token = guarded
    chrome.open(f"{world.url}/#token={token}")
    chrome.wait("#sentence", "waits for 1 site to join")
    assert chrome.driver.current_url == f"{world.url}/"
    chrome.forget()


def test_the_page_resumes_after_a_server_restart(tmp_path: Path, chrome: Browser) -> None:
    """If the server restarts, the page says that it has no answer, then continues and shows each event once."""
    with World(tmp_path, START, "ab", rounds=9) as world:
        chrome.open(world.url)
        play(world, 1, 0.9)
        chrome.wait("#sentence", "in round 1")
        world.stop()
        chrome.wait("#link", "no answer from the server")
        world.start()
        play(world, 2, 0.5)
        chrome.wait("#sentence", "Loss 0.505 in round 2")
        chrome.wait("#link", "live")
        chrome.until(
            lambda: any("round 2 made version 2" in each for each in chrome.texts("#event-list span")), "the round"
        )
        numbers = [
            int(each.split(" ")[1])
            for each in chrome.js("return [...document.querySelectorAll('#event-list time')].map(e => e.title)")
        ]
        assert numbers == sorted(set(numbers), reverse=True)
        kept = [each["number"] for each in get(world.url, "/v1/events?last=1000")[1]["events"]]
        assert numbers[-1] == kept[0]
        assert set(numbers) <= set(kept)


def test_page_links_open_a_site_and_a_round(tmp_path: Path, chrome: Browser) -> None:
    """A link to the page with a site and a round in it opens that site and that round."""
    with World(tmp_path, START, "ab", rounds=9) as world:
        play(world, 1, 0.9)
        play(world, 2, 0.5)
        chrome.open(f"{world.url}/#site=b&round=1")
        chrome.wait("#detail", "b close")
        assert "chosen" in chrome.js("return document.getElementById('row-b').className")
        assert "0.91" in chrome.wait("#round", "Round 1")
        chrome.js("location.hash = '#site=nobody'")
        chrome.wait("#detail", "No site nobody has joined this run.")


def test_pointing_at_a_curve_names_its_site(tmp_path: Path, chrome: Browser) -> None:
    """If the mouse points at a line of the chart, the page names its site."""
    # The site b reports 0.5 in both rounds, the site a 0.1, so the line of b is at the top of the chart.
    with World(tmp_path, START, "ab", rounds=9) as world:
        for number in (1, 2, 3):
            world.pull(number=number)
            for name, loss in {"a": 0.1, "b": 0.5}.items():
                world.submit(name, 0.5, metrics={"loss": loss})
            world.wait(number)
        chrome.open(world.url)
        chrome.wait("figcaption", "mean 0.3 in round 3")
        chrome.js(
            "const over = document.querySelector('.u-over'), r = over.getBoundingClientRect();"
            "over.dispatchEvent(new MouseEvent('mousemove', {bubbles: true, clientX: r.left + r.width / 2, "
            "clientY: r.top + 2}));"
        )
        chrome.wait("figcaption", "mean 0.3 in round 2; b 0.5")


def test_the_page_can_be_used_by_keyboard(tmp_path: Path, chrome: Browser) -> None:
    """The Tab key reaches the sections, the sort buttons and the sites of the page, and Enter sorts or opens them."""
    from selenium.webdriver.common.keys import Keys

    with World(tmp_path, START, "ab", rounds=9) as world:
        play(world, 1, 0.9)
        world.pull()
        chrome.open(world.url)
        chrome.wait("#row-b", "b")
        seen = list[str]()
        for _ in range(60):
            chrome.press(Keys.TAB)
            focused = chrome.js(
                "const e = document.activeElement; return e.innerText || e.id || e.ariaLabel || e.tagName"
            )
            seen.append(focused.strip())
            if focused.strip() == "Weight" and seen.count("Weight") == 1:
                chrome.press(Keys.ENTER)
                assert chrome.js("return document.activeElement.closest('th').ariaSort") == "ascending"
        for wanted in (
            "Skip to the state of the run",
            "Timeline",
            "find",
            "Site",
            "b",
            "Show them with their sources",
            "Print",
        ):
            assert wanted in seen, wanted
        chrome.js("document.querySelector('nav a').focus({focusVisible: true})")
        outline = chrome.js("return getComputedStyle(document.querySelector('nav a')).outlineStyle")
        assert outline == "solid"


@pytest.mark.skipif(AXE_PACKAGE is None, reason="the package axe-core-python is not installed")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390], ids=["laptop", "phone"])
def test_the_page_has_no_accessibility_faults(tmp_path: Path, chrome: Browser, dark: bool, width: int) -> None:
    """The accessibility checker axe finds no serious fault on the page, on a laptop or a phone, in light or dark."""
    with prepared("nan", tmp_path) as world:
        chrome.set_look(dark=dark, width=width)
        chrome.open(f"{world.url}/#site=clinic-cedar&round=2")
        chrome.wait("#round", "Round 2")
        chrome.wait("figcaption", "mean")
        chrome.js("document.querySelectorAll('details').forEach((each) => (each.open = true))")
        chrome.wait("#setting-table", "rounds.total")
        assert chrome.axe() == []


def test_the_page_fits_a_phone(tmp_path: Path, chrome: Browser) -> None:
    """On a phone, the page is not wider than the screen. Wide tables scroll by themselves."""
    with prepared("hostile", tmp_path) as world:
        chrome.set_look(width=390, height=844)
        chrome.open(world.url)
        chrome.wait("#version-table", "1 (durable)")
        assert chrome.js("return document.documentElement.scrollWidth") <= 390


def test_the_servers_evaluation_is_in_charts_and_tables(tmp_path: Path, chrome: Browser) -> None:
    """Version v is evaluated to 0.8 / v: it has a line in the chart, a column of versions, and a row when compared."""
    with World(tmp_path, START, "a", rounds=9, evaluate=evaluated) as world:
        for number in (1, 2):
            world.pull(number=number)
            world.submit("a", 0.5, metrics={"loss": 1 / number})
            world.wait(number)
        chrome.open(world.url)
        told = "mean 0.5 in round 2, down from 1 in round 1; at the server 0.4 in round 2, down from 0.8 in round 1"
        chrome.wait("figcaption", told)
        chrome.wait("#version-table", "loss at the server")
        chrome.wait("#version-table", "0.4")
        for box in chrome.driver.find_elements("css selector", "#version-table input"):
            box.click()
        assert "loss at the server 0.8 0.4 -0.4" in " ".join(chrome.wait("#compared", "at the server").split())
        world.pull(number=3)
        world.submit("a", 0.5, metrics={"loss": 0.25})
        chrome.wait("figcaption", "at the server 0.2667 in round 3, down from 0.8 in round 1")  # without a reload


def evaluated(model: Any) -> dict[str, float]:
    """By version: each adds 0.5."""
    return {"loss": 0.8 / (2 * float(model["bias"][0]))}


def test_a_held_up_run_is_amber(tmp_path: Path, chrome: Browser) -> None:
    """Paused is neither calm nor red, the time left is not known, and the end waits."""
    with World(tmp_path, START, "ab", rounds=9) as world:
        chrome.open(world.url)
        assert chrome.wait("#alive", "none") == "none has joined"
        calm = colour(chrome)
        play(world, 1, 0.9)
        pause(world)
        chrome.wait("#sentence", "The run is paused in round 2 of 9")
        assert "The end waits for that, then for 7 more rounds" in chrome.text("#sentence")
        assert chrome.text("#left") == "not known"
        assert chrome.js("return document.getElementById('headline').className") == "held"
        assert colour(chrome) != calm


def test_the_timeline_shows_how_long_a_round_is_open(tmp_path: Path, chrome: Browser) -> None:
    """A page that is opened long after the last event shows the time of the server, not that of the event."""
    with World(tmp_path, START, "ab", rounds=9) as world:
        world.pull(number=1)
        open_s = wait_until(lambda: max(0.0, world.status.fragments[0].open_s - 1.5), "a round open for 1.5 s") + 1.5
        chrome.open(world.url)
        said = chrome.wait("#lanes .hint", "1 round in ")
        assert float(said.removeprefix("1 round in ").partition(" s;")[0]) >= round(open_s, 1) - 0.05


def test_a_late_site_of_an_async_run_is_amber(tmp_path: Path, chrome: Browser) -> None:
    """The sentence and its row say how late it is, although no other site waits."""
    with World(tmp_path, START, "ab", rounds=99, **{"async.enabled": True}) as world:
        for number in (1, 2, 3):
            world.pull("a", "b")
            for name in "ab":
                world.submit(name, 0.5, metrics={"loss": 1 / number})
        world.pull("b")
        chrome.open(world.url)
        chrome.wait("#sentence", '"b" is late: ')
        assert chrome.js("return document.getElementById('headline').className") == "held"
        assert chrome.texts("#row-b .late")[0] == world.status.workers[1].doing
        assert "It is late: " in chrome.text("#row-b small")
        assert chrome.texts("#row-a .late") == []
        assert [chrome.texts(f"#row-{name} td")[4] for name in "ab"] == ["–", "0"]


def test_a_refused_update_is_drawn_as_refused(tmp_path: Path, chrome: Browser) -> None:
    """The timeline shows a refused update as refused, not as waiting. Bytes that the server did not count are unknown,
    not 0.
    """
    with prepared("nan", tmp_path) as world:
        chrome.open(world.url)
        chrome.wait("#row-clinic-cedar", "its updates are refused")
        drawn = "return [...document.querySelectorAll('#lanes canvas')].map((each) => each.ariaLabel).join('\\n')"
        chrome.until(lambda: "clinic-cedar, most recently: " in chrome.js(drawn), "the timeline")
        cedar = next(line for line in chrome.js(drawn).splitlines() if line.startswith("clinic-cedar"))
        assert "refused" in cedar.rpartition(", ")[2]
        received = chrome.texts("#row-clinic-cedar td")[-2]
        assert received == "–"


def test_no_site_is_amber_while_the_disk_is_full(tmp_path: Path, chrome: Browser) -> None:
    with prepared("full", tmp_path) as world:
        chrome.open(world.url)
        chrome.wait("#sentence", "(disk.min_free_bytes)")
        chrome.wait("#row-clinic-amber", "The round waits for it")
        assert chrome.texts("#table td span.late") == []


@pytest.fixture
def in_module(tmp_path: Path, chrome: Browser) -> Iterator[Callable[[str, str], Any]]:
    """Run code with a module of the page as `page`, on the page of a run, and return what the code returns."""
    with World(tmp_path, START, "ab", rounds=3) as world:
        chrome.open(world.url)
        chrome.wait("#sentence", "waits for")
        yield lambda name, code: chrome.driver.execute_async_script(
            f"import('/page/{name}.js').then((page) => {{ {code} }}).then(arguments[0])"
        )


def test_the_timeline_counts_only_updates_that_a_round_used(in_module: Callable[[str, str], Any]) -> None:
    """A round's end adds times only for updates that it used: not for refused ones, nor for tickets of gone sites."""
    spans = (
        "const at = (s) => new Date(1e12 + s * 1000).toISOString();"
        "const site = (what, s, more) => ({ what, site: 'a', at: at(s), ...more });"
        "const over = (s, name, train_seconds) => ({ what: 'round ended', fragment: 0, round: 1, at: at(s),"
        "  summary: { sites: [{ site: name, train_seconds }] } });"
        "const rounds = new page.Rounds(); ["
        "  site('ticket issued', 0, { ticket: 1 }), site('update refused', 5, { ticket: 1 }), over(10, 'b', 4),"
        "  site('ticket issued', 10, { ticket: 2 }), site('update accepted', 20, { ticket: 2, send_seconds: 1 }),"
        "  over(30, 'a', 3), site('ticket issued', 30, { ticket: 3 }), site(GONE, 40), over(99, 'b', 4),"
        "  ].forEach((event) => rounds.take(event));"
        "return rounds.spans('a', 1e12, 1e12 + 99e3).map(([from, to, kind]) =>"
        "  [(from - 1e12) / 1e3, (to - 1e12) / 1e3, kind]);"
    )
    for gone in ("site silent", "site left"):
        # 10 s from ticket to update: 6 s to pull, 3 s of training as the site reports, 1 s to send.
        assert in_module("timeline", spans.replace("GONE", f"'{gone}'")) == [
            [0, 5, "train"],
            [5, 10, "refused"],
            [10, 16, "pull"],
            [16, 19, "train"],
            [19, 20, "send"],
            [20, 30, "wait"],
            [30, 40, "train"],
        ]


def test_commands_have_the_path_of_a_gateway(in_module: Callable[[str, str], Any], chrome: Browser) -> None:
    said = in_module(
        "server",
        "history.replaceState(null, '', '/hospital/run/');"
        "return page.reached('atoll stop --server http://here:1', { address: 'http://here:1' });",
    )
    assert said == f"atoll stop --server {chrome.js('return location.origin')}/hospital/run"


def test_commands_have_the_address_of_the_page(tmp_path: Path, chrome: Browser) -> None:
    """Another machine cannot use the server's own name for itself."""
    with World(tmp_path, START, "ab", rounds=3) as world:
        address = world.url.replace("127.0.0.1", "localhost")
        chrome.open(address)
        assert (
            chrome.wait("#command", "atoll worker") == f"atoll worker --server {address} --site NAME -- python train.py"
        )
        assert f"atoll export --server {address}" in chrome.text("#versions-hint")


def test_an_event_of_another_day_has_its_date(in_module: Callable[[str, str], Any]) -> None:
    shown = in_module(
        "sections",
        "const at = (time) => ({ at: time.toISOString(), number: 1, what: 'run paused' });"
        "page.drawEvents([at(new Date(2020, 0, 2, 13, 4, 5)), at(new Date())]);"
        "return [...document.querySelectorAll('#event-list time')].map((each) => each.textContent);",
    )
    assert shown[1] == "2020-01-02 13:04:05"
    assert len(shown[0]) == len("13:04:05")


def test_the_page_explains_its_columns(tmp_path: Path, chrome: Browser) -> None:
    """The page explains its columns where the pointer is, and in a list for phones. A shadow shows that a table goes
    on.
    """
    with World(tmp_path, START, "ab", rounds=3) as world:
        chrome.set_look(width=390, height=844)
        chrome.open(world.url)
        chrome.wait("#versions-hint", "A durable version is safely on the server's disk")
        chrome.js("document.querySelector('#sites details').open = true")
        for title in ("Behind", "Norm"):
            told = chrome.js(
                f"return [...document.querySelectorAll('#table button')].find(e => e.textContent === '{title}').title"
            )
            assert f"{title}\n{told}" in chrome.wait("#columns", title)
        assert "local" in chrome.js("return getComputedStyle(document.querySelector('.wide')).backgroundAttachment")


def colour(chrome: Browser) -> str:
    return str(chrome.js("return getComputedStyle(document.getElementById('headline')).backgroundColor"))


def test_a_reader_saves_versions_and_updates(guarded: tuple[World, str], chrome: Browser, tmp_path: Path) -> None:
    """The file has the tensors of the version, and the table each update; both come with the reader's token."""
    world, token = guarded
    for number in (1, 2):
        world.pull(number=number)
        world.submit("a", 0.5, metrics={"loss": 1 / number})
    world.wait(2)
    saved = tmp_path / "saved"
    chrome.save_in(saved)
    chrome.open(f"{world.url}/#token={token}")
    chrome.wait("#version-table", "Save")
    chrome.js("document.querySelector('[aria-label=\"Save version 2 as safetensors\"]').click()")
    wait_until((saved / "version-2.safetensors").is_file, "the version")
    assert {name: float(each.mean()) for name, each in load_file(saved / "version-2.safetensors").items()} == {
        "weight": 1.0,
        "bias": 1.0,
    }
    chrome.js("document.getElementById('csv').click()")
    wait_until((saved / "updates.csv").is_file, "the table")
    rows = list(csv.DictReader((saved / "updates.csv").read_text().splitlines()))
    assert [(row["round"], row["site"], row["metrics.loss"]) for row in rows] == [
        (number, site, value) for number, value in (("1", "1.0"), ("2", "0.5")) for site in ("", "a")
    ]
    chrome.forget()


@pytest.mark.parametrize(("swarm", "words"), [(False, "asynchronous"), (True, "swarm")], ids=["asynchronous", "swarm"])
def test_the_page_names_the_kind_of_a_run(tmp_path: Path, chrome: Browser, swarm: bool, words: str) -> None:
    settings = {"swarm.enabled": True} if swarm else {"async.enabled": True}
    with World(tmp_path, START, "ab", rounds=9, **settings) as world:
        chrome.open(world.url)
        chrome.wait("#about", words)
