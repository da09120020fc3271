"""No secret survives masking, and nothing else is harmed by it."""

import time

from evenstep.masking import mask, mask_command, mask_tree

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"

SECRETS = [
    ("login hf_abcdefghijklmnopqrst done", "login *** done"),
    ("sk-abcdefghijklmnopqrst", "***"),
    ("ghp_abcdefghijklmnopqrst", "***"),
    ("AKIAABCDEFGHIJKLMNOP", "***"),
    ("eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl", "***"),
    ("wandb_v1_abcdefghijklmnopqrstuvwxyz", "***"),
    (f"local-{COMMIT}", "***"),
    ("clone https://me:hunter2@host/x.git", "clone https://***@host/x.git"),
    ("Authorization: Bearer abcdefgh", "Authorization: Bearer ***"),
    ("--api-key abcdefgh --verbose --token qwertyui", "--api-key *** --verbose --token ***"),
    ("--token=abcdefgh x=1", "--token=*** x=1"),
    ("db.password=12345678", "db.password=***"),
    ("https://host/?token=abcdefgh&page=2", "https://host/?token=***&page=2"),
    ('{"hf_token": "abcd efgh", "x": 2}', '{"hf_token": "***", "x": 2}'),
    ('+API_KEY = "abcdefgh"', '+API_KEY = "***"'),
    ("apiKey=abcdefgh MYSECRET=abcdefgh", "apiKey=*** MYSECRET=***"),
    (f"WANDB_API_KEY={COMMIT}", "WANDB_API_KEY=***"),
]

HARMLESS = [
    f"git commit {COMMIT}",
    "commit=" + COMMIT,
    "task.tokenizer=gpt2-large max_tokens=100000 pad_token=<|endoftext|>",
    "step 100000  loss 1.234  1234 samples/s",
    "sorted(names, key=operator.itemgetter(1))",
    "token = tokenizer.decode(ids)",
    "ssh git@github.com:someone/repository.git",
    "use_token=true",
    "token_accuracy=0.98765 loss_per_token: 1.23456",
    "--password --other",
]


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch):
    monkeypatch.setattr("os.environ", {})


@pytest.mark.parametrize(("text", "masked"), SECRETS)
def test_a_secret_is_hidden_and_the_rest_stays(text, masked):
    assert mask(text) == masked
    assert mask(masked) == masked


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_secret_stays(text):
    assert mask(text) == text


def test_a_value_of_the_environment_is_hidden_wherever_it_stands(monkeypatch):
    monkeypatch.setattr("os.environ", {"MY_TOKEN": "plain words", "WANDB_API_KEY": COMMIT})
    assert mask(f"about plain words and {COMMIT}.") == "about *** and ***."


def test_a_value_of_the_command_line_is_hidden_wherever_it_stands(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "hub.token=qwertyui", "--secret", "asdfghjk"])
    assert mask("unknown key: qwertyui, asdfghjk") == "unknown key: ***, ***"


def test_switches_and_numbers_of_the_environment_hide_nothing(monkeypatch):
    environment = {"TOKENIZERS_PARALLELISM": "disabled", "USE_TOKEN": "1", "MAX_TOKEN": "100000"}
    monkeypatch.setattr("os.environ", environment)
    assert mask("disabled 1 at step 100000") == "disabled 1 at step 100000"


def test_a_tree_is_masked_by_value_and_by_key():
    tree = {"hub": {"token": "abcdefgh", "password": 12345678}, "pad_token": 50256, "lr": 1e-3}
    tree["token_accuracy"] = 0.98765
    tree["notes"] = ["hf_abcdefghijklmnopqrst", None, True]
    assert mask_tree(tree) == {
        "hub": {"token": "***", "password": "***"},
        "pad_token": 50256,
        "lr": 1e-3,
        "token_accuracy": 0.98765,
        "notes": ["***", None, True],
    }


def test_a_secret_argument_with_blanks_and_quotes_is_hidden_whole():
    command = ["train.py", "--token", "it's a secret", "hub.password=so is this", "seed=1"]
    assert mask_command(command) == ["train.py", "--token", "***", "hub.password=***", "seed=1"]


@pytest.mark.parametrize("word", ["a", "key-", "token", "secret=x ", "eyJ"])
def test_a_long_line_costs_little(word):
    start = time.perf_counter()
    mask(word * 50_000)
    assert time.perf_counter() - start < 2  # a quadratic pattern takes minutes
