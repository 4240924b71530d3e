"""The axes of the golden matrix, what does not go together, and the runs: computed from these tables alone.

A run is a setup and a way. The setup decides every bit; the way decides none: all runs of one setup end with the same
digests. The runs cover every pair of values of two axes that Atoll does not refuse.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations, product
from statistics import fmean
from typing import Any

Row = dict[str, str]

SETUP: dict[str, tuple[str, ...]] = {
    "algorithm": ("fedavg", "fedprox", "scaffold", "fednova", "fedadam", "diloco", "streaming", "overlapped"),
    "codec": ("none", "bf16", "int8", "topk"),
    "downlink": ("none", "int8"),
    "dtype": ("float32", "bfloat16"),
    "weights": ("unequal", "equal"),
    "outer": ("momentum", "plain", "delayed"),
    "reducer": ("own", "median", "clipped_mean"),
}
WAY: dict[str, tuple[str, ...]] = {
    "place": ("server", "swarm", "simulation", "fsdp", "ddp"),
    "mode": ("sync", "async"),
    "storage": ("disk", "memory"),
    "parts": ("several", "one"),
}
AXES = SETUP | WAY
CLIPPED = "clipped_mean"
DENSITY = 0.1
"""Share of the values that `topk` sends."""
PARTS: list[Row] = [{"parts": each} for each in WAY["parts"]]
DEFAULTS = {axis: values[0] for axis, values in AXES.items()}

STREAMING = {
    "algorithm.name": "diloco",
    "diloco.sync_every": 6,
    "diloco.num_fragments": 3,
    "diloco.fragment_update_alpha": 0.5,
}

SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("algorithm", "fedprox"): {"algorithm.mu": 0.1},
    ("algorithm", "fedadam"): {"algorithm.outer_optimizer.lr": 0.01, "algorithm.outer_optimizer.momentum": None},
    ("algorithm", "diloco"): {"diloco.sync_every": 2},
    ("algorithm", "streaming"): STREAMING,
    ("algorithm", "overlapped"): {**STREAMING, "diloco.fragment_sync_delay": 1},
    ("codec", "topk"): {"aggregation.upload_codec.density": DENSITY},
    ("outer", "plain"): {"algorithm.outer_optimizer.momentum": None},
    ("outer", "momentum"): {"algorithm.outer_optimizer.momentum": 0.9},
    ("outer", "delayed"): {"algorithm.outer_optimizer.momentum": 0.9, "async.momentum_every": 2},
    ("place", "swarm"): {"swarm.enabled": True},
    ("place", "fsdp"): {"model.ranks": 2},
    ("mode", "async"): {"async.enabled": True, "async.grace_s": float("inf")},
    ("storage", "memory"): {"disk.in_files": False},
    ("parts", "several"): {"network.part_bytes": 2**16},
}
"""What a value of an axis sets."""


@dataclass(frozen=True)
class Exclusion:
    """Values that do not go together.

    Attributes:
        of: axis → values.
        by: settings or words that the refusal names, or its class; empty where Atoll does not refuse.
        why: for readers.
    """

    of: dict[str, tuple[str, ...]]
    by: tuple[str, ...]
    why: str

    def has(self, row: Row) -> bool:
        """Whether the row has one of these values on every axis."""
        return all(row.get(axis) in values for axis, values in self.of.items())

    def rows(self) -> Iterator[Row]:
        """Every combination that it excludes, with the first value on all other axes."""
        for values in product(*self.of.values()):
            yield DEFAULTS | {"outer": "plain"} | dict(zip(self.of, values, strict=True))


STREAMS = ("streaming", "overlapped")
STEPS = ("diloco", *STREAMS)
ROUNDS = tuple(each for each in SETUP["algorithm"] if each not in STEPS)
UNCONTROLLED = tuple(each for each in ROUNDS if each != "scaffold")

EXCLUSIONS = (
    Exclusion(
        {"algorithm": ("scaffold",), "mode": ("async",)},
        ("algorithm", "async.enabled"),
        "controls are means of a round",
    ),
    Exclusion(
        {"algorithm": ("fednova",), "reducer": ("median", "clipped_mean")}, ("reducer",), "its mean is what makes it"
    ),
    Exclusion(
        {"algorithm": ("fedadam",), "outer": ("momentum",)},
        ("algorithm.outer_optimizer.momentum",),
        "Adam has moments of its own",
    ),
    Exclusion({"algorithm": ("fedadam",), "outer": ("delayed",)}, ("async.momentum_every",), "it divides steps of SGD"),
    Exclusion(
        {"place": ("swarm",), "downlink": ("int8",)},
        ("aggregation.download_codec", "swarm.enabled"),
        "versions travel whole",
    ),
    Exclusion({"place": ("simulation",), "mode": ("async",)}, ("async.enabled", "simulation"), "rounds wait there"),
    Exclusion(
        {"place": ("simulation",), "algorithm": STREAMS}, ("diloco.num_fragments", "simulation"), "whole models there"
    ),
    Exclusion(
        {"place": ("simulation",), "algorithm": ("diloco",)},
        ("DiLoCo", "simulation"),
        "it synchronises after a number of local steps",
    ),
    Exclusion(
        {"place": ("fsdp",), "algorithm": STREAMS}, ("diloco.num_fragments", "model.ranks"), "fragments are not sharded"
    ),
    Exclusion(
        {"place": ("fsdp",), "algorithm": ("scaffold",)}, ("algorithm", "model.ranks"), "controls are not sharded"
    ),
    Exclusion({"place": ("fsdp",), "algorithm": UNCONTROLLED}, ("DTensor", "DiLoCo"), "join has no ranks"),
    Exclusion(
        {"place": ("ddp",), "algorithm": ROUNDS}, ("StateLocked",), "join has no ranks: each would be the same site"
    ),
    Exclusion({"algorithm": ("overlapped",), "mode": ("async",)}, (), "the bits depend on when results arrive"),
)

CHEAP = ("server", "swarm")
FEW = ("simulation", "fsdp", "ddp")
"""Places that are dear: they start processes."""


def is_valid(row: Row) -> bool:
    """Whether nothing in the row is excluded; a row may have some of the axes."""
    return not any(each.has(row) for each in EXCLUSIONS)


def pairs_of(row: Row) -> set[frozenset[tuple[str, str]]]:
    """The pairs of values of two axes that a row has."""
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def valid_pairs() -> set[frozenset[tuple[str, str]]]:
    """All that a matrix has to cover."""
    return {
        frozenset(((one, first), (other, second)))
        for one, other in combinations(AXES, 2)
        for first, second in product(AXES[one], AXES[other])
        if is_valid({one: first, other: second})
    }


def setup_of(row: Row) -> Row:
    """What decides its bits. The norms that bound a clipped mean are sums of sums by part: parts decide there, too."""
    return {axis: row[axis] for axis in AXES if axis in SETUP or (axis == "parts" and row["reducer"] == CLIPPED)}


def name_of(row: Row) -> str:
    """Its values in the order of the axes."""
    return " ".join(row[axis] for axis in AXES if axis in row)


def settings_of(row: Row) -> dict[str, Any]:
    """Of a run."""
    settings: dict[str, Any] = {
        "algorithm.name": row["algorithm"],
        "algorithm.outer_optimizer.name": None,
        "algorithm.outer_optimizer.lr": 0.7,
        "aggregation.upload_codec.name": row["codec"],
        "aggregation.download_codec.name": row["downlink"],
        "network.part_bytes": 2**24,
        "model.buffers": {"seen": "max"},
    }
    if row["reducer"] != "own":
        settings["aggregation.reducer.name"] = row["reducer"]
    for chosen in row.items():
        settings |= SETTINGS.get(chosen, {})
    if row["algorithm"] == "fedadam" and row["outer"] == "delayed":  # refused for itself, not for its momentum
        settings["algorithm.outer_optimizer.momentum"] = None
    return settings


def runs() -> list[Row]:
    """The matrix: every algorithm with every codec up and down, each in two ways at least; dear places where needed."""
    setups = _setups()
    chosen = [row for place in FEW for row in _fewest([each for setup in setups for each in _ways(setup, (place,))])]
    seen = Counter(pair for row in chosen for pair in pairs_of(row))

    def take(candidates: Iterable[Row]) -> None:
        chosen.append(_rarest([row for row in candidates if row not in chosen], seen))

    for setup in setups:
        for _ in range(2 - sum(setup_of(row) == setup for row in chosen)):
            take(_ways(setup, CHEAP))
    while missing := valid_pairs() - seen.keys():
        take(row for setup in setups for row in _ways(setup, CHEAP) if pairs_of(row) & missing)
    order = {name_of(setup): index for index, setup in enumerate(setups)}
    return sorted(chosen, key=lambda row: order[name_of(setup_of(row))])


def covering(rows: list[Row]) -> list[Row]:
    """A few of the rows that cover all their pairs: by turns the one that adds most."""
    missing = set().union(*map(pairs_of, rows))
    chosen: list[Row] = []
    while missing:
        chosen.append(max(rows, key=lambda row: len(pairs_of(row) & missing)))
        missing -= pairs_of(chosen[-1])
    return [row for row in rows if row in chosen]


def by_setup(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Name of a setup → its rows among these."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(name_of(setup_of(row)), []).append(row)
    return found


def _fewest(candidates: list[Row]) -> list[Row]:
    """As few of these as cover every value that one of them has: the best of some greedy choices."""
    values = {pair for row in candidates for pair in row.items()}
    best = candidates
    for seed in range(12):
        shuffled = random.Random(seed).sample(candidates, len(candidates))
        missing, found = set(values), []
        while missing:
            found.append(max(shuffled, key=lambda row: len(row.items() & missing)))
            missing -= found[-1].items()
        best = min(best, found, key=len)
    return best


def _rarest(candidates: list[Row], seen: Counter[frozenset[tuple[str, str]]]) -> Row:
    """The one whose pairs were seen least; it counts as seen."""
    best = max(candidates, key=lambda row: fmean(2.0 ** -seen[pair] for pair in pairs_of(row)))
    seen.update(pairs_of(best))
    return best


def _setups() -> list[Row]:
    """One for each algorithm and codecs; their other values cover what pairs they can."""
    first = ("algorithm", "codec", "downlink")
    others = [axis for axis in SETUP if axis not in first]
    rest = [dict(zip(others, values, strict=True)) for values in product(*(SETUP[axis] for axis in others))]
    rest = [each | more for each in rest for more in (PARTS if each["reducer"] == CLIPPED else [{}])]
    seen: Counter[frozenset[tuple[str, str]]] = Counter()
    setups = []
    for values in product(*(SETUP[axis] for axis in first)):
        start = dict(zip(first, values, strict=True))
        candidates = [row for each in rest if is_valid(row := start | each)]
        setups.append(_rarest(candidates, seen))
    return setups


def _ways(setup: Row, places: tuple[str, ...]) -> list[Row]:
    axes = {axis: values for axis, values in WAY.items() if axis not in setup} | {"place": places}
    rows = [setup | dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    return [row for row in rows if is_valid(row)]
