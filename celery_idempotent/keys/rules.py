"""From a call to its identity: its key, its scope and the fingerprint of its arguments.

A key has one canonical text, which no other key shares, and which is the same before and after the broker. Its
beginning shows where the key comes from:

=================  ===============================================================================
``order-17``       a str as it is, unless it could be mistaken for one of the forms below
``17``             an int
``"17"``           a str that is the text of an int, or begins with ``"``, ``[``, ``*`` or ``@``
``["a",17]``       several values
``*0123...``       the digest of all arguments (:data:`ALL_ARGUMENTS`)
``@<task id>``     no key was given: the task id
=================  ===============================================================================
"""

from __future__ import annotations

import hashlib
import inspect
import re
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from json.encoder import encode_basestring
from typing import Any, TypeAlias

from celery_idempotent.errors import InvalidKey, KeyMissing, bad_option
from celery_idempotent.keys import arguments
from celery_idempotent.keys.arguments import ALL_ARGUMENTS, AllArguments, Given
from celery_idempotent.keys.fingerprints import NoFormError, fingerprint_of, form, quote
from celery_idempotent.keys.stamp import MAX_CHARS, Identified, is_text
from celery_idempotent.records import Identity

_MISTAKABLE = re.compile(r'-?[0-9]+\Z|["\[*@~]')
#: A str in ASCII that is its own canonical text.
_CANONICAL = re.compile(rf"(?!-?[0-9]+\Z)[A-Za-z0-9_.:/-][ -~]{{0,{MAX_CHARS - 1}}}")
_NESTED_ID = re.compile(r"\+[0-9]+\Z")


def canonical(value: object, *, what: str = "key", task: str) -> str:
    """Return the canonical text of a raw key or scope; raise ``InvalidKey``, without the value, for a bad one."""
    if type(value) is str and _CANONICAL.fullmatch(value):
        return value
    try:
        text = _text(value)
        if text in ("", "[]"):
            raise ValueError("is empty")
        if what == "scope" and _has_blank(value):
            raise ValueError("has an empty part")
        if len(text) > MAX_CHARS:
            written = " as JSON" if text[0] in '["' else ""
            raise ValueError(f"has {len(text)} characters{written}, and {MAX_CHARS} are allowed")
    except ValueError as refused:
        raise InvalidKey(f"The idempotency {what} of task {task} {refused}.") from None
    except RecursionError:
        raise InvalidKey(f"The idempotency {what} of task {task} contains itself.") from None
    return text


def _has_blank(scope: object) -> bool:
    """Is a part of it empty? All whose part is empty would share their results."""
    if isinstance(scope, (tuple, list)):
        return not scope or any(map(_has_blank, scope))
    return scope == ""


def _text(value: object, *, nested: bool = False) -> str:
    """Return the text of a raw key; a nested value is written as JSON."""
    if isinstance(value, uuid.UUID):
        value = str(value)
    if isinstance(value, str):
        if not value.isprintable():
            raise ValueError("has characters that are not printable")
        plain = str.__str__(value)
        return encode_basestring(plain) if nested or _MISTAKABLE.match(plain) else plain
    if isinstance(value, int) and not isinstance(value, bool):
        return int.__repr__(value)
    if isinstance(value, (tuple, list)):
        return f"[{','.join([_text(part, nested=True) for part in value])}]"
    raise ValueError(
        f"must be a str, int or UUID, or a tuple of these, not {arguments.type_name(value)}"
    )


def task_id_key(task_id: str, nesting: int = 0) -> str:
    """Return the key of a call without one: its task id, and how often the task was replaced."""
    text = f"@{task_id}"
    if nesting or _NESTED_ID.search(text):
        text = f"{text}+{nesting}"
    if is_text(text):
        return text
    return f"@@{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"


#: Puts models in the place of their dumps.
Validate: TypeAlias = Callable[[Any, Any], tuple[Any, Any]]


class Identifier:
    """The rules for keys, scopes and fingerprints of a task's calls, compiled once from its options.

    Raises:
        InvalidOption: if an option cannot be used with this task, whose ``signature`` has no ``self``.
    """

    def __init__(
        self,
        task_name: str,
        signature: inspect.Signature,
        *,
        key: object = None,
        scope: object = None,
        namespace: str | None = None,
        fingerprint: object = ALL_ARGUMENTS,
        validate: Validate | None = None,
    ) -> None:
        self.task_name, self._validate = task_name, validate
        self.namespace = task_name if namespace is None else namespace
        self._parameters = parameters = arguments.Parameters(signature)
        if not is_text(self.namespace):
            problem = f"must be 1 to {MAX_CHARS} printable characters"
            remedy = "Leave it out for the name of the task."
            where = f"task {task_name}"
            raise bad_option("idempotency_namespace", where, namespace, problem, remedy)
        compiled = partial(arguments.compile_rule, parameters=parameters, task=task_name)
        scope_rule = compiled(scope, what="idempotency_scope")
        if isinstance(scope_rule, AllArguments):
            problem = "must be names of arguments, a function of them, or None"
            raise bad_option("idempotency_scope", f"task {task_name}", scope, problem)
        self._scope = scope_rule
        self._key = compiled(key, what="idempotency_key")
        self._fingerprint = compiled(fingerprint, what="idempotency_fingerprint")
        self._default_forms: dict[str, str] = {}
        for name, default in parameters.defaults.items():
            with suppress(NoFormError):
                self._default_forms[name] = form(default)

    def identity(self, key: object, scope: object = None) -> Identity:
        """Return the identity of a raw key and scope; raise :exc:`InvalidKey` as :func:`canonical`."""
        return self._identity(canonical(key, task=self.task_name), scope)

    def identify(
        self,
        args: Any,
        kwargs: Any,
        *,
        task_id: str,
        nesting: int = 0,
        key: object = None,
        scope: object = None,
    ) -> Identified:
        """Return the identity and fingerprint of a call, of which ``key`` and ``scope`` are part.

        Arguments that do not fit the signature give no key: the task will raise TypeError.

        Raises:
            KeyMissing: if an argument that ``idempotency_key`` names is missing or None.
            InvalidKey: if key or scope cannot be used, or an argument has no canonical form.
        """
        if self._validate is not None:
            args, kwargs = self._validate(args, kwargs)
        given, rule = self._parameters.bind(args, kwargs), self._key
        if given is not None:
            if scope is None and self._scope is not None:
                scope = self._scope.read(given)
            if key is None and rule is not None:
                if rule is ALL_ARGUMENTS:
                    digest = self._digest(given, "idempotency_key").hex()
                    return Identified(self._identity(f"*{digest}", scope))
                key = rule.read(given)
                if key is None and rule.function is None:
                    names = [text for text, value in rule.values(given).items() if value is None]
                    raise KeyMissing(
                        f"The idempotency key of task {self.task_name} is read from {', '.join(names)}, which this "
                        "call leaves out or passes as None: pass it, or idempotency_key with the call. A function as "
                        "the task's idempotency_key may return None: then the call is guarded by its task id."
                    )
        if key is None:
            return Identified(self._identity(task_id_key(task_id, nesting), scope))
        identity = self._identity(canonical(key, task=self.task_name), scope)
        return Identified(identity, self._fingerprint_of(given, args, kwargs))

    def by_task_id(self, task_id: str) -> Identified:
        """Return the identity of a call without a usable key."""
        return Identified(Identity(namespace=self.namespace, scope="", key=task_id_key(task_id)))

    def _identity(self, key: str, scope: object) -> Identity:
        text = "" if scope is None else canonical(scope, what="scope", task=self.task_name)
        return Identity(namespace=self.namespace, scope=text, key=key)

    def _fingerprint_of(self, given: Given | None, args: Any, kwargs: Any) -> bytes | None:
        rule = self._fingerprint
        if rule is None:
            return None
        counted: Mapping[str, object]
        if given is None:  # never equal to the fingerprint of a call that fits the signature
            counted = {"*args, **kwargs": [[*(args or ())], kwargs]}
        elif rule is ALL_ARGUMENTS:
            counted = given
        elif rule.function is None:
            counted = rule.values(given)
        else:
            counted = {"(the result)": rule.read(given)}
            if counted["(the result)"] is None:
                return None
        return self._digest(counted, "idempotency_fingerprint")

    def _digest(self, counted: Mapping[str, object], what: str) -> bytes:
        """Return the digest of the values that are not defaults: a deploy may add a parameter with one."""
        defaults, parts = self._parameters.defaults, []
        for name in sorted(counted):
            value = counted[name]
            if name in defaults and value is defaults[name]:
                continue
            try:
                text = form(value)
            except NoFormError as refused:
                problem = str(refused)
                break
            if text != self._default_forms.get(name):
                parts.append(f"{quote(name)}:{text}")
        else:
            return fingerprint_of(f"{{{','.join(parts)}}}")
        # Outside of the handler: the error of a model that cannot be dumped would show its values.
        raise InvalidKey(
            f"{what} of task {self.task_name} cannot include argument {name}: {problem}. "
            f"Set {what} to the names of the arguments that count, or to a function of them"
            + (", or to None." if what == "idempotency_fingerprint" else ".")
        )
