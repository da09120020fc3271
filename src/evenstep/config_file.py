"""Reading run configs: YAML, then `key=value` overrides, then one validation that reports every
problem at once, each with its key, file and line; and writing and comparing resolved ones."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from evenstep.config import RunConfig
from evenstep.masking import mask, mask_command, mask_tree
from evenstep.sections import Key, Section, is_housekeeping, keys, specialise

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

REPOSITORY = Path(__file__).parents[2]
DEFAULT = "configs/digits.yaml"

_OVERRIDE = re.compile(r"[\w.-]+=")
# YAML 1.2's core schema. PyYAML alone follows YAML 1.1, where 1e-4 is a string, no is false,
# 017 is 15 and 1:30 is 90. (Numbers with a leading zero stay text: they are mostly names.)
_SCALARS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?(?:0|[1-9][0-9]*)", "-+0123456789"),
    "float": (
        r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012 (a class attribute of PyYAML's)


class _Dumper(yaml.SafeDumper):
    """Quotes what either YAML 1.1 or 1.2 would take for more than text."""


for _tag, (_pattern, _first) in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), [*_first]
        )


class ConfigError(ValueError):
    """All problems of a run config, one a line."""

    def __init__(self, problems: Sequence[str]) -> None:
        count = f"{len(problems)} problem{'s' * (len(problems) != 1)}"
        super().__init__("\n  ".join([f"{count} in the run config:", *problems]))


@dataclass
class Draft:
    """A run config as written, not validated yet."""

    path: Path
    raw: dict[str, Any] = field(default_factory=dict)
    places: dict[Key, str] = field(default_factory=dict)
    """Where each key was written: "configs/digits.yaml:7" or "command line"."""
    problems: list[str] = field(default_factory=list)

    def place(self, key: Key) -> str:
        """Where a key, or else the section that should have it, was written."""
        written = (key[:length] for length in range(len(key), 0, -1))
        return next((self.places[k] for k in written if k in self.places), str(self.path))


def load(argv: Sequence[str]) -> tuple[RunConfig, Path]:
    """The run config that `[path] [key=value ...]` asks for, and the file it was read from.

    Raises ConfigError with all problems at once.
    """
    draft = read(argv)
    config_class = specialise(RunConfig, draft.raw)
    try:
        config = config_class.model_validate(draft.raw)
    except ValidationError as error:
        known = dict(keys(config_class))
        draft.problems += [_described(problem, draft, known) for problem in error.errors()]
    if draft.problems:
        raise ConfigError(draft.problems)
    return config, draft.path


def read(argv: Sequence[str]) -> Draft:
    """The file with the overrides applied. Raises ConfigError if the file cannot be read."""
    overrides = [argument for argument in argv if _OVERRIDE.match(argument)]
    paths = [argument for argument in argv if not _OVERRIDE.match(argument)]
    if len(paths) > 1 or any(path.startswith("-") for path in paths):
        given = " ".join(mask_command(paths))
        raise ConfigError(
            [f"command line: {given}: give one run config, then overrides as key=value"]
        )
    draft = _read_yaml(_find(*paths))
    for override in overrides:
        _apply(draft, override)
    return draft


def _find(path: str = DEFAULT) -> Path:
    found = next((p for p in (Path(path), REPOSITORY / path) if p.is_file()), None)
    if found is None:
        raise ConfigError([f"{path}: no such file"])
    return found


def _read_yaml(path: Path) -> Draft:
    draft = Draft(path)
    try:
        node, value = _parse(path.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError([f"{path}{line}: {error.problem}"]) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: {error}"]) from None
    if not isinstance(value, dict | None):
        raise ConfigError([f"{path}: a run config is made of lines `key: value`"])
    draft.raw = value or {}
    for key, number in _lines(node):
        if key in draft.places:
            draft.problems.append(f"{path}:{number}: {'.'.join(key)}: key given twice")
        draft.places[key] = f"{path}:{number}"
    return draft


def _parse(text: str) -> tuple[yaml.Node | None, Any]:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        return node, None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def _lines(node: yaml.Node | None, section: Key = ()) -> Iterator[tuple[Key, int]]:
    """Every key of a YAML document with its line, keys given twice included."""
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            key = (*section, str(name.value))
            yield key, name.start_mark.line + 1
            yield from _lines(value, key)


def _apply(draft: Draft, override: str) -> None:
    """Write an override into the draft, over what the file says."""
    dotted, _, text = override.partition("=")
    key = tuple(dotted.split("."))
    try:
        _, value = _parse(text)
        section = _section(draft, key)
    except (yaml.YAMLError, ValueError) as error:
        rule = getattr(error, "problem", error)  # PyYAML's own text shows the value, unmasked
        draft.problems.append(f"command line: {mask_command([override])[0]}: {rule}")
        return
    section[key[-1]] = value
    draft.places = {k: place for k, place in draft.places.items() if k[: len(key)] != key}
    draft.places[key] = "command line"


def _section(draft: Draft, key: Key) -> dict[str, Any]:
    """The section of the draft that holds a key, made where it is not there yet."""
    section = draft.raw
    for depth, part in enumerate(key[:-1], start=1):
        inner = {} if section.get(part) is None else section[part]
        if not isinstance(inner, dict):
            raise ValueError(f"{'.'.join(key[:depth])} is a value, not a section")
        section[part] = section = dict(inner)  # a copy: what YAML aliases is one dict
        draft.places.setdefault(key[:depth], "command line")
    return section


def _described(problem: ErrorDetails, draft: Draft, known: Mapping[Key, FieldInfo]) -> str:
    """A line for one problem: where, key, what was given, the rule, the way out."""
    key = _key(problem["loc"], draft.raw, known)
    match problem["type"]:
        case "missing":
            return f"{draft.place(key)}: {'.'.join(key)}: required, but not given"
        case "extra_forbidden":
            rule = f"unknown key; {_way_out(key, known)}"
        case "model_type":
            inner = [other[-1] for other in known if other[:-1] == key]
            rule = f"a section is no value: it has {', '.join(inner)}"
        case "value_error":
            rule = str(problem["ctx"]["error"])
        case _:
            none = " (no value is written null)" if problem["input"] == "None" else ""
            rule = f"{problem['msg']}{none}"
    return f"{draft.place(key)}: {_given(key, problem['input'])}: {mask(rule)}"


def _key(location: Sequence[int | str], raw: Any, known: Container[Key]) -> Key:
    """pydantic's location without the parts that name a type of a union and not a key."""
    key: Key = ()
    for part in location:
        inner = {str(name): value for name, value in raw.items()} if isinstance(raw, dict) else {}
        if str(part) in inner or isinstance(part, int) or (*key, part) in known:
            key = (*key, str(part))
            raw = inner.get(str(part))
    return key


def _given(key: Key, value: Any) -> str:
    name = ".".join(key)
    if isinstance(value, Section):  # a default, which nobody has written
        value = value.model_dump(mode="json", exclude_unset=True) or getattr(value, "name", {})
    text = json.dumps(mask_tree({name: value})[name], default=str, ensure_ascii=False)
    return f"{name}={text if len(text) <= 60 else text[:57] + '...'}"


def _way_out(key: Key, known: Mapping[Key, FieldInfo]) -> str:
    def likeness(other: Key) -> float:
        names = (other[-1], known[other].title or "")
        return max(SequenceMatcher(None, key[-1], name).ratio() for name in names)

    here = [other for other in known if other[:-1] == key[:-1]]
    nearest = max(here + list(known), key=likeness)  # the first of equals: one from here
    if likeness(nearest) < 0.6:
        return f"valid here: {', '.join(other[-1] for other in here)}"
    return f"did you mean {'.'.join(nearest)}?"


def resolved(config: RunConfig) -> dict[str, Any]:
    """The config as plain data, every default filled in."""
    return config.model_dump(mode="json", by_alias=True)


def to_yaml(config: RunConfig) -> str:
    """The resolved config, which `load` reads back as an equal one; secrets are masked."""
    values = mask_tree(resolved(config))
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def difference(old: Mapping[str, Any], new: RunConfig) -> list[str]:
    """What differs between a resolved config and this one: "optimizer.lr: 0.001 -> 0.01".

    Housekeeping keys may differ between a run and its resume, and are left out. A secret is
    compared as `to_yaml` writes it: masked.
    """
    free = [key for key, field in keys(type(new)) if is_housekeeping(field)]
    if new.early_stopping:
        free.remove(("eval_every",))  # it decides where the run ends
    if new.reproducibility == "rounding":
        free.append(("cpu_threads",))  # which is all that it changes
    before, after = dict(_leaves(mask_tree(old))), dict(_leaves(mask_tree(resolved(new))))
    return [
        f"{'.'.join(key)}: {before.get(key, 'absent')} -> {after.get(key, 'absent')}"
        for key in {**before, **after}
        if before.get(key) != after.get(key)
        and not any(key[: len(section)] == section for section in free)
    ]


def _leaves(data: Mapping[str, Any], section: Key = ()) -> Iterator[tuple[Key, str]]:
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*section, name))
        else:
            yield (*section, name), json.dumps(value, ensure_ascii=False)
