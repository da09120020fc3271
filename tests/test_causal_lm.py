"""Causal language modelling: what is counted, what a model has to fit, and one curve on any P."""

import json
import math
import random
import shutil

from evenstep import packing, tokenization
from evenstep.models import causal_lm as models
from evenstep.sections import specialise
from evenstep.tasks import causal_lm

import numpy as np
import pytest
import torch
import yaml
from launching import command, metrics, run, summary
from safetensors.torch import load_file
from torch import nn

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
}
GPT2 = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
WORDS = [
    "def",
    "return",
    "import",
    "self",
    "if",
    "else",
    "in",
    "None",
    "(",
    ")",
    ":",
    "=",
    "x",
    "y",
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder of documents of 1 to 60 words, for training and for evaluation."""
    folder, draw = tmp_path_factory.mktemp("texts"), random.Random(0)
    for split, documents in (("train", 60), ("validation", 12)):
        rows = [
            json.dumps({"text": " ".join(draw.choices(WORDS, k=draw.randint(1, 60)))})
            for _ in range(documents)
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def configured(texts, **keys):
    raw = {
        "name": "causal_lm",
        "data": {"name": str(texts)},
        "model": {"name": "llama", "config": SMALL},
        "vocab_size": 280,
        "sequence_length": 32,
        **keys,
    }
    return specialise(causal_lm.Config, raw).model_validate(raw)


@torch.no_grad()
def evaluated(task, model):
    batches = [task.collate([sample]) for sample in task.eval_dataset]
    scores = [task.score(model, batch) for batch in batches]
    return task.summarize({key: torch.cat([s[key] for s in scores]).numpy() for key in scores[0]})


class Uniform(nn.Module):
    def __init__(self, num_tokens):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(num_tokens))

    def forward(self, input_ids, position_ids=None):
        return self.scale.expand(*input_ids.shape, -1)


@pytest.mark.parametrize("share", [True, False])
def test_a_model_that_knows_nothing_pays_for_every_token_and_byte(texts, share):
    """log(V) nats a token, and the bytes are those of the file."""
    task = causal_lm.build(configured(texts, packing=share))
    found = evaluated(task, Uniform(280))
    lines = (texts / "validation.jsonl").read_text().splitlines()
    num_bytes = sum(len(json.loads(line)["text"].encode()) for line in lines)
    tokens = sum(task.count(task.collate([sample])) for sample in task.eval_dataset)
    assert found["loss"] == pytest.approx(math.log(280))
    assert found["perplexity"] == pytest.approx(280)
    assert found["bits_per_byte"] == pytest.approx(tokens * math.log2(280) / num_bytes)
    tokenizer = causal_lm.make_tokenizer(configured(texts), train_rows(texts))
    documents = [json.loads(line)["text"] for line in lines]
    assert tokens == sum(len(ids) + 1 for ids in packing.plain(documents, tokenizer))


def train_rows(texts):
    return [json.loads(line) for line in (texts / "train.jsonl").read_text().splitlines()]


def test_metrics_are_of_the_sums_over_the_table():
    table = {
        "loss": np.array([2.0, 10.0]),
        "tokens": np.array([1, 7]),
        "correct": np.array([1, 1]),
        "bytes": np.array([0, 24]),
    }
    assert causal_lm.summarize(table) == pytest.approx(
        {
            "loss": 1.5,
            "perplexity": math.exp(1.5),
            "bits_per_byte": 12 / math.log(2) / 24,
            "token_accuracy": 0.25,
        }
    )


def test_sequences_in_which_no_document_ends_have_no_bits_per_byte():
    table = {name: np.array([4.0, 6.0]) for name in ("loss", "tokens", "correct")}
    metrics = causal_lm.summarize({**table, "bytes": np.array([0, 0])})
    assert math.isnan(metrics.pop("bits_per_byte"))
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2", "qwen3"])
def test_packing_changes_no_metric(texts, name):
    """The same documents, and the same loss a token."""
    model = {"name": name, "config": GPT2 if name == "gpt2" else SMALL}
    on, off = (
        causal_lm.build(configured(texts, model=model, packing=packing))
        for packing in (True, False)
    )
    assert len(on.train_dataset) < len(off.train_dataset)
    torch.manual_seed(0)
    network = on.model().eval()
    packed, alone = (evaluated(task, network) for task in (on, off))
    assert packed == pytest.approx(alone, rel=1e-5)


def test_models_that_mix_documents_get_one_a_sequence_and_are_refused_when_packing(texts):
    for name, config in (
        ("mamba", {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}),
        ("bloom", {"hidden_size": 16, "n_layer": 1, "n_head": 2}),
    ):
        section = {"name": name, "config": config}
        with pytest.raises(ValueError, match=f"{name} does not keep.*task.packing=false"):
            causal_lm.build(configured(texts, model=section, packing=True)).model()
        task, padded = (
            causal_lm.build(configured(texts, model=section, packing=packing))
            for packing in (None, False)
        )
        assert len(task.train_dataset) == len(padded.train_dataset)
        assert task.loss(task.model(), task.collate(list(task.train_dataset)[:3])).isfinite()


def test_what_the_model_writes_begins_with_the_prompt_and_repeats_with_the_seed(texts):
    task = causal_lm.build(configured(texts, prompt="def x", sample_tokens=10))
    model = task.model().eval()
    written = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        written.append(task.sample(model))
    assert written[0] == written[1] != written[2]
    assert all(text.startswith("def x") for text in written)
    assert causal_lm.build(configured(texts, sample_tokens=0)).sample is None


def test_the_sample_follows_what_the_model_predicts(texts):
    class Counting(nn.Module):
        """After token t comes t + 1."""

        def __init__(self):
            super().__init__()
            self.anything = nn.Parameter(torch.zeros(()))

        def forward(self, input_ids):
            return 1e4 * nn.functional.one_hot((input_ids + 1) % 280, 280).float()

    config = configured(texts, sample_tokens=100, sequence_length=12)
    tokenizer = causal_lm.make_tokenizer(config, train_rows(texts))
    start = packing.start_token(tokenizer)
    ids = range(start + 1, start + 12)
    assert causal_lm.sample(config, tokenizer, Counting()) == tokenizer.decode(list(ids))


@pytest.fixture
def gpt2_style(tmp_path, texts):
    """A local folder of a GPT-2 without a padding token, as on the hub, with its tokenizer."""
    from transformers import PreTrainedTokenizerFast

    bpe = causal_lm.make_tokenizer(configured(texts), train_rows(texts))
    folder = tmp_path / "gpt2-style"
    end = {"bos_token": tokenization.END, "eos_token": tokenization.END}
    backend = bpe.backend_tokenizer
    PreTrainedTokenizerFast(tokenizer_object=backend, **end).save_pretrained(folder)
    config = models.Config(name="gpt2", config=GPT2)
    model = models.build(config, tokenizer=bpe, sequence_length=64)
    model.config.pad_token_id = model.generation_config.pad_token_id = None
    model.save_pretrained(folder)
    return folder, model


@pytest.mark.parametrize("share", [True, False])
def test_a_folder_gives_its_weights_and_tokenizer_which_agree_on_padding(gpt2_style, texts, share):
    """CASES 32."""
    folder, saved = gpt2_style
    task = causal_lm.build(configured(texts, model={"name": str(folder)}, packing=share))
    model = task.model()
    for key, value in saved.state_dict().items():
        assert torch.equal(model.state_dict()[key], value)
    batch = task.collate(list(task.train_dataset))
    padded = batch["labels"] == -100
    assert padded.any()
    assert set(batch["input_ids"][padded].tolist()) == {model.config.pad_token_id}
    assert model.config.pad_token_id == model.config.eos_token_id
    assert (batch["labels"] == model.config.eos_token_id).any()  # the end is learnt all the same


def test_the_start_of_a_document_is_learnt_where_the_same_token_pads(gpt2_style, texts):
    """nn.Embedding gives no gradient to the row of its padding token."""
    folder, _ = gpt2_style
    model = {"name": "llama", "config": SMALL}
    task = causal_lm.build(configured(texts, model=model, tokenizer=str(folder)))
    network = task.model()
    assert network.config.pad_token_id == network.config.bos_token_id
    task.loss(network, task.collate(list(task.train_dataset)[:2])).backward()
    gradient = network.get_input_embeddings().weight.grad
    assert gradient[network.config.bos_token_id].abs().sum() > 0


def test_weights_refuse_a_tokenizer_and_sequences_that_do_not_fit(gpt2_style, texts, tmp_path):
    folder, _ = gpt2_style
    model = {"name": str(folder)}
    with pytest.raises(ValueError, match=r"at most 64 tokens: task.sequence_length=64"):
        causal_lm.build(configured(texts, model=model, sequence_length=65)).model()
    larger = configured(texts, model=model, tokenizer="bpe", vocab_size=290)
    with pytest.raises(ValueError, match=r"has 280 tokens, the tokenizer 290.*tokenizer=auto"):
        causal_lm.build(larger).model()
    for key in ("n_positions", "max_position_embeddings"):  # two names of one key
        short = {"name": "gpt2", "config": {**GPT2, key: 8}}
        with pytest.raises(ValueError, match=r"reads at most 8 tokens: task.sequence_length=8"):
            causal_lm.build(configured(texts, model=short)).model()
    misspelt = {"name": "llama", "config": {"hiden_size": 1}}
    with pytest.raises(ValueError, match="'hiden_size'; nearest: hidden_size"):
        causal_lm.build(configured(texts, model=misspelt)).model()
    odd = {"name": "gpt2", "config": {**GPT2, "num_attention_heads": 3}}
    with pytest.raises(ValueError, match=r"task.model.config: gpt2 cannot be built .*divisible"):
        causal_lm.build(configured(texts, model=odd)).model()


@pytest.mark.parametrize("packing", [True, False])
def test_a_model_that_reads_what_it_is_to_predict_is_refused(texts, packing):
    config = {**GPT2, "intermediate_size": 32}
    model = {"name": "bert", "config": config}
    with pytest.raises(ValueError, match=r"bert reads the tokens .*config.is_decoder=true"):
        causal_lm.build(configured(texts, model=model, packing=packing)).model()
    decoder = {**model, "config": {**config, "is_decoder": True}}
    assert causal_lm.build(configured(texts, model=decoder, packing=packing)).model().training


def test_smoothing_spreads_labels_over_all_tokens_in_training_alone(texts):
    """Written out: the loss of a token is the mean price of all tokens, in its share."""
    smooth, plain = (causal_lm.build(configured(texts, label_smoothing=s)) for s in (0.1, 0.0))
    batch = smooth.collate(list(smooth.train_dataset)[:3])
    torch.manual_seed(0)
    model = smooth.model().double().eval()
    logits = model(batch["input_ids"], position_ids=batch["position_ids"]).logits
    prices = -logits.log_softmax(2)[batch["labels"] != -100]
    known = batch["labels"][batch["labels"] != -100]
    expected = 0.9 * prices[range(len(known)), known] + 0.1 * prices.mean(1)
    assert smooth.loss(model, batch).item() == pytest.approx(expected.sum().item(), rel=1e-12)
    scores, same = smooth.score(model, batch), plain.score(model, batch)
    assert all(scores[name].equal(same[name]) for name in same)
    assert scores["loss"].sum().item() == pytest.approx(plain.loss(model, batch).item(), rel=1e-12)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"body": "x"},
            "'evaluation' has no column 'text'; set task.text_column to one of: body, or",
        ),
        ({"text": 5}, "split 'evaluation': row 0 has no text in column 'text': 5"),
        ({"text": ""}, "split 'evaluation' has no text in column 'text'"),
    ],
)
def test_what_the_evaluation_split_alone_lacks_is_named_with_it(texts, tmp_path, row, said):
    shutil.copy(texts / "train.jsonl", tmp_path)
    (tmp_path / "validation.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=said):
        causal_lm.build(configured(tmp_path))


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_one_run_on_one_process_on_two_and_in_one_micro_batch(tmp_path, texts):
    """CASES 8: numbers of tokens differ between samples, and the weights are the same to 1e-5; so
    are the curve, the metrics and what the model writes. `final/` loads with from_pretrained."""
    config = tmp_path / "lm.yaml"
    task = configured(texts, packing=False, prompt="if", label_smoothing=0.1).model_dump()
    task["model"] = {"name": "llama", "config": SMALL}
    task["data"] = {"name": str(texts)}
    run_config = {
        "task": task,
        "output_dir": str(tmp_path),
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "steps": 12,
        "optimizer": {"name": "adamw", "lr": 3e-3},
        "log_every": 1,
        "tracking": {"with": []},
    }
    config.write_text(yaml.safe_dump(run_config))
    for name, processes, *overrides in (
        ("one", 1),
        ("two", 2),
        ("big", 1, "micro_batch_size=8"),
    ):
        arguments = command(processes, str(config), f"name={name}", *overrides)
        code, output = run(arguments, timeout=200)
        assert code == 0, output
    one, two, big = (tmp_path / name for name in ("one", "two", "big"))
    assert len({row["train/targets"] for row in metrics(one)}) > 1
    for other in (two, big):
        for row, same in zip(metrics(one), metrics(other), strict=True):
            assert row["train/loss"] == pytest.approx(same["train/loss"], abs=1e-5)
        weights, others = (load_file(d / "final" / "model.safetensors") for d in (one, other))
        for key, value in weights.items():
            torch.testing.assert_close(value, others[key], rtol=0, atol=1e-5)
    assert summary(one)["metrics"]["eval/bits_per_byte"] == pytest.approx(
        summary(two)["metrics"]["eval/bits_per_byte"], abs=1e-5
    )
    assert_loads(one / "final")


def assert_loads(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (
        auto.from_pretrained(folder) for auto in (AutoModelForCausalLM, AutoTokenizer)
    )
    weights = load_file(folder / "model.safetensors")
    for key, value in model.state_dict().items():
        assert torch.equal(value, weights[key])
    (ids,) = packing.plain(["def x"], tokenizer)
    assert tokenizer.decode(ids) == "def x"
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert tokenizer.padding_side == "left"


def test_adapters_train_on_packed_documents(texts):
    """LoRA wraps the model; that it tells documents apart has to be seen through the wrapper."""
    model = {"name": "llama", "config": SMALL, "lora": {"r": 2}}
    task = causal_lm.build(configured(texts, model=model))
    trained = task.model()
    task.loss(trained, task.collate([task.train_dataset[0], task.train_dataset[1]])).backward()
    assert all("lora" in name for name, p in trained.named_parameters() if p.requires_grad)


def test_a_diverged_model_still_writes_a_sample(texts):
    task = causal_lm.build(configured(texts))
    model = Uniform(280)
    torch.nn.init.constant_(model.scale, math.nan)
    assert isinstance(task.sample(model), str)
