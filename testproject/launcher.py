"""Runs a program that must not outlive its owner; run as a script, standard library only.

A program that is started as a plain subprocess outlives an owner that is killed with SIGKILL, so this stands between::

    owner ── pipe ──> launcher ──> program
      X                  │            │      the owner dies in whatever way: the kernel closes the pipe
                         ├── crash ──-X      the launcher ends the program, removes its data, ends its process group
                         X ··· crash ·X      should the launcher die first, Linux sends the program its signal

    launcher.py DIRECTORY GENTLE CRASH USER COMMAND…

``GENTLE`` and ``CRASH`` are the names of the signals that end the program when its owner says ``stop``, and when the
owner is gone; ``USER`` is whom it runs as, or empty.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

__all__: list[str] = []

_POLL_S = 0.25
_GRACE_S = 10.0
_PR_SET_PDEATHSIG = 1


def main(
    directory: str, gentle: signal.Signals, crash: signal.Signals, user: str, command: Sequence[str]
) -> NoReturn:
    """Run the program until it ends, the owner says ``stop``, or the owner is gone."""
    owner = os.getppid()
    identity: dict[str, Any] = {}
    if user:
        identity = {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
    program = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        # Standard output is the pipe to the owner, standard error is the program's log.
        stdout=sys.stderr,
        # Safe: one thread here.
        preexec_fn=_die_with_parent(crash) if sys.platform == "linux" else None,
        **identity,
    )
    with contextlib.suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), b"%d\n" % program.pid)
    while program.poll() is None:
        readable, _, _ = select.select([sys.stdin], [], [], _POLL_S)
        if readable and os.read(sys.stdin.fileno(), 64):
            _end(program, gentle)
            break
        # The pipe alone does not tell: a child that the owner forked without exec holds its end open.
        if readable or os.getppid() != owner:
            _end(program, crash)
            shutil.rmtree(directory, ignore_errors=True)
            os.killpg(0, signal.SIGKILL)
    sys.exit(program.returncode)


def _die_with_parent(crash: signal.Signals) -> Callable[[], None]:
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, crash)

    return ask


def _end(program: subprocess.Popen[bytes], how: signal.Signals) -> None:
    program.send_signal(signal.SIGCONT)  # a frozen program would not hear the rest
    program.send_signal(how)
    try:
        program.wait(timeout=_GRACE_S)
    except subprocess.TimeoutExpired:
        program.kill()
        program.wait()


if __name__ == "__main__":
    main(
        sys.argv[1],
        signal.Signals[sys.argv[2]],
        signal.Signals[sys.argv[3]],
        sys.argv[4],
        sys.argv[5:],
    )
