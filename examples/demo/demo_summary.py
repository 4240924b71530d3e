"""The end of the demo: what was reached, what it cost on the wire, and where the files are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.cli.text import duration, size

if TYPE_CHECKING:
    from demo import Demo

    from atoll.protocol import status_messages

MODEL, METRICS, CURVE = "model.safetensors", "metrics.jsonl", "loss.png"


def rounds_of(demo: Demo) -> list[status_messages.RoundSummary]:
    """Every round, from the server's own file."""
    from atoll.protocol import status_messages

    lines = (demo.folder / METRICS).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    fields = status_messages.RoundSummary.model_fields
    return [status_messages.RoundSummary(**{key: row[key] for key in fields}) for row in rows]


def show(demo: Demo, status: status_messages.Status | None, seconds: float) -> None:
    """Judge the exported model, draw the curve, print the summary."""
    rounds = rounds_of(demo)
    print("\nthe run has ended; measuring the final model on held-out data, which takes some seconds …", flush=True)
    final = judge(demo, demo.folder / MODEL)
    curve = [(row.version - 1, row.metrics[demo.metric]) for row in rounds if demo.metric in row.metrics]
    curve.append((rounds[-1].version, final))
    local = [(row.version, row.metrics["loss"]) for row in rounds if "loss" in row.metrics]
    draw(demo, curve, local, demo.folder / CURVE)
    print()
    unit = " nats/byte" if demo.metric == "validation_loss" else ""
    print(f"{demo.metric_name}: {curve[0][1]:.4f}{unit} at the start, {final:.4f} at the end")
    deaths = ""
    if status is not None:
        for line in traffic(demo, status):
            print(line)
        deaths = f"; {status.deaths} died" if status.deaths else ""
    print(f"time: {duration(seconds)} for {len(rounds)} rounds with {demo.workers} workers{deaths}")
    print(
        "      from the start of the processes to their end: loading PyTorch and the workers' own evaluation included,"
    )
    print("      the measure of the final model not")
    print(f"files in {demo.folder}:")
    print(f"  {MODEL:<18} the model (safetensors.safe_open)")
    print(f"  {METRICS:<18} one line a round")
    print(f"  {CURVE:<18} the curve")
    print("  *.log              what each process said", flush=True)


def judge(demo: Demo, path: Path) -> float:
    """Load the exported model strictly and measure it on what no worker has trained on."""
    import demo_data
    import demo_models
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if demo.algorithm == "diloco":
        model = demo_models.byte_transformer()
        model.load_state_dict(state, strict=True)
        return demo_models.validation_loss(model, demo_data.corpus(demo.workers, demo.seed)[1])
    net = demo_models.digits_net()
    net.load_state_dict(state, strict=True)
    return demo_models.accuracy(net, *demo_data.digits(demo.workers, demo.seed)[1])


def traffic(demo: Demo, status: status_messages.Status) -> list[str]:
    """Bytes that a worker sent and received, against data-parallel training for the same steps.

    A ring all-reduce of n workers moves 2·(n − 1)/n times the gradients' bytes (fp32) each way at each in each step.
    """
    results = [result for worker in status.workers if (result := _result(demo, worker))]
    if not results:
        return []
    steps = max(int(result["steps"]) for result in results)
    sent = sum(int(result["bytes_up"]) for result in results) / len(results)
    received = sum(int(result["bytes_down"]) for result in results) / len(results)
    lines = [f"each worker sent {size(sent)} and received {size(received)} in {steps} local steps"]
    n = demo.workers
    if n > 1 and sent and received:
        ring = 2 * (n - 1) / n * status.model_bytes * steps
        lines.append(
            f"data-parallel training would have sent {size(ring)} each, {ring / sent:.0f} × as much, and received as "
            f"many, {ring / received:.0f} × as much: a ring all-reduce of fp32 gradients moves 2·(n−1)/n × "
            f"{size(status.model_bytes)} a step each way; n = {n}, {steps} steps"
        )
    return lines


def _result(demo: Demo, worker: status_messages.WorkerStatus) -> dict[str, Any]:
    """What the worker itself counted; nothing of one that did not live to the end."""
    path = demo.result_file(worker.site)
    counted: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return counted


def draw(demo: Demo, curve: list[tuple[int, float]], local: list[tuple[int, float]], path: Path) -> None:
    """The measure of every version, and the workers' own loss, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    axes.plot(*zip(*curve, strict=True), marker="o", label=f"global model: {demo.metric_name}")
    axes.set_xlabel("version")
    axes.grid(alpha=0.3)
    lines = axes.get_lines()
    if local:
        beside = axes if demo.metric == "validation_loss" else axes.twinx()
        beside.plot(*zip(*local, strict=True), marker=".", color="tab:gray", label="workers' training loss")
        lines = list(dict.fromkeys([*axes.get_lines(), *beside.get_lines()]))
    axes.legend(lines, [str(line.get_label()) for line in lines])
    axes.set_title(f"Atoll demo: {demo.algorithm}, {demo.workers} workers, {demo.rounds} rounds")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
