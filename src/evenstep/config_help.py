"""The text of `train.py --help`: every key of a run config with its sentence, type and default."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from evenstep.config import RunConfig
from evenstep.config_file import read
from evenstep.masking import mask
from evenstep.schedule import Duration
from evenstep.sections import Key, keys, sections, specialise
from evenstep.task import Named, module_names

from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

WIDTH = 100
_USAGE = """\
accelerate launch --config_file accelerate_configs/<hardware>.yaml \\
    train.py [configs/<run>.yaml] [key=value ...]

A key in a section is written section.key=value. A duration is a number of steps (100), "2 epochs"
or "5%" of the run. Below are the keys of {path}, with those of the modules that it names.
"""


def help_text(argv: Sequence[str]) -> str:
    """Every key that the run config of `argv` can set. Raises ConfigError if it cannot be read."""
    draft = read([argument for argument in argv if argument not in ("-h", "--help")])
    entries = list(keys(specialise(RunConfig, draft.raw)))
    margin = max(len(".".join(key)) for key, _ in entries) + 2
    lines = [_entry(key, field, margin, _given(draft.raw, key)) for key, field in entries]
    return "\n".join([_USAGE.format(path=draft.path), *lines])


def _given(raw: Any, key: Key) -> str:
    """What the run config at hand gives for a key, if anything."""
    for part in key:
        if not isinstance(raw, dict) or part not in raw:
            return ""
        raw = raw[part]
    return f", here {json.dumps(raw, default=str)}"


def _entry(key: Key, field: FieldInfo, margin: int, given: str) -> str:
    sentence = field.description or ""
    if sections(field):
        return "\n" + textwrap.fill(f"{'.'.join(key)}: {sentence}{_modules(field)}", WIDTH)
    return textwrap.fill(
        mask(f"{sentence} [{_type(field.annotation)}, {_default(field)}{given}]"),
        WIDTH,
        initial_indent=".".join(key).ljust(margin),
        subsequent_indent=" " * margin,
    )


def _modules(field: FieldInfo) -> str:
    kinds = [mark.kind for mark in field.metadata if isinstance(mark, Named)]
    return "".join(f" Files: {', '.join(module_names(kind))}." for kind in kinds)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    plain = isinstance(value, str | Path | Duration)
    return f"default {value if plain else json.dumps(to_jsonable_python(value))}"


def _type(annotation: Any) -> str:
    """A type in the words of YAML: `float or null`, `fp32 | bf16`, `list of str`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (Union, UnionType):
        return " or ".join(map(_type, arguments))
    if origin in (list, tuple, Sequence):
        return f"list of {_type(arguments[0])}"
    names = {type(None): "null", Any: "any"}
    return names.get(annotation) or (origin or annotation).__name__.lower()
