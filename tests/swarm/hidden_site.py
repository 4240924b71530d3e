"""A site that others cannot reach: it listens on 127.0.0.1 and says that it is on 127.0.0.2, where nobody is."""

from __future__ import annotations

import sys

import atoll
from atoll.errors import AtollError

try:
    with atoll.join() as worker:
        for _ in worker:
            pass
except AtollError as error:
    print(error)
    sys.exit(error.exit_code)
