"""Connections to the servers, by redis-py: commands and scripts, one server, a Cluster, errors, URLs."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from importlib.resources import files
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, urlencode, urlsplit

import redis
from redis import ConnectionPool, RedisCluster, exceptions
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.cluster import ClusterNode
from redis.connection import parse_url
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from celery_idempotent.errors import InvalidOption, StoreMisconfigured, StoreUnavailable
from celery_idempotent.stores.base import ServerFacts

#: redis-py's: bytes, a number, ``None``, a list of these, or a ``ResponseError``.
Reply: TypeAlias = Any
#: The words of a command. Numbers are text: hiredis 3.5 may crash while it packs one.
Command: TypeAlias = tuple[bytes, ...]


#: The digests of the scripts by name, and the scripts by digest, for servers that do not know them.
SCRIPTS: dict[str, bytes] = {}
SOURCES: dict[bytes, bytes] = {}
# Read now: a process may be forked while a thread reads one. From a zipapp, too.
for _file in files(__package__).joinpath("lua").iterdir():
    _digest = hashlib.sha1(_file.read_bytes(), usedforsecurity=False).hexdigest().encode()
    SCRIPTS[_file.name.removesuffix(".lua")], SOURCES[_digest] = _digest, _file.read_bytes()


def call(script: bytes, keys: Sequence[bytes], *args: bytes) -> Command:
    """Return the command that runs the script with this digest, on keys of one bucket."""
    return (b"EVALSHA", script, b"%d" % len(keys), *keys, *args)


#: How many idle connections stay open after a burst of threads or greenlets.
_MAX_IDLE = 64


class Server:
    """One server, by redis-py's connections without its pool, whose checks and locks take longer than a verb.

    A connection that did not finish its exchange is closed: a signal handler may raise between any two instructions,
    and the next verb would read the answer to this one.
    """

    #: To be called before the first exchange; it sets this to ``None``, or raises.
    before_first: Callable[[], None] | None = None

    def __init__(self, pool: ConnectionPool, where: str) -> None:
        self.pool, self.where = pool, where
        self._idle: list[Any] = []
        self._pid = os.getpid()

    def exchange(self, commands: Sequence[Command], node: Any = None) -> list[Reply]:  # noqa: ARG002
        """Return the answer to each command, from another connection if the first was dead."""
        packed = [_packed(commands)]
        if self._pid != os.getpid():
            # The parent's, which redis-py closes without shutting them down.
            self._idle, self._pid = [], os.getpid()
        try:
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = self._connect()
            return self._exchange(connection, packed, len(commands))
        except exceptions.ConnectionError as error:
            if isinstance(error, _LOGIN_ERRORS):
                raise
            # The server closed an idle connection, is no longer the master, or is away. Any verb may be sent twice.
            self.close()
            return self._exchange(self._connect(), packed, len(commands))

    def _exchange(self, connection: Any, packed: list[bytes], count: int) -> list[Reply]:
        answers: list[Reply] = []
        try:
            connection.send_packed_command(packed, check_health=False)
            for _ in range(count):
                try:
                    answer = connection.read_response()
                except exceptions.ResponseError as error:
                    if isinstance(error, exceptions.ReadOnlyError) or "READONLY You" in str(error):
                        raise exceptions.ConnectionError(f"no master: {error}") from error
                    answer = error
                answers.append(answer)
        except BaseException:
            connection.disconnect()
            raise
        if len(self._idle) < _MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.disconnect()
        return answers

    def _connect(self) -> Any:
        connection = self.pool.connection_class(**self.pool.connection_kwargs)
        connection.connect()  # a Sentinel's connection would send a first command to localhost
        return connection

    def nodes(self) -> Sequence[Any]:
        return (None,)

    def close(self) -> None:
        with contextlib.suppress(IndexError):
            while True:  # other threads may be taking and closing them as well
                self._idle.pop().disconnect()


#: The start of a command of n words, and of a word of n bytes. To format each takes 8 % of a claim's instructions.
_COUNTS = [b"*%d" % count for count in range(64)]
_SIZES = [b"\r\n$%d\r\n" % size for size in range(1024)]
_END = b"\r\n"


def _packed(commands: Sequence[Command]) -> bytes:
    """Return commands as they are sent, in a fraction of the time that redis-py's packer takes."""
    parts: list[bytes] = []
    for words in commands:
        is_script = words[0] == b"EVALSHA"
        start, rest = (_start(words[:3]), words[3:]) if is_script else (b"", words)
        try:
            parts += _COUNTS[len(words)], start, *[_SIZES[len(word)] + word for word in rest], _END
        except IndexError:  # a long word, or many
            parts += b"*%d" % len(words), start, *map(_sized, rest), _END
    return b"".join(parts)


def _sized(word: bytes) -> bytes:
    return b"\r\n$%d\r\n%b" % (len(word), word)


@lru_cache(maxsize=64)
def _start(words: Command) -> bytes:
    return b"".join(map(_sized, words))


#: Arguments that may lead a connection elsewhere, or log in otherwise.
_UNKNOWN = ("credential_provider", "redis_connect_func", "encoder_class")
#: Arguments that say where a connection leads and who logs in, with their defaults.
_TELLING = {"path": "", "host": "localhost", "port": 6379, "db": 0, "username": "", "password": ""}
_TELLING |= {"ssl_certfile": "", "ssl_keyfile": "", "encoding": "utf-8"}


def is_one_database(*pools: ConnectionPool) -> bool:
    """Do all these connections surely lead to the same database of the same server, with the same login?"""
    known = (redis.Connection, redis.SSLConnection, redis.UnixDomainSocketConnection)
    places = set()
    for pool in pools:
        given = pool.connection_kwargs
        if pool.connection_class not in known or any(map(given.get, _UNKNOWN)):
            return False
        where = (str(given.get(name) or usual) for name, usual in _TELLING.items())
        places.add((pool.connection_class, *where))
    return len(places) == 1


class Cluster:
    """All nodes of a Cluster, by redis-py's client, which connects when it is made."""

    before_first: Callable[[], None] | None = None

    def __init__(self, connect: Callable[[], RedisCluster], where: str) -> None:
        self._connect, self.where = connect, where

    @cached_property
    def client(self) -> Any:
        try:
            return self._connect()
        except _ERRORS as error:
            raise trouble(error, self.where) from error

    def exchange(self, commands: Sequence[Command], node: Any = None) -> list[Reply]:
        # redis-py finds the keys by the command's name, a ``str``.
        named = [(name.decode(), *words) for name, *words in commands]
        if len(commands) > 1:
            with self.client.pipeline(transaction=False) as pipeline:
                for words in named:
                    pipeline.execute_command(*words)
                answers: list[Reply] = pipeline.execute(raise_on_error=False)
            return answers
        given = {"target_nodes": node} if node else {}
        try:
            return [self.client.execute_command(*named[0], **given)]
        except exceptions.ResponseError as error:
            return [error]

    def nodes(self) -> Sequence[Any]:
        return sorted(self.client.get_primaries(), key=lambda node: str(node.name))

    def close(self) -> None:
        if "client" in vars(self):
            self.client.close()


Link: TypeAlias = Server | Cluster


def exchange(
    link: Link, commands: Sequence[Command], node: Any = None, *, first: bool = False
) -> list[Reply]:
    """Return the answer to each command, giving the server the scripts that it does not know.

    A ``node`` of a Cluster is asked for one that has no key. ``first``: nothing comes before this one.
    """
    if not commands:
        return []
    if link.before_first is not None and not first:
        link.before_first()
    try:
        answers = link.exchange(commands, node)
        for n, answer in enumerate(answers):
            if isinstance(answer, exceptions.NoScriptError):
                _, digest, *rest = commands[n]
                (answers[n],) = link.exchange([(b"EVAL", SOURCES[digest], *rest)])
    except _ERRORS as error:
        raise trouble(error, link.where) from error
    for answer in answers:
        if isinstance(answer, Exception):
            raise trouble(answer, link.where) from answer
    return answers


_LOGIN_ERRORS = (exceptions.AuthenticationError, exceptions.AuthorizationError)
_CUT = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)
_SILENT = (*_CUT, exceptions.ClusterError, exceptions.RedisClusterException)
_ERRORS = (exceptions.RedisError, *_SILENT)
#: Errors that may be gone at the next try: by redis-py's class, or a word at the start of the message or, before
#: Redis 7, in the middle of a script's.
_TRANSIENT = re.compile(
    r"^(Moved|Ask|MasterDown|ClusterDown|TryAgain|ReadOnly|OutOfMemory)Error"
    r"|(^\w+ |: -)(MOVED|ASK|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|READONLY|OOM"
    r"|LOADING|BUSY|MISCONF|NOREPLICAS|UNBLOCKED)\b"
)


def trouble(error: Exception, where: str) -> StoreUnavailable | StoreMisconfigured:
    """Return the store's error for one of redis-py: StoreUnavailable if another try may help."""
    cause: BaseException | None = error
    while isinstance(cause, exceptions.RedisClusterException):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, (exceptions.ResponseError, *_LOGIN_ERRORS)):
        error = cause
    text = str(error).rstrip(".")
    if isinstance(error, _LOGIN_ERRORS):
        return StoreMisconfigured(f"{where} refused us: {text}. Check user and password.")
    if isinstance(error, _SILENT):
        return StoreUnavailable(f"{where} did not answer: {error}")
    if isinstance(error, exceptions.NoPermissionError) or "can't run this command" in text:
        return StoreMisconfigured(f"{where} refused us: {text}. Give the user the rights.")
    if _TRANSIENT.search(f"{type(error).__name__} {text}"):
        return StoreUnavailable(f"{where} cannot serve us at the moment: {error}")
    return StoreMisconfigured(f"{where} answered: {error}")


def pairs(reply: Reply) -> list[tuple[Reply, Reply]]:
    """Return the pairs of an answer: a flat list by RESP2, a map or pairs by RESP3 and in a Cluster."""
    if isinstance(reply, dict):
        return list(reply.items())
    if reply and isinstance(reply[0], (list, tuple)):
        return [(first, second) for first, second in reply]
    return list(zip(reply[::2], reply[1::2], strict=True))


def facts_of(link: Link, node: Any) -> ServerFacts:
    """Read the facts of a server; a hosted one often refuses ``CONFIG``."""
    (info,) = exchange(link, [(b"INFO",)], node)
    if isinstance(info, bytes):  # else read by redis-py's client
        lines = info.decode(errors="replace").splitlines()
        info = dict(line.split(":", 1) for line in lines if ":" in line)
    read = {name: str(value).strip() for name, value in info.items()}
    kind, version = "Redis", read.get("redis_version", "0")
    if "valkey_version" in read:
        kind, version = "Valkey", read["valkey_version"]
    persistent = True if read.get("aof_enabled") == "1" else None
    if not persistent:
        with contextlib.suppress(StoreUnavailable, StoreMisconfigured):
            (saves,) = exchange(link, [(b"CONFIG", b"GET", b"save")], node)
            persistent = any(value for _, value in pairs(saves)) if saves else None
    eviction = read.get("maxmemory_policy", "unknown")
    memory = f"{read.get('used_memory_human')} of {read.get('maxmemory_human')}"
    about = {"kind": kind, "version": version, "eviction": eviction, "memory": memory}
    return ServerFacts(**about, persistent=persistent)


_Given: TypeAlias = dict[str, Any]

#: A task that fails can be tried again, one that hangs cannot. A URL's query may set other timeouts.
_DEFAULTS = {"socket_timeout": 5.0, "socket_connect_timeout": 2.0, "protocol": 2}


def link_and_prefix(url: str, options: Mapping[str, Any]) -> tuple[Link, str]:
    """Return the link of a URL, not yet connected, and its prefix.

    ::

        redis://:secret@cache:6379/1?prefix=shop      one server; keys begin with "shop"; rediss:// and unix:// likewise
        redis+cluster://node1:7000,node2:7000         a Cluster, found by any node that answers
        sentinel://s1:26379;s2:26379/mymaster/1       whichever server the Sentinels call the master now

    redis-py reads the rest of the query, which wins over ``options``, arguments of its connections.
    """
    address, _, text = url.partition("?")
    scheme = address.partition("://")[0]
    query = dict(parse_qsl(text, keep_blank_values=True))
    prefix = query.pop("prefix", "idem")
    query.pop("decode_responses", None)
    if "ssl_cert_reqs" in query:  # CERT_NONE, as Celery writes it
        query["ssl_cert_reqs"] = query["ssl_cert_reqs"].removeprefix("CERT_").lower()
    kind = {"sentinel": _sentinel, "redis+cluster": _cluster, "rediss+cluster": _cluster}
    try:
        return kind.get(scheme, _server)(address, query, options), prefix
    except (TypeError, exceptions.RedisError) as error:
        raise InvalidOption(
            f"the idempotency store's {scheme}:// URL asks for what redis-py does not know: {error}"
        ) from error
    except ValueError:
        # Shows nothing of the URL: an unquoted '#' or '/' in a password makes the rest of it look like a port.
        raise InvalidOption(
            f"the idempotency store's {scheme}:// URL cannot be read: check hosts, ports, database (a Cluster has only"
            " number 0) and master name, and percent-encode special characters in the password"
        ) from None


def _server(address: str, query: dict[str, str], options: Mapping[str, Any]) -> Link:
    pool = ConnectionPool(**_arguments(address, query, options))
    given = pool.connection_kwargs
    where = given.get("path") or f"{given.get('host', 'localhost')}:{given.get('port', 6379)}"
    return Server(pool, f"Redis at {where}")


def _cluster(address: str, query: dict[str, str], options: Mapping[str, Any]) -> Link:
    scheme, user, hosts, path = _parts(address)
    given = _without_host(_arguments(f"{scheme}://{user}{hosts[0]}{path}", query, options))
    if given.pop("db", 0):
        raise ValueError
    nodes = [ClusterNode(*_host_and_port(host, 6379)) for host in hosts]  # type: ignore[no-untyped-call]
    # Follows a Cluster's changes for about half a second; a failover takes longer, and is left to the caller.
    retry = Retry(ExponentialBackoff(cap=0.2, base=0.02), 5)
    connect = partial(RedisCluster, startup_nodes=nodes, retry=retry, **given)
    return Cluster(connect, f"Redis Cluster at {','.join(hosts)}")


def _sentinel(address: str, query: dict[str, str], options: Mapping[str, Any]) -> Link:
    _, user, hosts, path = _parts(address)
    name, _, db = path.strip("/").partition("/")
    if not name:
        raise ValueError
    scheme = "rediss" if query.pop("ssl", "").lower() in {"1", "true", "yes"} else "redis"
    names = [each for each in query if each.startswith("sentinel_")]
    own = {each.removeprefix("sentinel_"): query.pop(each) for each in names}
    masters = _without_host(_arguments(f"{scheme}://{user}localhost/{db}", query, options))
    # With the timeouts and certificates of the masters, but a user and a password of their own.
    shared = {k: v for k, v in masters.items() if k.startswith(("socket_", "ssl_"))}
    watchers = _without_host(_arguments(f"{scheme}://localhost", own, shared))
    # A Sentinel that is down is not tried again: there are others.
    watchers["retry"] = Retry(NoBackoff(), 0)
    addresses = [_host_and_port(host, 26379) for host in hosts]
    sentinels = Sentinel(addresses, sentinel_kwargs=watchers)  # type: ignore[no-untyped-call]
    pool = SentinelConnectionPool(name, sentinels, **masters)  # type: ignore[no-untyped-call]
    return Server(pool, f"Redis master {name} of Sentinel at {';'.join(hosts)}")


def _arguments(address: str, query: Mapping[str, str], options: Mapping[str, Any]) -> _Given:
    url = f"{address}?{urlencode(query)}"
    given: _Given = {**_DEFAULTS, **options, **parse_url(url)}  # type: ignore[no-untyped-call]
    pool = ConnectionPool(**given)
    pool.connection_class(**pool.connection_kwargs)  # refuses unknown options
    return given


def _without_host(given: _Given) -> _Given:
    is_tls = given.pop("connection_class", None) is redis.SSLConnection
    shared = {name: value for name, value in given.items() if name not in ("host", "port")}
    return shared | ({"ssl": True} if is_tls else {})


def _parts(address: str) -> tuple[str, str, list[str], str]:
    """Split ``scheme://user:password@host;host/path``; user and path keep their ``@`` and ``/``."""
    scheme, _, rest = address.partition("://")
    authority, slash, path = rest.partition("/")
    user, at, hosts = authority.rpartition("@")
    found = [host for host in hosts.replace(";", ",").split(",") if host]
    if not found:
        raise ValueError
    return scheme.removesuffix("+cluster"), user + at, found, slash + path


def _host_and_port(host: str, default_port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{host}")
    if not parts.hostname:
        raise ValueError
    return parts.hostname, parts.port or default_port
