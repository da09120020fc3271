"""Directories that are complete or not there: written atomically, verified, found and pruned.

Knows files only, nothing of tensors or processes. A checkpoint is complete when `manifest.json`,
written last, gives the size and SHA-256 of each of its files. Names beginning with a dot are never
taken for one: `.step-00000100.tmp` is being written, `.step-00000100.trash` is being deleted.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

from evenstep.files import flush, write_atomically

BEST = "best"
CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
CHUNK = 1 << 20  # bytes hashed at a time


def directory(run_dir: Path, step: int) -> Path:
    return run_dir / CHECKPOINTS / f"step-{step:08d}"


def checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """(step, directory) of each checkpoint, complete or not, sorted by number (not by text)."""
    folders = (path for path in (run_dir / CHECKPOINTS).glob("step-*") if path.is_dir())
    named = ((re.fullmatch(r"step-(\d+)", path.name), path) for path in folders)
    return sorted((int(match[1]), path) for match, path in named if match)


def temporary(final: Path) -> Path:
    """Where a directory is written before it gets its final name."""
    return final.with_name(f".{final.name}.tmp")


def begin(tmp: Path) -> None:
    """Make `tmp`, empty: a killed save may have left files in it."""
    if tmp.exists():
        shutil.rmtree(tmp)
    tmp.mkdir(parents=True)
    flush(tmp.parent.parent)  # the first save makes `checkpoints/`: a name to be kept as well


def complete(tmp: Path, final: Path) -> None:
    """Write the manifest of `tmp` and give it its final name."""
    files = {
        path.name: {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(tmp.iterdir())
    }
    (tmp / MANIFEST).write_text(json.dumps({"files": files}, indent=2) + "\n", encoding="utf-8")
    publish(tmp, final)


def publish(tmp: Path, final: Path) -> None:
    """Flush `tmp` to the disk, then rename it to `final`, replacing what is there.

    A process killed between the two renames leaves `tmp` complete; `newest` finishes its work.
    """
    for path in [*tmp.rglob("*"), tmp, tmp.parent]:
        flush(path)
    trash = _trash(final)
    if final.exists():
        _set_aside(final)
    try:
        tmp.rename(final)
    except OSError:
        if trash.exists():
            trash.rename(final)
        raise
    flush(final.parent)
    if trash.exists():
        shutil.rmtree(trash)


def point_best(run_dir: Path, step: int | None) -> None:
    """Make the file `best` hold the path, relative to it, of the checkpoint of `step`, if any.

    There is no file if there is no such checkpoint: a run that went back to an older one may know
    of a best step whose checkpoint has been deleted since.
    """
    best = run_dir / BEST
    if step is not None and directory(run_dir, step).is_dir():
        write_atomically(best, f"{directory(run_dir, step).relative_to(run_dir)}\n")
    elif best.exists():
        best.unlink()
        flush(run_dir)


def verify(path: Path) -> None:
    """Raise ValueError, naming the file, unless each file of a checkpoint is as it was written."""
    recorded = _manifest(path)
    for name, (size, sha256) in recorded.items():
        file = path / name
        if not file.is_file():
            raise ValueError(f"{file} is missing")
        if file.stat().st_size != size:
            raise ValueError(f"{file} has {file.stat().st_size} bytes, {size} were written")
        if _sha256(file) != sha256:
            raise ValueError(f"{file} has changed: its SHA-256 is not the one that was written")
    # Loading reads every *.safetensors of the directory, so one that was added would be read too.
    if stray := sorted({p.name for p in path.glob("*.safetensors")} - recorded.keys()):
        raise ValueError(f"{path / stray[0]} is not part of the checkpoint")


def newest(run_dir: Path) -> Path | None:
    """The checkpoint with the highest number that verifies; the broken ones are printed.

    To be called when nothing is being saved: it finishes a save that was killed when complete.
    """
    for tmp in sorted((run_dir / CHECKPOINTS).glob(".step-*.tmp")):
        _finish(tmp)
    for _, path in reversed(checkpoints(run_dir)):
        try:
            verify(path)
        except (OSError, ValueError) as error:
            _warn(f"checkpoint {path} is broken and not used: {error}")
        else:
            return path
    return None


def resolve(path: Path) -> Path:
    """The checkpoint that a user means by its directory or by the file `best` of a run.

    Raises ValueError or OSError, naming the file, where it is missing or broken.
    """
    if path.name == BEST and path.is_file():
        path = path.parent / path.read_text(encoding="utf-8").strip()
    if not path.exists() and temporary(path).exists():
        _finish(temporary(path))
    verify(path)
    return path


def prune(run_dir: Path, keep: int, best_step: int | None) -> None:
    """Delete all checkpoints but the newest `keep` by number and the best one.

    To be called after a new one is complete. Deletes what killed saves and deletions left, too;
    whatever else lies in the folder stays.
    """
    found = checkpoints(run_dir)
    for step, path in found[: max(0, len(found) - keep)]:
        if step != best_step:
            _set_aside(path)
    for kind in ("tmp", "trash"):
        for path in (run_dir / CHECKPOINTS).glob(f".step-*.{kind}"):
            shutil.rmtree(path)


def tidy(run_dir: Path, keep: int, best_step: int | None) -> None:
    """What follows a save that is complete: `best` is pointed to its step, then old ones go."""
    point_best(run_dir, best_step)
    prune(run_dir, keep, best_step)


def abandon_newer(run_dir: Path, step: int) -> None:
    """Rename the checkpoints after `step` to `<name>.abandoned`: the run goes on from `step`.

    They are broken, or passed over by the user. Left in place, they would count as the newest:
    `prune` would delete the good ones before them, and the next resume would jump to them.
    """
    for number, path in checkpoints(run_dir):
        if number > step:
            abandoned = path.with_name(f"{path.name}.abandoned")
            if abandoned.exists():
                shutil.rmtree(abandoned)
            path.rename(abandoned)
            flush(path.parent)
            _warn(f"the run goes on from step {step}; {path.name} is now {abandoned}")


def _manifest(path: Path) -> dict[str, tuple[int, str]]:
    manifest = path / MANIFEST
    if not manifest.is_file():
        raise ValueError(f"{path} is not a complete checkpoint: it has no {MANIFEST}")
    try:
        files = json.loads(manifest.read_bytes())["files"]
        return {name: (entry["size"], entry["sha256"]) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{manifest} is damaged: {error!r}") from error


def _finish(tmp: Path) -> None:
    final = tmp.with_name(tmp.name[1 : -len(".tmp")])
    try:
        verify(tmp)
    except (OSError, ValueError):
        _warn(f"{tmp} was left by a save that did not finish, and is not used")
    else:
        publish(tmp, final)


def _trash(path: Path) -> Path:
    return path.with_name(f".{path.name}.trash")


def _set_aside(path: Path) -> None:
    """Rename before deleting: a directory that is half deleted must not look complete."""
    trash = _trash(path)
    if trash.exists():
        shutil.rmtree(trash)
    path.rename(trash)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)
