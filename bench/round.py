"""How long a round takes and what it costs, measured on this machine and checked for exactness.

One server and N workers over loopback; training is an addition, the result is checked bit for bit.

    python bench/round.py --gb 1 --workers 4 --rounds 4
    python bench/round.py --gb 1 --no-disk-streaming     # in memory
    python bench/round.py --gb 1 --compare               # both: the same bits?
    python bench/round.py --gb 1 --credential certificate   # TLS in both directions
"""

from __future__ import annotations

import json as json_module
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from round_run import Bench, measure

from atoll import registry
from atoll.child_processes import raise_on_sigterm
from atoll.cli.main import run_command
from atoll.errors import RunFailed


class Durability(StrEnum):
    process = "process"
    power = "power"


class Shown(StrEnum):
    none = "none"
    token = "token"
    certificate = "certificate"


class Placement(StrEnum):
    server = "server"
    swarm = "swarm"


CODECS = ", ".join([*registry.TABLES["codecs"], "or a plugin's"])
"""For `--help`; plugins are looked up only when the command runs."""


def _codec(name: str) -> str:
    known = registry.names("codecs")
    if name not in known:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(known)}.")
    return name


Json = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")]
Folder = Annotated[
    Path | None, typer.Option("--dir", help="Folder for files while it runs; by default the temporary one.")
]


def main(
    gb: Annotated[float, typer.Option(min=1e-6, help="Size of the fp32 model, in 10⁹ bytes.")] = 1.0,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the first two are not steady.")] = 4,
    tensors: Annotated[int, typer.Option(min=1, help="Tensors of the model.")] = 50,
    codec: Annotated[str, typer.Option(help=f"How updates travel: {CODECS}.", callback=_codec)] = "none",
    downlink_codec: Annotated[
        str, typer.Option(help="How versions go down, as differences: one of these.", callback=_codec)
    ] = "none",
    durability: Annotated[Durability, typer.Option(help="What an acknowledged update survives.")] = Durability.process,
    disk_streaming: Annotated[
        bool, typer.Option(help="Whether updates and versions are files, or in memory, where rounds are aggregated.")
    ] = True,
    compare: Annotated[bool, typer.Option("--compare", help="Both, one after the other: the same bits?")] = False,
    placement: Annotated[Placement, typer.Option(help="Where rounds are aggregated.")] = Placement.server,
    tls: Annotated[bool, typer.Option("--tls", help="Encrypt the connections.")] = False,
    credential: Annotated[
        Shown, typer.Option(help="What the workers show; with certificates of their own, TLS in both directions.")
    ] = Shown.none,
    policy: Annotated[bool, typer.Option("--policy", help="Workers have a policy and an egress log.")] = False,
    directory: Folder = None,
    json: Json = False,
) -> None:
    """One server and N workers over loopback; training is an addition, the result is checked bit for bit."""
    raise_on_sigterm()
    ways = [True, False] if compare else [disk_streaming]
    how = (gb, workers, rounds, tensors, codec, downlink_codec, durability.value, directory)
    runs = [measure(Bench(*how, way, placement.value, tls, credential.value, policy), say) for way in ways]
    same = len({figures["digest"] for figures in runs}) == 1
    if json:
        both = {"disk": runs[0], "memory": runs[-1], "same_bits": same}
        print(json_module.dumps(both if compare else runs[0], indent=2), flush=True)
    else:
        for figures in runs:
            print("\n".join(report(figures)) + ("\n" if compare else ""), flush=True)
        if compare:
            print(f"{'disk and memory':<19}{'the same bits' if same else 'DIFFERENT BITS'}", flush=True)
    for figures in runs:
        require_exact(figures)
    if not same:
        raise RunFailed("On disk and in memory the results differ.", "Report it with the figures above.")


def report(figures: dict[str, Any]) -> list[str]:
    """The figures as lines for people."""
    settings, phases = figures["settings"], figures["phases"]
    rows = {
        "model": f"{settings['gb']:g} GB fp32 in {settings['tensors']} tensors, codec {settings['codec']}"
        f"{f', down {down}' if (down := settings['downlink_codec']) != 'none' else ''}",
        "workers × rounds": f"{settings['workers']} × {settings['rounds']}, durability {settings['durability']}"
        f"{', TLS' if settings['tls'] else ''}, credential {settings['credential']}"
        f"{', policy' if settings['policy'] else ''}",
        "steady round": f"{figures['steady_round_s']:.3f} s",
        "rounds": ", ".join(f"{seconds:.3f}" for seconds in figures["rounds_s"][:20]) + " s",
        "of which": ", ".join(f"{key.removesuffix('_s')} {value:.3f} s" for key, value in phases.items()),
        "server memory": f"{figures['server_peak_anon_mb']:.1f} MB anonymous above import, "
        + (
            "updates and versions on disk"
            if settings["download_to_disk"]
            else f"{figures['memory_files_mb']:.1f} MB of updates and versions where rounds are aggregated"
        ),
        "worker memory": f"{figures['worker_peak_anon_mb']:.1f} MB anonymous above the model",
        "bytes": f"{figures['bytes_up'] / 1e6:.1f} MB up, {figures['bytes_down'] / 1e6:.1f} MB down",
        "through the server": f"{figures['server_bytes_up'] / 1e6:.1f} MB up, "
        f"{figures['server_bytes_down'] / 1e6:.1f} MB down",
        "CPU": ", ".join(f"{name} {value:.1f} s" for name, value in figures["cpu_s"].items()),
        "result": "exact: every worker's model is bit for bit what it should be" if figures["exact"] else "WRONG",
    }
    return [f"{name:<19}{value}" for name, value in rows.items()]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def require_exact(figures: dict[str, Any]) -> None:
    if not figures["exact"]:
        raise RunFailed("The result is not the weighted mean, bit for bit.", "Report it with the figures above.")


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
