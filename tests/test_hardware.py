import sys

from evenstep.hardware import LaunchError, check_processes, check_settings

import pytest
import yaml
from launching import ROOT, run


def test_one_process_needs_no_launcher():
    check_processes({}, num_processes=1)


def test_several_processes_that_know_each_other_are_fine():
    check_processes({"WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, num_processes=2)


def test_processes_that_each_believe_to_be_alone_are_refused():
    with pytest.raises(LaunchError, match="2 processes were launched, but each sees 1"):
        check_processes({"WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, num_processes=1)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_hardware_file_cannot_change_the_precision(precision):
    with pytest.raises(LaunchError, match=f"`precision: {precision}` into the run config"):
        check_settings({"ACCELERATE_MIXED_PRECISION": precision}, "fp32")
    check_settings({"ACCELERATE_MIXED_PRECISION": precision}, precision)


def test_a_hardware_file_cannot_set_accumulation():
    with pytest.raises(LaunchError, match="asks for 4 gradient_accumulation_steps"):
        check_settings({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "fp32")


def test_a_hardware_file_cannot_compile():
    with pytest.raises(LaunchError, match="`compile: true` into the run config"):
        check_settings({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "fp32")
    check_settings({"ACCELERATE_DYNAMO_BACKEND": "NO"}, "fp32")


@pytest.mark.parametrize("kind", ["TP", "CP", "SP"])
def test_only_data_parallel_meshes_are_run(kind):
    with pytest.raises(ValueError, match=f"parallelism_config_{kind.lower()}_size 2"):
        check_settings({f"PARALLELISM_CONFIG_{kind}_SIZE": "2"}, "fp32")


def test_a_mesh_of_another_size_than_the_launch_is_refused():
    mesh = {f"PARALLELISM_CONFIG_DP_{kind}_SIZE": "2" for kind in ("REPLICATE", "SHARD")}
    with pytest.raises(ValueError, match=r"2 process\(es\) were launched, and .* mesh has 4"):
        check_settings({**mesh, "WORLD_SIZE": "2"}, "fp32")
    check_settings({**mesh, "WORLD_SIZE": "4"}, "fp32")


LAUNCH = ["-m", "accelerate.commands.launch"]


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["a MULTI_CPU file", "--cpu --num_processes 2"])
def test_a_launch_for_two_that_yields_one_stops_with_the_fix(tmp_path, kind):
    if kind == "a MULTI_CPU file":
        file = tmp_path / "multi_cpu.yaml"
        keys = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_CPU"}
        file.write_text(
            yaml.safe_dump({**keys, "num_processes": 2, "num_machines": 1, "use_cpu": True})
        )
        options = ["--config_file", str(file)]
    else:
        options = ["--cpu", "--num_processes", "2"]
    code, output = run(
        [sys.executable, *LAUNCH, *options, str(ROOT / "train.py"), f"output_dir={tmp_path}"]
    )
    assert code != 0
    assert "asked for several processes but started one" in output
    assert "accelerate_configs/cpu_2.yaml" in output
