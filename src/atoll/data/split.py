"""Functions that split a data set over sites, as experiments do. Each returns a `Partition`.

iid             every site has the same mix                              McMahan et al., arXiv 1602.05629
dirichlet       labels are spread unevenly                               Yurochkin et al., arXiv 1905.12022; balanced:
                                                                         Hsu, Qi, Brown, arXiv 1909.06335
shards          sorted by label, cut into shards, a few for each site    McMahan et al., arXiv 1602.05629
by_attribute    each site has a few values of an attribute               Li et al., arXiv 2102.02079
quantity_skew   the same mix, but different amounts                      Li et al., arXiv 2102.02079
natural         a site for each key: a person, a hospital, a role        Caldas et al. (LEAF), arXiv 1812.01097

Random numbers come from `numpy.random.RandomState`: its stream is frozen (NEP 19). So a seed gives the same split on
every machine and with every NumPy, and each site can compute the split by itself.
"""

from __future__ import annotations

import heapq
import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.data.partition import Partition
from atoll.data.read_values import By, count_of, values_of
from atoll.errors import UsageError, public_api

Indices = NDArray[np.int64]
Sites = int | Sequence[str]
ATTEMPTS = 1000
"""How often shares are drawn until each site has its minimum of examples."""


@public_api
def iid(data: Any, sites: Sites, *, seed: int = 0) -> Partition:
    """Deal the examples to the sites at random, the same number to each (or one more).

    Args:
        data: the data set, or its number of examples.
        sites: the names of the sites, or their number: `site-0000` and so on, as in a simulation.
        seed: the seed, from 0 to 2³² − 1.

    Raises:
        UsageError: there are more sites than examples, or an argument is wrong.
    """
    names, count = _sites_of(sites, data)
    return Partition(data, names, np.array_split(_draw(seed).permutation(count), len(names)))


@public_api
def dirichlet(
    data: Any,
    sites: Sites,
    alpha: float,
    *,
    by: By | None = None,
    seed: int = 0,
    min_size: int = 1,
    balanced: bool = False,
) -> Partition:
    """Spread the labels unevenly: the smaller `alpha`, the fewer labels a site has. With 100, sites hardly differ.

    The examples of each label are divided by shares of the sites that are drawn from Dirichlet(α, …, α). So sites
    differ in size, too. If `balanced`, each site has the same number of examples (or one more), and its mix of labels
    is drawn from Dirichlet(α·p), where p is the mix of the whole data set; what a label lacks at the end, the other
    labels of the site give.

    Args:
        data: the data set.
        sites: the names of the sites, or their number.
        alpha: α, above 0.
        by: the labels, if they are not found: the name of a column or attribute, a position in an example, a function
            of an example, or one value for each example.
        seed: the seed, from 0 to 2³² − 1.
        min_size: examples that each site has at least; shares are drawn until it is so.
        balanced: whether all sites have the same number of examples.

    Raises:
        UsageError: an argument is wrong, or no draw gives each site `min_size` examples.
    """
    names, _ = _sites_of(sites, data, min_size)
    alpha, draw = _positive("alpha", alpha), _draw(seed)
    labels, codes = np.unique(values_of(data, by), return_inverse=True)
    members = [np.flatnonzero(codes == code) for code in range(len(labels))]
    if balanced:
        return Partition(data, names, _of_own_mix(members, len(names), alpha, draw), by)

    def deal() -> list[Indices]:
        cut = [_cut(of_label, _shares(draw, [alpha] * len(names))) for of_label in members]
        return [np.concatenate([parts[site] for parts in cut]) for site in range(len(names))]

    return Partition(data, names, _repeated(deal, min_size, f"alpha = {alpha:g}"), by)


def _of_own_mix(members: list[Indices], sites: int, alpha: float, draw: np.random.RandomState) -> list[Indices]:
    """Return parts of the same size, each with a mix of labels that is drawn for its site."""
    left = np.array([len(each) for each in members])
    prior, shuffled = left / left.sum(), [draw.permutation(each) for each in members]
    parts: list[Indices] = []
    for size in (len(each) for each in np.array_split(np.arange(left.sum()), sites)):
        mix, part = _shares(draw, alpha * prior), []
        while size:
            open_mix = np.where(left > 0, mix, 0.0)
            if open_mix.sum() <= 0:  # the site's labels are used up
                open_mix = left.astype(float)
            taken = np.minimum(draw.multinomial(size, open_mix / open_mix.sum()), left)
            for label in np.flatnonzero(taken):
                part.append(shuffled[label][left[label] - taken[label] : left[label]])
            left, size = left - taken, size - int(taken.sum())
        parts.append(np.concatenate(part))
    return [parts[site] for site in draw.permutation(sites)]  # the last parts are made of what is left


@public_api
def shards(
    data: Any, sites: Sites, per_site: int = 2, *, by: By | None = None, seed: int = 0, min_size: int = 1
) -> Partition:
    """Sort the examples by label, cut them into shards of the same size, and deal `per_site` of them to each site.

    Args:
        data: the data set.
        sites: the names of the sites, or their number.
        per_site: shards of a site. With 2, most sites have at most two or three labels.
        by: the labels, as for `dirichlet`.
        seed: the seed, from 0 to 2³² − 1.
        min_size: examples that each site has at least.

    Raises:
        UsageError: there are more shards than examples, or an argument is wrong.
    """
    names, count = _sites_of(sites, data, min_size)
    total = len(names) * _whole("per_site", per_site)
    if total > count:
        raise UsageError(
            f"{len(names)} sites with {per_site} shards each need {total} examples, but there are {count}.",
            "Use fewer sites, or a smaller per_site.",
        )
    cut = np.array_split(np.argsort(values_of(data, by), kind="stable"), total)
    dealt = _draw(seed).permutation(total).reshape(len(names), per_site)
    parts = [np.concatenate([cut[shard] for shard in of_site]) for of_site in dealt]
    return Partition(data, names, _large_enough(parts, names, min_size), by)


@public_api
def by_attribute(
    data: Any, sites: Sites, per_site: int | None = None, *, by: By | None = None, seed: int = 0, min_size: int = 1
) -> Partition:
    """Give each site the examples with a few values of an attribute: labels, scanners, languages.

    Values are dealt in turn, in random order. The examples of a value are divided evenly among the sites that have it.

    Args:
        data: the data set.
        sites: the names of the sites, or their number.
        per_site: number of values of each site; by default as few as possible.
        by: the attribute, as for `dirichlet`; None: the labels.
        seed: the seed, from 0 to 2³² − 1.
        min_size: examples that each site has at least.

    Raises:
        UsageError: so few values for each site leave values over, or an argument is wrong.
    """
    names, _ = _sites_of(sites, data, min_size)
    values, codes = np.unique(values_of(data, by), return_inverse=True)
    least = math.ceil(len(values) / len(names))
    each = least if per_site is None else _whole("per_site", per_site)
    if not least <= each <= len(values):
        raise UsageError(
            f"per_site is {each}, but {len(names)} sites share {len(values)} values.",
            f"Give a number from {least}, so that no value is left over, to {len(values)}.",
        )
    draw = _draw(seed)
    order = draw.permutation(len(values))
    owners: list[list[int]] = [[] for _ in values]
    for slot in range(len(names) * each if per_site is not None else max(len(names), len(values))):
        owners[order[slot % len(values)]].append(slot // each if per_site is not None else slot % len(names))
    parts: list[list[Indices]] = [[] for _ in names]
    for code, owning in enumerate(owners):
        members = draw.permutation(np.flatnonzero(codes == code))
        for site, part in zip(owning, np.array_split(members, len(owning)), strict=True):
            parts[site].append(part)
    return Partition(data, names, _large_enough([np.concatenate(part) for part in parts], names, min_size), by)


@public_api
def quantity_skew(
    data: Any,
    sites: Sites,
    alpha: float = 1.0,
    *,
    shares: Sequence[float] | None = None,
    seed: int = 0,
    min_size: int = 1,
) -> Partition:
    """Deal the examples at random, different numbers of them to different sites.

    Args:
        data: the data set, or its number of examples.
        sites: the names of the sites, or their number.
        alpha: the shares of the sites are drawn from Dirichlet(α, …, α); the smaller, the more they differ.
        shares: the shares, in place of drawn ones: `[1, 2, 5]`. The last site gets the examples that rounding leaves.
        seed: the seed, from 0 to 2³² − 1.
        min_size: examples that each site has at least.

    Raises:
        UsageError: an argument is wrong, or no draw gives each site `min_size` examples.
    """
    names, count = _sites_of(sites, data, min_size)
    draw = _draw(seed)
    order = draw.permutation(count)
    if shares is None:
        each = [_positive("alpha", alpha)] * len(names)
        parts = _repeated(lambda: _cut(order, _shares(draw, each)), min_size, f"alpha = {alpha:g}")
        return Partition(data, names, parts)
    given = np.array([_positive("shares", share) for share in shares])
    if len(given) != len(names):
        raise UsageError(f"There are {len(given)} shares for {len(names)} sites.", "Give one share for each site.")
    sizes = (given / given.sum() * count).astype(int)
    return Partition(data, names, _large_enough(np.split(order, np.cumsum(sizes)[:-1]), names, min_size))


@public_api
def natural(data: Any, by: By, *, sites: Sites | None = None, min_size: int = 1) -> Partition:
    """Make a site of each value of an attribute: a person, a hospital, a role in a play. Nothing is random.

    Args:
        data: the data set.
        by: the attribute, as for `dirichlet`.
        sites: join the values to this number of sites of about the same size, or to sites of these names; None: one
            site a value, with its name, in which "-" replaces characters that names of sites do not have.
        min_size: examples that each site has at least.

    Raises:
        UsageError: a site has too few examples, there are fewer values than sites, or an argument is wrong.
    """
    values, codes = np.unique(values_of(data, by), return_inverse=True)
    parts = [np.flatnonzero(codes == code) for code in range(len(values))]
    if sites is None:
        names = [re.sub(r"[^A-Za-z0-9._-]+", "-", str(value)).strip("-._")[:64] or "site" for value in values]
        for place, name in enumerate(names):
            if name in names[:place]:
                numbered = (f"{name[:56]}-{number}" for number in itertools.count(1))
                names[place] = next(each for each in numbered if each not in names)
        return Partition(data, names, _large_enough(parts, names, min_size), by)
    names, _ = _sites_of(sites, data, min_size)
    if len(values) < len(names):
        raise UsageError(f"There are {len(values)} values for {len(names)} sites.", "Use fewer sites.")
    joined: list[list[Indices]] = [[] for _ in names]
    least = [(0, site) for site in range(len(names))]  # the smallest site gets the largest part that is left
    for part in sorted(parts, key=len, reverse=True):
        size, site = heapq.heappop(least)
        joined[site].append(part)
        heapq.heappush(least, (size + len(part), site))
    return Partition(data, names, _large_enough([np.concatenate(each) for each in joined], names, min_size), by)


@public_api
def holdout(data: Any, share: float = 0.2, *, seed: int = 0) -> tuple[list[int], list[int]]:
    """Draw test examples, and return the indices (train, test). Each has at least one.

    Args:
        data: the data set, or its number of examples; also that of one site.
        share: the share of the test examples, between 0 and 1.
        seed: the seed, from 0 to 2³² − 1.

    Raises:
        UsageError: there are fewer than two examples, or an argument is wrong.
    """
    count = count_of(data)
    if not isinstance(share, int | float) or not 0 < share < 1 or count < 2:
        raise UsageError(
            f"share is {share!r} of {count} examples.", "Give a number between 0 and 1, and at least two examples."
        )
    order = _draw(seed).permutation(count)
    tests = min(max(1, round(share * count)), count - 1)
    return sorted(order[tests:].tolist()), sorted(order[:tests].tolist())


# -- arguments, and what all share


def _sites_of(sites: Sites, data: Any, min_size: int = 1) -> tuple[list[str], int]:
    """Return the names of the sites and the number of examples."""
    count = count_of(data)
    names = [f"site-{number:04}" for number in range(_whole("sites", sites))] if isinstance(sites, int) else [*sites]
    if not names or len(set(names)) != len(names) or not all(isinstance(name, str) and name for name in names):
        raise UsageError(f"sites is {sites!r}.", "Give a number, or a list of different names.")
    if isinstance(sites, str):
        raise UsageError(f"sites is {sites!r}.", "Give a list of names, also for one site.")
    least = _whole("min_size", min_size, 0)
    if len(names) * max(least, 1) > count:
        need = f"{len(names)} sites" + (f" with at least {least} examples each" if least > 1 else "")
        raise UsageError(
            f"{need} need {len(names) * max(least, 1)} examples, but there are {count}.",
            "Use fewer sites" + (", or a smaller min_size." if least > 1 else "."),
        )
    return names, count


def _draw(seed: int) -> np.random.RandomState:
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
        raise UsageError(f"seed is {seed!r}.", "Give a whole number from 0 to 4294967295.")
    return np.random.RandomState(seed)


def _whole(name: str, value: int, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise UsageError(f"{name} is {value!r}.", f"Give a whole number of at least {least}.")
    return int(value)


def _positive(name: str, value: float) -> float:
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not is_number or not 1e-6 <= value < 1e9:  # NaN compares as false; beyond, draws have no precision
        raise UsageError(f"{name} is {value!r}.", "Give a number above 0, such as 0.3.")
    return float(value)


def _shares(draw: np.random.RandomState, alphas: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """Draw shares that sum to 1 from a Dirichlet distribution."""
    drawn: NDArray[np.float64] = draw.dirichlet(alphas)
    if np.isfinite(drawn).all():
        return drawn
    each = np.asarray(alphas)  # α is so small that all draws became 0: one share is 1, as in the limit
    all_to_one: NDArray[np.float64] = np.eye(len(each))[int(draw.choice(len(each), p=each / each.sum()))]
    return all_to_one


def _cut(members: Indices, shares: NDArray[np.float64]) -> list[Indices]:
    """Cut indices into parts by shares that sum to 1."""
    return np.split(members, (np.cumsum(shares)[:-1] * len(members)).astype(int))


def _repeated(deal: Callable[[], list[Indices]], min_size: int, what: str) -> list[Indices]:
    """Deal until each part has `min_size` indices.

    Raises:
        UsageError: no attempt has led to it.
    """
    most = 0
    for _ in range(ATTEMPTS):
        parts = deal()
        smallest = min(map(len, parts))
        if smallest >= min_size:
            return parts
        most = max(most, smallest)
    raise UsageError(
        f"With {what}, none of {ATTEMPTS} draws gave each of {len(parts)} sites {min_size} examples; in the best one, "
        f"the smallest site has {most}.",
        "Use a larger alpha, a smaller min_size, or fewer sites.",
    )


def _large_enough(parts: list[Indices], names: Sequence[str], min_size: int) -> list[Indices]:
    least = _whole("min_size", min_size, 0)
    sizes = [len(part) for part in parts]
    if min(sizes) < least:
        small = sum(size < least for size in sizes)
        raise UsageError(
            f"{small} of {len(parts)} sites have fewer than {least} examples; {names[int(np.argmin(sizes))]} has "
            f"{min(sizes)}.",
            "Use a smaller min_size or fewer sites, or leave out the examples of small sites first.",
        )
    return parts
