"""The webhook: tells another program, by one POST of a small JSON object, that the run has ended, failed or stalled."""

from __future__ import annotations

import base64
import json
import logging
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import unquote, urlsplit

from pydantic import SecretStr

from atoll.format_text import duration
from atoll.protocol import run_events
from atoll.trackers.base import TrackedRun, Tracker

LOG = logging.getLogger("atoll.server")

TIMEOUT_S = 5.0
"""Seconds without a byte after which an attempt fails."""
ATTEMPTS, PAUSE_S = 3, 1.0
"""Number of attempts, and the pause after the first in seconds; after each further one, it is twice as long."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: the message goes to the address in the run file alone."""

    def redirect_request(self, *_: Any) -> None:
        """Return no other request."""


class Webhook(Tracker):
    """Posts the end, the failure and each stall of a run. The answer's status alone counts, not its body.

    Args:
        run: the run.
        address: the setting `server.webhook`. A user name and a password in it are sent as Basic authentication.
    """

    def __init__(self, run: TrackedRun, address: SecretStr) -> None:
        super().__init__(run)
        parts = urlsplit(address.get_secret_value())
        login, _, where = parts.netloc.rpartition("@")
        self._url = parts._replace(netloc=where, fragment="").geturl()
        self._where = f"{parts.scheme}://{where}"  # the path of an address may be a secret
        self._headers = {"Content-Type": "application/json", "User-Agent": "atoll"}
        if login:
            self._headers["Authorization"] = f"Basic {base64.b64encode(unquote(login).encode()).decode()}"
        self._open = urllib.request.build_opener(_NoRedirects).open

    def on_event(self, event: run_events.Happened) -> None:
        """Post the event, if it is the end, the failure or a stall of the run.

        Raises:
            OSError: no attempt was answered with a status below 300.
        """
        match event:
            case run_events.RunFinished():
                text = "has finished"
            case run_events.RunFailed(reason=reason):
                text = f"has failed: {reason}"
            case run_events.RunStalled(reason=reason, seconds=seconds):
                text = f"has stalled: nothing has arrived for {duration(seconds)}; it {reason}"
            case _:
                return
        about = {"event": event.what, "run": self.run.id, "name": self.run.name, "at": event.at}
        self._post(json.dumps({**about, "text": f"The run {self.run.name} {text}"}).encode())
        LOG.info("told the webhook at %s: %s", self._where, event.what)

    def _post(self, body: bytes) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                request = urllib.request.Request(self._url, body, self._headers)
                with self._open(request, timeout=TIMEOUT_S):
                    return
            except (OSError, ValueError) as error:
                code = error.code if isinstance(error, urllib.error.HTTPError) else 500
                if attempt == ATTEMPTS or (code < 500 and code != 429):
                    raise OSError(f"{self._where} cannot be told ({error})") from None
            time.sleep(PAUSE_S * 2.0 ** (attempt - 1))
