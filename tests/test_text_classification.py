"""The text classification task: rows to batches, labels, losses, metrics, export, one curve."""

import json
import math
import pickle
import random
import shutil

from evenstep import text_metrics, text_samples, tokenization
from evenstep.models import text_encoder
from evenstep.sections import specialise
from evenstep.tasks import text_classification
from evenstep.text_augmentation import token_noise

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from launching import ROOT, command, metrics, run, summary
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import nn
from transformers import PreTrainedTokenizerFast

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


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


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


@pytest.fixture(scope="module")
def binary(tmp_path_factory):
    draw = random.Random(0)
    rows = [{"text": sentence(draw), "label": n % 2} for n in range(40)]
    return written(tmp_path_factory.mktemp("binary"), rows, rows[:9])


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


# Rows to batches


def test_a_batch_is_as_long_as_its_longest_text_and_padding_is_masked(binary):
    a_task = task(binary)
    samples = [a_task.train_dataset[i] for i in (0, 1, 2)]
    inputs = a_task.collate(samples)["inputs"]
    sizes = [len(own["input_ids"]) for own, _ in samples]
    assert inputs["input_ids"].shape == (3, max(sizes))
    assert inputs["attention_mask"].sum(1).tolist() == sizes
    for row, (own, _) in enumerate(samples):
        assert inputs["input_ids"][row, : sizes[row]].tolist() == own["input_ids"].tolist()
        assert (inputs["input_ids"][row, sizes[row] :] == 1).all()  # the BPE's padding token
        assert not inputs["attention_mask"][row, sizes[row] :].any()


def test_longer_texts_are_cut_to_max_length(tmp_path):
    rows = [{"text": "good " * 90, "label": 0}, {"text": "bad", "label": 1}]
    longest = task(written(tmp_path, rows), max_length=7, data=NO_EVALUATION)
    assert longest.train_dataset.lengths.max() == 7


def test_padding_changes_no_logit(binary):
    a_task = task(binary)
    model = a_task.model().eval()
    together = model(**batch(a_task, range(6))["inputs"]).logits
    alone = [model(**batch(a_task, [i])["inputs"]).logits for i in range(6)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-5)


def test_the_two_texts_of_a_pair_are_kept_apart(tmp_path):
    rows = [
        {"premise": "a film", "hypothesis": "was good", "label": "yes"},
        {"premise": "a film was", "hypothesis": " good", "label": "no"},
        {"premise": "", "hypothesis": "a film was good", "label": "no"},
    ]
    a_task = task(written(tmp_path, rows), data=NO_EVALUATION)
    seen = [own["input_ids"].tolist() for own, _ in (a_task.train_dataset[i] for i in range(3))]
    assert len({tuple(ids) for ids in seen}) == 3
    assert all(ids.count(0) == 3 for ids in seen)  # the end token: before, between, after
    assert a_task.train_dataset.labels.tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    "columns",
    [
        ("sentence",),
        ("sentence1", "sentence2"),
        ("question1", "question2"),
        ("premise", "hypothesis"),
        ("question", "sentence"),
    ],
)
def test_the_columns_of_glue_are_found(tmp_path, columns):
    rows = [{**{c: f"{c} {n}" for c in columns}, "label": n, "idx": n} for n in (0, 1)]
    a_task = task(written(tmp_path, rows), data=NO_EVALUATION)
    own, _ = a_task.train_dataset[0]
    assert own["input_ids"].tolist().count(0) == len(columns) + 1


def test_missing_columns_are_named_with_those_there_are(tmp_path):
    folder = written(tmp_path, [{"review": "a", "label": 0}, {"review": "b", "label": 1}])
    with pytest.raises(ValueError, match=r"task.text_columns to one or two of: review, label"):
        task(folder)
    with pytest.raises(ValueError, match=r"no column text_b"):
        task(folder, text_columns=["text_b"])
    assert len(task(folder, text_columns=["review"], data=NO_EVALUATION).train_dataset) == 2


def test_text_that_looks_like_nothing_or_like_a_token_is_text(tmp_path):
    hard = ["", "NA", "null", "None", "nan", "01", tokenization.END]
    lines = "".join(f"{value}\t{n % 2}\n" for n, value in enumerate(hard))
    (tmp_path / "train.tsv").write_text(lines)
    data = {"columns": ["text", "label"], "eval_split": "none"}
    a_task = task(tmp_path, data=data)
    seen = [
        tuple(own["input_ids"].tolist())
        for own, _ in map(a_task.train_dataset.__getitem__, range(len(hard)))
    ]
    assert len(set(seen)) == len(hard)
    assert seen[0] == (0, 0)
    assert seen[-1].count(0) == 2


# Tokenizers without a padding token


@pytest.fixture(scope="module")
def no_padding(tmp_path_factory):
    """A GPT-2 of a few KB as a local folder: its tokenizer has no padding token."""
    from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("gpt2")
    backend = tokenization.train_bpe(WORDS * 3, 270)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=tokenization.END)
    tokenizer.save_pretrained(folder)
    config = GPT2Config(vocab_size=len(tokenizer), eos_token_id=0, **GPT2["config"])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    assert tokenizer.pad_token_id is None
    return folder


def test_a_tokenizer_without_a_padding_token_trains_and_agrees_with_the_model(binary, no_padding):
    a_task = task(binary, model={"name": str(no_padding)})
    model = a_task.model()
    assert model.config.pad_token_id == 0  # its end token
    four = batch(a_task, range(4))
    a_task.loss(model, four).backward()
    logits = model.eval()(**four["inputs"]).logits
    alone = [model(**batch(a_task, [i])["inputs"]).logits for i in range(4)]
    torch.testing.assert_close(logits, torch.cat(alone), rtol=0, atol=1e-5)


def test_an_empty_text_has_a_token_where_the_tokenizer_gives_none(tmp_path, no_padding):
    rows = [{"text": "", "label": 0}, {"text": "", "label": 1}]
    folder = written(tmp_path, rows)
    a_task = task(folder, model={"name": str(no_padding)}, data=NO_EVALUATION)
    assert a_task.train_dataset.lengths.tolist() == [1, 1]
    assert a_task.loss(a_task.model(), batch(a_task)).isfinite()


@pytest.mark.parametrize(
    "model",
    [
        GPT2,
        {"name": "distilbert", "config": {"dim": 16, "n_layers": 1, "n_heads": 2}},
        {"name": "roberta", "config": BERT["config"]},
        {"name": "modernbert", "config": BERT["config"]},
        {"name": "xlnet", "config": {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16}},
    ],
    ids=lambda model: model["name"],
)
def test_model_types_read_texts_of_the_full_length(tmp_path, model):
    rows = [{"text": "good " * 90, "label": 0}, {"text": "bad", "label": 1}]
    a_task = task(written(tmp_path, rows), max_length=32, model=model, data=NO_EVALUATION)
    network = a_task.model()
    assert network.config.pad_token_id == 1
    a_task.loss(network, batch(a_task)).backward()


@pytest.mark.parametrize("name", ["bert", "roberta", "mpnet"])
def test_a_fresh_model_has_as_many_positions_as_its_texts_need(name):
    """Some count from behind the padding token, mpnet from behind 1 whatever that token is."""
    backend = tokenization.train_bpe(WORDS * 3, 270)
    special = {"eos_token": tokenization.END, "pad_token": "<|last|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    last = len(tokenizer) - 1
    assert tokenizer.pad_token_id == last > 200
    section = text_encoder.Config(name=name, config=BERT["config"])
    model = text_encoder.build(section, tokenizer=tokenizer, max_length=32, num_labels=2)
    first = {"bert": 0, "roberta": last + 1, "mpnet": 2}[name]
    assert model.config.max_position_embeddings == 32 + first
    assert model(torch.full((1, 32), 5)).logits.isfinite().all()


def test_weights_that_count_from_behind_the_padding_token_read_shorter_texts(binary, tmp_path):
    """As roberta-base, whose 514 positions hold 512 tokens."""
    rows = [{"text": "good " * 90, "label": n} for n in (0, 1)]
    keys = {"max_length": 32, "data": NO_EVALUATION}
    saved = task(written(tmp_path / "long", rows), model={**BERT, "name": "roberta"}, **keys)
    network = saved.model()
    assert network.config.max_position_embeddings == 34
    saved.export(network, tmp_path / "roberta")
    folder, own = tmp_path / "long", {"name": str(tmp_path / "roberta")}
    whole = task(folder, model=own, **keys)
    assert batch(whole)["inputs"]["input_ids"].shape == (2, 32)
    whole.loss(whole.model(), batch(whole))
    with pytest.raises(ValueError, match=r"at most 32 tokens: task\.max_length=32"):
        task(folder, model=own, **{**keys, "max_length": 33}).model()


def test_lengths_that_the_weights_cannot_read_are_refused(binary, no_padding):
    a_task = task(binary, model={"name": str(no_padding)}, max_length=2000)
    with pytest.raises(ValueError, match=r"task\.max_length=1024"):
        a_task.model()


# Labels


def test_the_kind_is_what_the_labels_tell(tmp_path):
    kinds = {
        "single_label": ["b", "a"],
        "regression": [2.5, 1.0],
        "multi_label": [["x", "y"], []],
    }
    for kind, labels in kinds.items():
        rows = [{"text": "a", "label": label} for label in labels]
        a_task = task(written(tmp_path / kind, rows), data=NO_EVALUATION)
        assert a_task.data_identity["kind"] == kind
    assert a_task.train_dataset.labels.tolist() == [[1, 1], [0, 0]]


def test_numbers_with_fractions_in_a_csv_file_may_be_either(tmp_path):
    (tmp_path / "train.csv").write_text("text,label\na,2.5\nb,3\n")
    with pytest.raises(ValueError, match=r"'2.5'.*task.kind=regression"):
        task(tmp_path)
    a_task = task(tmp_path, kind="regression", data=NO_EVALUATION)
    assert a_task.train_dataset.labels.tolist() == [2.5, 3]
    a_task = task(tmp_path, kind="single_label", data=NO_EVALUATION)
    assert a_task.train_dataset.labels.tolist() == [0, 1]


def test_columns_of_their_own_for_each_class_are_several_labels(tmp_path):
    (tmp_path / "train.csv").write_text("text,toxic,rude\na,0,1\nb,1,True\n")
    keys = {"label_column": ["toxic", "rude"], "data": NO_EVALUATION}
    assert task(tmp_path, **keys).train_dataset.labels.tolist() == [[0, 1], [1, 1]]
    (tmp_path / "train.csv").write_text("text,toxic,rude\na,0,1\nb,2,1\n")
    with pytest.raises(ValueError, match=r"row 1 of split 'train' has '2' in column 'toxic'"):
        task(tmp_path, **keys)


def test_declared_classes_keep_their_numbers_and_minus_one_is_no_label(tmp_path):
    features = datasets.Features(
        text=datasets.Value("string"), label=datasets.ClassLabel(names=["pos", "neg"])
    )
    data = {"text": ["a", "b", "c"], "label": [1, 0, -1]}
    datasets.Dataset.from_dict(data, features).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(ValueError, match="row 2 has no label"):
        task(tmp_path, data=NO_EVALUATION)
    a_task = task(tmp_path, on_error="skip", data=NO_EVALUATION)
    assert a_task.train_dataset.labels.tolist() == [1, 0]
    assert a_task.model().config.id2label == {0: "pos", 1: "neg"}


@pytest.mark.parametrize(
    ("known", "unknown"), [(["a", "b"], "c"), ([["a"], ["b", "a"]], ["a", "c"])]
)
def test_a_label_that_training_never_saw_is_an_error_that_names_it(tmp_path, known, unknown):
    rows = [{"text": "x", "label": label} for label in known]
    folder = written(tmp_path, rows, [*rows, {"text": "y", "label": unknown}])
    with pytest.raises(ValueError, match=r"row 2 of split 'evaluation' has the label.*'c'"):
        task(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"text": None},
            r"'evaluation' has no column 'text'; set task.text_columns to .*: label, or",
        ),
        (
            {"label": None},
            r"'evaluation' has no column 'label'; set task.label_column to one of: text, or",
        ),
        ({"text": 5}, r"'evaluation' has 2 row\(s\).*row 0 has no text in column 'text': 5"),
        ({"label": 0.5}, r"row 0 of split 'evaluation' has the label 0.5"),
        ({"label": [1]}, r"row 0 of split 'evaluation' has the label \[1\]"),
        ({"label": ""}, r"'evaluation' has 2 row\(s\).*row 0 has no label"),
    ],
)
def test_what_the_evaluation_split_alone_lacks_is_named_with_it(tmp_path, change, said):
    rows = [{"text": "good", "label": label} for label in (0, 1)]
    row = {key: value for key, value in ({**rows[0], **change}).items() if value is not None}
    with pytest.raises(ValueError, match=said):
        task(written(tmp_path, rows, [row, row]))


def test_rows_of_a_part_that_is_held_out_are_named_by_their_place_in_the_file(tmp_path):
    rows = [{"text": f"t{n}", "label": "ab"[n % 2]} for n in range(20)]
    rows[13]["label"] = ""
    folder = written(tmp_path, rows)
    for seed in range(4):  # the row is in one part or in the other
        with pytest.raises(ValueError, match="row 13 has no label"):
            task(folder, data={"split_seed": seed, "stratify_by": None, "eval_fraction": 0.5})


def test_of_a_class_in_a_column_of_its_own_the_evaluation_split_has_to_have_it(tmp_path):
    rows = [{"text": "x", "a": n, "b": 1} for n in (0, 1)]
    folder = written(tmp_path, rows, [{"text": "x", "a": 1}])
    with pytest.raises(ValueError, match="split 'evaluation' has no column 'b'"):
        task(folder, label_column=["a", "b"])


def test_rows_that_cannot_be_used_are_named_together_or_left_out(tmp_path, caplog):
    rows = [{"text": f"t{n}", "label": "ab"[n % 2]} for n in range(20)]
    for n in (3, 8):
        rows[n]["label"] = ""
    rows[11]["text"] = None
    folder = written(tmp_path, rows, rows)
    with pytest.raises(
        ValueError,
        match=r"3 row\(s\).*row 3 has no label; row 8 has no label; row 11 has no text in column "
        r"'text': None; task.on_error=skip",
    ):
        task(folder)
    skipping = task(folder, on_error="skip")
    assert len(skipping.train_dataset) == len(skipping.eval_dataset) == 17
    assert "left out: 3 of 20 rows of split 'train'" in caplog.text
    used = [n for n in range(20) if n not in (3, 8, 11)]
    assert skipping.train_dataset.labels.tolist() == [n % 2 for n in used]


def test_at_most_ten_rows_are_named(tmp_path):
    rows = [{"text": "t", "label": "ab"[n % 2] if n < 2 else None} for n in range(30)]
    with pytest.raises(ValueError, match=r"28 row\(s\)") as error:
        task(written(tmp_path, rows, rows[:2]))
    assert str(error.value).count("has no label") == 10


# Losses and metrics


def test_losses_are_summed_over_the_samples(binary, tmp_path):
    logits = torch.randn(5, 2, dtype=torch.float64)
    a_task = task(binary)
    five = batch(a_task, range(5))
    expected = sum(logits[n].logsumexp(0) - logits[n, n % 2] for n in range(5))
    assert a_task.loss(Fixed(logits), five).item() == pytest.approx(expected.item())
    assert a_task.count(five) == 5

    rows = [{"text": "t", "label": value} for value in (0.5, -1.5)]
    number = task(written(tmp_path / "r", rows), data=NO_EVALUATION)
    loss = number.loss(Fixed([[1.0], [0.5]]), batch(number))
    assert (loss.item(), number.count(batch(number))) == (0.5**2 + 2**2, 2)

    rows = [{"text": "t", "label": value} for value in (["a", "b"], ["c"])]
    several = task(written(tmp_path / "m", rows), data=NO_EVALUATION)
    logits = torch.randn(2, 3)
    probabilities, labels = logits.sigmoid(), torch.tensor([[1, 1, 0], [0, 0, 1]])
    likelihood = torch.where(labels == 1, probabilities, 1 - probabilities).log()
    loss = several.loss(Fixed(logits), batch(several))
    assert loss.item() == pytest.approx(-likelihood.mean(1).sum().item(), rel=1e-5)
    assert several.count(batch(several)) == 2


def test_smoothing_and_class_weights_act_on_the_training_loss_alone(binary):
    keys = {"label_smoothing": 0.2, "class_weights": [1.0, 3.0]}
    changed, plain = task(binary, **keys), task(binary)
    logits, four = torch.randn(4, 2), batch(plain, range(4))
    expected = F.cross_entropy(logits, four["label"], torch.tensor([1.0, 3.0]), label_smoothing=0.2)
    mean = changed.loss(Fixed(logits), four) / changed.count(four)
    assert mean.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, column in plain.score(Fixed(logits), four).items():
        assert torch.equal(column, changed.score(Fixed(logits), four)[name])


# A teacher

CNN = {"name": "text_cnn", "members": 1, "width": 4}


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


@pytest.mark.parametrize("model", [BERT, CNN], ids=lambda model: model["name"])
@pytest.mark.parametrize("weights", [None, [1.0, 3.0]])
def test_with_a_teacher_the_loss_is_labels_and_divergence_in_their_shares(
    binary, tmp_path, model, weights
):
    """Written out; the outputs of the teacher are matched by the names of their classes."""
    network = finished(tmp_path / "final", binary, model=model)
    description = json.loads((tmp_path / "final" / "config.json").read_text())
    description["id2label"] = {"0": "1", "1": "0"}
    (tmp_path / "final" / "config.json").write_text(json.dumps({**description, "label2id": {}}))
    teacher = {"name": str(tmp_path / "final"), "alpha": 0.3, "temperature": 2.0}
    keys = {"label_smoothing": 0.1, "class_weights": weights}
    taught, plain = task(binary, teacher=teacher, **keys), task(binary, **keys)
    five, fixed = batch(taught, range(5)), Fixed(torch.randn(5, 2, dtype=torch.float64))
    with torch.no_grad():
        output = network.double()(**five["inputs"])
        theirs = (getattr(output, "logits", output).flip(1) / 2).softmax(1)
    ours = (fixed.logits / 2).softmax(1)
    expected = 0.7 * plain.loss(fixed, five)
    for row, label in enumerate(five["label"].tolist()):
        divergence = (theirs[row] * (theirs[row] / ours[row]).log()).sum()
        expected = expected + 0.3 * (weights or [1.0, 1.0])[label] * 2 * 2 * divergence
    loss = taught.loss(fixed, five)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
    (gradient,), (by_hand,) = (torch.autograd.grad(x, fixed.logits) for x in (loss, expected))
    torch.testing.assert_close(gradient, by_hand, rtol=1e-9, atol=1e-12)
    assert taught.count(five) == plain.count(five)
    scores, same = table(taught, fixed.logits, five), table(plain, fixed.logits, five)
    assert all((scores[name] == same[name]).all() for name in same)
    assert taught.data_identity.keys() - plain.data_identity.keys() == {"teacher"}
    assert len(pickle.dumps(taught)) < len(pickle.dumps(plain)) + 2000  # no weights


def test_a_teacher_with_another_tokenizer_or_other_classes_is_refused(binary, tmp_path):
    folder = tmp_path / "final"
    finished(folder, binary, max_length=16)
    teacher = {"name": str(folder)}
    with pytest.raises(ValueError, match=r"another tokenizer .*300 and 290 tokens\): set task.tok"):
        task(binary, teacher=teacher, vocab_size=290)
    task(binary, teacher=teacher, max_length=16, vocab_size=290, tokenizer=str(folder))
    with pytest.raises(ValueError, match=r"at most 16 tokens: task.max_length=16"):
        task(binary, teacher=teacher)
    rows = [json.loads(line) for line in (binary / "train.jsonl").read_text().splitlines()]
    others = written(tmp_path / "others", [{**row, "label": row["label"] + 1} for row in rows])
    with pytest.raises(ValueError, match=r"does not know the class\(es\) \['2'\].*\['0', '1'\]"):
        task(others, teacher=teacher, max_length=16, tokenizer=str(folder))
    numbers = written(tmp_path / "numbers", [{**row, "label": 0.5} for row in rows])
    with pytest.raises(ValueError, match=r"task.teacher is for single_label"):
        task(numbers, teacher=teacher)
    shutil.rmtree(folder)
    finished(folder, binary, model=CNN)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="not the final/ of a text classification run"):
        task(binary, teacher=teacher)


def test_keys_for_one_label_are_refused_for_other_kinds(tmp_path):
    folder = written(tmp_path, [{"text": "t", "label": value} for value in (0.5, 1.5)])
    for key, value in (("label_smoothing", 0.1), ("class_weights", "balanced")):
        with pytest.raises(ValueError, match=rf"task.{key} is for single_label.*regression"):
            task(folder, **{key: value})


def test_balanced_sampling_gives_each_class_its_half(tmp_path):
    rows = [{"text": f"t{n}", "label": int(n < 5)} for n in range(40)]
    a_task = task(written(tmp_path, rows), balanced_sampling=True, data=NO_EVALUATION)
    labels = a_task.train_dataset.labels[a_task.order(0, 4, 0)]
    assert labels.sum() == 20


def test_metrics_of_one_label_equal_hand_computed_values(binary):
    labels, predictions = [0, 0, 0, 1, 1], [0, 0, 1, 1, 0]
    scores = np.array([0.1, 0.2, 0.7, 0.9, 0.4])
    found = text_metrics.single_label(
        {
            "label": np.array(labels),
            "prediction": np.array(predictions),
            "probabilities": np.stack([1 - scores, scores], 1),
            "loss": np.arange(5.0),
        }
    )
    # tp 1, fp 1, fn 1, tn 2
    assert found["accuracy"] == pytest.approx(3 / 5)
    assert found["loss"] == 2.0
    assert found["f1"] == pytest.approx(1 / 2)
    assert found["macro_f1"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert found["mcc"] == pytest.approx((1 * 2 - 1 * 1) / math.sqrt(2 * 2 * 3 * 3))
    assert found["auroc"] == pytest.approx(5 / 6)  # of 6 pairs, 0.4 < 0.7 is the wrong one


def test_metrics_of_several_labels_equal_hand_computed_values():
    labels = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 0]])
    probabilities = np.array([[0.9, 0.6, 0.2], [0.8, 0.7, 0.1], [0.1, 0.4, 0.3]])
    found = text_metrics.multi_label(
        {
            "label": labels,
            "prediction": probabilities > 0.5,
            "probabilities": probabilities,
            "loss": np.array([1.0, 2.0, 6.0]),
        }
    )
    assert found["accuracy"] == pytest.approx(1 / 3)
    assert found["loss"] == 3.0
    assert found["macro_f1"] == pytest.approx((1 + 1 / 2 + 0) / 3)
    assert found["micro_f1"] == pytest.approx(2 * 3 / (2 * 3 + 1 + 1))
    assert found["auroc"] == pytest.approx((1 + 1 / 2) / 2)  # the third has no positive sample


def test_metrics_of_numbers_equal_hand_computed_values():
    label, prediction = np.array([1.0, 2, 3, 4]), np.array([1.0, 3, 2, 40])
    found = text_metrics.regression({"label": label, "prediction": prediction, "loss": label})
    assert found["spearman"] == pytest.approx(1 - 6 * 2 / (4 * 15))
    assert found["pearson"] == pytest.approx(np.corrcoef(label, prediction)[0, 1])
    assert found["mae"] == pytest.approx((0 + 1 + 1 + 36) / 4)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("n", [1, 3])
def test_what_is_not_defined_is_nan_and_needs_no_warning(n):
    same = {"label": np.zeros(n, dtype=int), "loss": np.zeros(n)}
    one = {**same, "prediction": np.zeros(n, dtype=int), "probabilities": np.full((n, 2), 0.5)}
    found = text_metrics.single_label(one)
    assert math.isnan(found["auroc"])
    assert (found["accuracy"], found["mcc"]) == (1, 0)
    found = text_metrics.regression({**same, "prediction": np.arange(n)})
    assert math.isnan(found["pearson"])
    assert math.isnan(found["spearman"])
    wide = {name: np.zeros((n, 2)) for name in ("label", "prediction", "probabilities")}
    assert math.isnan(text_metrics.multi_label({**wide, "loss": np.zeros(n)})["auroc"])


def test_scores_feed_the_metrics_of_each_kind(binary, tmp_path):
    logits = [[2.0, 0.0], [0.0, 2.0], [0.0, 2.0]]
    a_task = task(binary)
    found = a_task.summarize(table(a_task, logits, batch(a_task, range(3), "eval_dataset")))
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["auroc"] == pytest.approx(3 / 4)
    assert (a_task.best_metric, a_task.higher_is_better) == ("accuracy", True)

    rows = [{"text": "t", "label": value} for value in (0.5, 1.5, 3.0)]
    number = task(written(tmp_path / "r", rows), best_metric="loss", data=NO_EVALUATION)
    found = number.summarize(table(number, [[1.0], [3.0], [6.0]], batch(number)))
    assert found["pearson"] == pytest.approx(1)
    assert (number.best_metric, number.higher_is_better) == ("loss", False)


# Noise


@pytest.fixture(scope="module")
def bpe():
    texts = [" ".join(WORDS)] * 20
    return text_samples.for_pairs(tokenization.byte_level_bpe(texts, 330))


def sample_of(tokenizer, text):
    ids = torch.tensor(tokenizer(text)["input_ids"])
    return {"input_ids": ids, "token_type_ids": torch.arange(len(ids))}, torch.tensor(1)


def test_split_tokens_spell_the_same_text_and_the_rest_follows_them(bpe):
    split = token_noise(bpe, splitting=0.5, dropout=0.0, max_length=99)
    text = "the actor was very good , not dull"
    before, label = sample_of(bpe, text)
    lengths = set()
    for seed in range(20):
        torch.manual_seed(seed)
        after, same = split((before, label))
        assert bpe.decode(after["input_ids"]) == bpe.decode(before["input_ids"])
        assert same is label
        assert after["token_type_ids"].unique().tolist() == list(range(len(before["input_ids"])))
        lengths.add(len(after["input_ids"]))
    assert len(lengths) > 3
    assert min(lengths) > len(before["input_ids"])


def test_a_sample_never_grows_beyond_max_length(bpe):
    before, label = sample_of(bpe, " ".join(WORDS))
    longest = len(before["input_ids"])
    split = token_noise(bpe, splitting=0.9, dropout=0.0, max_length=longest)
    assert len(split((before, label))[0]["input_ids"]) <= longest


def test_tokens_are_dropped_at_their_rate_and_special_ones_stay(bpe):
    drop = token_noise(bpe, splitting=0.0, dropout=0.3, max_length=99)
    before, label = sample_of(bpe, " ".join(WORDS * 100))
    torch.manual_seed(0)
    after = drop((before, label))[0]["input_ids"]
    assert len(after) / len(before["input_ids"]) == pytest.approx(0.7, abs=0.05)
    assert (after[0], after[-1]) == (0, 0)


def test_only_the_tokens_of_a_bpe_can_be_split(bpe):
    assert token_noise(bpe, splitting=0.0, dropout=0.0, max_length=9) is None
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    with pytest.raises(ValueError, match=r"task\.token_splitting needs a BPE"):
        token_noise(
            PreTrainedTokenizerFast(tokenizer_object=words),
            splitting=0.1,
            dropout=0.0,
            max_length=9,
        )


# The small network


def test_networks_of_a_text_cnn_share_nothing_and_their_votes_are_averaged(binary):
    """In training a sample teaches one of them; in evaluation padding changes no vote."""
    a_task = task(binary, model={"name": "text_cnn", "members": 3, "width": 4, "dropout": 0.0})
    torch.manual_seed(0)
    model = a_task.model().eval()
    one, many = batch(a_task, [0]), batch(a_task, range(8))
    model.train().embedding_dropout.p = 0.0
    votes = torch.cat([model(**one["inputs"]) for _ in range(40)]).unique(dim=0)
    assert len(votes) == 3
    torch.testing.assert_close(votes.mean(0), model.eval()(**one["inputs"])[0])
    torch.testing.assert_close(model(**many["inputs"])[0], model(**one["inputs"])[0])

    a_task.loss(model.train(), one).backward()
    taught = model.embedding.weight.grad.view(-1, 3, 4).abs().amax((0, 2)) > 0
    assert taught.sum() == 1


def test_a_text_cnn_is_exported_with_all_that_builds_it_again(binary, tmp_path):
    a_task = task(binary, model={"name": "text_cnn", "members": 2, "width": 4})
    a_task.export(a_task.model(), tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    assert described["model"]["members"] == 2
    assert described["id2label"] == {"0": "0", "1": "1"}
    assert (tmp_path / "tokenizer.json").exists()
    with pytest.raises(ValueError, match="odd number"):
        task(binary, model={"name": "text_cnn", "kernel_size": 2}).model()


# Whole runs


def test_a_task_can_be_sent_to_a_worker_process_however_it_is_started(binary):
    a_task = task(binary)
    sent = pickle.loads(pickle.dumps(a_task))
    assert torch.equal(sent.order(1, 4, 2), a_task.order(1, 4, 2))
    ours, theirs = batch(a_task, [1, 2]), batch(sent, [1, 2])
    assert torch.equal(ours["inputs"]["input_ids"], theirs["inputs"]["input_ids"])


def test_an_exported_model_answers_in_a_pipeline_as_it_did_here(tmp_path):
    from transformers import pipeline

    rows = [{"text": t, "label": label} for t, label in (("good film", "fine"), ("bad", "poor"))]
    a_task = task(written(tmp_path / "data", rows), data=NO_EVALUATION)
    torch.manual_seed(0)
    model = a_task.model().eval()
    model.classifier.weight.data *= 50  # so that the two texts differ
    (tmp_path / "final").mkdir()
    a_task.export(model, tmp_path / "final")
    expected = model(**batch(a_task, [0])["inputs"]).logits.softmax(1)[0].tolist()
    classify = pipeline("text-classification", model=str(tmp_path / "final"), top_k=None)
    (answer,) = classify(["good film"])
    scores = {row["label"]: row["score"] for row in answer}
    assert scores == pytest.approx(dict(zip(("fine", "poor"), expected, strict=True)), abs=1e-5)


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_run_on_one_process_and_on_two(tmp_path, binary):
    """Pairs, of lengths that differ, grouped; and what a teacher knows: the curves and the weights
    agree to 1e-9."""
    draw = random.Random(1)
    rows = [
        {"sentence1": sentence(draw), "sentence2": sentence(draw, 6), "label": draw.random() * 5}
        for _ in range(37)
    ]
    run_config = {
        "task": raw_config(written(tmp_path / "data", rows, rows[:9])),
        "output_dir": str(tmp_path),
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "steps": 14,
        "precision": "fp64",
        "optimizer": {"name": "adamw", "lr": 3e-3},
        "log_every": 1,
        "eval_every": 7,
        "tracking": {"with": []},
    }
    (tmp_path / "pairs.yaml").write_text(yaml.safe_dump(run_config))
    finished(tmp_path / "teacher", binary)
    taught = {"teacher": {"name": str(tmp_path / "teacher")}, "class_weights": [1.0, 3.0]}
    run_config["task"] = raw_config(binary, model=CNN, label_smoothing=0.1, **taught)
    (tmp_path / "taught.yaml").write_text(yaml.safe_dump(run_config))
    for processes in (1, 2):
        names = {kind: f"name={kind}-{processes}" for kind in ("pairs", "taught")}
        lines = [json.dumps([str(tmp_path / f"{kind}.yaml"), name]) for kind, name in names.items()]
        (tmp_path / "runs.jsonl").write_text("\n".join(lines))
        script = ROOT / "tests" / "recipe_runs.py"
        arguments = command(processes, str(tmp_path / "runs.jsonl"), script=script)
        code, output = run(arguments, timeout=140)
        assert code == 0, output
    for kind in names:
        assert_same(tmp_path / f"{kind}-1", tmp_path / f"{kind}-2")


def assert_same(one, two):
    for row, same in zip(metrics(one), metrics(two), strict=True):
        assert row["train/loss"] == pytest.approx(same["train/loss"], abs=1e-9)
    for key, value in summary(one)["metrics"].items():
        assert value == pytest.approx(summary(two)["metrics"][key], abs=1e-9)
    weights, others = (load_file(folder / "final/model.safetensors") for folder in (one, two))
    for key, value in weights.items():
        torch.testing.assert_close(value, others[key], rtol=0, atol=1e-9)


def test_a_stream_is_refused_before_anything_is_read(binary):
    source = {"name": str(binary / "train.jsonl")}
    with pytest.raises(ValueError, match="text_classification reads no streams"):
        task("streaming", data={"sources": [source]})


def test_one_class_of_several_labels_is_judged_by_itself():
    """scikit-learn takes one column for two classes, and would praise a model that finds none."""
    label, prediction = np.array([[1], [0], [0], [0]]), np.zeros((4, 1), dtype=int)
    losses, probabilities = np.zeros(4), np.zeros((4, 1))
    table = {"label": label, "prediction": prediction, "loss": losses}
    found = text_metrics.multi_label({**table, "probabilities": probabilities})
    assert found["macro_f1"] == found["micro_f1"] == 0


def test_a_missing_label_column_is_named(binary):
    with pytest.raises(ValueError, match="no column 'labels'; set task"):
        task(binary, label_column="labels")


def test_the_smallest_mean_error_is_the_best(tmp_path):
    rows = [{"text": word, "label": number / 4} for number, word in enumerate("abcdefg")]
    a_task = task(written(tmp_path / "numbers", rows), best_metric="mae", kind="regression")
    assert not a_task.higher_is_better


@pytest.mark.parametrize(
    ("metric", "known"), [("f1_score", "accuracy, .*f1, auroc"), ("mae", "mcc")]
)
def test_a_best_metric_that_there_is_not_is_refused_before_training(tmp_path, metric, known):
    rows = [{"text": f"word {i}", "label": i % 2} for i in range(8)]
    with pytest.raises(ValueError, match=rf"task.best_metric '{metric}' is none of: .*{known}"):
        task(written(tmp_path / "r", rows), best_metric=metric)
