"""Parameters that are not trained, by patterns of their names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze each parameter that a pattern names, by its own name or by that of a module it is in;
    * stands for any characters, dots too, ? for one. They get no gradient, weight decay or
    optimizer state, and stay what they are, bit for bit.

    A BatchNorm whose parameters are all named, or that is named and has none, keeps its statistics
    as well, and normalises by them: else the model would change although its weights do not.
    Dropout goes on. Raises ValueError for a pattern that names nothing.
    """
    parameters = dict(model.named_parameters())
    norms = {name: each for name, each in model.named_modules() if isinstance(each, _BatchNorm)}
    for pattern in patterns:
        named = [name for name in (*parameters, *norms) if _names(pattern, name)]
        if not named:
            nearest = _nearest(pattern, [*parameters, *norms])
            raise ValueError(f"freeze: {pattern!r} names no parameter; {nearest}")
        for name in parameters.keys() & named:
            parameters[name].requires_grad_(False)
    for name, norm in norms.items():
        own = [f"{name}.{key}" for key, _ in norm.named_parameters(recurse=False)]
        if all(_any(patterns, key) for key in own or [name]):
            norm.eval()


def _names(pattern: str, name: str) -> bool:
    return any(fnmatchcase(each, pattern) for each in _with_modules(name))


def _any(patterns: Iterable[str], name: str) -> bool:
    return any(_names(pattern, name) for pattern in patterns)


def _with_modules(name: str) -> Iterator[str]:
    """ "a.b.weight", "a.b", "a"."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _nearest(pattern: str, freezable: Iterable[str]) -> str:
    names = {each: None for name in freezable for each in _with_modules(name)}
    plain = pattern.strip("*.")
    inside = [name for name in names if plain and plain in name]
    nearest = inside[:3] or difflib.get_close_matches(plain, names, n=3, cutoff=0.4)
    return f"nearest: {', '.join(nearest or list(names)[:3])} (* stands for any characters)"
