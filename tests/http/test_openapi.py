"""The schema of an API says what idempotency asks of its clients, and the API keeps to it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.http.sites import Site
from tests.support.servers import need


@pytest.fixture(scope="session")
def schema(running: Site) -> Any:
    answer = running.ask("GET", "/openapi/")
    assert answer.status == 200
    return yaml.safe_load(answer.body)


@pytest.mark.parametrize("path", ["/payments/", "/payments/now/"])
def test_a_guarded_operation_has_the_header_and_its_answers(schema: Any, path: str) -> None:
    operation = schema["paths"][path]["post"]
    (header,) = [each for each in operation["parameters"] if each["in"] == "header"]
    assert (header["name"], header["required"]) == ("Idempotency-Key", True)
    queued = path == "/payments/"
    own = {"200", "202", "500", "504"} if queued else {"201", "402", "410"}
    assert set(operation["responses"]) == {"400", "409", "411", "413", "422", "503"} | own
    for status in ("400", "409", "422", "503"):
        content = operation["responses"][status]["content"]
        assert set(content["application/problem+json"]["schema"]["required"]) >= {
            "code",
            "retryable",
        }


def test_an_operation_that_is_safe_has_neither(schema: Any) -> None:
    operation = schema["paths"]["/payments/"]["get"]
    assert "parameters" not in operation
    assert set(operation["responses"]) == {"200"}


def test_the_status_resource_is_described(schema: Any) -> None:
    operation = schema["paths"]["/idempotency/{namespace}/{key}"]["get"]
    assert set(operation["responses"]) == {"200", "304", "404", "503"}


@pytest.mark.wide
def test_schemathesis_finds_nothing(site: Site, tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("st")
    need(program.exists(), "schemathesis")
    # A key that it used before with other data is no fault of either.
    config = """
        [checks]
        positive_data_acceptance.expected-statuses = ["2xx", 409, 422]
        [[operations]]
        # Nobody knows a key that was made up.
        include-path = "/idempotency/{namespace}/{key}"
        checks.positive_data_acceptance.expected-statuses = ["2xx", 404]
    """
    (tmp_path / "schemathesis.toml").write_text(config)
    done = subprocess.run(
        [
            *(str(program), "run", f"http://127.0.0.1:{site.web.port}/openapi/"),
            *("--auth", "alice:alice", "--include-path-regex", "^/(payments|idempotency)/"),
            *("--max-examples", "15", "--generation-database", "none", "--seed", "1", "--no-color"),
            *("--phases", "coverage,fuzzing"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
