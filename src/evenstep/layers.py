"""The repeated blocks of a model, found by its structure, and how deep each parameter lies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import nn


def blocks(model: nn.Module, needed_by: str) -> dict[str, nn.Module]:
    """The repeated blocks by name, from the first to the last: transformer layers, residual blocks.

    A block is a module with parts of its own, in a ModuleList or Sequential. Of all classes of
    such modules, the one that one list holds most often is taken, wherever a list holds it, which
    gives a ResNet's blocks from all of its stages; but none that holds less than half of the
    parameters that another does, such as a stem of many parts. Raises ValueError where nothing is
    repeated; `needed_by` is the setting that asks for blocks.
    """
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    most: Counter[type[nn.Module]] = Counter()
    for parts in lists:
        most |= Counter(type(part) for part in parts if _is_block(part))  # | is the larger count
    found: dict[str, nn.Module] = {}
    size = 0
    for kind, _ in most.most_common():  # of equals the outermost first
        listed = {part for parts in lists for part in parts if type(part) is kind}
        each = dict(_outermost(model, listed))
        if len(each) > 1 and (each_size := _size(each.values())) > 2 * size:
            found, size = each, each_size
    if not found:
        raise ValueError(
            f"{needed_by} needs repeated blocks (modules of one class, with parts of their own, in "
            "a ModuleList or Sequential), which this model has not: leave that setting out"
        )
    return found


def _is_block(part: nn.Module) -> bool:
    return any(part.children()) and not isinstance(part, nn.ModuleList)


def _size(parts: Iterable[nn.Module]) -> int:
    return sum({p: p.numel() for part in parts for p in part.parameters()}.values())


def _outermost(
    module: nn.Module, wanted: set[nn.Module], name: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    for key, part in module.named_children():
        if part in wanted:
            yield f"{name}{key}", part
        else:
            yield from _outermost(part, wanted, f"{name}{key}.")


def depths(model: nn.Module, needed_by: str) -> dict[str, int]:
    """The depth of each parameter, by name: 0 before the first block, i in the i-th block and
    between it and the next, L + 1 after the last of L blocks.

    "Before" and "after" are the order in which the model defines its parts, nearly always that in
    which a forward uses them.
    """
    numbered = enumerate(blocks(model, needed_by).values(), start=1)
    owner = {parameter: number for number, block in numbered for parameter in block.parameters()}
    names = list(model.named_parameters())
    end = 1 + max(place for place, (_, parameter) in enumerate(names) if parameter in owner)
    found, depth = {}, 0
    for name, parameter in names[:end]:
        depth = found[name] = owner.get(parameter, depth)
    return found | {name: max(owner.values()) + 1 for name, _ in names[end:]}
