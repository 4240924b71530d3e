"""A model that a user gives, held against the schema of the run."""

from __future__ import annotations

from torch import Tensor, nn

from atoll.tensors.module_tensors import Tensors, fits, named_tensors, schema_of, unwrapped
from atoll.worker.session.session import Session


def matching(session: Session, model: nn.Module | Tensors) -> dict[str, Tensor]:
    """The model's own tensors by name, after its schema was found to be the run's."""
    schema = session.schema.model
    tensors = fits(model, schema)
    if tensors is not None:
        return tensors
    if not isinstance(model, nn.Module):
        # a mapping cannot say which of its tensors are buffers, nor which are tied: what the run knows is taken over
        model = unwrapped(model, {spec.name for spec in schema.tensors} | {name for name, _ in schema.aliases})
        groups = {spec.name: spec.group for spec in schema.tensors}
        tied = dict(schema.aliases)
        tensors = {name: tensor for name, tensor in named_tensors(model)[0].items() if name not in tied}
        mine = schema_of(tensors)
        mine = type(mine).build(
            [type(spec)(spec.name, spec.dtype, spec.shape, groups.get(spec.name, spec.group)) for spec in mine.tensors],
            tied,
        )
    else:
        tensors, mine = named_tensors(model)[0], schema_of(model)
    mine.require_equal(schema, mine=f"worker {session.site}", theirs="the server")
    return tensors
