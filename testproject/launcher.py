"""Runs a server that must not outlive its owner; run as a script, standard library only.

A server that is started as a plain subprocess outlives an owner that is killed with SIGKILL, so this stands between::

    owner ── pipe ──> launcher ──> server
      X                  │            │      the owner dies in whatever way
               end of file            │      the kernel closes the pipe
                         ├── crash ──-X      the launcher ends the server, removes its data, and ends
                         X ··· crash ·X      should the launcher die first, Linux sends the server its signal

    launcher.py DIRECTORY GENTLE CRASH USER COMMAND…

``GENTLE`` and ``CRASH`` are the names of the signals that end the server; ``USER`` is whom it runs as, or empty.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

__all__: list[str] = []

_LOOK_SECONDS = 0.25
_GRACE_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1


def main(
    directory: str, gentle: signal.Signals, crash: signal.Signals, user: str, command: Sequence[str]
) -> NoReturn:
    """Run the server until it ends, the owner says ``stop``, or the owner is gone."""
    owner = os.getppid()
    as_whom: dict[str, Any] = {"user": user, "group": _group(user), "extra_groups": []}
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Safe: one thread here.
        preexec_fn=_die_with_parent(crash) if sys.platform == "linux" else None,
        **(as_whom if user else {}),
    )
    sys.stdout.write(f"{server.pid}\n")
    sys.stdout.flush()
    while server.poll() is None:
        readable, _, _ = select.select([sys.stdin], [], [], _LOOK_SECONDS)
        if readable and os.read(sys.stdin.fileno(), 64):
            _end(server, gentle)
            sys.exit(0)
        # The pipe alone does not tell: a child that the owner forked without exec holds its end open.
        if readable or os.getppid() != owner:
            _end(server, crash)
            shutil.rmtree(directory, ignore_errors=True)
            sys.exit(0)
    sys.exit(server.returncode)


def _group(user: str) -> int | None:
    if not user:
        return None
    import pwd

    return pwd.getpwnam(user).pw_gid


def _die_with_parent(crash: signal.Signals) -> Callable[[], None]:
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, crash)

    return ask


def _end(server: subprocess.Popen[bytes], how: signal.Signals) -> None:
    server.send_signal(signal.SIGCONT)  # a frozen server would not hear the rest
    server.send_signal(how)
    try:
        server.wait(timeout=_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main(
        sys.argv[1],
        signal.Signals[sys.argv[2]],
        signal.Signals[sys.argv[3]],
        sys.argv[4],
        sys.argv[5:],
    )
