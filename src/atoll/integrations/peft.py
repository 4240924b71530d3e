"""PEFT: train only an adapter across sites, and open the result with `PeftModel.from_pretrained`.

    model = get_peft_model(base, LoraConfig(...))
    lora = adapter(model)       # use this as the model at the server and at every worker
    fl_round.load_into(lora)    # changes the parameters of `model` in place

The base model is never sent. Every site must have the same base model.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from safetensors.torch import save
from torch import Tensor, nn

from atoll.errors import UsageError

try:
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict
    from peft.tuners.tuners_utils import BaseTunerLayer
except ImportError as error:
    raise UsageError("PEFT is not installed.", "pip install 'atoll[peft]'.") from error

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""Names of the two files that `PeftModel.from_pretrained` reads in a folder."""


def adapter(model: PeftModel, name: str | None = None) -> nn.Module:
    """Return the tensors of an adapter as a module, under the names that PEFT gives them in files.

    Args:
        model: the model from `get_peft_model`. The result has the same parameters: a change in one changes both.
        name: name of the adapter; by default the active one.

    Returns:
        A module without a forward. Use it as the model for `atoll.Server`, `load_into`, `correct`, `submit`,
        `atoll.DiLoCo` and the Trainer callback.

    Raises:
        UsageError: `model` is not a PEFT model or has no such adapter, the adapter is merged into the base model, or
            PEFT computes one of the adapter's tensors only when saving. The method `state_dict` of the result raises
            this error, too, if the adapter was merged later or the model no longer uses the same tensors.
    """
    if not isinstance(model, PeftModel):
        raise UsageError(
            f"adapter() got an object of type {type(model).__name__}, not a PEFT model.",
            "Pass the result of peft.get_peft_model.",
        )
    name = name or model.active_adapter
    if name not in model.peft_config:
        raise UsageError(f"The model has no adapter {name!r}.", f"It has {', '.join(map(repr, model.peft_config))}.")
    live = model.state_dict(keep_vars=True)
    adapter_ids = {id(tensor) for tensor in live.values()}
    root = nn.Module()
    saved = get_peft_model_state_dict(model, state_dict=live, adapter_name=name, save_embedding_layers=False)
    for path, tensor in saved.items():
        if id(tensor) not in adapter_ids:
            raise UsageError(
                f"{path!r} is computed when the adapter is saved; it is not a parameter or buffer of the model.",
                "Use an adapter that consists of parameters, for example LoRA.",
            )
        _set_tensor(root, path, tensor)

    def require_live(*_: Any) -> None:
        """Check that the model still uses the tensors that `adapter` returned, and that the adapter is not merged.

        Otherwise, loading the global model would not change the PEFT model, or the update would not contain training.
        """
        if any(isinstance(module, BaseTunerLayer) and name in module.merged_adapters for module in model.modules()):
            raise UsageError(
                f"The adapter {name!r} is merged into the base model, so training would not change it.",
                "Call model.unmerge_adapter() before the round continues.",
            )
        ids = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
        for path, tensor in [*root.named_parameters(), *root.named_buffers()]:
            if id(tensor) not in ids:
                raise UsageError(
                    f"The tensor {path!r} of the model was replaced after adapter() was called: the adapter was "
                    "created again, or the model was moved to another device.",
                    "Call adapter(model) again once the model is on its training device.",
                )

    require_live()
    root.register_state_dict_pre_hook(require_live)  # type: ignore[no-untyped-call]
    return root


def export(weights: str | Path, config: PeftConfig, folder: str | Path) -> Path:
    """Write `adapter_model.safetensors` and `adapter_config.json`, for `PeftModel.from_pretrained(base, folder)`.

    Args:
        weights: the file `exports/model.safetensors` of a run that trained the result of `adapter`.
        config: the adapter's configuration: `model.peft_config["default"]`.
        folder: folder for the two files; created if it does not exist.

    Returns:
        The folder.

    Raises:
        UsageError: `weights` does not exist.
    """
    source, folder = Path(weights), Path(folder)
    if not source.is_file():
        raise UsageError(f"The file {str(source)!r} does not exist.", "Pass exports/model.safetensors of the run.")
    with source.open("rb") as content:
        return _written(folder, config, lambda file: shutil.copyfileobj(content, file))


class AdapterFolder:
    """Saves versions of an adapter at the server, in the files that `PeftModel.from_pretrained(base, folder)` opens.

    This is a persistor: a class that decides how the server saves models. Choose it in the run file:

        [model.persistor]
        path = "atoll.integrations.peft:AdapterFolder"
        config = "adapter_config.json"
        folder = "adapter"

    Args:
        config: path of an `adapter_config.json` from `PeftConfig.save_pretrained`, relative to the folder in which the
            server is started.
        folder: folder for the newest version, relative to the same folder; created if it does not exist. Its subfolder
            `best` gets the best version by the setting `rounds.best_metric`.

    Raises:
        UsageError: `config` is not the path of an existing file `adapter_config.json`.
    """

    def __init__(self, config: str, folder: str) -> None:
        if Path(config).name != CONFIG or not Path(config).is_file():
            raise UsageError(
                f"{CONFIG} does not exist at {str(Path(config).absolute())!r}.",
                f"Write it with model.peft_config['default'].save_pretrained(FOLDER), and pass FOLDER/{CONFIG}.",
            )
        self._config: PeftConfig = PeftConfig.from_pretrained(str(Path(config).parent))
        self._folder = Path(folder)

    def save(self, state: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
        """Write a version, replacing the previous one."""
        _save(self._folder, self._config, state)

    def save_best(self, state: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
        """Write the best version so far into the subfolder `best`."""
        _save(self._folder / "best", self._config, state)


def _save(folder: Path, config: PeftConfig, state: Mapping[str, Tensor]) -> None:
    own = {name: tensor.clone() for name, tensor in state.items()}  # the format refuses tensors that share memory
    content = save(own, {"format": "pt"})
    _written(folder, config, lambda file: file.write(content))


def _written(folder: Path, config: PeftConfig, write: Callable[[BinaryIO], object]) -> Path:
    """Write the two files of an adapter. Each file replaces the old one only when it is complete.

    Args:
        folder: the folder for the files.
        config: the adapter's configuration, for `adapter_config.json`.
        write: writes the tensors into an open file, for `adapter_model.safetensors`.
    """
    new = folder / ".new"
    if os.path.islink(new):
        new.unlink()
    shutil.rmtree(new, ignore_errors=True)  # a killed save has left it
    new.mkdir(parents=True)
    config = copy.deepcopy(config)
    config.inference_mode = True  # as PEFT does when it saves; to continue training, load with is_trainable=True
    config.save_pretrained(str(new))
    with (new / WEIGHTS).open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    for name in (CONFIG, WEIGHTS):
        os.replace(new / name, folder / name)
    shutil.rmtree(new)
    return folder


def _set_tensor(root: nn.Module, path: str, tensor: Tensor) -> None:
    """Register a tensor in `root` under its dotted name, and create missing submodules."""
    *parents, leaf = path.split(".")
    module = root
    for parent in parents:
        if parent not in dict(module.named_children()):
            module.add_module(parent, nn.Module())
        module = module.get_submodule(parent)
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(leaf, tensor)
    else:
        module.register_buffer(leaf, tensor)
