"""Started by test_exact.py on several processes: evaluates splits of several sizes with the
program's own `evaluate`, and prints the rows, their order and their mean for each."""

import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import exact_task
import pyarrow.parquet as pq

sys.path.append(str(Path(__file__).parent.parent))
import train
from evenstep import data, hardware, learner
from evenstep.config_file import load
from evenstep.plan import Plan
from evenstep.run_state import RunState

config, _ = load([sys.argv[1], "micro_batch_size=4", "global_batch_size=16"])
machine = hardware.start(config)
with tempfile.TemporaryDirectory() as folder:
    for n in (1, 7, 9, 10):
        task = exact_task.build(exact_task.Config(num_eval=n))
        plan = Plan(50, 16, 4, seed=0)
        run = train.Run(config, machine, task, learner.build(config, task, machine))
        _, batches = data.loaders(task, plan, machine, config, range(1, 2), {})
        out = SimpleNamespace(directory=Path(folder), alive=lambda step: None)
        metrics = train.evaluate(run, RunState(), batches, out, last=1)
        if machine.is_main:
            rows = pq.read_table(Path(folder) / "predictions.parquet").to_pydict()
            print(f"n={n} index={rows['index']} mean={metrics['eval/value']}", flush=True)
machine.accelerator.end_training()
