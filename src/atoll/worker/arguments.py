"""Checks of the values that a training script or its environment gives: site name, weights, metrics, times."""

from __future__ import annotations

import math
import operator
import os
import re
import socket
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from atoll.config.run_file import TRUTHS
from atoll.errors import ConfigError, UsageError
from atoll.format_text import shown
from atoll.protocol import messages
from atoll.transport.http_client import enrolled_site
from atoll.worker.log_lines import LOG

GIVE_UP_S = 86400.0
"""Default of `ATOLL_GIVE_UP_S`: one day, so that a server may be repaired the next morning."""
_SITE: TypeAdapter[str] = TypeAdapter(messages.Site)
_LABELS: TypeAdapter[dict[str, str]] = TypeAdapter(messages.Labels)
SURROGATE = re.compile(r"[\ud800-\udfff]")
"""A lone surrogate: half of a character, which UTF-8 cannot encode."""


def site_of(given: str | None, server: str | None = None) -> str:
    """Return the name of a script's site: `given`, else the name in `ATOLL_SITE`, else that of the enrolled site.

    With none of them, the name is "alone" for a script without a server, else made of host name and process id.

    Args:
        given: what the script says.
        server: address of the server; None: the script has none.

    Raises:
        ConfigError: the name is empty, is too long, or has a character that is not allowed.
        UsageError: several sites of this machine have enrolled at the server, and no name says which one.
    """
    host = "".join(char if char.isalnum() or char in "-_" else "-" for char in socket.gethostname())
    name = given or os.environ.get("ATOLL_SITE")
    if not name and server:
        name = enrolled_site(server) or f"{host.lstrip('-_')[:40] or 'worker'}-{os.getpid()}"
    return require_site(name or "alone")


def require_site(site: str) -> str:
    """Return `site` if every server accepts it as a site name.

    Raises:
        ConfigError: the name is empty, is too long, or has a character that is not allowed.
    """
    try:
        return _SITE.validate_python(site)
    except ValidationError:
        raise ConfigError(
            f"{site!r} is not a site name.", "Use 1 to 64 letters, digits, dots, hyphens and underscores."
        ) from None


def require_labels(labels: object) -> dict[str, str]:
    """Return the labels of a worker if every server accepts them.

    Raises:
        UsageError: they are not a dict of short texts.
    """
    try:
        return _LABELS.validate_python({} if labels is None else labels, strict=True)
    except ValidationError as error:
        found = error.errors()[0]
        raise UsageError(
            f"labels is {labels!r}: {found['msg'][0].lower()}{found['msg'][1:]}.",
            'Give a dict of at most 32 texts: labels={"gpu": "H200"}.',
        ) from None


def require_counts(**given: int | None) -> None:
    """Check that each argument is a whole number of at least 1, or None.

    Raises:
        UsageError: an argument is not. The message names it.
    """
    for name, value in given.items():
        if value is not None and (is_no_number(value) or not isinstance(value, int) or value < 1):
            raise UsageError(f"{name} is {shown(value)}.", "Give a whole number, at least 1, or leave it out.")


def weight_of(weight: float) -> float:
    """Return the weight of an update as a float; 0: the site sits out the round.

    Raises:
        UsageError: the weight is negative, not finite, or not a number.
    """
    try:
        value = number(weight)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        value = math.nan
    if not 0 <= value < float("inf"):
        raise UsageError(
            f"The weight is {shown(weight)}.",
            "Give a positive, finite number: the samples or tokens trained on. With 0, the site sits out the round.",
        )
    return value


def require_accepted(weight: float, steps: int | None, info: messages.RunInfo) -> None:
    """Refuse numbers that the server would refuse with the update, before the site trains in vain again.

    Args:
        weight: the weight of the update.
        steps: its number of local steps; None if it is not known yet.
        info: description of the run, with its bounds.

    Raises:
        UsageError: a number is above the run's bound, or the number of steps is missing.
    """
    if weight > info.max_weight:
        raise UsageError(
            f"The weight is {weight:g}, above aggregation.max_weight of the run, {info.max_weight:g}.",
            "Give the samples or tokens trained on. If it is right, raise aggregation.max_weight at the server, then "
            "start this script again.",
        )
    if steps is None or not info.needs_steps:
        return
    if not steps:
        raise UsageError(
            "The update was submitted without a number of local steps, by which this run divides.",
            "Report it: fl_round.submit(model, steps=…), or train within fl_round.correct(model, optimizer), which "
            "counts the steps.",
        )
    if steps > info.max_steps:
        raise UsageError(
            f"steps is {steps}, above aggregation.max_steps of the run, {info.max_steps}.",
            "Report the number of optimizer steps, not samples or tokens. If it is right, raise aggregation.max_steps "
            "at the server, then start this script again.",
        )


def require_joined(has_left: bool, site: str, rejoin: str, process: int | None = None) -> None:
    """Raise an error if the worker has left its run, or if another process has joined.

    Args:
        has_left: whether the worker has left.
        site: the worker's site name, for the message.
        rejoin: the call with which a script joins the run again, such as `atoll.join`, for the message.
        process: id of the process that joined; None: a server takes no part, so a fork may go on.

    Raises:
        UsageError: the worker has left its run, or this process is a fork of the one that joined.
    """
    if process not in (None, os.getpid()):
        raise UsageError(
            f"Process {os.getpid()} is a fork of process {process}, which takes part in the run as site {site!r}. A "
            "fork cannot take part in its place: both would use the same connections and files.",
            f"Train in process {process}, or call {rejoin} in the fork, with another site name.",
        )
    if has_left:
        raise UsageError(f"Site {site} has already left its run.", f"Call {rejoin} again, and use the new worker.")


def steps_of(steps: int) -> int:
    """Return the number of local optimizer steps in a round as an int.

    Raises:
        UsageError: `steps` is not an integer, is negative, or is too large to be sent to the server.
    """
    try:
        value = -1 if is_no_number(steps) else operator.index(steps)
    except TypeError:
        value = -1
    if not 0 <= value < messages.NUMBER_BELOW:
        raise UsageError(f"steps is {shown(steps)}.", "Give the number of local optimizer steps in the round.")
    return value


def is_no_number(value: Any) -> bool:
    """Return whether a value is a text or a boolean, which `float` would accept as a number."""
    dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
    return isinstance(value, bool | str | bytes | bytearray) or dtype == "bool"


def number(value: Any) -> float:
    """Return `float(value)`. A tensor is detached first, because torch warns if it requires grad.

    Raises:
        TypeError: the value is a text or a boolean, which is more likely a mistake than a number.
    """
    if is_no_number(value):
        raise TypeError(f"{value!r} is not a number")
    return float(value.detach() if hasattr(value, "detach") else value)


def finite_metrics(metrics: Mapping[str, float], site: str, warned: set[str] | None = None) -> dict[str, float]:
    """Return the finite metrics as floats. Leave out NaN and infinite ones, with a warning.

    Args:
        metrics: metric name → number.
        site: the site's name, for warnings.
        warned: names of metrics for which a warning was already logged; updated in place. Another warning is logged
            only after the metric was finite again. None: log a warning each time.

    Raises:
        UsageError: `metrics` is not a mapping or has too many entries, or an entry has an invalid name or value.
    """
    if not isinstance(metrics, Mapping):
        raise UsageError(
            f"The metrics are of type {type(metrics).__name__}, not a dict.", "Give a dict of metric name → number."
        )
    if len(metrics) > messages.METRICS:
        raise UsageError(
            f"There are {len(metrics)} metrics; an update may have at most {messages.METRICS}.",
            "Report only the most important ones.",
        )
    values: dict[str, float] = {}
    for key, metric in metrics.items():
        if not isinstance(key, str) or len(key) > messages.METRIC_CHARS or SURROGATE.search(key):
            raise UsageError(
                f"{str(key)[:80]!r} cannot be the name of a metric.",
                f"Use strings of at most {messages.METRIC_CHARS} characters of UTF-8.",
            )
        try:
            values[key] = number(metric)
        except OverflowError:
            values[key] = math.inf
        except (TypeError, ValueError, RuntimeError):
            raise UsageError(f"The metric {key!r} is {shown(metric)}.", "Give a number.") from None
    for key, value in values.items():
        if abs(value) < float("inf"):
            if warned is not None:
                warned.discard(key)
        elif warned is None or key not in warned:
            LOG.warning("%s: the metric %r is %s, so it is not reported", site, key, value)
            if warned is not None:
                warned.add(key)
    return {key: value for key, value in values.items() if abs(value) < float("inf")}


def takes_part_in_swarms(given: bool) -> bool:
    """Return whether this site takes part in swarms: its script, `ATOLL_SWARM` or an `ATOLL_PEER_*` variable says so.

    If `ATOLL_SWARM` is false, the site takes part in none, whatever the others say.

    Args:
        given: what the script says.

    Raises:
        ConfigError: `ATOLL_SWARM` or `ATOLL_PEER_INSECURE` is neither true nor false.
    """
    allows = flag("ATOLL_SWARM", "let this site take part in swarms, or to 0 to forbid it")
    if os.environ.get("ATOLL_SWARM", "").strip():
        return allows
    others = {name for name, value in os.environ.items() if name.startswith("ATOLL_PEER_") and value.strip()}
    return given or bool(others - {INSECURE}) or insecure_peers()


INSECURE = "ATOLL_PEER_INSECURE"


def insecure_peers() -> bool:
    """Return whether this site's user allows plain HTTP to other workers of a swarm.

    Raises:
        ConfigError: `ATOLL_PEER_INSECURE` is neither true nor false.
    """
    return flag(INSECURE, "listen without TLS on a trusted network")


def flag(variable: str, what: str) -> bool:
    """Return whether an environment variable is set to true: 1, true, yes or on. Unset, it is false.

    Args:
        variable: name of the variable.
        what: what it allows, for the message.

    Raises:
        ConfigError: the variable is neither true nor false.
    """
    text = os.environ.get(variable, "").strip()
    if not text or text.lower() in TRUTHS:
        return TRUTHS.get(text.lower(), False)
    raise ConfigError(f"{variable} is {text!r}.", f"Set it to 1 to {what}.")


SYNC_RETRIES = 6


def sync_retries(max_sync_retries: int | None) -> int:
    """Return the number of retries before a synchronisation is skipped.

    The number is `max_sync_retries` if it is not None, else `ATOLL_MAX_SYNC_RETRIES` if that is set, else 6.

    Raises:
        UsageError: `max_sync_retries` is not an integer, or is negative.
        ConfigError: `ATOLL_MAX_SYNC_RETRIES` is not a whole number, or is negative.
    """
    if max_sync_retries is not None:
        if is_no_number(max_sync_retries) or not isinstance(max_sync_retries, int) or max_sync_retries < 0:
            raise UsageError(f"max_sync_retries is {shown(max_sync_retries)}.", "Give a whole number, at least 0.")
        return max_sync_retries
    text = os.environ.get("ATOLL_MAX_SYNC_RETRIES", "") or str(SYNC_RETRIES)
    if not text.isdecimal():
        raise ConfigError(f"ATOLL_MAX_SYNC_RETRIES is {text!r}.", "Set it to a whole number, at least 0.")
    return int(text)


def give_up_s() -> float:
    """Return for how many seconds a worker keeps trying to reach a server that does not answer.

    The number is `ATOLL_GIVE_UP_S` if that is set, else `GIVE_UP_S`. The value 0 means no limit: return infinity.

    Raises:
        ConfigError: `ATOLL_GIVE_UP_S` is not a number of seconds.
    """
    text = os.environ.get("ATOLL_GIVE_UP_S", "")
    try:
        seconds = float(text) if text else GIVE_UP_S
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise ConfigError(f"ATOLL_GIVE_UP_S is {text!r}.", "Set it to a number of seconds; 0 means no limit.")
    return seconds or math.inf
