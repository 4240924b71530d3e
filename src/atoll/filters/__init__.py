"""What a site does to its update before any byte of it leaves, and the server before it aggregates.

atoll.join(server, site, filters=[Drop("head.*"), NormClip(1.0, noise=0.5)])
atoll.Server(model, filters={"clinic-a": [NormClip(10.0)]})
"""

from atoll.filters.base import About, Filter, Outgoing
from atoll.filters.builtin import Cast, Drop, NormClip

__all__ = ["About", "Cast", "Drop", "Filter", "NormClip", "Outgoing"]
