import math

from evenstep.schedule import Duration, due, lr_factor

import pytest


def factors(name, total, **options):
    return [lr_factor(step, total, name, **options) for step in range(1, total + 1)]


def test_linear_over_ten_steps_is_one_minus_k_tenths():
    assert factors("linear", 10)[:4] == pytest.approx([1, 0.9, 0.8, 0.7])  # CASES 7


def test_warmup_rises_to_the_peak_and_reaches_it():
    assert factors("constant", 6, warmup=4) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])


def test_cosine_is_half_way_down_in_the_middle():
    values = factors("cosine", 100)
    assert values[0] == 1
    assert values[50] == pytest.approx(0.5)
    assert values == sorted(values, reverse=True)
    assert values[-1] == pytest.approx((1 + math.cos(0.99 * math.pi)) / 2)


def test_final_is_what_the_fall_heads_for():
    assert lr_factor(101, 100, "cosine", final=0.1) == pytest.approx(0.1)
    assert lr_factor(101, 100, "linear", final=0.1) == pytest.approx(0.1)


def test_warmup_stable_decay():
    assert factors("wsd", 10, warmup=2, decay=4) == pytest.approx(
        [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    )


def test_a_warmup_as_long_as_training_divides_by_nothing():
    assert factors("cosine", 4, warmup=4) == pytest.approx([0.25, 0.5, 0.75, 1])
    assert all(0 <= f <= 1 for f in factors("wsd", 4, warmup=4, decay=4))


@pytest.mark.parametrize(
    ("text", "steps"),
    [(100, 100), ("100", 100), ("7 steps", 7), ("2 epochs", 45), ("1 epoch", 22), ("5%", 11),
     ("0.1%", 1), (0, 0), ("0.5 epochs", 11)],
)  # fmt: skip
def test_durations_in_steps(text, steps):
    assert Duration.parse(text).steps(steps_per_epoch=22.47, total_steps=225) == steps


@pytest.mark.parametrize("text", ["soon", "-3", "1.5", "101%", "2 weeks", True, "", "epoch"])
def test_what_is_no_duration_is_named(text):
    with pytest.raises(ValueError, match="is not a duration"):
        Duration.parse(text)


@pytest.mark.parametrize("text", ["100", "2 epochs", "1 epoch", "5%", "0.5 epochs", "2.5%"])
def test_a_duration_prints_as_it_is_written(text):
    assert str(Duration.parse(text)) == text


def test_due():
    assert [s for s in range(1, 11) if due(s, 4, last=10)] == [4, 8, 10]
    assert [s for s in range(1, 11) if due(s, 0, last=10)] == [10]
