"""What the demo can tell of a process from outside, before it kills it."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.waiting import wait_for

pytest.importorskip("django")

from testproject.demo.processes import has_unread, is_asleep

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/net/tcp").exists(), reason="this system has no /proc"
)

#: Connects, and reads from there only once it is told to.
READER = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
    sys.stdin.readline()
    connection.recv(100)
    sys.stdin.readline()
"""


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def test_a_process_that_has_not_read_what_it_was_sent_is_known(server: socket.socket) -> None:
    """As a worker whose slots are taken, and whose broker has sent one message more."""
    port = server.getsockname()[1]
    command = [sys.executable, "-c", READER, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as reader:
        assert reader.stdin is not None
        connection, _ = server.accept()
        with connection:
            wait_for(lambda: is_asleep(reader.pid), 10, "the reader asleep")
            assert not has_unread(reader.pid)
            connection.sendall(b"a message")
            wait_for(lambda: has_unread(reader.pid), 10, "a message in its socket")
            assert is_asleep(reader.pid)
            reader.stdin.write("read\n")
            reader.stdin.flush()
            wait_for(lambda: not has_unread(reader.pid), 10, "the message read")
            reader.stdin.write("end\n")
            reader.stdin.flush()
