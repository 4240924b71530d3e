"""N worker processes with a model of M GB, rounds aggregated at the server or by a swarm: memory, bytes, seconds.

    python bench/stress.py --workers 3 --gb 2                       one way, the figures of every process
    python bench/stress.py --gb 0.25 --workers 4 --placement both   server against swarm
    python bench/stress.py --gb 1 --placement swarm --compare       on disk against in memory: the same bits?
    python bench/stress.py --gb 1 --no-disk-streaming               in memory alone
    python bench/stress.py --experiments                            those of docs/results/swarm.md

Training is an addition, and every worker checks its model bit for bit. Memory is anonymous memory at its peak: of the
server above what it has after importing, of a worker above that and its model. Size is a choice: the disk has to have
about six times the model per worker; `--experiments` leaves out what does not fit, and says so. Swap counts as memory:
in memory files, 3 workers with 4 GB have some 50 GB.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "quality"))

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from results import FOLDER, Gate, write
from round_run import Bench, measure

from atoll.errors import AtollError

Figures = dict[str, Any]

SITE_BAR_MB, FLAT = 500.0, 1.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="of the fp32 model, in 10⁹ bytes")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tensors", type=int, default=50)
    parser.add_argument("--codec", default="none")
    parser.add_argument("--placement", choices=["server", "swarm", "both"], default="server")
    parser.add_argument("--no-disk-streaming", action="store_true", help="keep updates and versions in memory")
    parser.add_argument("--compare", action="store_true", help="on disk and in memory: the same bits?")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--dir", type=Path, help="where files go while it runs")
    parser.add_argument("--experiments", action="store_true", help="those of docs/results/swarm.md")
    parser.add_argument("--more", action="store_true", help="of the experiments those that the table has not yet")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of their table")
    options = parser.parse_args()
    if options.experiments:
        experiments(options)
        return
    runs = [run(options, placement, disk) for placement in placements(options) for disk in ways(options)]
    if options.json:
        print(json.dumps(runs, indent=1))
    else:
        for figures in runs:
            print("\n".join(lines(figures)) + "\n")
    same = len({figures["digest"] for figures in runs}) == 1
    if len(runs) > 1 and not options.json:
        print("the same bits in every way" if same else "DIFFERENT BITS")
    if not same or not all(figures["exact"] for figures in runs):
        sys.exit("The result is not what it should be.")


def placements(options: argparse.Namespace) -> list[str]:
    return ["server", "swarm"] if options.placement == "both" else [options.placement]


def ways(options: argparse.Namespace) -> list[bool]:
    return [True, False] if options.compare else [not options.no_disk_streaming]


def run(options: argparse.Namespace, placement: str, disk: bool, **more: Any) -> Figures:
    """One way of running it."""
    chosen = {key: getattr(options, key) for key in ("gb", "workers", "rounds", "tensors", "codec")} | more
    bench = Bench(**chosen, folder=options.dir, download_to_disk=disk, placement=placement)
    what = f"{chosen['workers']} × {chosen['gb']:g} GB, {placement}, {'disk' if disk else 'memory'}"
    print(f"-- {what}", file=sys.stderr, flush=True)
    return measure(bench, lambda text: print(text, file=sys.stderr, flush=True))


def lines(figures: Figures) -> list[str]:
    """The figures of one run, for people."""
    settings, memory = figures["settings"], figures["workers_peak_anon_mb"]
    where = "at the server" if settings["placement"] == "server" else "by " + ", ".join(figures["aggregators"])
    kept = "on disk" if settings["download_to_disk"] else f"in memory ({figures['memory_files_mb']:.0f} MB of files)"
    what = f"{settings['workers']} workers, {settings['gb']:g} GB, {settings['rounds']} rounds"
    return [
        f"{what}, aggregated {where}, {kept}",
        "  seconds a round   " + ", ".join(f"{seconds:.2f}" for seconds in figures["rounds_s"]),
        f"  server            {figures['server_peak_anon_mb']:.1f} MB",
        *(f"  {name}        {mb:.1f} MB" for name, mb in memory.items()),
        f"  moved             {figures['bytes_up'] / 1e9:.3f} GB up, {figures['bytes_down'] / 1e9:.3f} GB down",
        f"  of it by server   {figures['server_bytes_up'] / 1e9:.3f} GB up, "
        f"{figures['server_bytes_down'] / 1e9:.3f} GB down",
        f"  result            {'exact' if figures['exact'] else 'WRONG'}",
    ]


# -- what docs/results/swarm.md shows


def experiments(options: argparse.Namespace) -> None:
    """Memory of a swarm at two sizes, disk against memory, and server against swarm."""
    rows: list[list[Any]] = []
    gates: list[Gate] = []
    figures: dict[str, Figures] = {}
    missing: list[str] = []
    kept: dict[str, Figures] = {}
    if options.more:
        kept = json.loads((options.folder / "swarm.json").read_text())["figures"]

    def take(name: str, placement: str, disk: bool, **more: Any) -> Figures | None:
        if name not in kept:
            workers = more["workers"]
            # on disk the files of each, and the initial model; in memory models, versions and updates
            needed = 1.05 * ((1 + 5 * workers) if disk else (3 + 3 * workers)) * more["gb"] * 1e9
            free = free_bytes(options, disk)
            if needed > free:
                missing.append(f"{name} ({free / 1e9:.0f} GB free)")
                return None
            kept[name] = run(options, placement, disk, **more)
        found = figures[name] = kept[name]
        rows.append(row(found))
        return found

    sizes = [
        (gb, take(f"swarm, {gb:g} GB, disk", "swarm", True, gb=gb, workers=3, rounds=1)) for gb in (0.5, 1.0, 2.0, 4.0)
    ]
    at = {gb: found for gb, found in sizes if found is not None}
    for gb, found in at.items():
        peak = found["worker_peak_anon_mb"]
        gates.append(
            Gate(f"swarm, {gb:g} GB: any worker above its model, MB", peak, f"<= {SITE_BAR_MB:g}", peak <= SITE_BAR_MB)
        )
    if len(at) > 1:
        small, large = at[min(at)]["worker_peak_anon_mb"], at[max(at)]["worker_peak_anon_mb"]
        name = f"the same at {max(at):g} GB against {min(at):g} GB, times"
        gates.append(Gate(name, large / small, f"<= {FLAT:g} (flat)", large / small <= FLAT))
    for gb in (0.5, 1.0, 2.0, 4.0):
        in_memory = take(f"swarm, {gb:g} GB, memory", "swarm", False, gb=gb, workers=3, rounds=1)
        if in_memory is not None and gb in at:
            same = in_memory["digest"] == at[gb]["digest"]
            gates.append(Gate(f"swarm, {gb:g} GB: disk and memory the same bits", float(same), "1", same))
    for placement in ("server", "swarm"):
        take(f"{placement}, 4 × 0.25 GB", placement, True, gb=0.25, workers=4, rounds=6)
    swarm = figures.get("swarm, 4 × 0.25 GB")
    if swarm is not None:
        beyond = swarm["server_bytes_up"] + swarm["server_bytes_down"] - int(0.25e9)
        gates.append(
            Gate(
                "swarm, 4 × 0.25 GB: tensor bytes through the server besides the initial model, once",
                float(max(0, beyond - 2**16)),
                "0",
                beyond <= 2**16,
            )
        )
    exact = all(found["exact"] for found in figures.values())
    gates.append(Gate("every worker's model is bit for bit what it should be", float(exact), "1", exact))
    left_out = f"Left out, for want of room here: {'; '.join(missing)}." if missing else ""
    write(
        "swarm",
        title="A swarm: aggregation by workers, against the server",
        command="python bench/stress.py --experiments",
        settings={"tensors": options.tensors},
        figures=figures,
        gates=gates,
        header=["where", "kept", "workers", "GB", "s a round", "server, MB", "largest worker, MB", "by the server, GB"],
        rows=rows,
        text=f"""All processes run on this machine and use loopback. A round is the pull, an addition, the
updates and the reduction. The table has the median of the rounds, without the first two where there are more. Memory
is the peak of anonymous memory: for the server above what it has after importing, for a worker above its model, which
stands for the site's own training state. So it includes what aggregating imports, but no memory files. An earlier
system needs 6.32 GB in the aggregating process at 2 GB and 10.04 GB at 4 GB on disk, and 10.40 and 17.32 GB in
memory. "By the server" counts tensor bytes in both directions; in a swarm that is the initial model, once. With 4 GB
in memory files a machine of 24 GB swaps, which makes that run slow. {left_out}""",
        folder=options.folder,
    )
    for gate in gates:
        print(f"{gate.name}: {gate.value:.4g} ({gate.bar}) {'met' if gate.ok else 'MISSED'}")


def free_bytes(options: argparse.Namespace, disk: bool) -> int:
    if disk:
        return shutil.disk_usage(options.dir or tempfile.gettempdir()).free
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("MemAvailable:", "SwapFree:")))


def row(figures: Figures) -> list[Any]:
    settings = figures["settings"]
    through = (figures["server_bytes_up"] + figures["server_bytes_down"]) / 1e9
    return [
        settings["placement"],
        "disk" if settings["download_to_disk"] else "memory",
        settings["workers"],
        settings["gb"],
        figures["steady_round_s"],
        figures["server_peak_anon_mb"],
        figures["worker_peak_anon_mb"],
        through,
    ]


if __name__ == "__main__":
    try:
        main()
    except AtollError as error:
        sys.exit(f"stress: {error}")
