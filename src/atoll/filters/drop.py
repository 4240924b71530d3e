"""Tensors that stay where they are: the other side gets nothing of them."""

from __future__ import annotations

from fnmatch import fnmatchcase

from atoll.errors import UsageError
from atoll.filters.base import Filter, Outgoing
from atoll.registry import nearest
from atoll.tensors.schema import TensorSpec


class Drop(Filter):
    """Send no change of, or in tasks none of, the tensors whose names match.

    The mean counts this site's change of them as zero. What the site itself has trained in them is overwritten when the
    next version is loaded. The payload of a task has None in their places.

    Args:
        patterns: names, or patterns as a shell has them: `"head.*"`, `"*.running_mean"`.
    """

    def __init__(self, *patterns: str) -> None:
        if not patterns:
            raise UsageError("Drop() names no tensor.", 'Give it names or patterns: Drop("head.*").')
        self.patterns = patterns

    def __repr__(self) -> str:
        return f"Drop({', '.join(map(repr, self.patterns))})"

    def begin(self, update: Outgoing) -> None:
        """Refuse a pattern that is nobody's name: what it was to hold back would leave.

        Raises:
            UsageError: naming it.
        """
        what, remedy = "model", "Print the names with `[name for name in model.state_dict()]`."
        if update.about.task:
            what, remedy = "payload", "A tensor is called by its path in the payload, as in 'model.w'."
        names = [*update.tensors, *update.aliases, *update.model]
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UsageError(
                    f"{self!r}: no tensor of the {what} is called {pattern!r}; nothing was sent.",
                    nearest(pattern, names, remedy),
                )

    def keeps(self, spec: TensorSpec) -> bool:
        return not any(fnmatchcase(spec.name, pattern) for pattern in self.patterns)
