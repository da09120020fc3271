"""Started by test_recipes_training.py: several runs of the program in one launch, each an argument
list as JSON on a line of the file named on the command line."""

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))
import train

from accelerate import PartialState

destroy = PartialState.destroy_process_group
PartialState.destroy_process_group = lambda self, group=None: None  # one for all runs
for line in Path(sys.argv[1]).read_text().splitlines():
    code = train.main(json.loads(line))
    assert code == 0, line
destroy(PartialState())
