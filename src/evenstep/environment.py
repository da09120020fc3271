"""What a run ran on, for `environment.json`, and what of it has changed when the run goes on."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

from evenstep.files import to_json, write_atomically
from evenstep.hardware import Hardware
from evenstep.masking import mask, mask_command, mask_tree

import torch

PACKAGES = (
    "evenstep",
    "torch",
    "torchvision",
    "accelerate",
    "transformers",
    "datasets",
    "numpy",
    "timm",
    "deepspeed",
)
MAX_DIFF = 200_000  # characters


def record(run_dir: Path, hardware: Hardware, data_identity: Mapping[str, Any]) -> None:
    """Write `environment.json`; warn of what has changed since the run was last started."""
    if not hardware.is_main:
        return
    file = run_dir / "environment.json"
    now = describe(
        num_processes=hardware.num_processes,
        device=hardware.device,
        data_identity=data_identity,
        code=Path(__file__).parent,
    )
    if file.exists():
        for change in _changes_since(file, now):
            hardware.say(f"warning: since this run was started, {change}; its result may differ")
    write_atomically(file, to_json(now, indent=2) + "\n")


def _changes_since(file: Path, now: Mapping[str, Any]) -> list[str]:
    try:
        return changes(json.loads(file.read_text(encoding="utf-8")), now)
    except (ValueError, KeyError, TypeError) as error:
        return [f"{file} was damaged ({error!r})"]


def describe(
    *, num_processes: int, device: torch.device, data_identity: Mapping[str, Any], code: Path
) -> dict[str, Any]:
    """The environment as plain JSON values without secrets.

    `code` is a directory of the git repository the run's code is in. Takes a few git commands:
    call it on the main process only.
    """
    environment = {
        "command": shlex.join(mask_command(sys.orig_argv)),
        "hardware_file": hardware_file(),
        "num_processes": num_processes,
        "device": {"type": device.type, "name": _device_name(device)},
        "host": platform.node(),
        "platform": platform.platform(),
        "cpu_count": _cpu_count(),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), **_versions()},
        "git": _git(code),
        "data": mask_tree(data_identity),
    }
    described: dict[str, Any] = json.loads(to_json(environment))
    return described


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs and may change results, a phrase each: code, versions, data, kind of device.

    Another number of processes, another machine or another hardware file is no such change.
    """
    return [
        f"{name} was {_short(was)} and is {_short(now)}"
        for name, was, now in _compared(old, new)
        if was != now
    ]


def _compared(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    yield "device", old["device"]["type"], new["device"]["type"]
    old_git, new_git = old["git"] or {}, new["git"] or {}
    yield "git commit", old_git.get("commit"), new_git.get("commit")
    yield "uncommitted code (SHA-256)", old_git.get("sha256"), new_git.get("sha256")
    for section in ("versions", "data"):
        for key in sorted({*old[section], *new[section]}):
            yield f"{section}: {key}", old[section].get(key), new[section].get(key)


def _short(value: Any) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def hardware_file() -> str | None:
    """The `--config_file` of the `accelerate launch` that started this process, if it says so.

    Read from /proc: Accelerate hands down the settings, not the name of the file.
    """
    try:
        arguments = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
    except OSError:
        return None
    for argument, following in pairwise(arguments):
        name, equals, value = argument.partition("=")
        if name in ("--config_file", "--config-file"):
            return value if equals else following
    return None


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    models = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _cpu_count() -> int | None:
    """What this process may use, which a container or Slurm makes fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _versions() -> dict[str, str]:
    """From the packages' metadata: nothing is imported for it."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _git(directory: Path) -> dict[str, Any] | None:
    """Commit, masked diff and new Python files; None where there is no git or no commit.

    `sha256` is over the whole diff and the new Python files, so that a change in code is seen
    even where the diff is cut or masked.
    """
    try:
        root = Path(_run_git(directory, "rev-parse", "--show-toplevel").strip())
        commit = _run_git(root, "rev-parse", "HEAD").strip()
        diff = _run_git(root, "diff", "HEAD", "--no-color", "--no-ext-diff")
        others = _run_git(root, "ls-files", "-z", "--others", "--exclude-standard", "--", "*.py")
    except (OSError, subprocess.SubprocessError):
        return None
    untracked = sorted(filter(None, others.split("\0")))
    contents = [(root / name).read_bytes() for name in untracked]
    code = b"\0".join([diff.encode(), *map(str.encode, untracked), *contents])
    return {
        "commit": commit,
        "diff": mask(diff) if len(diff) <= MAX_DIFF else _cut(diff),
        "untracked": untracked,
        "sha256": hashlib.sha256(code).hexdigest() if diff or untracked else None,
    }


def _cut(diff: str) -> str:
    """Whole lines only: half a secret might not be recognised."""
    return mask(diff[:MAX_DIFF].rpartition("\n")[0]) + f"\n... {len(diff)} characters, cut\n"


def _run_git(directory: Path, *arguments: str) -> str:
    command = ["git", "-C", str(directory), *arguments]
    done = subprocess.run(command, capture_output=True, timeout=20, check=True)
    return done.stdout.decode(errors="replace")
