"""The run config: what YAML and the command line mean, and what an error says."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from textwrap import dedent

from evenstep.config import RunConfig
from evenstep.config_file import ConfigError, difference, load, resolved, to_yaml
from evenstep.config_help import help_text
from evenstep.schedule import Duration
from evenstep.sections import HOUSEKEEPING, keys, specialise

import pytest
import yaml

ROOT = Path(__file__).parents[1]

TASK = """
    from typing import Annotated, Any
    from pydantic import BaseModel, ConfigDict, Field
    from evenstep.task import Named

    class Config(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")
        name: str = Field(description="Picks the task.")
        model: Annotated[Any, Named("models")] = Field(description="The network.")
        label: str | None = Field(None, description="A text.")
        token: str | None = Field(None, description="A secret.")
        ratio: float = Field(0.5, description="A number.")
        shuffle: bool = Field(True, description="A switch.")
        cache: str | None = Field(
            None, description="A folder.", json_schema_extra={"housekeeping": True}
        )

    def build(config): ...
"""
MODEL = """
    from pydantic import BaseModel, ConfigDict, Field

    class Config(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")
        name: str = Field(description="Picks the model.")
        depth: int = Field(18, description="How many layers.")

    def build(config): ...
"""
BASE = """
    task: {name: toy.task, model: {name: toy.model}}
    global_batch_size: 64
    micro_batch_size: 16
    epochs: 2
"""


@pytest.fixture(autouse=True)
def toy_modules(tmp_path, monkeypatch):
    for name, text in {"__init__": "", "task": TASK, "model": MODEL}.items():
        (tmp_path / "toy").mkdir(exist_ok=True)
        (tmp_path / "toy" / f"{name}.py").write_text(dedent(text))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "toy"]:
        del sys.modules[name]


def loaded(*overrides: str, more: str = "") -> RunConfig:
    Path("run.yaml").write_text(dedent(BASE) + dedent(more))
    config, path = load(["run.yaml", *overrides])
    assert path == Path("run.yaml")
    return config


def problems(*overrides: str, text: str | None = None, more: str = "") -> list[str]:
    Path("run.yaml").write_text(dedent(BASE if text is None else text) + dedent(more))
    with pytest.raises(ConfigError) as error:
        load(["run.yaml", *overrides])
    return [line.strip() for line in str(error.value).splitlines()[1:]]


@pytest.mark.parametrize(
    ("text", "value"), [("1e-4", 0.0001), ("5e5", 500000.0), ("1e+4", 10000.0), (".5", 0.5)]
)
def test_numbers_with_an_exponent_are_floats(text, value):
    assert loaded(more=f"optimizer: {{name: adamw, lr: {text}}}").optimizer.lr == value
    assert loaded(f"optimizer.lr={text}").optimizer.lr == value


@pytest.mark.parametrize(
    "text", ["017", "1:30", "no", "yes", "on", "off", "None", "2024-01-01", "0x1F", "1_000", "<<"]
)
def test_what_only_yaml_1_1_reads_as_something_else_stays_text(text):
    assert loaded(f"task.label={text}").task.label == text
    Path("run.yaml").write_text(
        dedent(BASE).replace("{name: toy.t", f"{{label: {text}, name: toy.t")
    )
    config, _ = load(["run.yaml"])
    assert config.task.label == text
    assert yaml.safe_load(to_yaml(config))["task"]["label"] == text, "as PyYAML alone reads it back"


@pytest.mark.parametrize("text", ["false", "False", "0"])
def test_false_is_false(text):
    assert loaded(f"task.shuffle={text}").task.shuffle is False
    assert loaded(more=f"compile: {text}").compile is False


@pytest.mark.parametrize("text", ["null", "~", ""])
def test_null_is_no_value(text):
    assert loaded(f"log_every={text}").log_every is None


def test_command_line_beats_yaml_beats_default():
    assert loaded().seed == 0
    assert loaded(more="seed: 1").seed == 1
    assert loaded("seed=2", more="seed: 1").seed == 2
    assert loaded("optimizer.lr=0.5", more="optimizer: {name: sgd}").optimizer.name == "sgd"


def test_an_override_reaches_sections_that_the_file_leaves_out_or_empty():
    config = loaded("schedule.warmup=5", "tracking.mode=offline", more="tracking:")
    assert config.schedule.warmup == Duration(5, "steps")
    assert config.tracking.mode == "offline"


def test_an_override_does_not_reach_through_a_yaml_alias():
    text = "task: &t {name: toy.task, model: {name: toy.model}}\nold: *t\n"
    found = problems("task.ratio=1", text=text)
    assert any(line.startswith("run.yaml:2: old=") and "ratio" not in line for line in found)


def test_an_unknown_key_is_named_with_file_line_and_nearest_key():
    assert problems(more="learning_rte: 1") == [
        "run.yaml:6: learning_rte=1: unknown key; did you mean optimizer.lr?"
    ]
    assert problems("task.model.dpth=3") == [
        "command line: task.model.dpth=3: unknown key; did you mean task.model.depth?"
    ]
    assert problems("batch_size=3") == [
        "command line: batch_size=3: unknown key; did you mean global_batch_size?"
    ]


def test_all_problems_are_reported_at_once():
    found = problems(
        "seed.x=1",
        "log_every=5x",
        "nosuch.key=1",
        "optimizer.lr=-1",
        text="""
            seed: 0
            task:
              name: toy.task
              wdth: 3
              model: {name: toy.nosuch}
            global_batch_size: 64
            micro_batch_size: 48
            epochs: 2
            steps: 10
            steps: 11
            precision: fp17
            ema_decay: None
            optimizer: {name: adamw, momentum: 0.9, betas: [0.9, 1]}
            schedule: {name: sine}
        """,
    )
    expected = [
        "run.yaml:11: steps: key given twice",
        "command line: seed.x=1: seed is a value, not a section",
        "command line: log_every=",
        'command line: nosuch={"key": 1}: unknown key',
        "command line: optimizer.lr=-1: Input should be greater than 0",
        "run.yaml:5: task.wdth=3: unknown key",
        'run.yaml:6: task.model.name="toy.nosuch"',
        "run.yaml:8: micro_batch_size=48: micro_batch_size 48 does not divide",
        "run.yaml:11: steps=11: give exactly one of epochs and steps",
        "run.yaml:12: precision=\"fp17\": Input should be 'fp32'",
        'run.yaml:13: ema_decay="None"',
        "run.yaml:14: optimizer.momentum=0.9: unknown key; valid here: name, lr",
        "run.yaml:14: optimizer.betas.1=1",
        "run.yaml:15: schedule.name=\"sine\": 'sine' is none of cosine, linear, constant, wsd",
    ]
    missing = [start for start in expected if not any(line.startswith(start) for line in found)]
    assert not missing, found
    assert len(found) == len(expected), found


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("optimizer.lr=0", "greater than 0"),
        ("optimizer.lr=.inf", "finite"),
        ("optimizer.weight_decay=-0.1", "greater than or equal to 0"),
        ("optimizer.max_grad_norm=0", "greater than 0"),
        ("optimizer={name: sgd, nesterov: true}", "nesterov needs a momentum above 0"),
        ("optimizer={name: sgd, momentum: 1}", "less than 1"),
        ("schedule={name: cosine, decay: 5%}", "unknown key"),
        ("schedule={name: constant, final: 0.1}", "unknown key"),
        ("schedule.warmup=null", "not a duration"),
        ("schedule=5", "a section is no value: it has name, warmup, final"),
        ("early_stopping=true", "it has metric, higher_is_better, patience, min_delta"),
        ("ema_decay=1", "less than 1"),
        ("optimizer.layer_decay=0", "greater than 0"),
        ("optimizer={name: schedule_free, betas: [0, 0.9]}", "greater than 0"),
        ("early_stopping={metrik: loss}", "did you mean early_stopping.metric?"),
        ("early_stopping.patience=0", "greater than or equal to 1"),
        ("swa_start=110%", "at most 100%"),
        ("freeze=stem", "valid tuple"),
        ("keep_checkpoints=0", "greater than or equal to 1"),
        ("seed=-1", "greater than or equal to 0"),
        ("micro_batch_size=0", "greater than or equal to 1"),
        ("micro_batch_size=most", "valid integer"),
        ("cpu_threads=0", "greater than or equal to 1"),
        ("reproducibility=exact", "'rounding' or 'bitwise'"),
        ("time_limit=0", "greater than 0"),
        ("time_limit=soon", "valid timedelta"),
        ("collective_timeout=-5", "greater than 0"),
        ("collective_timeout=null", "valid timedelta"),
        ("async_save=later", "valid boolean"),
        ("epochs=0", "greater than 0"),
        ("steps=5", "exactly one of epochs and steps"),
        ("name=../x", "pattern"),
        ("tracking.mode=on", "'auto', 'online'"),
        ("task.name=nosuch", "'nosuch' is not in evenstep/tasks/"),
        ("tracking.mode=[a", "expected ',' or ']'"),
    ],
)
def test_a_bad_value_is_one_problem_that_states_the_rule(override, rule):
    (line,) = problems(override)
    assert line.startswith("command line: ")
    assert rule in line


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("ema_decay=0.9", "swa_start=75%"),
        ("ema_decay=0.9", "optimizer={name: schedule_free}"),
        ("swa_start=75%", "optimizer={name: schedule_free}"),
    ],
)
def test_one_average_of_the_weights_at_most(first, second):
    (line,) = problems(first, second, "schedule.name=constant")
    assert "averages the weights already: drop one of the two" in line


@pytest.mark.parametrize("schedule", [(), ("schedule.name=linear",)])
def test_a_schedule_free_optimizer_has_no_decaying_schedule(schedule):
    (line,) = problems("optimizer.name=schedule_free", *schedule)
    assert "set schedule.name=constant" in line
    loaded("optimizer.name=schedule_free", "schedule={name: constant, warmup: 5%}")


def test_an_average_has_steps_to_average():
    config = loaded("epochs=null", "steps=100", "swa_start=75%")
    assert config.in_steps(10).swa_start == 75
    assert loaded("epochs=null", "steps=100").in_steps(10).swa_start is None
    with pytest.raises(ValueError, match="leaves none of 100 steps"):
        loaded("epochs=null", "steps=100", "swa_start=100").in_steps(10)


def test_what_is_missing_is_said():
    assert problems(text="") == [
        "run.yaml: task: required, but not given",
        "run.yaml: global_batch_size: required, but not given",
        "run.yaml: micro_batch_size: required, but not given",
        "run.yaml: steps=null: give exactly one of epochs and steps; "
        "epochs=null or steps=null drops one",
    ]
    assert problems("task.model={depth: 3}") == [
        "command line: task.model.name: required, but not given"
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("seed: 1\na: b: c", "run.yaml:2: mapping values are not allowed here"),
        ("- seed", "run.yaml: a run config is made of lines"),
        ("[a]: 1", "run.yaml:1: found unhashable key"),
    ],
)
def test_a_file_that_is_no_run_config_is_reported_with_its_line(text, line):
    (found,) = problems(text=text)
    assert found.startswith(line)


def test_arguments_that_are_no_overrides_are_refused():
    with pytest.raises(ConfigError, match=r"nosuch\.yaml: no such file"):
        load(["nosuch.yaml"])
    with pytest.raises(ConfigError, match="key=value"):
        load(["--seed", "1"])
    with pytest.raises(ConfigError, match="did you mean seed"):
        load(["--seed=1"])


def test_an_error_shows_no_secret():
    secret = "hf_" + "A1b2" * 8
    text = "\n".join(problems(f"wandb_api_key={secret[3:]}", f"task.ratio={secret}"))
    assert 'wandb_api_key="***"' in text
    assert "task.ratio" in text
    assert secret[3:] not in text


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon", "schedule_free"])
@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_help_shows_every_key_with_its_sentence_and_default(optimizer, schedule):
    Path("run.yaml").write_text(dedent(BASE))
    text = help_text(
        ["run.yaml", f"optimizer.name={optimizer}", f"schedule.name={schedule}", "--help"]
    )
    chosen = {"optimizer": {"name": optimizer}, "schedule": {"name": schedule}}
    config_class = specialise(RunConfig, {**yaml.safe_load(dedent(BASE)), **chosen})
    described = dict(keys(config_class))
    assert ("task", "model", "depth") in described
    assert (("optimizer", "nesterov") in described) == (optimizer == "sgd")
    assert ("early_stopping", "patience") in described
    flat = " ".join(text.split())
    for key, field in described.items():
        assert field.description, f"{key} has no sentence"
        assert ".".join(key) in text
        assert " ".join(field.description.split()) in flat
    assert "The network." in flat
    assert "How many layers. [int, default 18]" in flat
    assert "Samples of an optimizer step, over all processes. [int, required, here 64]" in flat
    assert max(map(len, text.splitlines())) <= 100


def test_help_without_arguments_describes_the_default_config():
    assert "digits.yaml" in help_text(["--help"])


def test_yaml_written_reads_back_as_the_same_config():
    config = loaded(
        "name=r1",
        "task.label='1e-4'",
        "optimizer={name: sgd, lr: 1e-05, momentum: 0.9}",
        "schedule={name: wsd, warmup: 100, decay: 2.5%}",
        "save_every=0.5 epochs",
        "log_every=null",
        "tracking.with=[]",
    )
    Path("resolved.yaml").write_text(to_yaml(config))
    again, _ = load(["resolved.yaml"])
    assert resolved(again) == resolved(config)
    assert again.task.label == "1e-4"
    assert difference(yaml.safe_load(to_yaml(config)), again) == []


def test_a_config_written_holds_no_secret_and_a_resume_sees_no_difference():
    config = loaded("task.token=correct-horse")
    text = to_yaml(config)
    assert "correct-horse" not in text
    assert difference(yaml.safe_load(text), config) == []
    assert difference(resolved(config), loaded("task.token=null")) == ['task.token: "***" -> null']


def test_difference_names_result_deciding_keys_only():
    old = resolved(loaded("optimizer.lr=0.001", "task.model.depth=18"))
    new = loaded(
        "optimizer.lr=0.01",
        "task.model.depth=34",
        "task.cache=there",
        "name=other",
        "output_dir=elsewhere",
        "log_every=3",
        "tracking.mode=disabled",
        "resume=never",
    )
    assert difference(old, new) == ["task.model.depth: 18 -> 34", "optimizer.lr: 0.001 -> 0.01"]


def test_how_often_is_evaluated_decides_the_result_only_with_early_stopping():
    stopping = "early_stopping={patience: 2}"
    assert difference(resolved(loaded()), loaded("eval_every=7")) == []
    changed = difference(resolved(loaded(stopping)), loaded(stopping, "eval_every=7"))
    assert changed == ['eval_every: "1 epoch" -> 7']


def test_threads_may_change_where_rounding_may():
    bitwise = "reproducibility=bitwise"
    assert difference(resolved(loaded()), loaded("cpu_threads=1")) == []
    changed = difference(resolved(loaded(bitwise)), loaded(bitwise, "cpu_threads=1"))
    assert changed == ['cpu_threads: "auto" -> 1']


def test_a_default_that_does_not_fit_is_shown_by_its_name():
    with pytest.raises(ConfigError) as caught:
        loaded("optimizer.name=schedule_free")
    assert 'schedule="cosine": optimizer.name schedule_free' in str(caught.value)


def test_difference_names_keys_of_one_side():
    adamw, sgd = loaded("optimizer.name=adamw"), loaded("optimizer.name=sgd")
    lines = difference(resolved(adamw), sgd)
    assert "optimizer.momentum: absent -> 0.0" in lines
    assert "optimizer.eps: 1e-08 -> absent" in lines
    assert 'optimizer.name: "adamw" -> "sgd"' in lines


def test_exactly_the_housekeeping_keys_are_marked():
    marked = {
        name
        for name, field in RunConfig.model_fields.items()
        if field.json_schema_extra == HOUSEKEEPING
    }
    assert marked == {
        "name", "output_dir", "log_every", "eval_every", "save_every", "keep_checkpoints",
        "resume", "num_workers", "tracking", "async_save", "time_limit", "collective_timeout",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "duration", "written"),
    [
        ("100", Duration(100, "steps"), 100),
        ("100 steps", Duration(100, "steps"), 100),
        ("1234567", Duration(1234567, "steps"), 1234567),
        ("2 epochs", Duration(2, "epochs"), "2 epochs"),
        ("1 epoch", Duration(1, "epochs"), "1 epoch"),
        ("5%", Duration(5, "percent"), "5%"),
    ],
)
def test_durations_are_parsed_and_written_back(given, duration, written):
    config = loaded(f"eval_every={given}")
    assert config.eval_every == duration
    assert resolved(config)["eval_every"] == written


@pytest.mark.parametrize(
    ("given", "hours"),
    [
        ("11:30:00", 11.5),
        ("41400", 11.5),
        ("PT11H30M", 11.5),
        ("'1 day, 2:00:00'", 26),
        ("P3D", 72),
    ],
)
def test_times_are_read_as_people_and_schedulers_write_them_and_written_back(given, hours):
    for config in (loaded(f"time_limit={given}"), loaded(more=f"time_limit: {given}")):
        assert config.time_limit == timedelta(hours=hours)
        Path("resolved.yaml").write_text(to_yaml(config))
        again, _ = load(["resolved.yaml"])
        assert again.time_limit == config.time_limit
        assert yaml.safe_load(to_yaml(config))["time_limit"] == resolved(config)["time_limit"]


def test_a_count_that_is_found_later_is_written_auto():
    config = loaded("micro_batch_size=auto", "cpu_threads=auto", "reproducibility=bitwise")
    assert config.micro_batch_size == config.cpu_threads == "auto"
    assert resolved(config)["micro_batch_size"] == "auto"
    assert loaded("micro_batch_size=4", "cpu_threads=3").cpu_threads == 3
    other = loaded("micro_batch_size=8", "cpu_threads=1", "reproducibility=bitwise")
    changed = difference(resolved(config), other)
    assert changed == ['micro_batch_size: "auto" -> 8', 'cpu_threads: "auto" -> 1']


def test_a_schedule_gives_the_arguments_of_lr_factor():
    config = loaded("schedule={name: wsd, warmup: 5%, decay: 1 epoch, final: 0.1}")
    assert config.schedule.in_steps(steps_per_epoch=22.5, total_steps=200) == {
        "name": "wsd", "warmup": 10, "decay": 22, "final": 0.1,
    }  # fmt: skip
    with pytest.raises(ValueError, match="do not fit into 20 steps"):
        loaded("schedule={name: wsd, warmup: 10, decay: 1 epoch}").schedule.in_steps(22.5, 20)


@pytest.mark.parametrize(
    ("epochs", "samples", "batch", "steps"),
    [(10, 11, 10, 11), (1, 10, 4, 3), (3, 10, 4, 8), (0.5, 10, 4, 2), (2, 3, 8, 1), (3, 7, 7, 3)],
)
def test_epochs_take_just_the_steps_that_see_every_sample(epochs, samples, batch, steps):
    assert loaded(f"epochs={epochs}").total_steps(samples / batch) == steps


def test_total_steps_is_exact_for_any_sizes():
    config = loaded("epochs=7")
    for samples in range(1, 400):
        for batch in (1, 3, 7, 10, 49, 64, 96):
            assert config.total_steps(samples / batch) == -(-7 * samples // batch)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_configs_open_with_their_command_and_load(path):
    assert (
        f"accelerate launch train.py configs/{path.name}" in path.read_text().partition("\n\n")[0]
    )
    config, _ = load([str(path)])
    assert config.name is None
