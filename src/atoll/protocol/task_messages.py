"""Typed messages of tasks, their answers, and cross-site evaluations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from atoll.config.bounds import MOST_CHUNK_BYTES
from atoll.protocol.messages import SHOWN_CHARS, Count, Estimate, Hex16, Hex32, Many, Message, Metrics, Text

TaskName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$")]
"""Name of a task: `train`, `validate`, `submit_model`, or a name that the user chose."""


ChunkBytes = Annotated[int, Field(ge=0, le=MOST_CHUNK_BYTES)]


class ObjectKey(Message):
    """The id, digest and secret of an object that the server stores. They are needed to download the object."""

    object: Hex16
    secret: Hex16
    digest: Hex32
    expires_at: Count = Field(description="Expiry time, in seconds since 1970.")


class TaskBody(Message):
    """The payload of a task or an answer: JSON text if it is small and has no tensors, else an object to download."""

    plain: str | None = Field(None, description="The payload as JSON text.")
    object: ObjectKey | None = None


class TaskRequest(Message):
    """A request for the next open task of this site. The server waits up to `wait_s` for a task."""

    wait_s: float = Field(0.0, ge=0, le=20.0)
    rounds: bool = Field(False, description="This process takes part in rounds, too: tell it when they start.")
    besides: Hex16 | None = Field(None, description="Task that the site has already: send another one.")


class TaskMessage(Message):
    """A task for a site. The server sends the task again until the site has answered it."""

    task: Hex16 = Field(description="Id of the task, the same for all sites.")
    name: TaskName
    streamed: bool = Field(description="Whether tensors of the answer are sent in parts instead of inline.")
    tensor_chunk_bytes: ChunkBytes = Field(description="Bytes of a part of torch tensors; 0: send them inline.")
    np_chunk_bytes: ChunkBytes = Field(description="Bytes of a part of NumPy arrays; 0: inline.")
    body: TaskBody


class TaskReply(Message):
    """The answer to `TaskRequest`: a task, or the reason why there is none."""

    status: Literal["task", "wait", "finished", "rounds"] = Field(
        description="finished: the last workflow has ended; rounds: the rounds have begun (if asked with `rounds`)."
    )
    task: TaskMessage | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if (self.status == "task") != (self.task is not None):
            raise ValueError(f"the status {self.status} does not fit the task")
        return self


class TaskAnswer(Message):
    """A site's answer to a task: a payload, or an error."""

    body: TaskBody | None = None
    error: Text | None = None


NOT_FINITE = "not finite"
Cut = Annotated[str, AfterValidator(lambda text: text[:SHOWN_CHARS])]
"""Text that a longer one is cut to; what shows it makes it harmless."""


class EvaluatedModel(Message):
    """A model of a cross-site evaluation: one row of the matrix."""

    name: Cut = Field(description="Readable name: `version 12`, `best (version 9)`, a file, or a site.")
    kind: Literal["site", "version", "file"]
    version: Count | None = Field(None, description="Version number, if the model is a version.")
    digest: Cut = Field("", description="Digest of the object that sites pulled; empty if none.")
    error: Cut = Field("", description="Why no site could evaluate the model; else empty.")
    means: Metrics = Field(
        default_factory=dict,
        description="Mean of each metric over the sites that measured it: by weight if all of these told theirs.",
    )


class Cell(Message):
    """The result of one model on the data of one site: one cell of the matrix."""

    model: Cut
    site: Cut
    metrics: Metrics = Field(default_factory=dict)
    not_finite: Many[Cut] = Field(default_factory=list, description="Metrics that were NaN or infinite.")
    error: Cut = Field("", description="Why there is no result; empty if there is one.")
    weight: float | None = Field(None, ge=0, description="Number of samples of the site; null: the site did not tell.")
    seconds: Estimate = 0.0


class Evaluation(Message):
    """The matrix of a cross-site evaluation (rows: models, columns: sites), complete or partial."""

    run: Cut
    name: Cut = Field(description="Name of the run.")
    finished: bool
    sites: Many[Cut] = Field(description="Columns: the sites with the data.")
    models: Many[EvaluatedModel] = Field(description="Rows: the models.")
    cells: Many[Cell]

    @property
    def metrics(self) -> list[str]:
        """Names of all metrics that sites have reported, sorted."""
        return sorted({key for cell in self.cells for key in (*cell.metrics, *cell.not_finite)})

    def rows(self, metric: str) -> Iterator[list[str]]:
        """Yield the rows of a metric's table: the header, one row for each model, and the weights that sites told.

        The last column is the mean over the sites. An empty cell is a dash.
        """
        yield ["model", *self.sites, "mean"]
        cell_of = {(cell.model, cell.site): cell for cell in self.cells}
        for model in self.models:
            cells = (cell_of.get((model.name, site)) for site in self.sites)
            yield [model.name, *(_shown(cell, metric) for cell in cells), _number(model.means.get(metric))]
        weights = {cell.site: cell.weight for cell in self.cells if cell.weight is not None}
        if weights:
            yield ["weight", *(_number(weights.get(site)) for site in self.sites), _number(sum(weights.values()))]

    def with_means(self) -> Self:
        """Return the matrix with the means of each model over the sites."""
        found: list[EvaluatedModel] = []
        for model in self.models:
            cells = [cell for cell in self.cells if cell.model == model.name]
            means = {metric: _mean(metric, cells) for metric in sorted({key for cell in cells for key in cell.metrics})}
            found.append(model.model_copy(update={"means": means}))
        return self.model_copy(update={"models": found})

    def empty(self) -> list[str]:
        """Return a line for each empty cell, with the reason. One line covers a whole empty row or column."""
        lines = [f"{model.name} on every site: {model.error}" for model in self.models if model.error]
        failed = {model.name for model in self.models if model.error}
        cells = [cell for cell in self.cells if cell.error and cell.model not in failed]
        columns = {site: {cell.error for cell in cells if cell.site == site} for site in self.sites}
        count = len(self.models) - len(failed)
        for site, errors in columns.items():
            errors_of_site = [cell for cell in cells if cell.site == site]
            if len(errors) == 1 and len(errors_of_site) == count > 1:
                lines.append(f"every model on {site}: {errors_of_site[0].error}")
            else:
                lines += [f"{cell.model} on {site}: {cell.error}" for cell in errors_of_site]
        return lines


def markdown(evaluation: Evaluation) -> str:
    """Return a Markdown document with one table for each metric, and the reasons for empty cells."""
    out = [
        f"# Cross-site evaluation of {evaluation.name}",
        "",
        "Rows are models, columns the sites with the data.",
        "",
    ]
    if not evaluation.finished:
        out += ["Not complete.", ""]
    for metric in evaluation.metrics:
        head, *rows = evaluation.rows(metric)
        out += [f"## {_escaped(metric)}", "", _line(head), _line(["---"] + ["---:"] * (len(head) - 1))]
        out += [*map(_line, rows), ""]
    if empty := evaluation.empty():
        out += ["## Empty cells", "", *(f"- {_escaped(line)}" for line in empty), ""]
    return "\n".join(out)


def plain(evaluation: Evaluation) -> list[str]:
    """Return one plain text table for each metric, and the reasons for empty cells, as lines."""
    out: list[str] = []
    for metric in evaluation.metrics:
        rows = list(evaluation.rows(metric))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        out.append(f"{metric} (rows: models, columns: sites)")
        for name, *cells in rows:
            numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
            out.append("  ".join([name.ljust(widths[0]), *numbers]).rstrip())
        out.append("")
    return [*out, *(f"empty: {line}" for line in evaluation.empty())]


def _mean(metric: str, cells: list[Cell]) -> float:
    measured = [cell for cell in cells if metric in cell.metrics]
    weights = [1.0 if cell.weight is None else cell.weight for cell in measured]
    if any(cell.weight is None for cell in measured) or not sum(weights):
        weights = [1.0] * len(measured)
    largest = max(weights)  # the sum of huge weights is not finite
    shares = [weight / largest for weight in weights]
    total = sum(shares)
    return sum(cell.metrics[metric] * (share / total) for cell, share in zip(measured, shares, strict=True))


def _shown(cell: Cell | None, metric: str) -> str:
    if cell is not None and metric in cell.not_finite:
        return NOT_FINITE
    return _number(cell.metrics.get(metric) if cell is not None else None)


def _number(value: float | None) -> str:
    return "—" if value is None else f"{value:.6g}"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(_escaped(cell) for cell in cells)} |"


def _escaped(text: str) -> str:
    """Escape text from a site, so that it cannot change the Markdown table."""
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "\\`")
