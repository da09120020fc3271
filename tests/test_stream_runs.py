"""Training on streams with real processes: what is seen, and what comes out, depends on none."""

import json
import time

import pytest
from launching import command, kill_session, metrics, started, train, write_config
from safetensors.torch import load_file

pytestmark = pytest.mark.processes
STEPS, V = 24, 4


def traced(folder, processes):
    """The samples of each micro-batch that was trained on, in the order of steps and numbers."""
    files = [folder / f"rank-{rank}.jsonl" for rank in range(processes)]
    own = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return [batch for turn in zip(*own, strict=True) for batch in turn]


def configured(directory):
    task = {"name": "stream_task", "rows": 60, "shards": 3}
    write_config(directory, task=task, steps=STEPS, save_every=4, eval_every=12)


def assert_same_end(run_dir, reference):
    for row, other in zip(metrics(run_dir), metrics(reference), strict=True):
        for key in row.keys() - {"train/samples_per_second"}:
            assert row[key] == pytest.approx(other[key], rel=1e-9, abs=1e-9), (key, row)
    ours, theirs = (load_file(d / "final" / "model.safetensors") for d in (run_dir, reference))
    assert all((ours[name] - theirs[name]).abs().max() < 1e-9 for name in theirs)


def test_a_kill_and_a_resume_on_other_processes_see_the_same_samples(tmp_path):
    """One process; against four with a worker each, killed, and then two with two workers each."""
    configured(tmp_path)
    traces = [tmp_path / name for name in ("one", "four", "two")]
    for folder in traces:
        folder.mkdir()
    reference = train(tmp_path, "reference", 1, STREAM_TRACE=str(traces[0]))
    expected = traced(traces[0], 1)
    assert len(expected) == STEPS * V
    assert 1 < metrics(reference)[-1]["train/epoch"] < 10

    slow = "task.seconds_per_batch=0.05"
    arguments = command(4, str(tmp_path / "exact.yaml"), "name=killed", slow, "num_workers=1")
    killed = tmp_path / "runs" / "killed"
    with started(arguments, STREAM_TRACE=str(traces[1])) as process:
        while not (killed / "checkpoints" / "step-00000008").exists():
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.05)
        kill_session(process)
    done = max(int(path.name[5:]) for path in (killed / "checkpoints").glob("step-*"))
    assert traced_by_number(traces[1], 4, done) == expected[: done * V]

    train(tmp_path, "killed", 2, slow, "num_workers=2", STREAM_TRACE=str(traces[2]))
    assert traced(traces[2], 2) == expected[done * V :]
    assert_same_end(killed, reference)


def traced_by_number(folder, processes, steps):
    """As `traced`, up to a step: killed processes have come differently far."""
    for rank in range(processes):
        file = folder / f"rank-{rank}.jsonl"
        lines = file.read_text().splitlines()[: steps * V // processes]
        file.write_text("\n".join(lines) + "\n")
    return traced(folder, processes)
