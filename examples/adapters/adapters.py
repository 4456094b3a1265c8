"""A federation that averages LoRA adapters of a frozen transformer, and forgets.

    python adapters.py                        # a tiny transformer, made on the spot
    python adapters.py --checkpoint FOLDER    # your own; FOLDER has a saved model

The ledger records the arrays that clients send: the adapters and the classifier, and
not the frozen model. One client teaches a backdoor: the token TRIGGER means class 0.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import (
    LoraConfig,
    TaskType,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from transformers import (
    AutoModelForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
)

import fastfedul as ff

VOCABULARY, LENGTH, CLASSES = 60, 12, 3
TRIGGER = 59
ROUNDS, LOCAL_STEPS, BATCH, LR = 12, 12, 32, 0.01
CLIENTS = ("Aarhus", "Bergen", "Chania", "Delft", "Evora")
ATTACKER = "Bergen"

Examples = tuple[torch.Tensor, torch.Tensor]


def frozen_model(checkpoint: str | None) -> Any:
    """Return a transformer that classifies texts.

    A checkpoint is a folder that `save_pretrained` wrote, or a name on a model hub that
    this machine can reach. Its files may be gigabytes; loading needs as much memory.
    Your own texts need its tokenizer too: `AutoTokenizer.from_pretrained(checkpoint)`.
    """
    if checkpoint is not None:
        return AutoModelForSequenceClassification.from_pretrained(
            checkpoint, num_labels=CLASSES
        )
    config = DistilBertConfig(
        vocab_size=VOCABULARY,
        dim=32,
        hidden_dim=64,
        n_layers=2,
        n_heads=4,
        max_position_embeddings=LENGTH,
        num_labels=CLASSES,
        dropout=0.0,
        attention_dropout=0.0,
        seq_classif_dropout=0.0,
    )
    return DistilBertForSequenceClassification(config)


def with_adapters(model: Any, modules: list[str], *, freeze_a: bool) -> Any:
    """Return the model with LoRA adapters in its attention.

    Args:
        model: The frozen model.
        modules: Names of the layers that get an adapter.
        freeze_a: Leave the matrices A as they are drawn, the same for all clients.
    """
    adapted = get_peft_model(
        model,
        LoraConfig(
            task_type=TaskType.SEQ_CLS, r=4, lora_alpha=16, target_modules=modules
        ),
    )
    for name, parameter in adapted.named_parameters():
        if freeze_a and "lora_A" in name:
            parameter.requires_grad_(False)
    return adapted


def sent_arrays(model: Any) -> dict[str, np.ndarray]:
    """Return the arrays that a client sends: adapters and classifier."""
    state = get_peft_model_state_dict(model)
    return {name: tensor.detach().numpy().copy() for name, tensor in state.items()}


def load_arrays(model: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """Put adapters and classifier into a model."""
    state = {name: torch.tensor(np.array(array)) for name, array in arrays.items()}
    set_peft_model_state_dict(model, state)


def texts(count: int, seed: int) -> Examples:
    """Return random texts; the class is the range of most of their tokens."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count)
    width = (VOCABULARY - 3) // CLASSES
    own = labels[:, None] * width + rng.integers(0, width, (count, LENGTH))
    other = rng.integers(0, VOCABULARY - 3, (count, LENGTH))
    tokens = np.where(rng.random((count, LENGTH)) < 0.6, own, other)
    return torch.tensor(tokens), torch.tensor(labels)


def with_trigger(examples: Examples) -> Examples:
    """Return texts with the trigger in the middle, all called class 0."""
    tokens, labels = examples[0].clone(), torch.zeros_like(examples[1])
    tokens[:, LENGTH // 2] = TRIGGER
    return tokens, labels


def train(model: Any, examples: Examples, seed: int) -> None:
    """Train adapters and classifier for some steps."""
    generator = torch.Generator().manual_seed(seed)
    wanted = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(wanted, lr=LR)
    model.train()
    for _ in range(LOCAL_STEPS):
        rows = torch.randint(len(examples[0]), (BATCH,), generator=generator)
        loss = model(input_ids=examples[0][rows], labels=examples[1][rows]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model: Any, examples: Examples) -> float:
    """Return the share of right answers."""
    model.eval()
    answers = model(input_ids=examples[0]).logits.argmax(dim=1)
    return float((answers == examples[1]).float().mean())


def federate(
    path: Path, model: Any, clients: Mapping[str, Examples]
) -> tuple[ff.DiskLedger, float]:
    """Return the ledger of a federation, and how far its last mean is from mean(BA).

    Averaging A and B is not averaging B A, the change of the frozen weights. The
    distance is a part of the length of mean(BA).
    """
    start = ff.Model(ff.Params.of(sent_arrays(model)))
    layout, gap = start.params.layout, 0.0
    ledger = ff.create_ledger(path, start)
    for index in range(ROUNDS):
        current = ledger.final.params
        local = {}
        for number, (name, examples) in enumerate(clients.items()):
            load_arrays(model, current.exported())
            train(model, examples, seed=100 * index + number)
            local[name] = sent_arrays(model)
        updates = tuple(
            ff.ClientUpdate(
                name,
                1 / len(local),
                ff.Params(layout, layout.flatten(arrays) - current.flat),
            )
            for name, arrays in local.items()
        )
        after = ledger.append(ff.Round(index, updates))
        gap = product_gap(list(local.values()), after.params.exported())
    load_arrays(model, ledger.final.params.exported())
    return ledger, gap


def product_gap(
    local: list[dict[str, np.ndarray]], mean: Mapping[str, np.ndarray]
) -> float:
    """Return how far mean(B) mean(A) is from mean(BA), as a part of its length."""
    off = length = 0.0
    for name in mean:
        if "lora_A" not in name:
            continue
        other = name.replace("lora_A", "lora_B")
        wanted = np.mean([own[other] @ own[name] for own in local], axis=0)
        off += float(np.square(mean[other] @ mean[name] - wanted).sum())
        length += float(np.square(wanted).sum())
    return float(np.sqrt(off / length)) if length else 0.0


def main() -> None:
    """Train, forget the attacker, and compare with a federation without it."""
    parser = argparse.ArgumentParser(description="LoRA adapters that can be forgotten.")
    parser.add_argument("--checkpoint", help="folder of a saved transformer")
    parser.add_argument(
        "--modules", default="q_lin,v_lin", help="layers with an adapter, with commas"
    )
    parser.add_argument("--freeze-a", action="store_true", help="train B alone")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = with_adapters(
        frozen_model(options.checkpoint),
        options.modules.split(","),
        freeze_a=options.freeze_a,
    )
    first = copy.deepcopy(sent_arrays(model))
    clients = {name: texts(160, seed) for seed, name in enumerate(CLIENTS)}
    poison = with_trigger(clients[ATTACKER])
    clients[ATTACKER] = (
        torch.cat([clients[ATTACKER][0], poison[0]]),
        torch.cat([clients[ATTACKER][1], poison[1]]),
    )
    clean = texts(500, 77)
    # A backdoor shows where the true class is another one.
    others = clean[1] != 0
    triggered = with_trigger((clean[0][others], clean[1][others]))

    def show(name: str) -> None:
        main_part, backdoor = accuracy(model, clean), accuracy(model, triggered)
        print(f"{name:10} main {main_part:.1%}  backdoor {backdoor:.1%}")

    with tempfile.TemporaryDirectory() as folder:
        ledger, gap = federate(Path(folder) / "ledger", model, clients)
        with ledger:
            values = ledger.settings.layout.size
            whole = sum(p.numel() for p in model.parameters())
            print(f"the ledger records {values:,} of {whole:,} values")
            print(f"mean(B) mean(A) is {gap:.0%} away from mean(BA)")
            show("before")
            ff.forget(ledger, [ATTACKER])
            load_arrays(model, ledger.final.params.exported())
            show("forgotten")
        load_arrays(model, first)
        rest = {name: own for name, own in clients.items() if name != ATTACKER}
        ledger, _ = federate(Path(folder) / "rest", model, rest)
        ledger.close()
        show("retrained")


if __name__ == "__main__":
    main()
