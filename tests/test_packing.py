"""Packing: every token of every document is predicted once, and no document sees another one."""

import pickle
import random

from evenstep import packing
from evenstep.labels import IGNORED

import datasets
import pytest
import torch
import torch.nn.functional as F

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "vocab_size": 64}
LLAMA_LIKE = {**SMALL, "intermediate_size": 32, "num_key_value_heads": 1}
MODELS = {
    "gpt2": SMALL,
    "llama": LLAMA_LIKE,
    "qwen2": LLAMA_LIKE,
    "qwen3": {**LLAMA_LIKE, "head_dim": 8},
}
START, END, PAD = 1, 2, 0


class Letters:
    """A tokenizer: a is 10, b is 11, and so on."""

    bos_token_id, eos_token_id, pad_token_id = START, END, PAD

    def __call__(self, documents, **_):
        return {"input_ids": [[ord(letter) - 87 for letter in text] for text in documents]}


def rows(*lengths, seed=0):
    letters = random.Random(seed)
    return [{"text": "".join(letters.choices("abcdefghij", k=n))} for n in lengths]


def pieces(sample):
    """The pieces of a sample, told apart by positions that start again: (inputs, labels)."""
    starts = (sample["position_ids"] == 0).nonzero()[:, 0].tolist()
    ends = [*starts[1:], len(sample["input_ids"])]
    both = (sample["input_ids"].tolist(), sample["labels"].tolist())
    return [tuple(part[i:j] for part in both) for i, j in zip(starts, ends, strict=True)]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("sequence_length", [2, 5, 16, 100])
def test_every_token_of_every_document_is_predicted_once_after_its_own_past(sequence_length, share):
    data = rows(1, 2, 3, 4, 5, 6, 15, 16, 17, 33, 64)
    packed = packing.pack(data, Letters(), sequence_length, share=share)
    expected = []
    for tokens in Letters()([row["text"] for row in data])["input_ids"]:
        whole = [START, *tokens, END]
        for i in range(0, len(whole) - 1, sequence_length):
            window = whole[i : i + sequence_length + 1]
            expected.append((window[:-1], window[1:]))
    found = [piece for sample in packed for piece in pieces(sample)]
    assert sorted(found) == sorted(expected)
    assert max(len(sample["input_ids"]) for sample in packed) <= sequence_length
    assert share or all(len(pieces(sample)) == 1 for sample in packed)


def test_bytes_are_those_of_the_text():
    data = [{"text": "é" * 30}, {"text": "日本"}, {"text": "abc"}]

    class Characters(Letters):
        def __call__(self, documents, **_):
            return {"input_ids": [[ord(letter) % 50 + 10 for letter in t] for t in documents]}

    for share in (True, False):
        packed = packing.pack(data, Characters(), 8, share=share)
        assert sum(int(sample["bytes"]) for sample in packed) == 60 + 6 + 3


def best_fit_slowly(lengths, capacity):
    groups = []
    for piece in sorted(range(len(lengths)), key=lambda piece: -lengths[piece]):
        room = [(capacity - sum(lengths[p] for p in group), group) for group in groups]
        fitting = [(free, group) for free, group in room if free >= lengths[piece]]
        if fitting:
            min(fitting, key=lambda pair: pair[0])[1].append(piece)
        else:
            groups.append([piece])
    return groups


def test_the_fullest_group_that_has_room_takes_the_next_piece():
    assert packing.best_fit([2, 5, 3, 3, 8], 8) == [[4], [1, 2], [3, 0]]
    lengths = random.Random(1).choices(range(1, 41), k=300)
    groups = packing.best_fit(lengths, 40)
    assert sorted(piece for group in groups for piece in group) == list(range(300))
    # Which of several groups with the same room took a piece is nobody's business.
    full, slowly = (
        sorted(sum(lengths[piece] for piece in group) for group in found)
        for found in (groups, best_fit_slowly(lengths, 40))
    )
    assert full == slowly
    assert len(groups) <= 1.02 * sum(lengths) / 40 + 1


def test_packing_is_a_function_of_the_rows_and_goes_to_worker_processes():
    one, two = (packing.pack(rows(3, 9, 1, 30), Letters(), 8) for _ in range(2))
    three = pickle.loads(pickle.dumps(one))
    for samples in zip(one, two, three, strict=True):
        for name, value in samples[0].items():
            assert all(torch.equal(value, sample[name]) for sample in samples)


def test_rows_without_text_are_named():
    with pytest.raises(ValueError, match=r"no column 'text'.*task.text_column.*content, url"):
        packing.pack([{"content": "a", "url": "b"}], Letters(), 8)
    with pytest.raises(ValueError, match="row 1 has no text in column 'text': None"):
        packing.pack([{"text": "a"}, {"text": None}], Letters(), 8)
    assert len(packing.pack([{"text": ""}, {"text": "a"}, {"text": ""}], Letters(), 8)) == 1


def test_rows_without_text_are_left_out_and_counted_where_that_is_asked_for(caplog):
    broken = [{"text": "ab"}, {"text": None}, {"text": "c"}, {"text": ["d"]}, {"text": ""}]
    found = packing.pack(broken, Letters(), 8, split="evaluation", skip=True)
    kept = packing.pack([{"text": "ab"}, {"text": "c"}], Letters(), 8)
    assert found.tokens.tolist() == kept.tokens.tolist()
    assert caplog.messages == ["left out: 2 rows without text of split 'evaluation'"]


def test_half_a_surrogate_pair_is_no_text_and_a_stream_may_have_rows_without_the_column():
    broken = [{"text": "ab"}, {"text": "c\ud83d"}, {"id": 1}]
    assert packing.pack(broken, Letters(), 8, skip=True).tokens.tolist() == (
        packing.pack(broken[:1], Letters(), 8).tokens.tolist()
    )
    with pytest.raises(ValueError, match=r"row 1 has no text in column 'text': .*ud83d"):
        packing.pack(broken, Letters(), 8)
    with pytest.raises(ValueError, match="no column 'txt'"):
        packing.pack(datasets.Dataset.from_list(broken[:1]), Letters(), 8, column="txt", skip=True)


def test_padding_counts_nowhere():
    samples = list(packing.pack(rows(3, 5), Letters(), 16, share=False))
    batch = packing.collate(samples, PAD)
    assert batch["input_ids"].tolist()[0] == [*samples[0]["input_ids"].tolist(), PAD, PAD]
    assert (batch["labels"] == IGNORED).sum(1).tolist() == [2, 0]
    assert packing.collate(samples, PAD, 16)["labels"].shape == (2, 16)


def build(name, attention="sdpa"):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(name, **MODELS[name], use_cache=False, initializer_range=0.3)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def nats(model, batch):
    """Of each token that counts, by its document's label sequence."""
    logits = model(input_ids=batch["input_ids"], position_ids=batch.get("position_ids")).logits
    labels = batch["labels"]
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=IGNORED)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_packed_tokens_have_the_loss_and_gradient_that_their_documents_have_alone(name, attention):
    """To 1e-5 for each token: several documents in a sequence, padding, and a batch of them."""
    model = build(name, attention).train(False)
    documents = rows(5, 9, 2, 20, 7, 1, 3, 11)
    packed = packing.pack(documents, Letters(), 24)
    assert max(len(pieces(sample)) for sample in packed) > 2
    batch = packing.collate(list(packed), PAD, 24)
    together = nats(model, batch)
    together.sum().backward()
    gradient = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    alone = {}
    for row in documents:
        tokens = [START, *Letters()([row["text"]])["input_ids"][0], END]
        one = {"input_ids": torch.tensor([tokens[:-1]]), "labels": torch.tensor([tokens[1:]])}
        alone[tuple(tokens[1:])] = nats(model, one)[0]
    sum(loss.sum() for loss in alone.values()).backward()
    for number, sample in enumerate(packed):
        place = 0
        for _, labels in pieces(sample):
            found = together[number, place : place + len(labels)]
            torch.testing.assert_close(found, alone[tuple(labels)], rtol=0, atol=1e-5)
            place += len(labels)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(gradient[key], parameter.grad, rtol=1e-4, atol=1e-4)
