"""Which operation a call of a task is, also while a deploy changes how its keys are made.

A task whose key, scope or namespace changes has two sets of rules for a while: the new ones, and in the options
``idempotency_key_before``, ``idempotency_scope_before`` and ``idempotency_namespace_before`` the old ones. Publishers
and workers of both versions are at work meanwhile, and each worker has to find the key by which the others know the
call::

    publisher   stamp of its message           an old worker uses   a new worker uses
    old         {old key}                      the old key          both: it computes the new one from the arguments
    new         {old key, next: {new key}}     the old key          both
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from celery_idempotent.errors import InvalidKey
from celery_idempotent.identity.identified import Identified
from celery_idempotent.identity.keys import About, KeyRules

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Identifier(KeyRules):
    """The rules of a task and, in ``old_rules``, the old ones while a deploy changes some of them.

    The keyword arguments are those of :class:`KeyRules`, and the same with ``_before`` for what changed.

    Raises:
        InvalidOption: if an option cannot be used with this task.
    """

    def __init__(
        self,
        task_name: str,
        signature: inspect.Signature,
        **options: Any,
    ) -> None:
        changed = {
            name.removesuffix("_before"): options.pop(name)
            for name in tuple(options)
            if name.endswith("_before")
        }
        self.old_rules: KeyRules | None = None
        if changed:
            of_old = {**options, **changed}
            self.old_rules = KeyRules(task_name, signature, **of_old, suffix="_before")
        super().__init__(task_name, signature, **options)

    def identify(
        self,
        args: Sequence[object] | None,
        kwargs: Mapping[str, object] | None,
        **about: Unpack[About],
    ) -> Identified:
        """Return the identity by the new rules, and in ``old`` that by the old ones where it differs."""
        identified = super().identify(args, kwargs, **about)
        if self.old_rules is None:
            return identified
        try:
            old = self.old_rules.identify(args, kwargs, **about)
        except InvalidKey:
            return identified  # the old rules refused this call, so no old worker runs it
        same = old.identity == identified.identity
        return identified if same else replace(identified, old=old)

    def from_stamp(
        self,
        header: object,
        args: Sequence[object] | None,
        kwargs: Mapping[str, object] | None,
        **about: Unpack[About],
    ) -> Identified | None:
        """Return what a message's stamp says to this task, ``None`` if it says nothing about the key.

        The publisher may know older rules than this task, the same, or newer ones. Which they were shows by comparison
        with the keys that this task computes from the arguments (``about`` is what :meth:`identify` takes)::

            in the stamp    this task computes    the call is    since
            K               has no old rules      K              nothing changes here
            K               L, old key K          L, old key K   the publisher has the old rules
            K, next L       L, old key K          L, old key K   both have the new rules
            K, next L       K, no old rules       K              this worker is an old one
            K               M, old key N          K              the call gave its key, or is a retry with new arguments

        Raises:
            InvalidKey: if it is malformed. It came over the network: anything may be in it.
        """
        first = Identified.from_header(header, self.namespace)
        next_header = header.get("next") if isinstance(header, Mapping) else None
        if first is None or (self.old_rules is None and next_header is None):
            return first
        following = Identified.from_header(next_header, self.namespace)
        try:
            computed = self.identify(args, kwargs, **about)
        except InvalidKey:
            # The call gave the key, or the arguments are those of a retry: the stamp alone has it.
            if self.old_rules is None:
                return first
            return self.renamed(first) if following is None else self._replacing(first, following)
        if following is not None and self._has_rules_of(following, first, computed):
            if computed.same_key(following):
                return _as_stamped(computed, following.fingerprint, first.fingerprint)
            return following if self.old_rules is None else self._replacing(first, following)
        if self.old_rules is None:
            return first
        if computed.same_key(first):
            return _as_stamped(computed, first.fingerprint, first.fingerprint)
        if computed.old is not None and computed.old.same_key(first):
            known = first.fingerprint
            return _as_stamped(computed, computed.fingerprint if known is None else known, known)
        # No rule made this key: it was given with the call, or is that of a retry's first message, with other
        # arguments.
        return self.renamed(first)

    def renamed(self, identified: Identified) -> Identified:
        """Return the same key, and in ``old`` the one in the old namespace, if that was another."""
        if self.old_rules is None or self.old_rules.namespace == self.namespace:
            return identified
        return replace(identified, old=self._in_old_namespace(identified))

    def _replacing(self, old: Identified, new: Identified) -> Identified:
        """Return the new key of a stamp, and in ``old`` its old one."""
        return replace(new, old=self._in_old_namespace(old))

    def _in_old_namespace(self, identified: Identified) -> Identified:
        """Return the same key in the old namespace."""
        assert self.old_rules is not None
        old = replace(identified.identity, namespace=self.old_rules.namespace)
        return Identified(old, identified.fingerprint)

    def _has_rules_of(self, new: Identified, old: Identified, computed: Identified) -> bool:
        """Does this task have the rules by which the publisher of a message made the ``new`` key of its stamp?

        Only what differs between the two keys of the stamp decides: a key or scope that was given with the call is the
        same in both. Where the arguments are others (a retry's), neither key can be computed from them; then a task
        that has old rules is taken for a new one.
        """
        ours, of_new, of_old = (
            (each.identity.key, each.identity.scope) for each in (computed, new, old)
        )
        changed = [n for n in range(2) if of_new[n] != of_old[n]]
        if all(ours[n] == of_new[n] for n in changed):
            return True
        return self.old_rules is not None and any(ours[n] != of_old[n] for n in changed)


def _as_stamped(
    computed: Identified, fingerprint: bytes | None, old_fingerprint: bytes | None
) -> Identified:
    """Return what was computed with the fingerprints of the first message: a retry may have other arguments."""
    old = computed.old
    if old is not None:
        old = replace(old, fingerprint=old_fingerprint)
    return replace(computed, fingerprint=fingerprint, old=old)
