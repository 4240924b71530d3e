"""The script of every site: fine-tune a causal language model with LoRA. Only the adapter travels.

python train.py                                              trains alone, without a server
python train.py folders                                      writes base/ and adapter/, for `atoll export --like`
atoll worker --server URL --site NAME -- python train.py     takes part in a run
"""

import math
import sys
import zlib

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

import atoll
from atoll.integrations.peft import adapter

STEPS = 20
BATCH = 8
TOKENS = 32
WORDS = ["each ", "site ", "trains ", "an ", "adapter, ", "and ", "the ", "server ", "takes ", "their ", "mean. "]


def base() -> nn.Module:
    """Return the base model, the same at every site. Put yours here: AutoModelForCausalLM.from_pretrained(NAME)."""
    torch.manual_seed(0)  # this example has a tiny one that has learned nothing yet; its tokens are bytes
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, tie_word_embeddings=True, **sizes))


def with_adapter() -> nn.Module:
    """Return the base model with an adapter, which alone is trained."""
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base(), config)
    model.peft_config["default"].base_model_name_or_path = "base"  # the folder, or the name of yours
    return model


def build() -> nn.Module:
    """Return what travels: the tensors of the adapter. The server calls this for the initial ones."""
    return adapter(with_adapter())


def load_data(site: str) -> tuple[Tensor, Tensor]:
    """Return a site's training and test texts as tokens [N, TOKENS]. Put your data and your tokenizer here."""
    own = torch.Generator().manual_seed(zlib.crc32(site.encode()))
    order = torch.randint(len(WORDS), (2000,), generator=own).tolist()
    text = "".join(WORDS[each] for each in order).encode()
    rows = torch.tensor(list(text[: len(text) // TOKENS * TOKENS])).view(-1, TOKENS)
    return rows[: -len(rows) // 5], rows[-len(rows) // 5 :]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rows: Tensor) -> float:
    """Train for `STEPS` steps, and return the mean loss."""
    model.train()
    losses = []
    for _ in range(STEPS):
        batch = rows[torch.randint(len(rows), (BATCH,))]
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def perplexity(model: nn.Module, rows: Tensor) -> float:
    """Return e to the mean loss of a token; the smaller, the better."""
    model.eval()
    return math.exp(model(input_ids=rows[:64], labels=rows[:64]).loss.item())


def main() -> None:
    """Take part in every round of the run; without a server, train one round alone."""
    model = with_adapter()
    lora = adapter(model)  # shares its parameters with the model
    with atoll.join() as worker:  # the address comes from ATOLL_SERVER; without it, this trains one round alone
        train_rows, test_rows = load_data(worker.site)
        for fl_round in worker:
            fl_round.load_into(lora)
            before = perplexity(model, test_rows)
            optimizer = torch.optim.AdamW(lora.parameters(), lr=5e-3)
            with fl_round.correct(lora, optimizer):  # FedProx and SCAFFOLD need it; FedAvg does nothing here
                loss = train(model, optimizer, train_rows)
            print(f"round {fl_round.number}: perplexity {before:.1f} of the global model, loss {loss:.3f}", flush=True)
            fl_round.submit(lora, weight=len(train_rows), metrics={"perplexity": before, "loss": loss})


if __name__ == "__main__":
    if sys.argv[1:] == ["folders"]:
        base().save_pretrained("base")
        with_adapter().save_pretrained("adapter")
    else:
        main()
