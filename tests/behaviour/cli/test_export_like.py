"""`atoll export --like FOLDER`: Transformers and PEFT open what it writes, and a model that does not fit is refused."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.servers import plain_server
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

# Transformers takes seconds to import: these functions do it, so that only processes that run these tests wait for it.


def causal_lm(seed: int, **options: Any) -> Any:
    """A tiny Llama; its head is tied to its embedding unless `options` say otherwise."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | {"tie_word_embeddings": True} | options))


def with_adapter(seed: int) -> Any:
    import peft

    torch.manual_seed(seed)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(causal_lm(0), config)


def like_model(folder: Path, **options: Any) -> Path:
    """A folder with other values than the run's model, its tokenizer, and files that are not to be copied."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    causal_lm(9, **options.pop("config", {})).to(options.pop("dtype", torch.float32)).save_pretrained(folder, **options)
    words = Tokenizer(models.WordLevel({"site": 0, "?": 1}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder)
    for stale in ("pytorch_model.bin", "old.safetensors", "checkpoint-5/config.json", ".cache/x", "onnx/model.onnx"):
        (folder / stale).parent.mkdir(exist_ok=True)
        (folder / stale).write_text("stale")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    return folder


@pytest.fixture
def exported(atoll_command, tmp_path) -> Callable[..., Any]:
    """A function: a run with this initial model is exported as OUT, like a folder; returns how the command ended."""

    def export(model: nn.Module, like: Path, *words: str, server: bool = False) -> Any:
        with plain_server(tmp_path, model, algorithm="diloco") as running:
            if server:
                return atoll_command("export", "out", "--server", running.url, "--like", str(like), *words)
        return atoll_command("export", "out", "--dir", "state", "--like", str(like), *words)

    return export


def require_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def head_of(path: Path) -> bytes:
    data = path.read_bytes()
    return data[: 8 + int.from_bytes(data[:8], "little")]


@pytest.mark.slow
@pytest.mark.covers("S18")
@pytest.mark.parametrize("server", [False, True], ids=["of a folder", "of a server"])
def test_from_pretrained_opens_an_export(exported, tmp_path, server: bool) -> None:
    """The export has the run's values in FOLDER's dtype, names and shards, with its tokenizer; the head stays tied."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, out = causal_lm(1), tmp_path / "out"
    like = like_model(tmp_path / "like", dtype=torch.bfloat16, max_shard_size="4KB")
    outcome = exported(model, like, server=server)
    assert (outcome.returncode, outcome.stdout) == (0, "version 0: out\n"), outcome.stderr
    opened, told = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert [told[each] for each in ("missing_keys", "unexpected_keys", "mismatched_keys")] == [set(), set(), set()]
    assert opened.dtype == torch.bfloat16
    assert opened.lm_head.weight is opened.model.embed_tokens.weight
    require_equal(opened.state_dict(), {name: value.bfloat16() for name, value in model.state_dict().items()})
    assert AutoTokenizer.from_pretrained(out)("site")["input_ids"] == [0]

    shards = sorted(path.name for path in like.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert [head_of(out / name) for name in shards] == [head_of(like / name) for name in shards]
    stale = {"pytorch_model.bin", "old.safetensors", "checkpoint-5", ".cache", "onnx"}
    assert {path.name for path in out.iterdir()} == {path.name for path in like.iterdir()} - stale
    assert (out / "1_Pooling" / "config.json").read_text() == "{}"
    assert {path.name for path in tmp_path.iterdir()} == {"like", "out", "state"}


@pytest.mark.covers("S17", "S18")
def test_peft_opens_an_export_of_an_adapter(exported, tmp_path) -> None:
    """The export of an adapter has the run's values, and PEFT opens it without a warning of missing tensors."""
    import peft

    from atoll.integrations.peft import adapter

    lora = adapter(with_adapter(1))
    with_adapter(2).save_pretrained(tmp_path / "like")
    outcome = exported(lora, tmp_path / "like")
    assert outcome.returncode == 0, outcome.stderr
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(missing|unexpected).*")
        opened = peft.PeftModel.from_pretrained(causal_lm(0), tmp_path / "out")
    require_equal(adapter(opened).state_dict(), lora.state_dict())
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"README.md", "adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.covers("S18")
def test_a_model_within_another_module_is_exported(exported, tmp_path) -> None:
    """A run whose names all have the same beginning, such as that of an attribute, is exported without it."""
    from transformers import AutoModelForCausalLM

    model = causal_lm(1)
    outcome = exported(nn.ModuleDict({"net": model}), like_model(tmp_path / "like"))
    assert outcome.returncode == 0, outcome.stderr
    require_equal(AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict(), model.state_dict())


@pytest.mark.covers("S18")
def test_a_folder_may_have_both_names_of_tied_tensors(exported, tmp_path) -> None:
    """A folder of an untied model gets a tied model's tensor under both names."""
    like = like_model(tmp_path / "like", config={"tie_word_embeddings": False})
    model = causal_lm(1)
    assert exported(model, like).returncode == 0
    require_equal(load_file(tmp_path / "out" / "model.safetensors"), dict(model.state_dict()))


@pytest.mark.covers("S18")
def test_a_folder_may_have_the_other_name_of_a_tied_tensor(exported, tmp_path) -> None:
    """A folder with the head, but not the embedding that it is tied to, gets the head alone."""
    like = like_model(tmp_path / "like")
    rewritten(like, lambda each: each.update({HEAD: each.pop(EMBEDDING)}))
    model = causal_lm(1)
    assert exported(model, like).returncode == 0
    wanted = dict(model.state_dict())
    del wanted[EMBEDDING]
    require_equal(load_file(tmp_path / "out" / "model.safetensors"), wanted)


WIDER = {"vocab_size": 40}
REMEDY = r"Save the model that the sites begin with there: model\.save_pretrained\(FOLDER\), with the same "


@pytest.mark.covers("S18", "X3")
@pytest.mark.parametrize(
    ("run", "folder", "said"),
    [
        (
            {"num_hidden_layers": 1},
            {},
            r"The folder '\S*like' has tensors that the run lacks: 'model\.layers\.1\.\S+' \[\S.*\], .* and 6 more\. ",
        ),
        (
            {},
            {"num_hidden_layers": 1},
            r"The run has tensors that the folder '\S*like' lacks: 'model\.layers\.1\.\S+' \[\S.*\], .* and 6 more\. ",
        ),
        (
            {"tie_word_embeddings": False},
            {},
            r"The run has tensors that the folder '\S*like' lacks: 'lm_head\.weight' \[32, 16\]\. ",
        ),
        (
            WIDER,
            {},
            r"Shapes differ in the run and in '\S*like': 'model\.embed_tokens\.weight': \[40, 16\] and \[32, 16\]\. ",
        ),
    ],
    ids=["missing", "extra", "untied", "another shape"],
)
def test_a_model_that_does_not_fit_is_refused(
    exported, tmp_path, run: dict[str, Any], folder: dict[str, Any], said: str
) -> None:
    """An export like a folder with other tensors is refused: the error names them with both shapes, and the remedy."""
    # A layer has 9 tensors: four projections of the attention, three of the perceptron, two norms. Three are named.
    outcome = exported(causal_lm(1, **run), like_model(tmp_path / "like", config=folder))
    assert outcome.returncode == 2
    assert re.search(f"{said}{REMEDY}", outcome.stderr), outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"like", "state"}


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def index_with(name: object) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {EMBEDDING: name}}))

    return write


CANNOT = r"model\.safetensors\.index\.json is no list of weights: "


@pytest.mark.covers("S18", "X3")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda folder: rewritten(folder, lambda each: each.update({NORM: each[NORM].to(torch.int8)})),
            r"Dtypes in the run cannot be cast to those in '\S*like': 'model\.norm\.weight': F32 and I8\.",
        ),
        (
            lambda folder: rewritten(folder, lambda each: each.update({NORM: each[NORM].half()})),
            r"'model\.norm\.weight' has values in the run that F16 cannot hold, its dtype in model\.safetensors\.",
        ),
        (
            lambda folder: (folder / "model.safetensors").unlink(),
            r"like' has no model\.safetensors, model\.safetensors",
        ),
        (lambda folder: (folder / "config.json").unlink(), r"like' has no config\.json\."),
        (index_with("../like/model.safetensors"), CANNOT + r"it lists '\.\./like/model\.safetensors'"),
        (index_with(5), CANNOT),
        (index_with("gone.safetensors"), r"gone\.safetensors cannot be used \(No such file or directory\)"),
        (
            lambda folder: (folder / "notes.md").symlink_to("gone"),
            r"like/notes\.md cannot be used \(No such file or directory\)\.",
        ),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"short"),
            r"like' cannot be used: model\.safetensors has only 5 bytes",
        ),
    ],
    ids=["int8", "overflow", "no weights", "no config", "outside", "no name", "no shard", "dangling link", "truncated"],
)
def test_an_unfit_folder_is_refused(exported, tmp_path, change: Callable[[Path], object], said: str) -> None:
    """A folder without weights, with a damaged file, or in a dtype that cannot hold the run is refused by name."""
    model = causal_lm(1)
    with torch.no_grad():
        model.model.norm.weight[0] = 1e6  # fp16 ends at 65,504
    like = like_model(tmp_path / "like")
    change(like)
    outcome = exported(model, like)
    assert outcome.returncode in (2, 7)
    assert re.search(said, outcome.stderr), outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"like", "state"}


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("like", "'like' exists, but --like needs a new folder. Give another name.\n"),
        ("out.safetensors", "'out.safetensors' is the name of a file, but --like needs a new folder."),
    ],
)
def test_an_export_overwrites_no_folder(atoll_command, tmp_path, out: str, said: str) -> None:
    """`atoll export --like` refuses a folder that has files, before it looks for a run, and leaves them as they are."""
    like = like_model(tmp_path / "like")
    before = sorted(path.name for path in like.iterdir())
    outcome = atoll_command("export", out, "--server", "http://127.0.0.1:9", "--like", "like")
    assert (outcome.returncode, said in outcome.stderr) == (2, True), outcome.stderr
    assert sorted(path.name for path in like.iterdir()) == before


def test_an_unreachable_server_leaves_no_folder(atoll_command, tmp_path) -> None:
    """If no server answers, the error suggests the whole command with the run's name, and no folder is left."""
    like_model(tmp_path / "like")
    outcome = atoll_command("export", "out", "--server", "http://127.0.0.1:9", "--like", "like")
    assert outcome.returncode == 5
    assert outcome.stderr.endswith("Without a server, name the run: atoll export out RUN --like like.\n")
    assert [path.name for path in tmp_path.iterdir()] == ["like"]


def test_what_a_killed_export_left_is_replaced(exported, tmp_path) -> None:
    """An incomplete folder that a killed export has left does not end up in the next one."""
    (tmp_path / ".out.new").mkdir()
    (tmp_path / ".out.new" / "left").touch()
    assert exported(causal_lm(1), like_model(tmp_path / "like")).returncode == 0
    assert not (tmp_path / "out" / "left").exists()
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(causal_lm(1).state_dict()) - {HEAD}
    assert {path.name for path in tmp_path.iterdir()} == {"like", "out", "state"}
