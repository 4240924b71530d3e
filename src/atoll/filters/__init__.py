"""Filters: code that changes updates and the payloads of tasks, at a site or at the server.

atoll.join(server, site, filters=[Drop("head.*"), NormClip(1.0, noise=0.5)])
atoll.Server(model, filters={"clinic-a": [NormClip(10.0)]})
"""

from atoll.filters.base import About, Filter, Outgoing
from atoll.filters.builtin import Cast, Drop, NormClip
from atoll.tensors.chunks import CHUNK_ELEMENTS

__all__ = ["CHUNK_ELEMENTS", "About", "Cast", "Drop", "Filter", "NormClip", "Outgoing"]
