"""What the demo shows while it works, and how its terminal is recorded."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.support.paths import ROOT

pytest.importorskip("django")

PROGRAM = """
import sys, time
sys.stdout.write("first <of> two")
sys.stdout.flush()
time.sleep(0.6)
print("\\r\\x1b[2K\\x1b[1;32msecond\\x1b[0m")
"""


def test_a_recording_has_each_screen_at_its_time_and_ends_with_the_last(tmp_path: Path) -> None:
    pytest.importorskip("pyte")
    (tmp_path / "program.py").write_text(PROGRAM)
    recorder = str(ROOT / "docs" / "recording.py")
    command = [sys.executable, recorder, "out.svg", sys.executable, "program.py"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    text = (tmp_path / "out.svg").read_text()
    said = [
        "".join(each.itertext())
        for each in ET.fromstring(text).iter()
        if each.tag.endswith("}text")
    ]
    assert {"first <of> two", "second"} < {*said}
    assert re.search(r'class="green b">second', text)
    moves = [float(each) for each in re.findall(r"([\d.]+)%{transform", text)]
    assert moves[0] == 0
    assert moves == sorted(moves)


def test_the_picture_of_the_readme_is_a_recording_of_the_demo() -> None:
    text = (ROOT / "docs" / "_static" / "demo.svg").read_text()
    assert "<title>A recorded run of make demo, played 2 times as fast</title>" in text
    for said in ("SIGKILL", "celery.Task", "IdempotentTask", "too many", "exactly once"):
        assert said in text
