"""Tracking: `metrics.jsonl` always, and Accelerate's trackers (Weights & Biases and others)."""

from __future__ import annotations

import difflib
import netrc
import os
import secrets
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from evenstep.files import write_atomically
from evenstep.masking import mask_tree
from evenstep.replay import JsonLines, Replay

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, filter_trackers, get_available_trackers


def check(names: Sequence[str]) -> None:
    """Raises ValueError for a tracker that Accelerate does not know or that is not installed."""
    available = [str(tracker) for tracker in get_available_trackers()]
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            nearest = difflib.get_close_matches(name, LOGGER_TYPE_TO_CLASS, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            known = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
            raise ValueError(f"tracking.with: {name!r} is no tracker ({known}){hint}")
        if name not in available:
            raise ValueError(
                f"tracking.with: {name!r} is not installed: pip install {name}, or leave it out"
            )


class Tracking:
    """The trackers of one run, from `with` to the end of its block.

    An exception that leaves the block, `SystemExit` included, marks the run as failed. Without
    one, the block ends the training for Accelerate too, which destroys the process group (two CPU
    processes that skip this crash at exit in one run of four). Every process enters the block.

    `config` is the resolved run config, nested; secrets in it are masked here. The keywords are
    the `tracking` section of the run config: `Tracking(..., **dict(config.tracking))`; and
    `rounding`, how far a step that is computed again may be from its row in metrics.jsonl.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        run_dir: Path,
        config: Mapping[str, Any],
        *,
        with_: Sequence[str] = (),
        project: str = "evenstep",
        entity: str | None = None,
        mode: str = "auto",
        tags: Sequence[str] = (),
        group: str | None = None,
        rounding: float = 0.0,
        say: Callable[[str], None] = print,
    ):
        check(with_)
        self._accelerator, self._run_dir, self._config = accelerator, run_dir, mask_tree(config)
        self._names = [] if mode == "disabled" else list(dict.fromkeys(with_))
        self._project, self._mode, self._say = project, mode, say
        self._labels = {"entity": entity, "tags": list(tags), "group": group}
        self._rows = JsonLines(run_dir / "metrics.jsonl") if accelerator.is_main_process else None
        self._replay = Replay(self._rows, rounding, say) if self._rows else None
        self._newest_step = 0
        self._exit_code = 0

    def __enter__(self) -> Tracking:
        accelerator = self._accelerator
        # Set here and not in the constructor: the run directory is agreed on after it.
        logging_dir = str(self._run_dir / "trackers")
        accelerator.project_configuration.logging_dir = logging_dir
        accelerator.log_with = filter_trackers(self._names, logging_dir)
        accelerator.init_trackers(self._project, init_kwargs=self._init_kwargs())
        flat = dict(_flatten(self._config))
        for tracker in accelerator.trackers:
            if tracker.name != "wandb":  # it got the nested config
                tracker.store_init_configuration(flat)
        return self

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Log the scalars and texts of `values`: once a step, with everything there is for it.

        A step up to the last one that was logged before a resume is compared with its row, and
        not logged again: no tracker ever sees a step twice or steps going backwards.
        """
        assert step > self._newest_step, "log() takes all values of a step in one call, in order"
        self._newest_step = step
        if self._rows is None or self._replay is None:
            return
        numbers = _numbers(values)
        if step <= self._replay.last_step:
            self._replay.check({"step": step, **numbers})
            return
        texts = {key: value for key, value in values.items() if isinstance(value, str)}
        # The row first: after a crash no tracker holds a step that metrics.jsonl lacks.
        self._rows.append({"step": step, **numbers, **texts})
        with self._unharmed():
            self._accelerator.log({**numbers, **texts}, step=step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Hand what `RunDirectory.write_summary` returned to W&B; its status sets the exit code."""
        self._exit_code = 0 if summary["status"] == "finished" else 1
        if run := self._wandb_run():
            kept = {key: summary[key] for key in ("status", "best", "seconds", "weights_sha256")}
            with self._unharmed():
                run.summary.update({**_numbers(summary["metrics"]), **kept})

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._rows is not None:
            self._rows.close()
        if self._replay is not None and kind is None:
            self._replay.finish()
        if run := self._wandb_run():
            with self._unharmed():
                run.finish(exit_code=1 if kind else self._exit_code)
        for tracker in self._accelerator.trackers:
            with self._unharmed():
                tracker.finish()
        if kind is None:  # else the process group stays: others may wait in a collective
            # torchrun kills the others 30 s after the first process has ended with an error code.
            self._accelerator.wait_for_everyone()
            self._accelerator.state.destroy_process_group()

    @contextmanager
    def _unharmed(self) -> Iterator[None]:
        """A tracker that fails costs no checkpoint: metrics.jsonl has every row. SLURM, for one,
        sends the SIGTERM of a preemption to W&B's service as well, which ends at once."""
        try:
            yield
        except Exception as error:
            self._say(f"warning: a tracker failed ({error!r}); metrics.jsonl has every row")

    def _wandb_run(self) -> Any:
        if self._rows is None or "wandb" not in self._names:
            return None
        return self._accelerator.get_tracker("wandb", unwrap=True)

    def _init_kwargs(self) -> dict[str, dict[str, Any]]:
        name = self._run_dir.name
        kwargs: dict[str, dict[str, Any]] = {"trackio": {"name": name, "resume": "allow"}}
        if self._rows is not None and "wandb" in self._names:
            mode, why_offline = wandb_mode(self._mode)
            if why_offline:
                files = self._run_dir / "wandb" / "offline-run-*"
                self._say(f"W&B is offline: {why_offline}. Upload later: wandb sync {files}")
            run = {"name": name, "mode": mode, "config": self._config, **self._labels}
            kwargs["wandb"] = {**run, **_wandb_settings(self._run_dir)}
        return kwargs


def wandb_mode(mode: str) -> tuple[str | None, str]:
    """W&B's mode for `tracking.mode`, and why "auto" came to be offline ("" if it did not).

    "auto" leaves the choice to WANDB_MODE or `wandb offline` where one of them was used; else it
    is online if there is a key and the server answers. None lets W&B decide.
    """
    if mode != "auto":
        return mode, ""
    if "WANDB_MODE" in os.environ:
        return None, ""
    import wandb

    settings = wandb.setup().settings
    if settings.mode != "online":
        return settings.mode, ""
    if not _has_key(settings):
        return "offline", "no API key (`wandb login` stores one)"
    if not _answers(settings.base_url):
        return "offline", f"{settings.base_url} does not answer"
    return "online", ""


def _has_key(settings: Any) -> bool:
    if settings.api_key or settings.identity_token_file or os.environ.get("WANDB_API_KEY"):
        return True
    hosts = [str(urlsplit(settings.base_url).hostname)]
    if hosts[0].endswith(("wandb.ai", "forge.coreweave.com")):
        hosts.append("api.wandb.ai")  # the name in files written before W&B's own server moved
    try:
        entries = netrc.netrc(os.environ.get("NETRC"))
    except (OSError, netrc.NetrcParseError):
        return False
    return any(entries.authenticators(host) for host in hosts)


def _answers(url: str) -> bool:
    """Whether anything answers at `url`, a proxy of the environment taken into account."""
    try:
        with urllib.request.urlopen(url, timeout=3):
            return True
    except urllib.error.HTTPError:
        return True  # an error page is an answer
    except OSError:
        return False


def _wandb_settings(run_dir: Path) -> dict[str, Any]:
    """Everything of the run in `<run_dir>/wandb`, one run id for all resumes, and no secrets.

    W&B by itself records the command line, the git diff and the console as they are.
    """
    import wandb

    run_id = run_dir / "wandb" / "run_id"
    if not run_id.exists():
        run_id.parent.mkdir(exist_ok=True)
        write_atomically(run_id, secrets.token_hex(8))
    settings = wandb.Settings(
        console="off",
        disable_code=True,
        disable_git=True,
        disable_job_creation=True,
        quiet=True,
        save_code=False,
        x_disable_meta=True,
    )
    return {"dir": run_dir, "id": run_id.read_text(), "resume": "allow", "settings": settings}


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        key: int(value) if isinstance(value, Integral) else float(value)
        for key, value in values.items()
        if isinstance(value, Real)
    }


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`{"optimizer.lr": 1e-3}`: what trackers without nested configs take."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            plain = isinstance(value, (bool, int, float, str))
            yield prefix + key, value if plain else str(value)
