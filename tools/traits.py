"""Which of 45 traits of good tools Atoll has: of its command line, live page and Python API.

python tools/traits.py                  check them, and print a table; about three minutes
python tools/traits.py --only page      of one group: command, page or api
python tools/traits.py --browser        also run the tests of the page in Chromium, which show some of its traits
python tools/traits.py --markdown       print a table for a page

Each check runs commands, reads files or imports. A trait is "by hand" where a program cannot tell; the reason is given.
"""

from __future__ import annotations

import argparse
from collections import Counter

import traits_of_api
import traits_of_commands
import traits_of_page
from trait_lab import CHECKS, Verdict, run_browser_tests

GROUPS = (traits_of_commands, traits_of_page, traits_of_api)
"""Each of them adds its checks when it is imported."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Which traits of good tools Atoll has.")
    parser.add_argument("--only", choices=CHECKS)
    parser.add_argument("--browser", action="store_true", help="run the tests of the page in Chromium, too")
    parser.add_argument("--markdown", action="store_true", help="print a table for a page")
    given = parser.parse_args()
    if given.browser:
        run_browser_tests()
    counts: Counter[str] = Counter()
    for group, checks in CHECKS.items():
        if given.only not in (None, group):
            continue
        if given.markdown:
            print(f"\n## {group}\n\n| | trait | | seen |\n|---|---|---|---|")
        for number, (text, check) in enumerate(checks, 1):
            try:
                found = check()
            except Exception as error:  # what cannot be checked does not hold
                found = Verdict("not", f"the check failed: {type(error).__name__}: {str(error)[:90]}")
            counts[found.state] += 1
            seen = " ".join(found.seen.split())
            line = f"| {number} | {text} | {found.state} | {seen.replace('|', '/')} |"
            print(line if given.markdown else f"{group:8}{number:3}  {found.state:8} {text}: {seen}", flush=True)
    totals = ", ".join(f"{counts[state]} {state}" for state in ("holds", "half", "not", "by hand"))
    print(f"\n{totals}; {counts.total()} in all")


if __name__ == "__main__":
    main()
