"""Searches for the step that meets a budget, on made-up curves."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lazyweights.quant.rate_control import Trial, largest_step_within_loss, smallest_step_within_size

LIMITS = [0.01, 0.02, 0.05, 0.10]


def noisy_loss(seed: int, power: float, scale: float, noise: float):
    """A loss curve like those of models; the same step always gives the same value."""

    def loss(step: float) -> float:
        rng = np.random.default_rng([seed, round(step * 1e6)])
        return scale * step**power * math.exp(0.1 * math.sin(step)) + noise * rng.standard_normal()

    return loss


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("power", [1.6, 2.0, 2.5])
@pytest.mark.parametrize("scale", [0.0005, 0.004, 0.03])
def test_smooth_losses_are_met_closely(limit, power, scale):
    search = largest_step_within_loss(noisy_loss(0, power, scale, 0), limit)
    assert len(search.trials) <= 4
    assert search.best is not None
    assert search.best.value <= limit
    assert search.best.value >= 0.85 * limit


def test_noise_costs_little():
    used = []
    for seed in range(40):
        for limit in LIMITS:
            search = largest_step_within_loss(noisy_loss(seed, 2.1, 0.004, 0.0007), limit)
            assert len(search.trials) <= 4
            assert search.best is not None
            assert search.best in search.trials
            assert search.best.value <= limit
            used.append(search.best.value / limit)
    assert np.median(used) > 0.93
    assert np.quantile(used, 0.05) > 0.7


def test_known_trials_cost_nothing_and_may_be_the_answer():
    calls = []

    def loss(step):
        calls.append(step)
        return 0.004 * step**2

    known: list[Trial] = []
    for limit in LIMITS:
        search = largest_step_within_loss(loss, limit, known=known)
        known += search.trials
    assert len(calls) == len(known) <= 9
    again = largest_step_within_loss(loss, 0.05, known=known)
    assert again.trials == ()
    assert again.best in known


def test_nothing_is_within_an_impossible_limit():
    search = largest_step_within_loss(lambda step: 1 + step, 0.01, lowest=0.25)
    assert search.best is None
    assert len(search.trials) <= 4
    assert min(trial.step for trial in search.trials) == 0.25


def test_everything_is_within_a_wide_limit():
    search = largest_step_within_loss(lambda step: 1e-6 * step, 0.5, highest=8)
    assert search.best is not None
    assert search.best.step == 8


def test_last_trial_is_cautious():
    # Steeper than assumed: without caution all four measurements may end just above the limit.
    search = largest_step_within_loss(lambda step: 0.02 * step**9, 0.01, start=4.0)
    assert search.best is not None
    assert search.best.value <= 0.01


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_models_that_broke_are_too_much(bad):
    search = largest_step_within_loss(lambda step: bad if step > 3 else 0.004 * step**2, 0.05, max_trials=6)
    assert search.best is not None
    assert search.best.step <= 3
    assert search.best.step > 2


def test_losses_below_zero_are_no_trouble():
    search = largest_step_within_loss(lambda step: 0.004 * step**2 - 0.003, 0.01)
    assert search.best is not None
    assert 0.008 < search.best.value <= 0.01
    assert largest_step_within_loss(lambda step: -0.001, 0.01).best is not None


def test_a_step_above_the_limit_below_one_that_keeps_it():
    known = [Trial(1.0, 0.021), Trial(1.1, 0.019), Trial(2.0, 0.08)]
    search = largest_step_within_loss(lambda step: 0.0172 * step**2, 0.02, known=known)
    assert search.best is not None
    assert search.best.step >= 1.1
    assert all(trial.step > 1.1 for trial in search.trials)


@pytest.mark.parametrize("target", [2.0, 3.3, 4.0, 5.5])
def test_sizes_are_met_closely(target):
    def bpw(step):
        return 0.4 + 0.5 * math.log2(1 + 4.0 ** (5 - math.log2(step)))

    search = smallest_step_within_size(bpw, target)
    assert search.best is not None
    assert len(search.trials) <= 6
    assert target * 0.995 <= search.best.value <= target


def test_bytes_are_as_good_as_bits():
    n = 134_515_008
    bits = smallest_step_within_size(lambda step: 5 - math.log2(step), 4.2)
    found = smallest_step_within_size(lambda step: n / 8 * (5 - math.log2(step)), n / 8 * 4.2)
    assert [t.step for t in found.trials] == pytest.approx([t.step for t in bits.trials])


def test_a_jump_does_not_hold_up_the_search():
    # Just above the limit on one side of the jump, far below it on the other.
    search = largest_step_within_loss(lambda step: 0.0011 * step**2 if step < 3 else 0.0056 * step, 0.015)
    assert search.best is not None
    assert search.best.step > 2
    close = [abs(math.log(a.step / b.step)) for a, b in zip(search.trials, search.trials[1:], strict=False)]
    assert min(close) > 0.02


def test_points_that_contradict_each_other_do_not_mislead():
    known = [Trial(1.0, 0.003), Trial(6.6, 0.369), Trial(8.4, 0.334), Trial(10.04, 1.41)]
    search = largest_step_within_loss(lambda step: 0.33 if step < 9.5 else 1.2, 0.5, known=known)
    assert search.best is not None
    assert search.best.step > 9
    assert len({round(trial.step, 1) for trial in search.trials}) == len(search.trials)


def test_same_inputs_same_steps():
    loss = noisy_loss(3, 2.0, 0.004, 0.0007)
    assert largest_step_within_loss(loss, 0.02) == largest_step_within_loss(loss, 0.02)


@pytest.mark.parametrize(
    "options", [dict(limit=0.0), dict(limit=-1.0), dict(limit=math.nan), dict(limit=1.0, start=100.0),
                dict(limit=1.0, lowest=0.0), dict(limit=1.0, tolerance=1.0)],
)  # fmt: skip
def test_arguments_that_make_no_sense(options):
    limit = options.pop("limit")
    with pytest.raises(ValueError, match=r"limit|range|tolerance"):
        largest_step_within_loss(lambda step: step, limit, **options)
