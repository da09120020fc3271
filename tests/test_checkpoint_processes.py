"""Checkpoints of several processes; and what a full disk leaves of a save."""

from __future__ import annotations

from pathlib import Path

from evenstep import checkpoint
from evenstep import checkpoint_files as files

import pytest
from checkpoint_run import Run, digest, names, script, stored_keys, weights_sha256


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_a_full_disk_ends_the_save_and_keeps_the_checkpoint_before_it(
    tmp_path: Path, run_dir: Path
) -> None:
    before = Run(0).train(1).save(run_dir, 1)
    size = max(file.stat().st_size for file in before.iterdir())
    code, output = script(
        tmp_path,
        f"""
        resource.setrlimit(resource.RLIMIT_FSIZE, ({size // 2}, {size // 2}))
        Run(1).train(2).save(run_dir, 2)
        """,
    )
    assert code == 1
    assert "could not save" in output
    assert "File too large" in output
    assert checkpoint.find(run_dir, "auto") == before
    assert names(run_dir) == ["step-00000001"]


@pytest.mark.processes
def test_one_and_two_processes_load_each_others_checkpoints_bit_for_bit(
    tmp_path: Path, run_dir: Path
) -> None:
    alone = Run(0).train(3)
    alone.save(run_dir, 1)
    code, output = script(
        tmp_path,
        """
        both, resumed = Run(0).train(3), Run(1)
        assert both.accelerator.num_processes == 2
        resumed.load(checkpoint.find(run_dir, "auto"))
        both.save(run_dir, 2)
        for text in ("loaded", digest(resumed)), ("saved", digest(both)):
            print(f"<{' '.join(text)}>", flush=True)
        print(f"<hash {weights_sha256(both.model)}>", flush=True)
        inside = Run(2, wrap=compiled)
        inside.load(files.directory(run_dir, 2))
        assert_same(inside.state(), both.state())
        for model in inside.model, compiled(both.model):
            assert weights_sha256(model) == weights_sha256(both.plain)
        both.accelerator.end_training()
        """,
        processes=2,
    )
    assert code == 0, output
    assert output.count(f"<loaded {digest(alone)}>") == 2
    resumed = Run(1)
    path = files.directory(run_dir, 2)
    resumed.load(path)
    assert output.count(f"<saved {digest(resumed)}>") == 2
    assert output.count(f"<hash {weights_sha256(resumed.plain)}>") == 2
    assert len(list(path.glob("*.safetensors"))) == 2
    assert not any("module." in key for key in stored_keys(path))


@pytest.mark.processes
def test_when_one_process_fails_all_raise_and_the_next_save_works(tmp_path: Path) -> None:
    code, output = script(
        tmp_path,
        """
        both = Run(0).train(1)
        rank = both.accelerator.process_index
        both.save(run_dir, 1)
        free = resource.getrlimit(resource.RLIMIT_FSIZE)
        for unlucky in (0, 1):
            if rank == unlucky:
                resource.setrlimit(resource.RLIMIT_FSIZE, (500, free[1]))
            with pytest.raises(RuntimeError, match=f"process {unlucky}: .*File too large"):
                both.save(run_dir, 2)
            resource.setrlimit(resource.RLIMIT_FSIZE, free)
        bad = both.optimizer.state[both.plain.conv.weight]
        if rank == 1:
            bad["count"] = 3
        with pytest.raises(RuntimeError, match="optimizer.conv.weight.count is a int"):
            both.save(run_dir, 2)
        bad.pop("count", None)
        with pytest.raises(ValueError, match="step-00000002"):
            checkpoint.find(run_dir, str(files.directory(run_dir, 2)))
        assert checkpoint.find(run_dir, "auto").name == "step-00000001"
        both.save(run_dir, 2)
        assert checkpoint.find(run_dir, "auto").name == "step-00000002"
        both.accelerator.end_training()
        """,
        processes=2,
    )
    assert code == 0, output


# --- in the background ----------------------------------------------------------------------------

BACKGROUND = """
    both = Run(0).train(2)
    before = digest(both)
    both.save(run_dir, 1)
    written, done, may_write = checkpoint.write, [], threading.Semaphore(0)

    def held_up(*arguments, **named):
        assert may_write.acquire(timeout=60)
        done.append(1)
        return written(*arguments, **named)

    def save(saver, step):
        saver.save(step, both.tensors, state={}, config_yaml="seed: 0\\n", best_step=step)

    checkpoint.write = held_up
    with checkpoint.Saver(run_dir, keep=9, background=True) as saver:
        save(saver, 2)
        both.train(20)  # its messages must not mix with those of the save
        assert not done
        after = digest(both)
        may_write.release()
        save(saver, 3)
        assert len(done) == 1  # one at a time
        may_write.release()
    assert len(done) == 2
    checkpoint.write = written
    for step, expected in ((1, before), (2, before), (3, after)):
        resumed = Run(1)
        resumed.load(files.directory(run_dir, step))
        assert digest(resumed) == expected
    assert (run_dir / "best").read_text() == "checkpoints/step-00000003\\n"

    # What fails on one process is raised by the next save, or by `wait`, on all of them.
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    for unlucky in range(both.accelerator.num_processes):
        for end in (lambda: save(saver, 5), lambda: saver.wait()):
            if both.accelerator.process_index == unlucky:
                resource.setrlimit(resource.RLIMIT_FSIZE, (500, limit[1]))
            with pytest.raises(RuntimeError, match="could not save .*step-00000004.*too large"):
                with checkpoint.Saver(run_dir, keep=9, background=True) as saver:
                    save(saver, 4)
                    end()
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            assert checkpoint.find(run_dir, "auto").name == "step-00000003"
    assert names(run_dir) == [f"step-0000000{step}" for step in (1, 2, 3)]

    # An exception waits for what is being saved, and is not hidden by it.
    with pytest.raises(ZeroDivisionError):
        with checkpoint.Saver(run_dir, keep=9, background=True) as saver:
            save(saver, 6)
            1 / 0
    assert checkpoint.find(run_dir, "auto").name == "step-00000006"
    both.accelerator.end_training()
"""


@pytest.mark.processes
@pytest.mark.parametrize("processes", [1, 2])
def test_a_save_in_the_background_is_the_same_and_fails_as_one_that_is_waited_for(
    tmp_path: Path, processes: int
) -> None:
    code, output = script(tmp_path, BACKGROUND, processes=processes)
    assert code == 0, output
