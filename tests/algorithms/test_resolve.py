"""Settings on top of an algorithm's defaults."""

import subprocess
import sys

import pytest

from atoll import Settings
from atoll.algorithms.base import Algorithm
from atoll.algorithms.resolve import resolve
from atoll.errors import ConfigError

mine = Algorithm(name="mine", citation="", outer="adam", outer_options={"lr": 0.1})
not_one = 3


def test_diloco_as_in_the_paper():
    run = resolve(Settings(algorithm="diloco", sync_every=200))
    assert (run.outer, run.outer_options) == ("sgd", {"lr": 0.7, "momentum": 0.9, "nesterov": True})
    assert (run.codec, run.sync_every, run.algorithm.on_missed) == ("bf16", 200, "rebase")


def test_fedavg_as_in_the_paper():
    run = resolve(Settings(algorithm="fedavg"))
    assert (run.outer, run.outer_options) == ("sgd", {"lr": 1.0, "momentum": 0.0})
    assert (run.codec, run.sync_every, run.algorithm.on_missed) == ("none", 0, "reset")


def test_settings_win_over_defaults():
    run = resolve(Settings(algorithm="diloco", outer_lr=0.5, outer_momentum=0.8, codec="none"))
    assert run.outer_options == {"lr": 0.5, "momentum": 0.8, "nesterov": True}
    assert run.codec == "none"


def test_another_optimizer_starts_from_its_own_defaults():
    run = resolve(Settings(algorithm="diloco", outer_optimizer="adam", outer_lr=0.01, outer_options={"eps": 1e-6}))
    assert (run.outer, run.outer_options) == ("adam", {"lr": 0.01, "eps": 1e-6})


def test_no_momentum_leaves_nothing_for_nesterov():
    assert resolve(Settings(outer_momentum=0.0)).outer_options == {"lr": 0.7, "momentum": 0.0}


def test_an_algorithm_of_ones_own():
    assert resolve(Settings(algorithm=f"{__name__}:mine")).algorithm is mine


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"algorithm": "dilocco"}, "Did you mean 'diloco'"),
        ({"algorithm": f"{__name__}:not_one"}, "not an algorithm"),
        ({"outer_optimizer": "adem"}, "Did you mean 'adam'"),
        ({"codec": "bf61"}, "Did you mean 'bf16'"),
        ({"outer_optimizer": "adam", "outer_momentum": 0.9}, "adam has no momentum.*betas"),
        ({"outer_lr": 0.1, "outer_options": {"lr": 0.2}}, "Give one of them"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(settings, words):
    with pytest.raises(ConfigError, match=words):
        resolve(Settings(**settings))


def test_no_torch_is_imported():
    code = (
        "import sys; from atoll.algorithms.resolve import resolve; from atoll.config import Settings\n"
        "resolve(Settings()); import atoll.codecs.plain, atoll.codecs.plain; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
