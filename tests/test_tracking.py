"""metrics.jsonl, Weights & Biases (the real one, offline, its file read back) and the console."""

import http.server
import json
import os
import pty
import struct
import subprocess
import sys
import threading

from evenstep import progress, tracking
from evenstep.replay import JsonLines

import pytest

pytestmark = pytest.mark.xdist_group("tracking")  # one process makes its fixture

# Three lives of one run: an exception after step 30, a resume from a checkpoint of step 10 that
# ends in sys.exit(0), and a resume from step 40 that finishes.
THREE_LIVES = """
import sys
from pathlib import Path
from accelerate import Accelerator
from evenstep import run_directory
from evenstep.run_state import RunState
from evenstep.tracking import Tracking

def live(steps, end):
    run = run_directory.create(Path(sys.argv[1]), "a", "digits", "auto", "")
    config = {"optimizer": {"lr": 1e-3}, "hub": {"token": "planted-config"}, "note": "planted-env"}
    tracker = Tracking(
        Accelerator(cpu=True), run.path, config, with_=["wandb"], mode="offline", tags=["t"]
    )
    with run, tracker:
        for step in steps:
            numbers = {"train/loss": 1 / step, "train/nan": float("nan")}
            tracker.log(step, {**numbers, "matrix": [1], "eval/sample": f"text {end.__name__}"})
        print("planted-env on the console")
        end(run, tracker)

def fail(run, tracker):
    raise RuntimeError("boom")

def finish(run, tracker):
    metrics = {"eval/accuracy": 0.5, "eval/matrix": [[1]]}
    best = {"metric": "eval/accuracy", "value": 0.75, "step": 20}
    state = RunState(step=50, metrics=metrics, best=best)
    tracker.finish(run.write_summary("finished", state))

try:
    live([10, 20, 30], fail)
except RuntimeError:
    pass
try:
    live([20, 30, 40], lambda run, tracker: sys.exit(0))
except SystemExit:
    pass
live([50], finish)
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tracking")
    command = [sys.executable, "-c", THREE_LIVES, str(directory), "--api-key", "planted-argument"]
    environment = {**os.environ, "MY_TOKEN": "planted-env", "HOME": str(directory)}
    environment.pop("WANDB_MODE", None)
    subprocess.run(command, check=True, timeout=120, env=environment, cwd=directory)
    return directory / "a"


@pytest.fixture(scope="module")
def lives(run_dir):
    """The records of the `.wandb` file of each life, in order."""
    paths = sorted(run_dir.glob("wandb/offline-run-*/*.wandb"), key=lambda p: p.stat().st_mtime)
    return [list(wandb_records(path.read_bytes())) for path in paths]


def wandb_records(data):
    """A `.wandb` file is a LevelDB log after a header of 7 bytes: blocks of 32 KiB with chunks of
    (checksum, length, type); types 1 and 4 end a record."""
    from wandb.proto.wandb_internal_pb2 import Record

    position, buffer = 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        buffer += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield Record.FromString(buffer)
            buffer = b""


def only(records, kind):
    return [getattr(record, kind) for record in records if record.WhichOneof("record_type") == kind]


def test_wandb_and_metrics_jsonl_hold_every_step_once_and_in_order(run_dir, lives):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [10, 20, 30, 40, 50]
    steps = [[history.step.num for history in only(records, "history")] for records in lives]
    assert steps == [[10, 20, 30], [40], [50]]


def test_rows_hold_full_floats_null_for_nan_texts_and_no_lists(run_dir):
    line = (run_dir / "metrics.jsonl").read_text().splitlines()[2]
    assert line == (
        '{"step": 30, "train/loss": 0.03333333333333333, "train/nan": null, '
        '"eval/sample": "text fail"}'
    )


def test_wandb_gets_texts_too(lives):
    (history,) = only(lives[2], "history")
    found = {item.key or item.nested_key[-1]: item.value_json for item in history.item}
    assert json.loads(found["eval/sample"]) == "text finish"


def test_wandb_sees_one_run_with_the_resolved_config(run_dir, lives):
    runs = [only(records, "run")[0] for records in lives]
    assert {run.run_id for run in runs} == {(run_dir / "wandb" / "run_id").read_text()}
    assert {run.display_name for run in runs} == {"a"}
    assert list(runs[0].tags) == ["t"]
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["optimizer"] == {"lr": 1e-3}
    assert config["hub"] == {"token": "***"}


def test_wandb_learns_that_an_exception_and_sys_exit_are_no_success(lives):
    assert [only(records, "exit")[0].exit_code for records in lives] == [1, 1, 0]


def test_wandb_summary_holds_the_final_metrics_and_the_best(lives):
    updates = [item for update in only(lives[2], "summary") for item in update.update]
    summary = {item.key: json.loads(item.value_json) for item in updates if item.key}
    assert summary["eval/accuracy"] == 0.5
    assert summary["best"] == {"metric": "eval/accuracy", "value": 0.75, "step": 20}
    assert summary["status"] == "finished"
    assert "eval/matrix" not in summary


def test_no_planted_secret_is_in_any_file_of_the_run(run_dir):
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert len(files) > 8
    assert [path for path in files if b"planted" in path.read_bytes()] == []


@pytest.mark.parametrize("half", ['{"step": 20, "train/lo', '{"step": 20}', "{"])
def test_a_half_written_last_line_is_cut_off(tmp_path, half):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 10}\n' + half)
    rows = JsonLines(path)
    assert rows.last_step == 10
    rows.append({"step": 20, "x": 1.5})
    rows.close()
    assert path.read_text() == '{"step": 10}\n{"step": 20, "x": 1.5}\n'
    assert JsonLines(path).last_step == 20


def test_an_unknown_and_a_missing_tracker_are_errors_with_the_way_out(monkeypatch):
    with pytest.raises(ValueError, match="did you mean 'wandb'"):
        tracking.check(["wanbd"])
    monkeypatch.setattr(tracking, "get_available_trackers", list)
    with pytest.raises(ValueError, match="pip install tensorboard"):
        tracking.check(["tensorboard"])


# tracking.mode


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(404)

    def log_message(self, *_):
        pass


@pytest.fixture
def wandb_server(monkeypatch, tmp_path):
    """No key, no proxy, no settings; and W&B's address is a local server, which answers 404."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.chdir(tmp_path)
    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        forget_wandb_settings()
        yield server
        server.shutdown()
    forget_wandb_settings()


def forget_wandb_settings():
    import wandb

    wandb.teardown()


def test_auto_is_offline_without_a_key(wandb_server):
    mode, why = tracking.wandb_mode("auto")
    assert mode == "offline"
    assert "no API key" in why


def test_auto_is_online_with_a_key_and_a_server_that_answers(wandb_server, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    assert tracking.wandb_mode("auto") == ("online", "")


def test_auto_finds_the_key_of_wandb_login(wandb_server, tmp_path):
    (tmp_path / "netrc").write_text(f"machine 127.0.0.1 login user password {'k' * 40}\n")
    assert tracking.wandb_mode("auto") == ("online", "")


def test_auto_is_offline_when_nothing_answers(wandb_server, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    wandb_server.shutdown()
    wandb_server.server_close()
    mode, why = tracking.wandb_mode("auto")
    assert mode == "offline"
    assert "does not answer" in why


def test_wandb_mode_of_the_environment_decides_for_auto_only(wandb_server, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert tracking.wandb_mode("auto") == (None, "")  # None: W&B reads the variable
    assert tracking.wandb_mode("online") == ("online", "")


# The console

VALUES = {"train/loss": 1.2344, "train/lr": 1e-3, "train/samples_per_second": 1234.4}

SHOW = f"""
import time
from evenstep import progress
with progress.create(3) as console:
    for step in (1, 2, 3):
        console.advance(step)
        console.log(step, {VALUES!r} | {{"eval/accuracy": 0.5, "eval/matrix": [1]}})
        time.sleep(0.3)
    console.say("saved with hf_abcdefghijklmnopqrst [not markup]")
"""


def test_a_terminal_gets_one_live_line_with_messages_above_it():
    controller, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    child = subprocess.Popen([sys.executable, "-c", SHOW], stdout=terminal, env=environment)
    os.close(terminal)
    output = read_all(controller)
    assert child.wait(timeout=30) == 0
    assert "3/3" in output
    assert "loss 1.234  lr 0.001  1234 samples/s" in output
    assert "\x1b[2K" in output  # the line is rewritten in place
    lines = output.split("\n")
    assert "step 2/3  eval  accuracy 0.5" in output
    assert any(line.strip().endswith("saved with *** [not markup]") for line in lines)


def read_all(descriptor):
    chunks = []
    while True:
        try:
            chunk = os.read(descriptor, 4096)
        except OSError:  # Linux reports the end of a terminal as an error
            chunk = b""
        if not chunk:
            os.close(descriptor)
            return b"".join(chunks).decode()
        chunks.append(chunk)


def test_elsewhere_there_is_one_plain_line_a_log_step(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as CI systems do
    with progress.create(225, done=5) as console:
        console.advance(10)
        console.log(10, VALUES)
        evaluation = {"eval/accuracy": 0.98764, "eval/matrix": [1], "eval/sample": "Once"}
        console.log(225, {**VALUES, **evaluation})
    assert capsys.readouterr().out.splitlines() == [
        "step 10/225  loss 1.234  lr 0.001  1234 samples/s  ETA 0:00:00",
        "step 225/225  loss 1.234  lr 0.001  1234 samples/s  ETA 0:00:00",
        "step 225/225  eval  accuracy 0.9876",
        "step 225/225  eval/sample  Once",
    ]


def test_the_eta_is_the_time_of_the_steps_left(capsys, monkeypatch):
    clock = iter([100.0, 130.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with progress.create(100, done=10) as console:
        console.log(40, VALUES)  # 30 steps in 30 seconds; 60 are left
    assert capsys.readouterr().out.endswith("ETA 0:01:00\n")


def test_other_processes_show_nothing(capsys):
    with progress.create(10, is_main=False) as console:
        console.advance(1)
        console.log(1, VALUES)
        console.say("nothing")
    assert capsys.readouterr() == ("", "")
