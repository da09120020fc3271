"""Tokens of training texts that are split and dropped."""

from evenstep import text_samples, tokenization
from evenstep.text_augmentation import token_noise

import pytest
import torch
from text_files import WORDS
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast


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
