"""The repository keeps its shape: import directions, file lengths, nothing that names a machine."""

import ast
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "evenstep"
MODULES = sorted(PACKAGE.rglob("*.py"))
AT_THE_HARDWARE = {"hardware", "checkpoint", "tracking", "fsdp2", "zero_setup", "launch", "memory"}
OWN_PURE = {"evenstep.plan", "evenstep.schedule", "evenstep.task"}


def imports(path):
    """Top-level names of what a file imports, anywhere in it; evenstep's modules in full."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            one_module = node.module != "evenstep"
            names = [node.module] if one_module else [f"evenstep.{a.name}" for a in node.names]
        else:
            continue
        found |= {n if n.startswith("evenstep") else n.partition(".")[0] for n in names}
    return found


def name(path):
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def importers(library):
    return {name(path) for path in MODULES if library in imports(path)}


@pytest.mark.parametrize("module", ["plan", "schedule", "task"])
def test_the_pure_modules_import_only_the_standard_library_and_torch(module):
    allowed = set(sys.stdlib_module_names) | {"torch"}
    assert imports(PACKAGE / f"{module}.py") <= allowed


def test_only_the_modules_at_the_hardware_import_accelerate():
    assert importers("accelerate") <= AT_THE_HARDWARE


def test_only_tracking_imports_wandb():
    assert importers("wandb") == {"tracking"}


@pytest.mark.parametrize("path", sorted((PACKAGE / "tasks").glob("*.py")), ids=lambda p: p.stem)
def test_tasks_know_nothing_of_the_loop(path):
    own = {module for module in imports(path) if module.startswith("evenstep")}
    loop = {"train", "hardware", "checkpoint", "tracking", "batchnorm", "config", "data", "stop"}
    assert not own & {f"evenstep.{module}" for module in loop}


def test_nothing_imports_train():
    assert not importers("train")


def test_files_are_short():
    too_long = {
        path.name: lines
        for path in [*MODULES, ROOT / "train.py"]
        if (lines := len(path.read_text().splitlines())) > (250 if path.name == "train.py" else 300)
    }
    assert not too_long


def test_the_loop_stands_on_the_first_screen_of_main():
    tree = ast.parse((ROOT / "train.py").read_text())
    main = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "main")
    loops = [node.end_lineno for node in ast.walk(main) if isinstance(node, ast.For)]
    assert loops
    assert max(loops) - main.lineno < 60


@pytest.mark.parametrize(
    "path", sorted((ROOT / "accelerate_configs").glob("*.yaml")), ids=lambda p: p.stem
)
def test_a_hardware_file_is_short_commented_and_decides_no_result(path):
    text = path.read_text()
    assert text.startswith("#")
    assert f"accelerate_configs/{path.name}" in text
    assert len(text.splitlines()) < 40
    keys = yaml.safe_load(text)
    assert not {"mixed_precision", "gradient_accumulation_steps", "gradient_clipping"} & set(keys)


def test_ci_runs_the_command_that_the_readme_gives():
    readme = (ROOT / "README.md").read_text().splitlines()
    (command,) = [line for line in readme if line.endswith("python -m pytest")]
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()
