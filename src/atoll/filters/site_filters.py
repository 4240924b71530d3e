"""The filters of a site's policy, which every update, answer and object passes after the script's own filters."""

from __future__ import annotations

from atoll.config.site_policy import Policy, allows
from atoll.errors import UsageError
from atoll.filters.base import Filter, Outgoing
from atoll.filters.builtin import NormClip
from atoll.tensors.schema import TensorSpec


class Allowed(Filter):
    """Leaves out the tensors that the policy drops, and refuses those that it does not allow.

    Unlike in `Drop`, a pattern may match nothing: a policy is for many runs.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def __repr__(self) -> str:
        rules = self._policy.tensors
        return f"Allowed(allow={list(rules.allow)}, drop={list(rules.drop)})"

    def begin(self, update: Outgoing) -> None:
        """Refuse a tensor that is neither allowed nor dropped.

        Raises:
            UsageError: there is such a tensor. The message names it, and the line of the policy.
        """
        rules = self._policy.tensors
        for name in (*update.tensors, *update.aliases):
            if not allows(rules.drop, name) and not allows(rules.allow, name):
                error = self._policy.refusal("tensors.allow", f"the tensor {name!r} is neither allowed nor dropped")
                raise UsageError(error.message, error.remedy)

    def keeps(self, spec: TensorSpec) -> bool:
        """Return False if the policy drops the tensor."""
        return not allows(self._policy.tensors.drop, spec.name)


def site_filters(policy: Policy | None) -> tuple[Filter, ...]:
    """Return new filters of a policy, in order; none without a policy, or if it has no rules for tensors."""
    if policy is None:
        return ()
    rules, found = policy.tensors, list[Filter]()
    if rules.drop or rules.allow != ("*",):
        found.append(Allowed(policy))
    if rules.max_norm is not None:
        found.append(NormClip(rules.max_norm, rules.noise))
    return tuple(found)
