"""A newcomer, who does what a page of the docs says: its files and its commands, word by word, in an empty folder."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.paths import ROOT
from tests.support.waiting import wait_for
from tests.support.workers import freeze_group

#: Programs of the environment that tests run in. The repository is in none of their paths, only what is installed.
HERE = Path(sys.executable).parent


class Newcomer:
    """Somebody with one page or several, and a folder.

    ``programs`` is the ``bin`` of a virtual environment. ``changes`` are what differs from the page on this machine,
    such as addresses of servers; they are made in files, commands and what they print.
    """

    def __init__(
        self, *pages: str, directory: Path, programs: Path = HERE, changes: Mapping[str, str]
    ) -> None:
        self._text = "\n".join((ROOT / "docs" / f"{page}.md").read_text() for page in pages)
        for old, new in changes.items():
            assert old in self._text, f"{pages} have no {old}"
            self._text = self._text.replace(old, new)
        self.directory = directory
        self._running: list[Running] = []
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "DJANGO", "CELERY", "COVERAGE"))
        }
        self._environment = kept | {
            "PATH": os.pathsep.join([str(programs), kept.get("PATH", "")]),
            "PYTHONUNBUFFERED": "1",
            "PYTHONNOUSERSITE": "1",
            # Root on a test machine is nothing to warn about.
            "C_FORCE_ROOT": "1",
        }

    def write(self, *, after: Mapping[str, str] | None = None) -> list[str]:
        """Write the files of the page, each named by its first line; return their names.

        Settings go to the end of what is there. ``after`` has titles of blocks that are no file, each with the
        beginning of the line in ``shop.py`` below which it goes.
        """
        found: dict[str, str] = dict(
            re.findall(r"^```python\n# (\S+\.py)\n(.*?)^```", self._text, re.MULTILINE | re.DOTALL)
        )
        for title, line in (after or {}).items():
            before, begin, rest = found["shop.py"].partition(line)
            whole, end, below = (begin + rest).partition("\n")
            found["shop.py"] = before + whole + end + self._block(title) + below
        for name, text in found.items():
            path = self.directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            before = path.read_text() if name.endswith("settings.py") else ""
            path.write_text(before + text)
        return [*found]

    def _block(self, title: str) -> str:
        (found,) = re.findall(
            rf"^```python\n# {title}\n(.*?)^```", self._text, re.MULTILINE | re.DOTALL
        )
        return str(found)

    def command(self, beginning: str) -> str:
        """Return the command of the page that begins so: there may be no other."""
        found = set(re.findall(rf"^\$ ({re.escape(beginning)}.*)$", self._text, re.MULTILINE))
        assert len(found) == 1, f"commands of the page that begin with {beginning!r}: {found}"
        return str(found.pop())

    def told(self, beginning: str) -> str:
        """Return what the page prints below a command."""
        command = re.escape(self.command(beginning))
        found = re.search(rf"^\$ {command}\n((?:(?!\$|```).*\n)*)", self._text, re.MULTILINE)
        assert found
        return found[1]

    def run(self, beginning: str, **changes: str) -> str:
        """Run a command of the page, with these changes; return what it prints."""
        command = self.command(beginning)
        for old, new in changes.items():
            assert old in command
            command = command.replace(old, new)
        done = subprocess.run(
            shlex.split(command),
            cwd=self.directory,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
        return done.stdout

    def start(self, beginning: str) -> Running:
        """Start a command of the page that goes on; :meth:`close` ends it."""
        return self._start(shlex.split(self.command(beginning)))

    def start_program(self, text: str) -> Running:
        """Start a Python program that is not on the page."""
        return self._start(["python", "-c", text])

    def _start(self, words: list[str]) -> Running:
        log = self.directory.parent / f"{len(self._running)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                words,
                cwd=self.directory,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running.append(Running(process, words, log))
        return self._running[-1]

    def close(self) -> None:
        """End all that was started."""
        for each in self._running:
            each.kill()

    def show_logs(self) -> None:
        """Print the ends of what all that was started wrote: it is shown with a failure."""
        for each in self._running:
            sys.stdout.write(f"--- {each.command}\n{each.log[-3000:]}\n")


class Running:
    """A program that goes on, with its children."""

    def __init__(self, process: subprocess.Popen[bytes], words: list[str], log: Path) -> None:
        self._process = process
        self._log = log
        self.command = shlex.join(words)

    @property
    def log(self) -> str:
        """What it has written."""
        return self._log.read_text(errors="replace")

    def says(self, text: str) -> None:
        """Wait until it has written that."""
        wait_for(
            lambda: text in self.log or self._process.poll() is not None,
            90,
            lambda: f"{text!r} of {self.command}:\n{self.log}",
        )
        assert text in self.log, self.log

    def end(self) -> str:
        """Wait until it ends by itself, and well; return what it wrote."""
        assert self._process.wait(90) == 0, self.log
        return self.log

    def freeze(self) -> None:
        """Stop it and its children, so that they neither work nor die."""
        freeze_group(self._process.pid)

    def kill(self) -> None:
        """End it and its children with SIGKILL, as the loss of the machine would."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)


def clean_venv(directory: Path, wheel: Path, page: str) -> Path:
    """Make a virtual environment, and install there what a page says, with the wheel as this library.

    Returns the folder of its programs.
    """
    subprocess.run([sys.executable, "-m", "venv", directory], check=True, timeout=120)
    text = (ROOT / "docs" / f"{page}.md").read_text()
    commands = re.findall(r"^\$ (pip install .+)$", text, re.MULTILINE)
    assert commands, f"{page} does not say what to install"
    for command in commands:
        _, *words = shlex.split(command.replace("celery-idempotent", str(wheel)))
        pip = [str(directory / "bin" / "python"), "-m", "pip"]
        subprocess.run([*pip, *words, "--quiet"], check=True, timeout=300)
    return directory / "bin"
