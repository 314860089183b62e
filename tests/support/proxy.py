"""A TCP proxy between a worker and its Redis that can break the connection in the ways networks do."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_HOST = "127.0.0.1"
_MAX_CONNECTIONS = 256


class Proxy:
    """Forwards bytes to ``host:port`` until told otherwise.

    ::

        with Proxy("127.0.0.1", server.port) as proxy:
            client = redis.Redis.from_url(proxy.url(db=0))
            proxy.swallow_replies(b"idem:")  # the server executes, the client never learns
            proxy.cut()  # close what is open; new connections are fine
            proxy.refuse()  # new connections are refused
            proxy.hold_requests(
                b"idem:"
            )  # they arrive when it is healed, whatever became of the client

            proxy.heal()  # all is well again

    ``swallowed`` counts the replies lost, ``lost`` the requests lost and ``held`` those held back so far.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._lock = threading.Lock()
        self._links: set[_Link] = set()
        self._threads: list[threading.Thread] = []
        self._rules: list[_Rule] = []
        self._listener: socket.socket | None = None
        self._closed = threading.Event()
        self.swallowed = 0
        self.lost = 0
        self.held = 0
        self._healed = threading.Event()
        self.port = 0
        self._listen()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def url(self, db: int = 0) -> str:
        """Return the address of a Redis database behind the proxy."""
        return f"redis://{_HOST}:{self.port}/{db}"

    def cut(self) -> None:
        """Close every open connection, on both sides."""
        with self._lock:
            links = list(self._links)
        for link in links:
            link.close()

    def refuse(self) -> None:
        """Refuse new connections, and close the open ones: the server is down."""
        with self._lock:
            listener, self._listener = self._listener, None
        if listener is not None:
            _wake(listener)
            self._accepting.join(timeout=5)  # it closes the listener
        self.cut()

    def swallow_replies(
        self, matching: bytes, *, times: int | None = 1, silent: bool = False
    ) -> None:
        """Let requests with these bytes reach the server, and lose the reply.

        The connection is closed as soon as the reply came: the server is then known to have executed the request. Or,
        with ``silent``, stays open without a byte more, until the client's own timeout. ``times=None``: every time.
        """
        with self._lock:
            self._rules.append(_Rule(matching, times, silent=silent))

    def lose_requests(self, matching: bytes, *, times: int | None = 1) -> None:
        """Close the connection before a request with these bytes reaches the server."""
        with self._lock:
            self._rules.append(_Rule(matching, times, forward=False))

    def hold_requests(self, matching: bytes, *, times: int | None = 1) -> None:
        """Forward a request with these bytes when the proxy is healed, even if its client is gone by then."""
        with self._lock:
            self._healed.clear()
            self._rules.append(_Rule(matching, times, hold=True))

    def heal(self) -> None:
        """Forward everything again. Connections that were closed or silenced stay as they are."""
        with self._lock:
            self._rules.clear()
        self._healed.set()
        if self._listener is None and not self._closed.is_set():
            self._listen()

    def close(self) -> None:
        """Stop, and wait until every thread has ended."""
        self._closed.set()
        self._healed.set()
        self.refuse()
        for thread in self._threads:
            thread.join(timeout=5)

    # What runs in threads -------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((_HOST, self.port))
        listener.listen(_MAX_CONNECTIONS)
        self.port = listener.getsockname()[1]
        self._listener = listener
        self._accepting = self._start(self._accept, listener)

    def _start(self, target: Callable[..., None], *args: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads = [each for each in self._threads if each.is_alive()] + [thread]
        thread.start()
        return thread

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                listener.close()
                return
            with self._lock:
                welcome = self._listener is listener and len(self._links) < _MAX_CONNECTIONS

            if not welcome:
                client.close()
                continue
            try:
                server = socket.create_connection(self._target, timeout=5)
            except OSError:
                client.close()
                continue
            link = _Link(client, server)
            with self._lock:
                self._links.add(link)
            self._start(self._pump_requests, link)
            self._start(self._pump_replies, link)

    def _pump_requests(self, link: _Link) -> None:
        tail = b""
        for chunk in link.chunks(link.client):
            rule, tail = self._match(tail, chunk)
            if rule is not None and not rule.forward:
                self.lost += 1
                break
            if rule is not None and rule.hold:
                self.held += 1
                self._healed.wait()
            elif rule is not None:
                link.swallowing = rule
            if not _send(link.server, chunk):
                break
        self._drop(link)

    def _pump_replies(self, link: _Link) -> None:
        for chunk in link.chunks(link.server):
            rule = link.swallowing
            if rule is not None:
                self.swallowed += not link.silenced
                link.silenced = True
                if rule.silent:
                    continue
                break
            if not _send(link.client, chunk):
                break
        self._drop(link)

    def _match(self, tail: bytes, chunk: bytes) -> tuple[_Rule | None, bytes]:
        """Find the first rule for these bytes; also return what the next chunk may complete to a match."""
        seen = tail + chunk
        with self._lock:
            for rule in self._rules:
                if rule.matching in seen and rule.times != 0:
                    if rule.times is not None:
                        rule.times -= 1
                    return rule, b""
            longest = max((len(rule.matching) for rule in self._rules), default=1)
        return None, seen[-(longest - 1) :] if longest > 1 else b""

    def _drop(self, link: _Link) -> None:
        link.close()
        with self._lock:
            self._links.discard(link)
            link.pumps -= 1
            last = not link.pumps
        if last:
            link.client.close()
            link.server.close()


@dataclass
class _Rule:
    matching: bytes
    times: int | None
    silent: bool = False
    forward: bool = True
    hold: bool = False


class _Link:
    """One client's connection and its twin to the server."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.swallowing: _Rule | None = None
        self.silenced = False
        #: The threads that use the sockets. The last of them closes these: no other may, since the number of a closed
        #: socket goes to the next one, and a thread that is in ``send`` or ``recv`` would go on with that one.
        self.pumps = 2
        for end in (client, server):
            end.settimeout(None)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def chunks(self, end: socket.socket) -> Iterator[bytes]:
        while True:
            try:
                chunk = end.recv(65536)
            except OSError:
                return
            if not chunk:
                return
            yield chunk

    def close(self) -> None:
        """End both connections, and with that the threads."""
        _wake(self.client)
        _wake(self.server)


def _send(end: socket.socket, data: bytes) -> bool:
    try:
        end.sendall(data)
    except OSError:
        return False
    return True


def _wake(end: socket.socket) -> None:
    """End a connection, or the accepting of them, and wake the thread that waits for it."""
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
