"""Traits of the live page."""

from __future__ import annotations

import re
import subprocess

from trait_lab import (
    ATOLL,
    Verdict,
    by_tests,
    commands,
    environment,
    finished_state,
    got,
    lab,
    page,
    trait,
    verdict,
)


@trait("page", "its address is printed at the start")
def _() -> Verdict:
    return verdict(page().code == 200 and "http://" in page().log, f"GET / of the printed address: {page().code}")


@trait("page", "first picture under 1 s, offline, at most 100 kB")
def _() -> Verdict:
    texts = [page().text, *page().files.values()]
    loads = [
        each for text in texts for each in re.findall(r"(?:src=|href=|url\(|import )[\"']?(https?://[^\"')\s]+)", text)
    ]
    foreign = [each for each in loads if "w3.org" not in each]
    fits = page().code == 200 and page().nbytes <= 100_000 and not foreign
    return verdict(
        fits and page().seconds < 1,
        f"{page().nbytes:,} bytes in {page().seconds:.2f} s; from elsewhere: {foreign or 'none'}",
        half=fits,
    )


@trait("page", "live without reload, reconnects where it was")
def _() -> Verdict:
    return by_tests("without_reload|cut_stream|reconnect", "live")


@trait("page", "the loss curve first")
def _() -> Verdict:
    places = [page().text.find(each) for each in ('id="charts"', "<table")]
    return verdict(0 <= places[0] < places[1], "the charts stand before the tables")


@trait("page", "compare runs")
def _() -> Verdict:
    tests = by_tests("compares_runs", "side by side")
    return tests if tests.state != "not" else Verdict("half" if "compare" in commands() else "not", "atoll compare")


@trait("page", "a timeline of who waits for whom")
def _() -> Verdict:
    return verdict('id="timeline"' in page().text, "a section with a timeline")


@trait("page", "one sentence of state with time left")
def _() -> Verdict:
    fits = 'id="sentence"' in page().text
    sentence = next((value for key, value in page().status.items() if key in ("sentence", "headline", "said")), "")
    return verdict(fits, f"a place for it on the page: {fits}; from the server: {str(sentence)[:90]!r}")


@trait("page", "each state's reason in words")
def _() -> Verdict:
    fragments = page().status["fragments"]
    assert isinstance(fragments, list)
    reason = fragments[0]["reason"]
    return verdict(bool(reason) and page().code == 200, f"a waiting round: {reason!r}", half=bool(reason))


@trait("page", "a link to a site or a round")
def _() -> Verdict:
    return by_tests("links_open", "links")


@trait("page", "read-only; what changes things needs a credential")
def _() -> Verdict:
    from atoll.protocol.identity_messages import Enrol
    from atoll.protocol.openapi import OPERATIONS

    changing = [each for each in OPERATIONS if each.method not in ("GET", "HEAD")]
    open_ones = [
        each.name
        for each in changing
        if {"stranger", "reader"} & set(map(str, each.callers)) and each.request is not Enrol  # its invitation is one
    ]
    scripts = [
        name for name, text in page().files.items() if re.search(r"method: *[\"'](?:POST|PUT|DELETE|PATCH)", text)
    ]
    fits = not open_ones and not scripts
    return verdict(
        fits and page().code == 200,
        f"open to readers: {open_ones or 'none'}; scripts that send: {scripts or 'none'}",
        half=fits,
    )


@trait("page", "works for a finished or dead run, from files")
def _() -> Verdict:
    if "page" not in commands():
        return Verdict("not", "there is no atoll page")
    process = subprocess.Popen(
        [*ATOLL, "page", str(finished_state())], cwd=lab(), env=environment(), stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        address = ""
        while not address and (line := process.stdout.readline().decode()):
            address = next(iter(re.findall(r"http://[^\s#/]+", line)), "")
        code = got(f"{address}/")[0]
        return verdict(code == 200, f"atoll page: {address or 'no address'}, {code}")
    finally:
        process.kill()
        process.wait()


@trait("page", "light, dark, keyboard, axe-clean")
def _() -> Verdict:
    return by_tests("axe|keyboard", "accessible")


@trait("page", "10,000 points × 500 series stay fluid")
def _() -> Verdict:
    tests = by_tests("fluid|many_rounds|10_?000|decimat", "fluid")
    return (
        tests
        if tests.state != "not"
        else Verdict("by hand", "scroll and zoom such a page; bench/site_curves.py measures the server's part")
    )


@trait("page", "hostile names are text, CSP")
def _() -> Verdict:
    policy = page().headers.get("content-security-policy", "")
    tests = by_tests("hostile", "names")
    if "default-src 'self'" not in policy or tests.state in ("not", "half"):
        return verdict(False, f"policy {policy[:40]!r}; {tests.seen}", half=bool(policy))
    return Verdict(tests.state, f"policy {policy[:40]!r}; {tests.seen}")


@trait("page", "export as CSV, JSON, print")
def _() -> Verdict:
    there = [each for each in ("csv", "json", "print") if f'id="{each}"' in page().text]
    return verdict(len(there) == 3, f"buttons: {', '.join(there) or 'none'}", half=bool(there))
