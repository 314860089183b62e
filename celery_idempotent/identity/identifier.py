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
    """The rules of a task and, in ``before``, the old rules while a deploy changes some of them.

    The keyword arguments are those of :class:`KeyRules`, and the same with ``_before`` for what changed.

    Raises:
        InvalidOption: if an option cannot be used with this task.
    """

    def __init__(
        self,
        task_name: str,
        signature: inspect.Signature,
        *,
        require_key: bool = False,
        **options: Any,
    ) -> None:
        changed = {
            name.removesuffix("_before"): options.pop(name)
            for name in tuple(options)
            if name.endswith("_before")
        }
        self.before: KeyRules | None = None
        if changed:
            self.before = KeyRules(task_name, signature, **{**options, **changed}, suffix="_before")
        super().__init__(task_name, signature, **options, require_key=require_key)

    def identify(
        self,
        args: Sequence[object] | None,
        kwargs: Mapping[str, object] | None,
        **about: Unpack[About],
    ) -> Identified:
        """Return the identity by the new rules, and in ``before`` that by the old ones where it differs."""
        identified = super().identify(args, kwargs, **about)
        if self.before is None:
            return identified
        try:
            before = self.before.identify(args, kwargs, **about)
        except InvalidKey:
            return identified  # the old rules refused this call, so no old worker runs it
        same = before.identity == identified.identity
        return identified if same else replace(identified, before=before)

    def stamped(
        self,
        header: object,
        args: Sequence[object] | None,
        kwargs: Mapping[str, object] | None,
        **about: Unpack[About],
    ) -> Identified | None:
        """Return what a message's stamp says to this task, ``None`` if it says nothing about the key.

        The publisher may know older rules than this task, the same, or newer ones. Which they were shows by comparison
        with the keys that this task computes from the arguments. ``about`` is what :meth:`identify` takes.

        Raises:
            InvalidKey: if it is malformed. It came over the network: anything may be in it.
        """
        stamped = Identified.from_header(header, self.namespace)
        following = header.get("next") if isinstance(header, Mapping) else None
        if stamped is None or (self.before is None and following is None):
            return stamped
        coming = Identified.from_header(following, self.namespace)
        try:
            computed = self.identify(args, kwargs, **about)
        except InvalidKey:
            # The call gave the key, or the arguments are those of a retry: the stamp alone has it.
            if self.before is None:
                return stamped
            return self.renamed(stamped) if coming is None else self._after(coming, stamped)
        if coming is not None and self._follows(computed, coming, stamped):
            if computed.same_key(coming):
                return _as_stamped(computed, coming.fingerprint, stamped.fingerprint)
            return coming if self.before is None else self._after(coming, stamped)
        if self.before is None:
            return stamped
        if computed.same_key(stamped):
            return _as_stamped(computed, stamped.fingerprint, stamped.fingerprint)
        if computed.before is not None and computed.before.same_key(stamped):
            known = stamped.fingerprint
            return _as_stamped(computed, computed.fingerprint if known is None else known, known)
        # No rule made this key: it was given with the call, or is that of a retry's first message, with other
        # arguments.
        return self.renamed(stamped)

    def renamed(self, identified: Identified) -> Identified:
        """Return the same key, and in ``before`` its record in the old namespace, if that was another."""
        if self.before is None or self.before.namespace == self.namespace:
            return identified
        return replace(identified, before=self._of_before(identified))

    def _after(self, coming: Identified, stamped: Identified) -> Identified:
        """Return the key that a stamp names as the next one, and in ``before`` the one that it names first."""
        return replace(coming, before=self._of_before(stamped))

    def _of_before(self, identified: Identified) -> Identified:
        """Return the same key in the old namespace."""
        assert self.before is not None
        old = replace(identified.identity, namespace=self.before.namespace)
        return Identified(old, identified.fingerprint)

    def _follows(self, computed: Identified, coming: Identified, stamped: Identified) -> bool:
        """Does this task have the rules that the publisher of a message named as the next ones?

        Only what differs between the two keys of the stamp decides: a key or scope that was given with the call is the
        same in both. Where the arguments are others (a retry's), neither key can be computed from them; then a task
        that has old rules is taken for a new one.
        """
        ours, new, old = (
            (each.identity.key, each.identity.scope) for each in (computed, coming, stamped)
        )
        changed = [n for n in range(2) if new[n] != old[n]]
        if all(ours[n] == new[n] for n in changed):
            return True
        return self.before is not None and any(ours[n] != old[n] for n in changed)


def _as_stamped(
    computed: Identified, fingerprint: bytes | None, fingerprint_before: bytes | None
) -> Identified:
    """Return what was computed with the fingerprints of the first message: a retry may have other arguments."""
    before = computed.before
    if before is not None:
        before = replace(before, fingerprint=fingerprint_before)
    return replace(computed, fingerprint=fingerprint, before=before)
