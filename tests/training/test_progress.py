"""Progress lines, with a fake trainer, console and clock."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from mgk.cli.progress import progress_bar
from mgk.training.objectives import Classification, LanguageModelling
from mgk.training.progress import LINE_EVERY, ProgressBar, clock_time


class Fake:
    """A trainer of 100 steps, a module, a console that writes to memory, and a clock set by hand."""

    def __init__(self, terminal=False, objective=Classification, width=120):
        self.file, self.now = io.StringIO(), 1000.0
        console = Console(file=self.file, force_terminal=terminal, width=width, color_system=None)
        self.bar = ProgressBar(100, console, lambda: self.now)
        self.trainer = SimpleNamespace(global_step=0, is_global_zero=True, callback_metrics={}, num_val_batches=[7])
        self.module = SimpleNamespace(objective=objective(None, None, None, {}), device="cpu", train_means={})

    def step(self, number, seconds=1.0, **metrics):
        self.now += seconds
        self.trainer.global_step = number
        self.module.train_means = metrics
        self.bar.on_train_batch_end(self.trainer, self.module, None, None, 0)

    def evaluate(self, seconds, **metrics):
        self.bar.on_validation_start(self.trainer, self.module)
        self.now += seconds
        self.bar.on_validation_batch_end(self.trainer, self.module, None, None, 2)
        self.trainer.callback_metrics |= metrics
        self.bar.on_validation_end(self.trainer, self.module)

    def start(self):
        self.bar.on_train_start(self.trainer, self.module)
        return self

    @property
    def lines(self):
        return self.file.getvalue().splitlines()


def test_line_has_step_loss_metric_speed_and_remaining_time():
    fake = Fake().start()
    fake.step(1, seconds=40)  # includes compilation: excluded from speed and remaining time later
    assert fake.lines[-1] == "step 1/100  40.0 s/step  1:06:00 left"
    fake.step(41, seconds=20, loss=1.5, accuracy=0.25)
    assert fake.lines[-1] == "step 41/100  loss 1.500  accuracy 25.00 %  2.0 steps/s  0:30 left"


def test_evaluations_count_for_remaining_time_but_not_for_speed():
    fake = Fake(objective=LanguageModelling).start()
    fake.step(1)
    fake.evaluate(10.0, dev_loss=0.0)
    fake.step(11, seconds=20, loss=2.0)
    assert fake.lines[-1] == "step 11/100  loss 2.000  perplexity 7.39  dev perplexity 1.00  2.0 s/step  4:27 left"


def test_without_a_terminal_lines_come_at_fixed_intervals():
    fake = Fake().start()
    for number in range(1, 101):
        fake.step(number, seconds=1.0, loss=1.0, accuracy=0.5)
    assert len(fake.lines) == 1 + 100 / LINE_EVERY
    assert all(line.startswith("step ") and "\x1b" not in line for line in fake.lines)
    fake.evaluate(LINE_EVERY)
    assert fake.lines[-1] == "step 100/100  evaluating, 3 of 7"


def test_long_steps_have_one_line_each_with_the_remaining_time():
    fake = Fake()
    fake.trainer.global_step = 50  # resumed
    fake.start()
    for number in (51, 52, 53):
        fake.step(number, seconds=120.0, loss=1.0, accuracy=0.5)
    metrics = "loss 1.000  accuracy 50.00 %  120.0 s/step"
    assert fake.lines[1:] == [
        f"step 51/100  {metrics}  1:38:00 left",
        f"step 52/100  {metrics}  1:36:00 left",
        f"step 53/100  {metrics}  1:34:00 left",
    ]


def test_other_ranks_print_nothing():
    fake = Fake()
    fake.trainer.is_global_zero = False
    fake.start().step(50, seconds=60)
    assert fake.lines == []


@pytest.mark.parametrize("width", [80, 120])
def test_terminal_shows_a_bar_that_is_removed_at_the_end(width):
    fake = Fake(terminal=True, width=width).start()
    fake.step(1)
    fake.step(41, seconds=20, loss=1.5, accuracy=0.25)
    assert "step 41/100  loss 1.500  accuracy 25.00 %  2.0 steps/s  0:30 left ━" in fake.file.getvalue()
    fake.bar.on_exception(fake.trainer, fake.module, KeyboardInterrupt())
    # The cursor is visible again.
    assert "\x1b[?25h" in fake.file.getvalue()


def test_stage_of_an_analysis_with_a_line_has_one_for_its_end(monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with progress_bar() as report:
        for done in range(1, 5):
            now += 0.6 * LINE_EVERY
            report("analysing", done, 4)
        report("writing", 1, 1)
    assert capsys.readouterr().err.splitlines() == ["analysing: 2 of 4", "analysing: 4 of 4"]
    with progress_bar() as report:
        report("analysing", 1, 2)
        now += 1.1 * LINE_EVERY
        report("analysing", 1, 3)
        report("analysing", 3, 3)
        report("analysing", 3, 3)
    assert capsys.readouterr().err.splitlines() == ["analysing: 1 of 3", "analysing: 3 of 3"]


def test_durations_are_formatted_as_clock_times():
    assert [clock_time(seconds) for seconds in (3.4, 62, 3723)] == ["0:03", "1:02", "1:02:03"]
