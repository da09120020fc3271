"""Replaces secrets by `***` in whatever is written to disk, sent to a tracker or printed.

A secret is known by its value (what the environment or the command line holds under a
secret-looking name, or a format like `hf_...`) or by its place (the value of a secret-looking
key: `api_key=...`, `--token ...`, `https://user:password@host`).

40 hexadecimal digits are a W&B key of the old kind, but a git commit too. They are masked only
in the place of a secret, or where the environment holds the same value: a bare commit stays.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

HIDDEN = "***"
_MIN_LENGTH = 6  # shorter values ("1", "true", "none") are switches; masking them ruins the text

_WORD = (
    r"(?:secret|passw|passphrase|credential|(?:api|access|auth|private)[_-]?key|token(?![a-z])"
    r"|(?<![a-z])keys?(?![a-z]))"
)
_SECRET_NAME = re.compile(_WORD, re.IGNORECASE)
_PASSWORD = re.compile(r"passw|secret", re.IGNORECASE)
_NUMBER = re.compile(r"[\d.eE+-]+")
# What tasks and tools call by such a name although it is no secret.
_HARMLESS_NAME = re.compile(
    r"(?:--|.*\.)?(?:key|(?:bos|cls|eos|mask|pad|sep|unk)_token|(?:image|label|sort|text)_key)"
    r"|.*_(?:dir|file|path|sock)",
    re.IGNORECASE,
)
_TOKEN = re.compile(
    r"\b(?:"
    r"hf_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|(?:wandb_v\d+_|local-)[\w-]{20,}"  # W&B: the new kind, and self-hosted
    r"|sk-[\w-]{16,}"  # OpenAI, Anthropic
    r"|gh[oprsu]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{35}|xox[abprs]-[\w-]{10,}"  # AWS, Google, Slack
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"  # JSON Web Token
    r")|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_LOGIN = re.compile(r"(://)[^/\s:@]*:[^/\s@]+(?=@)|(\bBearer )[\w.~+/=-]{6,}", re.IGNORECASE)
# name=value, name: value, "name": "value", name = "value", --name value. Names start at the start
# of a word and are bounded, so that a line of a million characters without a blank stays cheap.
_PAIR = re.compile(
    rf"(?<![\w.-])(?P<name>(?P<dashes>--)?[\w.-]{{0,64}}?{_WORD}[\w.-]{{0,64}})"
    r"(?P<gap>[\"']?(?:[ ]*[=:][ ]*(?=[\"'])|=|:[ ])|(?(dashes)[ ]+(?!-)|(?!)))"
    r"(?P<value>\"[^\"\n]*\"|'[^'\n]*'|[^\s\"',;&)\]}]+)",
    re.IGNORECASE,
)


def mask(text: str) -> str:
    """`text` with every secret in it replaced by `***`."""
    if values := _known_secrets():
        text = _any_of(values).sub(HIDDEN, text)
    text = _TOKEN.sub(HIDDEN, text)
    text = _LOGIN.sub(lambda match: (match[1] or match[2]) + HIDDEN, text)
    return _PAIR.sub(_mask_pair, text)


def mask_tree(value: Any) -> Any:
    """Nested dicts and lists with every string masked, and whatever stands under a secret key."""
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if _is_secret(str(key), item) else mask_tree(item)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [mask_tree(item) for item in value]
    return mask(value) if isinstance(value, str) else value


def mask_command(arguments: Sequence[str]) -> list[str]:
    """A command line, masked argument by argument: a secret may hold blanks and quotes."""
    masked, name = [], ""
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if _is_secret(name, argument) and not argument.startswith("-"):
            masked.append(HIDDEN)
        elif equals and _is_secret(key, value):
            masked.append(f"{key}={HIDDEN}")
        else:
            masked.append(mask(argument))
        name = argument if argument.startswith("--") and not equals else ""
    return masked


def _is_secret(name: str, value: Any) -> bool:
    if not isinstance(value, (str, int, float)) or len(str(value)) < _MIN_LENGTH:
        return False
    return _is_secret_name(name, is_number=bool(_NUMBER.fullmatch(str(value))))


@lru_cache(maxsize=4096)
def _is_secret_name(name: str, is_number: bool) -> bool:
    # Numbers are hidden as passwords only: token_accuracy=0.98765 and MAX_TOKEN=100000 are none.
    pattern = _PASSWORD if is_number else _SECRET_NAME
    return bool(pattern.search(name)) and not _HARMLESS_NAME.fullmatch(name)


def _mask_pair(match: re.Match[str]) -> str:
    quote = match["value"][0] if match["value"][0] in "\"'" else ""
    if not _is_secret(match["name"], match["value"].strip(quote)):
        return match[0]
    return match["name"] + match["gap"] + quote + HIDDEN + quote


def _known_secrets() -> tuple[str, ...]:
    """The values that the environment and the command line hold under secret names."""
    arguments = sys.argv
    pairs = [
        *os.environ.items(),
        *(argument.partition("=")[::2] for argument in arguments),
        *(pair for pair in pairwise(arguments) if pair[0][:2] == "--"),
    ]
    values = {value for name, value in pairs if _is_secret(name, value) and value[0] != "-"}
    return tuple(sorted(values, key=len, reverse=True))


@lru_cache(maxsize=8)
def _any_of(values: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, values)))
