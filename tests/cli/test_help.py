"""What the documentation says about the command line is what the command line says."""

from __future__ import annotations

import re
import shlex
from typing import Any

import click
import pytest

from celery_idempotent.cli import idempotency
from celery_idempotent.cli.commands import FOUND, UNREACHABLE
from tests.support.paths import ROOT
from tests.support.programs import run

PAGE = (ROOT / "docs" / "operating.md").read_text()
PAGE = PAGE.partition("\n## The command line\n")[2].partition("\n## ")[0]
CONTEXT = click.Context(idempotency)
COMMANDS: dict[str, Any] = {
    name: idempotency.get_command(CONTEXT, name) for name in idempotency.list_commands(CONTEXT)
}


def examples_of(command: click.Command) -> list[str]:
    """The command lines at the end of its help, without what all begin with."""
    return re.findall(r"^ *celery -A proj idempotency (.*)$", command.epilog or "", re.MULTILINE)


EXAMPLES = [
    line.split(" idempotency ", 1)[1]
    for line in re.findall(r"^\$ (celery -A proj idempotency .*)$", PAGE, re.MULTILINE)
]


def test_every_command_has_a_section_and_every_section_a_command():
    titles = " ".join(re.findall(r"^### (.*)$", PAGE, re.MULTILINE))
    operations = PAGE.partition("### Operations\n")[2].partition("```")[0]
    named = re.findall(r"`([a-z]+)`", titles) + re.findall(
        r"^- `(\w+)` \(", operations, re.MULTILINE
    )
    assert set(named) == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_what_it_does_and_has_an_example_on_the_page(name):
    command = COMMANDS[name]
    assert command.help
    assert examples_of(command)
    assert [each for each in EXAMPLES if each.split()[0] == name]
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.help, f"{name} {option.name}"


@pytest.mark.parametrize(
    "line",
    [
        *EXAMPLES,
        *(each for command in COMMANDS.values() for each in examples_of(command)),
    ],
)
def test_every_example_is_a_command_line_that_is_understood(line):
    name, *words = shlex.split(line)
    COMMANDS[name].make_context(name, words)


def test_every_option_is_on_the_page():
    for name, command in COMMANDS.items():
        for option in command.params:
            if isinstance(option, click.Option):
                assert option.opts[0] in PAGE, f"{name} {option.opts[0]}"


def test_the_page_has_the_exit_codes():
    codes = dict(re.findall(r"^- ([0-9]): (.*)$", PAGE, re.MULTILINE))
    assert set(codes) == {"0", str(FOUND), "2", str(UNREACHABLE)}


def test_the_command_line_starts_without_django_and_without_importing_its_commands():
    """Celery loads it whenever it starts, for a worker too."""
    program = (
        "import sys; sys.modules['django'] = None\n"
        "import celery_idempotent.cli\n"
        "assert 'celery_idempotent.cli.commands' not in sys.modules\n"
        "from click.testing import CliRunner\n"
        "done = CliRunner().invoke(celery_idempotent.cli.idempotency, ['forget', '--help'])\n"
        "assert done.exit_code == 0, done.output\n"
    )
    run("-c", program)
