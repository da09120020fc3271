"""Sections of the run config: how the `name` in a section picks the class that types it.

A section is picked from modules (`model: Annotated[Any, Named("models")]`) or from a union of
classes (`optimizer: AdamW | SGD`); both ways, only the keys of what is picked are valid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from evenstep.task import Named

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model
from pydantic.fields import FieldInfo

Key = tuple[str, ...]  # ("optimizer", "lr")
Model = TypeVar("Model", bound=BaseModel)
T = TypeVar("T")

HOUSEKEEPING: dict[str, Any] = {"housekeeping": True}
"""As a field's `json_schema_extra`: this key does not decide the result; a resume may change it."""

Housekeeping = Annotated[T, Field(json_schema_extra=HOUSEKEEPING)]
"""Marks a key so by its type: `log_every: Housekeeping[int] = 10`."""


class Section(BaseModel):
    """Nothing is changed once loaded, no unknown key slips through; docstrings describe keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


def specialise(cls: type[Model], raw: Any) -> type[Model]:
    """`cls` with each section typed by what the section's `name` in `raw` picks.

    One `model_validate` of the returned class then reports the problems of all sections, each at
    its own key, and `keys` walks all that this run config can set.
    """
    fields: dict[str, Any] = {}
    for name, field in cls.model_fields.items():
        given = raw.get(field.alias or name) if isinstance(raw, Mapping) else None
        annotation = _specialised(field, given)
        if annotation != field.annotation:
            fields[name] = (annotation, copy(field))
    return create_model(cls.__name__, __base__=cls, **fields) if fields else cls


def _specialised(field: FieldInfo, given: Any) -> Any:
    name = given.get("name") if isinstance(given, Mapping) else None
    for mark in field.metadata:
        if isinstance(mark, Named):
            return specialise(_module_config(mark, str(name)), given)
    if not (choices := sections(field)):
        return field.annotation
    section = specialise(_choice(choices, name), given)
    return section | None if type(None) in get_args(field.annotation) else section


def _choice(choices: list[type[BaseModel]], name: Any) -> type[BaseModel]:
    if len(choices) == 1 or name is None:
        return choices[0]
    by_name = {choice.model_fields["name"].default: choice for choice in choices}
    return by_name.get(str(name)) or _unknown(f"{name!r} is none of {', '.join(by_name)}")


def _module_config(mark: Named, name: str) -> type[BaseModel]:
    try:
        config: type[BaseModel] = mark.module(name).Config
    except (ValueError, ImportError) as error:
        return _unknown(str(error))
    return config


def _unknown(problem: str) -> type[BaseModel]:
    """Stands in for a section whose name picks nothing, so that all else is validated as well."""

    def refuse(name: str) -> str:
        raise ValueError(problem)

    allow = ConfigDict(extra="allow")
    return create_model("Unknown", __config__=allow, name=Annotated[str, AfterValidator(refuse)])


def sections(field: FieldInfo) -> list[type[BaseModel]]:
    """The classes that type a field, if it is a section; several if its name is to pick one."""
    union = get_origin(field.annotation) in (Union, UnionType)  # not of a tuple[Section, ...]
    choices = get_args(field.annotation) if union else (field.annotation,)
    return [c for c in choices if isinstance(c, type) and issubclass(c, BaseModel)]


def keys(cls: type[BaseModel], section: Key = ()) -> Iterator[tuple[Key, FieldInfo]]:
    """Every key of a specialised class: single keys first, then each section and its keys."""
    for name, field in sorted(cls.model_fields.items(), key=lambda item: bool(sections(item[1]))):
        key = (*section, field.alias or name)
        yield key, field
        for choice in sections(field):
            yield from keys(choice, key)


def is_housekeeping(field: FieldInfo) -> bool:
    extra = field.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("housekeeping"))
