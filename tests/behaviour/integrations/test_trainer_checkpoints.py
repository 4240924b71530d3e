"""Checkpoints of trainers in a DiLoCo run: one that agrees with the site's folder resumes, another one is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning_world as world
import pytest
import torch
import transformers_world
from lightning_world import Tiny, data, trainer_of

import atoll
from atoll.errors import UsageError
from atoll.integrations.transformers import AtollCallback

OTHER_RUN = "f" * 32


@pytest.mark.covers("X3")
def test_a_lightning_fit_resumes_diloco_from_a_checkpoint_that_agrees(tmp_path: Path) -> None:
    """Three steps an epoch, H = 3: an epoch is a round. The second fit trains epoch 2 of 2."""
    file, changed = tmp_path / "one.ckpt", tmp_path / "other.ckpt"
    with world.serve(tmp_path, "diloco", **{"diloco.sync_every": 3, "rounds.total": 2}) as server:

        def trainer(folder: Path, epochs: int) -> Any:
            made = trainer_of(max_epochs=epochs)
            atoll.integrations.lightning.patch(made, server.url, "a", folder=folder)
            return made

        first = trainer(tmp_path / "w", 1)
        first.fit(Tiny(), data())
        first.save_checkpoint(file)
        first.callbacks[0].driver.leave()
        content = torch.load(file, weights_only=True)
        (state,) = [each for each in content["callbacks"].values() if "versions" in each]
        assert (state["site"], state["versions"]) == ("a", [1])
        state["run"] = OTHER_RUN
        torch.save(content, changed)
        with pytest.raises(UsageError, match="The checkpoint belongs to site 'a' in run ffffffff"):
            trainer(tmp_path / "w", 2).fit(Tiny(), data(), ckpt_path=changed)
        with pytest.raises(UsageError, match=r"starts from version 1 of fragment 0, .* has no version"):
            trainer(tmp_path / "new", 2).fit(Tiny(), data(), ckpt_path=file)
        module = Tiny()
        trainer(tmp_path / "w", 2).fit(module, data(), ckpt_path=file)
        assert module.steps == 3
        assert len(world.lines(server)) == 2


@pytest.mark.covers("X3")
def test_a_transformers_trainer_resumes_diloco_from_a_checkpoint_that_agrees(tmp_path: Path) -> None:
    steps, out = transformers_world.STEPS, tmp_path / "out"
    with transformers_world.serving(tmp_path) as serve:
        server = serve("diloco", **{"diloco.sync_every": steps, "rounds.total": 2})

        def trainer(folder: Path, most: int) -> Any:
            callback = AtollCallback(server.url, "a", folder=folder)
            model = transformers_world.One()
            return transformers_world.trainer_for(
                model, 1.0, callback, out, max_steps=most, save_strategy="steps", save_steps=steps
            )

        trainer(tmp_path / "w", steps).train()
        written = out / f"checkpoint-{steps}" / "atoll.json"
        state = json.loads(written.read_text())
        assert (state["site"], state["versions"]) == ("a", [1])
        with pytest.raises(UsageError, match=r"starts from version 1 of fragment 0, .* has no version"):
            trainer(tmp_path / "new", 2 * steps).train(resume_from_checkpoint=True)
        written.write_text(json.dumps(state | {"run": OTHER_RUN}))
        with pytest.raises(UsageError, match="The checkpoint belongs to site 'a' in run ffffffff"):
            trainer(tmp_path / "w", 2 * steps).train(resume_from_checkpoint=True)
        written.write_text(json.dumps(state))
        trainer(tmp_path / "w", 2 * steps).train(resume_from_checkpoint=True)
        assert server.wait(60)
        assert server.status().fragments[0].version == 2
