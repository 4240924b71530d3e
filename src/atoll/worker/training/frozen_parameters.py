"""Says once that parameters travel which a site does not train."""

from __future__ import annotations

from torch import nn

from atoll.format_text import size
from atoll.tensors.module_tensors import named_parameters
from atoll.worker.session.session import OF_FROZEN, Session

LEAST_SHARE = 0.1
"""Share of the model's bytes from which on frozen parameters are worth a warning."""


def say_frozen(session: Session, model: object) -> None:
    """Warn, once for each worker, if a large share of what travels each round is parameters without a gradient.

    Args:
        session: the worker's place in the run.
        model: what the script trains; nothing is known of the parameters if it is not a module.
    """
    if not isinstance(model, nn.Module) or not session.is_first(OF_FROZEN):
        return
    schema, parameters = session.schema.model, named_parameters(model)
    sent = [spec for spec in schema.tensors if spec.name not in schema.kept]
    frozen = [each for each in sent if each.name in parameters and not parameters[each.name].requires_grad]
    frozen_bytes, total_bytes = (sum(each.nbytes for each in specs) for specs in (frozen, sent))
    if frozen_bytes < max(1, LEAST_SHARE * total_bytes):
        return
    session.report(
        OF_FROZEN,
        f"{size(frozen_bytes)} of the {size(total_bytes)} that travel each way in a round are parameters that this "
        f"site does not train (requires_grad is False), such as {frozen[0].name}. If no site trains them, give Atoll "
        "only the trained ones, as atoll.integrations.peft does with adapters; or, if each site has the same values, "
        'set model.buffers = {"PATTERN" = "keep"} at the server, so that they stay there',
    )
