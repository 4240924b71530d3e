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
    run = resolve(Settings.build({"algorithm.name": "diloco", "diloco.sync_every": 200}))
    assert (run.outer, run.outer_options) == ("sgd", {"lr": 0.7, "momentum": 0.9, "nesterov": True})
    assert (run.codec, run.sync_every, run.algorithm.on_missed) == ("bf16", 200, "rebase")


def test_fedavg_as_in_the_paper():
    run = resolve(Settings.build({"algorithm.name": "fedavg"}))
    assert (run.outer, run.outer_options) == ("sgd", {"lr": 1.0, "momentum": 0.0})
    assert (run.codec, run.sync_every, run.algorithm.on_missed) == ("none", 0, "reset")


def test_settings_win_over_defaults():
    run = resolve(
        Settings.build(
            {
                "algorithm.name": "diloco",
                "algorithm.outer_optimizer.lr": 0.5,
                "algorithm.outer_optimizer.momentum": 0.8,
                "aggregation.upload_codec.name": "none",
            }
        )
    )
    assert run.outer_options == {"lr": 0.5, "momentum": 0.8, "nesterov": True}
    assert run.codec == "none"


def test_another_optimizer_starts_from_its_own_defaults():
    run = resolve(
        Settings.build(
            {
                "algorithm.name": "diloco",
                "algorithm.outer_optimizer.name": "adam",
                "algorithm.outer_optimizer.lr": 0.01,
                "algorithm.outer_optimizer.eps": 1e-6,
            }
        )
    )
    assert (run.outer, run.outer_options) == ("adam", {"lr": 0.01, "eps": 1e-6})


def test_no_momentum_leaves_nothing_for_nesterov():
    settings = {"algorithm.name": "diloco", "algorithm.outer_optimizer.momentum": 0.0}
    assert resolve(Settings.build(settings)).outer_options == {
        "lr": 0.7,
        "momentum": 0.0,
    }


def test_an_algorithm_of_ones_own():
    assert resolve(Settings.build({"algorithm.path": f"{__name__}:mine"})).algorithm is mine


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"algorithm.name": "dilocco"}, "Did you mean 'diloco'"),
        ({"algorithm.path": f"{__name__}:not_one"}, "not an algorithm"),
        ({"algorithm.outer_optimizer.name": "adem"}, "Did you mean 'adam'"),
        ({"aggregation.upload_codec.name": "bf61"}, "Did you mean 'bf16'"),
        (
            {"algorithm.outer_optimizer.name": "adam", "algorithm.outer_optimizer.momentum": 0.9},
            "adam has no momentum.*betas",
        ),
        ({"algorithm.outer_optimizer.lr": 0}, "Give a number above 0"),
        ({"algorithm.outer_optimizer.momentum": 1.0}, "Give 0 or more, below 1"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(settings, words):
    with pytest.raises(ConfigError, match=words):
        resolve(Settings.build(settings))


def test_delayed_nesterov_is_made_of_sgd():
    settings = Settings.build(
        {
            "algorithm.name": "diloco",
            "async.enabled": True,
            "async.momentum_every": 4,
            "async.sync_rounds_first": 3,
            "algorithm.outer_optimizer.lr": 0.5,
        }
    )
    resolved = resolve(settings)
    assert resolved.outer == "delayed_nesterov"
    assert resolved.outer_options == {"lr": 0.5, "momentum": 0.9, "delay": 4, "undelayed": 3}
    sync = resolve(Settings.build({"algorithm.name": "diloco", "async.momentum_every": 4}))
    assert sync.outer_options == {"lr": 0.7, "momentum": 0.9, "delay": 4, "undelayed": 0}


@pytest.mark.covers("L19")
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"algorithm.outer_optimizer.name": "adam"}, "the outer optimizer is 'adam'"),
        ({"algorithm.name": "fedyogi"}, "the outer optimizer is 'yogi'"),
        ({"algorithm.outer_optimizer.weight_decay": 0.1}, "weight_decay = 0.1, which delayed Nesterov"),
    ],
)
def test_delayed_nesterov_of_another_optimizer_is_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        resolve(Settings.build({"algorithm.name": "diloco", "async.momentum_every": 2, **settings}))


def test_no_torch_is_imported():
    code = (
        "import sys; from atoll.algorithms.resolve import resolve; from atoll.config import Settings\n"
        "resolve(Settings()); import atoll.codecs.plain, atoll.codecs.plain; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
