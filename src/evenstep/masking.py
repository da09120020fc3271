"""Replaces secrets by `***` in whatever is written to disk, sent to a tracker or printed.

A secret is known by its value (what an environment variable with a secret-looking name holds, or
a format like `hf_...`) or by its place (the value of a secret-looking key: `api_key=...`,
`--token ...`, `https://user:password@host`).

40 hexadecimal digits are a W&B key of the old kind, but a git commit too. So they are masked only
in the place of a secret or where the environment holds the same value; a bare commit stays.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

HIDDEN = "***"
_MIN_LENGTH = 6  # shorter values ("1", "true", "none") are switches, and masking them ruins text

_SECRET_NAME = re.compile(
    r"secret|passw|passphrase|credential|api_?key|(?<![a-z])(?:key|keys|token)(?![a-z])|token$"
)
# Names that tasks and tools use for what is no secret.
_HARMLESS_NAME = re.compile(
    r"(?:.*[._])?(?:key|(?:bos|cls|eos|mask|pad|sep|unk)_token|(?:image|label|sort|text)_key)"
    r"|.*_(?:dir|file|path|sock)"
)
_TOKEN = re.compile(
    r"\b(?:"
    r"hf_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|(?:wandb_v\d+_|local-)[\w-]{20,}"  # W&B: the new kind, and its own servers
    r"|sk-[\w-]{16,}"  # OpenAI, Anthropic
    r"|gh[oprsu]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{35}|xox[abprs]-[\w-]{10,}"  # AWS, Google, Slack
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"  # JSON Web Token
    r")|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_URL_LOGIN = re.compile(r"(://)[^/\s:@]*:[^/\s@]+(?=@)")
_BEARER = re.compile(r"(\b(?:Bearer|Basic) +)[\w.~+/=-]{6,}")
# `name=value`, `name: value`, `"name": "value"`, `--name value`
_PAIR = re.compile(
    r"""(?P<name>[A-Za-z][\w.-]*)(?P<gap>["']?(?:=|:[ ]?)|(?<=--(?P=name))[ ]+)"""
    r"""(?P<value>"[^"\n]*"|'[^'\n]*'|[^\s"',;&)\]}]+)"""
) if False else re.compile(
    r"""(?P<head>--(?P<option>[A-Za-z][\w.-]*)(?:=|[ ]+)|(?P<name>[A-Za-z][\w.-]*)["']?(?:=|:[ ]?))"""
    r"""(?P<value>"[^"\n]*"|'[^'\n]*'|[^\s"',;&)\]}]+)"""
)
