"""Runs a command that must not outlive its owner; run as a script, standard library only.

::

    owner -- pipe --> leash --> command --> whatever it starts
      X                 |                       the owner dies in whatever way
                  end of file                   the kernel closes the pipe
                        +-- SIGKILL to the whole process group, this one included
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

__all__: list[str] = []


def main() -> int:
    """Start the command, pass SIGTERM on to it, and watch the pipe on standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A pipe's reader must not be inherited, or the command could eat the end of file.
    command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: command.terminate())
    threading.Thread(target=_end_with_the_owner, daemon=True).start()
    return command.wait()


def _end_with_the_owner() -> None:
    while os.read(sys.stdin.fileno(), 64):
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
