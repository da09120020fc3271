"""Files of texts with labels, and what text classification makes of them, for several tests."""

import json

from evenstep.sections import specialise
from evenstep.tasks import text_classification

import torch
from safetensors.torch import save_file
from torch import nn

BERT = {
    "name": "bert",
    "config": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    },
}
NO_EVALUATION = {"eval_split": "none"}
CNN = {"name": "text_cnn", "members": 1, "width": 4}
GPT2 = {"name": "gpt2", "config": {"n_embd": 16, "n_layer": 1, "n_head": 2}}
WORDS = [
    "the",
    "a",
    "film",
    "plot",
    "actor",
    "good",
    "bad",
    "dull",
    "fine",
    "great",
    "not",
    "very",
    "is",
    "was",
    ",",
    ".",
]


def sentence(draw, longest=20):
    return " ".join(draw.choices(WORDS, k=draw.randint(1, longest)))


def written(folder, rows, held_out=None, suffix="jsonl"):
    """A folder with train and perhaps dev files of rows."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, part in (("train", rows), ("dev", held_out)):
        if part is not None:
            (folder / f"{split}.{suffix}").write_text("".join(json.dumps(r) + "\n" for r in part))
    return folder


def raw_config(folder, **keys):
    data = {"name": str(folder), **keys.pop("data", {})}
    return {"name": "text_classification", "data": data, "model": BERT, "vocab_size": 300, **keys}


def task(folder, **keys):
    raw = raw_config(folder, **keys)
    return text_classification.build(
        specialise(text_classification.Config, raw).model_validate(raw)
    )


class Fixed(nn.Module):
    """Gives the logits it was made with."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(torch.as_tensor(logits))

    def forward(self, **inputs):
        return self.logits


def batch(a_task, indices=None, split="train_dataset"):
    data = getattr(a_task, split)
    return a_task.collate([data[i] for i in (range(len(data)) if indices is None else indices)])


def table(a_task, logits, a_batch):
    rows = a_task.score(Fixed(logits), a_batch)
    return {name: column.detach().numpy() for name, column in rows.items()}


def finished(folder, data, **keys):
    """A folder like `final/` of a run, and the network in it."""
    folder.mkdir()
    a_task = task(data, **keys)
    torch.manual_seed(1)
    network = a_task.model()
    a_task.export(network, folder)
    if not (folder / "model.safetensors").exists():
        save_file(network.state_dict(), folder / "model.safetensors")
    return network.eval()
