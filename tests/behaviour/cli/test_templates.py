"""`atoll new --template`: the files train by the commands that are printed, and their results open without Atoll."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from harness.processes import Nursery
from kit.processes import Outcome, command, run_commands
from kit.workflows import run_workflow
from safetensors.torch import load_file

from atoll.cli import new
from atoll.testing.run import history

NEEDS = {"peft": "peft", "sklearn": "sklearn", "xgboost": "xgboost"}
"""Template → the package that it needs, besides Atoll's own."""


def made(template: str, folder: Path) -> tuple[Path, list[list[str]]]:
    """The files of a template in a new folder, and the words of the commands that `atoll new` prints."""
    pytest.importorskip(NEEDS[template], reason=f"{NEEDS[template]} is not installed; the extra `test` has it")
    words = [sys.executable, "-m", "atoll.cli.main", "new", "mine", "--template", template]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = [line.split("#")[0].split() for line in done.stdout.splitlines() if line.startswith("  ")]
    assert printed[0] == ["cd", "mine"]
    return folder / "mine", printed[1:]


def run_alone(words: list[str], folder: Path) -> str:
    assert words[0] == "python"
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words[1:]], cwd=folder, env=alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(nursery: Nursery, words: list[str], folder: Path, *further: str) -> Outcome:
    assert words[0] == "atoll"
    done = command(nursery, folder, *words[1:], *further, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture
def script(request: pytest.FixtureRequest, tmp_path: Path) -> ModuleType:
    """The script of a template, imported from its new folder."""
    folder, _ = made(request.param, tmp_path)
    spec = importlib.util.spec_from_file_location("template_under_test", folder / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def accuracies(printed: str) -> list[float]:
    """The accuracy that each round printed, of the model that it began with."""
    found = re.findall(r"^round (\d+): accuracy ([\d.]+) of the model so far", printed, re.MULTILINE)
    assert [int(number) for number, _ in found] == [*range(1, 11)]
    return [float(each) for _, each in found]


@pytest.mark.slow
@pytest.mark.covers("X45", "T9")
@pytest.mark.parametrize("template", ["xgboost", "sklearn"])
def test_tabular_templates_train_by_the_printed_commands(nursery: Nursery, tmp_path: Path, template: str) -> None:
    """The script trains alone, with three sites by `atoll run`, and with two workers at a server; each learns."""
    folder, (alone, here, serve, work, *_) = made(template, tmp_path)
    assert accuracies(run_alone(alone, folder))[-1] > 0.75
    assert not (folder / "model.npz").exists()
    done = run(nursery, here, folder)
    assert re.search(r"next: runs/mine-1/server\.log has what the workflow printed", done.stdout), done.stdout
    printed = (folder / "runs" / "mine-1" / "server.log").read_text()
    assert accuracies(printed)[-1] > 0.85
    assert ", 3 sites" in printed
    require_opens(template, folder, sites=3)
    server = run_commands(nursery, folder, serve, work)
    assert accuracies(server.output())[-1] > 0.85
    assert ", 2 sites" in server.output()
    require_opens(template, folder, sites=2)


def require_opens(template: str, folder: Path, sites: int) -> None:
    """The result opens with the library alone, and predicts the labels of five other sites better than one label would.

    Ten rounds of two trees at each site are 20 trees for each site.
    """
    code = {
        "xgboost": f"""
            import xgboost
            model = xgboost.Booster(model_file="model.ubj")
            assert model.num_boosted_rounds() == {20 * sites}, model.num_boosted_rounds()
            found, labels = [model.predict(rows) > 0.5 for rows in others], [rows.get_label() for rows in others]
        """,
        "sklearn": """
            model = dict(np.load("model.npz"))
            found = [train.classifier(model).predict(train.scaled(rows, model)) for rows, _ in others]
            labels = [each for _, each in others]
        """,
    }[template]
    before = "import numpy as np, train\nothers = [train.load_data(f'new-{number}')[0] for number in range(5)]\n"
    after = (
        "found, labels = np.concatenate(found), np.concatenate(labels)\nprint((found == labels).mean(), labels.mean())"
    )
    said = run_alone(["python", "-c", before + textwrap.dedent(code) + after], folder)
    accuracy, positive = map(float, said.split())
    assert 0.3 < positive < 0.7
    assert accuracy > 0.8


@pytest.mark.slow
@pytest.mark.covers("X45", "S17", "S18")
def test_the_peft_template_trains_and_opens(nursery: Nursery, tmp_path: Path) -> None:
    """The printed commands train the adapter, and the export opens with PEFT: it predicts better than before."""
    folder, (alone, here, serve, work, _, _, _, folders, export) = made("peft", tmp_path)
    assert "round 1: perplexity" in run_alone(alone, folder)
    run_alone(folders, folder)
    run(nursery, here, folder, "--rounds", "2")
    run_commands(nursery, folder, [*serve, "--rounds=3"], work)
    rows = history(folder / "atoll-run")
    assert [[each["site"] for each in row["sites"]] for row in rows] == [["a", "b"]] * 3
    assert rows[-1]["metrics"]["perplexity"] < rows[0]["metrics"]["perplexity"]
    assert run(nursery, export, folder).stdout == "version 3: tuned\n"  # of the newest run here: the server's
    trained = load_file(folder / "atoll-run" / "exports" / "model.safetensors")
    written = load_file(folder / "tuned" / "adapter_model.safetensors")
    assert trained.keys() == written.keys()
    assert [name for name in trained if not torch.equal(trained[name], written[name])] == []
    assert all("lora_" in name for name in written)  # the base model stays at the sites
    said = run_alone(
        [
            "python",
            "-c",
            "import train; from peft import AutoPeftModelForCausalLM as Auto; _, rows = train.load_data('new'); "
            "print(train.perplexity(train.base(), rows), train.perplexity(Auto.from_pretrained('tuned'), rows))",
        ],
        folder,
    )
    before, after = map(float, said.split()[-2:])
    assert after < before / 2


@pytest.mark.slow
@pytest.mark.long
def test_the_peft_template_can_be_simulated(nursery: Nursery, tmp_path: Path) -> None:
    folder, (_, _, _, _, _, _, simulate, *_) = made("peft", tmp_path)
    done = run(nursery, simulate, folder, "--rounds", "1")
    assert "20 worker-rounds" in done.stdout + done.stderr


# -- what the scripts compute


@pytest.mark.parametrize("script", ["xgboost"], indirect=True)
def test_a_joined_booster_adds_what_its_parts_predict(script: Any) -> None:
    """The margin of the joined model is the sum of the margins of all trees; a site adds its share of the rate."""
    import xgboost

    (one, _), (two, _) = script.load_data("a"), script.load_data("b")
    first = script.train({"model": np.empty(0, np.uint8), "rate": 0.3}, script.load_data("a"))["trees"]
    news = [script.train({"model": first, "rate": 0.15}, script.load_data(site))["trees"] for site in ("a", "b")]
    joined = script.booster_of(script.joined(first, news))
    parts = [script.booster_of(each).predict(two, output_margin=True) for each in (first, *news)]
    assert np.abs(parts[2]).max() > 0.01
    np.testing.assert_allclose(joined.predict(two, output_margin=True), sum(parts), atol=1e-5)
    assert joined.num_boosted_rounds() == 3 * script.TREES
    reloaded = xgboost.Booster(model_file=bytearray(joined.save_raw("ubj")))
    assert np.array_equal(reloaded.predict(one), joined.predict(one))


@pytest.mark.parametrize("script", ["xgboost"], indirect=True)
def test_boosters_of_several_classes_are_joined(script: Any) -> None:
    """With three classes a round has three trees, and the joined model still adds what its parts predict."""
    import xgboost

    rows = np.random.default_rng(1).normal(size=(90, 2))
    data = xgboost.DMatrix(rows, (rows[:, 0] > 0).astype(int) + (rows[:, 1] > 0))
    options = {"objective": "multi:softprob", "num_class": 3, "base_score": 0.5, "nthread": 1}
    parts = [
        np.frombuffer(xgboost.train(options | {"max_depth": depth}, data, depth).save_raw("json"), np.uint8)
        for depth in (1, 2)
    ]
    joined = script.booster_of(script.joined(*parts[:1], parts[1:]))
    margins = [script.booster_of(each).predict(data, output_margin=True) for each in parts]
    assert joined.num_boosted_rounds() == 3
    np.testing.assert_allclose(joined.predict(data, output_margin=True), sum(margins) - 0.5, atol=1e-5)


@pytest.mark.parametrize("script", ["xgboost"], indirect=True)
def test_boosters_of_other_columns_are_refused(script: Any) -> None:
    import xgboost

    rows = np.random.default_rng(1).normal(size=(50, 3))
    trained = [
        xgboost.train(script.PARAMS, xgboost.DMatrix(rows[:, :columns], rows[:, 0] > 0), 1).save_raw("json")
        for columns in (2, 3)
    ]
    one, other = (np.frombuffer(each, np.uint8) for each in trained)
    with pytest.raises(ValueError, match=r"'num_feature': '3'.*'num_feature': '2'.*\. Use the same columns and PARAMS"):
        script.joined(one, [other])


@pytest.mark.parametrize("script", ["sklearn"], indirect=True)
def test_moments_are_those_of_all_rows_together(script: Any) -> None:
    """The common mean and deviation are NumPy's of the rows of both sites, and a constant column stays as it is."""
    sites = [script.load_data(site) for site in ("a", "b")]
    model = script.start([script.measure(each) for each in sites])
    rows = np.concatenate([table for (table, _), _ in sites])
    np.testing.assert_allclose(model["mean"], rows.mean(0))
    np.testing.assert_allclose(model["scale"], rows.std(0))
    constant = ((np.full((4, 1), 3.0), None), None)
    assert script.start([script.measure(constant)])["scale"].tolist() == [1.0]


@pytest.mark.parametrize("script", ["sklearn"], indirect=True)
def test_coefficients_are_averaged_by_rows(script: Any, tmp_path: Path) -> None:
    """Sites with 1 and 3 rows: the mean of their coefficients 0 and 4 is (1·0 + 3·4)/4 = 3, of 4 and 0 it is 1.

    The column has the sum 2 + 6 and the squares 4 + 28 in 4 rows: its mean is 2, its deviation √(32/4 − 2²) = 2.
    """
    measured = iter([(1, 2.0, 4.0), (3, 6.0, 28.0)])
    trained = iter([(1, 0.0, 4.0), (3, 4.0, 0.0)])
    began = []

    def measure(_: Any) -> dict[str, Any]:
        rows, total, squares = next(measured)
        return {"rows": rows, "sum": np.array([total]), "squares": np.array([squares])}

    def train(model: Any) -> dict[str, Any]:
        began.append({name: each.tolist() for name, each in model.items()})
        rows, coefficient, intercept = next(trained)
        return {"rows": rows, "accuracy": 0.5, "coef": np.array([[coefficient]]), "intercept": np.array([intercept])}

    run_workflow(tmp_path, partial(script.main, rounds=1), {"measure": measure, "train": train}, "ab")
    assert began == [{"mean": [2.0], "scale": [2.0], "coef": [[0.0]], "intercept": [0.0]}] * 2
    result = np.load(script.RESULT)
    assert {name: result[name].tolist() for name in ("coef", "intercept")} == {"coef": [[3.0]], "intercept": [1.0]}


@pytest.mark.parametrize("script", ["xgboost"], indirect=True)
def test_two_sites_share_the_learning_rate(script: Any, tmp_path: Path) -> None:
    """Each of two sites gets half of 0.3, and the result has the trees of both."""
    import xgboost

    rates = []

    def train(task: Any) -> dict[str, Any]:
        rates.append(task["rate"])
        return dict(script.train(task, script.load_data("a")))

    run_workflow(tmp_path, partial(script.main, rounds=1), {"train": train}, "ab")
    assert rates == [0.15, 0.15]
    assert xgboost.Booster(model_file=script.RESULT).num_boosted_rounds() == 2 * script.TREES


# -- the files


@pytest.mark.parametrize("template", NEEDS)
def test_the_run_file_of_a_template_is_valid(atoll_command, tmp_path: Path, template: str) -> None:
    """All comments of the run file can be turned into settings, and nothing changes by that."""
    import jsonschema

    assert atoll_command("new", "x", "--template", template).returncode == 0
    file = tmp_path / "x" / "run.toml"

    def in_effect() -> list[str]:
        shown = atoll_command("config", "show", str(file))
        assert shown.returncode == 0, shown.stderr
        return [line.split("  # ")[0] for line in shown.stdout.splitlines()]

    before, text = in_effect(), file.read_text()
    schema = json.loads((tmp_path / "x" / text.split("\n")[0].removeprefix("#:schema ")).read_text())
    jsonschema.validate(tomllib.loads(text), schema)
    assert ("[algorithm]" in text) == (template == "peft")
    file.write_text(re.sub(r"^# (\w+ =.*)$", r"\1", text, flags=re.MULTILINE))
    assert in_effect() == before


def test_a_missing_package_is_the_first_thing_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`atoll new` prints the command that installs what the template needs, if it is missing."""
    monkeypatch.setattr(new, "find_spec", lambda module: None if module == "sklearn" else object())
    assert new.next_commands(tmp_path, "sklearn").splitlines()[1] == "  pip install scikit-learn"
    assert "pip install" not in new.next_commands(tmp_path, "peft")
