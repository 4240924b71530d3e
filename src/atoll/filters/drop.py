"""Tensors that stay at the site: the server gets no change of them."""

from __future__ import annotations

from fnmatch import fnmatchcase

from atoll.errors import UsageError
from atoll.filters.base import Filter, Outgoing
from atoll.registry import nearest
from atoll.tensors.schema import TensorSpec


class Drop(Filter):
    """Send no change of the tensors whose names match.

    The mean counts this site's change of them as zero. What the site itself has trained in them is overwritten when the
    next version is loaded.

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
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name in update.tensors):
                raise UsageError(
                    f"{self!r}: no tensor of the model is called {pattern!r}; nothing was sent.",
                    nearest(pattern, update.tensors, "Print the names with `[name for name in model.state_dict()]`."),
                )

    def keeps(self, spec: TensorSpec) -> bool:
        return not any(fnmatchcase(spec.name, pattern) for pattern in self.patterns)
