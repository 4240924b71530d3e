"""Error feedback: what encoding an update has lost stays at the worker and is added to its next update.

    g = Δ + e        sent: C(g)        e ← g − dec(C(g)), once the update was counted

So over rounds what the server decodes adds up to what was trained, but for the last e (Karimireddy et al., arXiv
1901.09847, algorithm 2). e is kept in the dtype of accumulation, one tensor for each parameter.
"""

from __future__ import annotations

from pathlib import Path

from atoll.tensors.dtypes import accumulate_dtype, dtype_name
from atoll.tensors.schema import PARAMS, Schema, TensorSpec
from atoll.worker.exchange.local_state import UNTOLD, Owner, Turns
from atoll.worker.log_lines import LOG


class Residuals(Turns):
    """e of one site in one run; zero where nothing is kept.

    Args:
        folder: of the site in the run; locked by the caller.
        schema: of what is trained together.
        name: of the files.
        owner: as `Turns` has it.
        sparse: whether only one rank's share is kept here.
    """

    def __init__(
        self,
        folder: Path,
        schema: Schema,
        name: str = "residual",
        *,
        owner: Owner = UNTOLD,
        sparse: bool = False,
    ) -> None:
        super().__init__(
            folder,
            name,
            (
                TensorSpec(spec.name, dtype_name(accumulate_dtype(spec.dtype)), spec.shape)
                for spec in schema.tensors
                if spec.group == PARAMS
            ),
            owner=owner,
            sparse=sparse,
        )
        if not self.found:
            self.zero()

    def follow(self, version: int, site: str) -> None:
        """An update against this version is about to be formed: what belongs to a later one is of no use.

        A server that was restored, or fell back, goes on from a version before the last update that counted.
        """
        if self.note.version >= version:
            LOG.warning(
                "%s: the server went back to version %d: what compression had left over is dropped", site, version
            )
            self.zero()
