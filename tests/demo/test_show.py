"""The picture of the demo in the README."""

from __future__ import annotations

from tests.support.paths import ROOT


def test_the_picture_of_the_readme_is_a_recording_of_the_demo() -> None:
    text = (ROOT / "docs" / "_static" / "demo.svg").read_text()
    assert "<title>A recorded run of make demo, played 2 times as fast</title>" in text
    for said in ("SIGKILL", "celery.Task", "IdempotentTask", "too many", "exactly once"):
        assert said in text
