"""Rows of text to samples of tokens and to batches; tokenizers and models of all kinds."""

from evenstep import tokenization
from evenstep.models import text_encoder

import pytest
import torch
from text_files import BERT, GPT2, NO_EVALUATION, WORDS, batch, task, written
from transformers import PreTrainedTokenizerFast


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


@pytest.mark.parametrize(
    "model",
    [
        {"name": "t5", "config": {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2}},
        {
            "name": "gemma3",
            "config": {
                "text_config": {
                    **BERT["config"], "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 300
                }
            },
        },
    ],
    ids=lambda model: model["name"],
)  # fmt: skip
def test_models_of_several_parts_know_where_a_text_ends(binary, caplog, model):
    a_task = task(binary, model=model)
    network = a_task.model().eval()
    together = network(**batch(a_task, range(6))["inputs"]).logits
    alone = [network(**batch(a_task, [i])["inputs"]).logits for i in range(6)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-5)
    assert "lets padding change" not in caplog.text


def test_a_model_that_sees_padding_is_warned_of(binary, caplog):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
    task(binary, model={"name": "fnet", "config": sizes}).model()
    assert "fnet lets padding change what it makes of a text" in caplog.text
