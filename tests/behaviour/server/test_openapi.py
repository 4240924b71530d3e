"""The documented interface is the served one: schemathesis sends what the document allows, and what it does not."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from kit.requests import get
from kit.servers import plain_server
from schemathesis.specs.openapi.checks import positive_data_acceptance
from torch import nn


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("openapi")
    # no heartbeat timeout: workers that schemathesis makes up come and go as it likes
    options = {"network.heartbeat_interval_s": 0, "network.heartbeat_timeout_s": 0, "rounds.sites": 10_000}
    with plain_server(folder, nn.Linear(2, 2), **options) as server:
        yield server.url


@pytest.fixture(scope="module")
def api(url: str) -> object:
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


schema = schemathesis.pytest.from_fixture("api")


def few_cases(most: int) -> settings:
    return settings(max_examples=most, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@pytest.mark.covers("F38", "F39")
@schema.parametrize()
@few_cases(4)
def test_every_answer_is_a_documented_one(case: schemathesis.Case) -> None:
    require_documented(case)


@pytest.mark.long
@schema.parametrize()
@few_cases(24)
def test_every_answer_to_more_requests_is_a_documented_one(case: schemathesis.Case) -> None:
    require_documented(case)


def require_documented(case: schemathesis.Case) -> None:
    # a made-up lease, ticket or version is well-formed and still refused (409, 410): that is not a fault
    case.call_and_validate(timeout=30.0, excluded_checks=[positive_data_acceptance])


def test_every_problem_has_a_status() -> None:
    """That every operation has a handler, each start of a server shows."""
    from atoll.protocol.openapi import OPERATIONS, STATUS_OF

    assert {code for operation in OPERATIONS for code in operation.problems} <= STATUS_OF.keys()


def test_the_document_defines_what_it_refers_to_and_no_more(url: str) -> None:
    _, document = get(url, "/openapi.json")
    referred = set(re.findall(r"'#/components/schemas/(\w+)'", str(document)))
    assert referred | {"Problem"} == set(document["components"]["schemas"])
    names = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(names) == len(set(names)) >= len(document["paths"])
