"""Aggregators that users write, and the process that runs them.

values.py    what an aggregator is given, and what it may be
result.py    what it gives: checked, and written as one update of `params`
channel.py   messages and open files between the server and that process
child.py     that process
"""

from atoll.aggregation.custom.values import Update

__all__ = ["Update"]
