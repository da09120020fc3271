"""A task section that takes any text data, to read run configs with."""

from __future__ import annotations

from typing import Annotated, Any

from evenstep.sections import Section
from evenstep.task import Named


class Config(Section):
    name: str = "streaming_config"
    data: Annotated[Any, Named("datasets")]


def build(config: Config) -> None:
    raise NotImplementedError
