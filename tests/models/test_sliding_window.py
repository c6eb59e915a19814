"""Sliding-window losses agree with one window at a time."""

import pytest
import torch

import experiments.paper  # noqa: F401  (adds its recipes)
from mgk.models.sliding_window import sliding_losses
from tests.models.test_decoder import tiny


@torch.no_grad()
def losses_by_window(model, tokens, window):
    """Score all positions of the first window, then the last position of each window."""
    first = model(tokens[None, :window]).log_softmax(-1)[0]
    losses = [-first[n, tokens[n + 1]] for n in range(min(window, len(tokens) - 1))]
    for start in range(1, len(tokens) - window):
        last = model(tokens[None, start : start + window]).log_softmax(-1)[0, -1]
        losses.append(-last[tokens[start + window]])
    return torch.stack(losses)


@pytest.mark.parametrize("variant", ["softmax", "smgk", "mgk", "mlk", ("softmax", "linear", "smgk-hard")])
@pytest.mark.parametrize("form", ["paper", "modern"])
def test_sliding_losses_equal_single_windows(variant, form):
    model, tokens = tiny(form, variant=variant), torch.randint(50, (41,))
    expected = losses_by_window(model, tokens, 11)
    for batch_size in (1, 7, 100):
        actual = sliding_losses(model, tokens, window=11, batch_size=batch_size)
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)
    # Predictions must depend on the window, or the test would be empty.
    assert (sliding_losses(model, tokens, window=12)[12:] - expected[12:]).abs().max() > 1e-3


@pytest.mark.parametrize("length", [2, 8, 11, 12, 13])
def test_texts_of_about_window_length(length):
    model, tokens = tiny(), torch.randint(50, (length,))
    torch.testing.assert_close(sliding_losses(model, tokens, window=11), losses_by_window(model, tokens, 11))


@pytest.mark.parametrize("length", [40, 41, 42])
def test_stride_scores_last_positions(length):
    model, tokens = tiny(), torch.randint(50, (length,))
    actual = sliding_losses(model, tokens, window=11, stride=4, batch_size=3)
    expected = losses_by_window(model, tokens, 11)
    assert len(actual) == length - 1
    # Positions 11 to 14 come from the window that ends at 14, whose last is exact.
    assert torch.allclose(actual[[10, 14, 18, -1]], expected[[10, 14, 18, -1]], atol=1e-5)
    with torch.no_grad():
        window = model(tokens[None, 4:15]).log_softmax(-1)[0, -4:]
    torch.testing.assert_close(actual[11:15], -window.gather(-1, tokens[12:16, None])[:, 0])


@pytest.mark.parametrize("batch_size", [1, 3, 100])
@pytest.mark.parametrize("length", [13, 38, 39, 40, 41])
def test_stride_scores_each_position_once(length, batch_size):
    """The last window, which may advance by less than the stride, leaves the positions scored before it unchanged."""
    model, tokens = tiny(), torch.randint(50, (length,))
    actual = sliding_losses(model, tokens, window=11, stride=4, batch_size=batch_size)
    expected = losses_by_window(model, tokens, 11)[:11].tolist()
    while len(expected) < length - 1:
        end = min(len(expected) + 4, length - 1)
        with torch.no_grad():
            log_p = model(tokens[None, end - 11 : end]).log_softmax(-1)[0]
        expected += [-float(log_p[n + 11 - end, tokens[n + 1]]) for n in range(len(expected), end)]
    torch.testing.assert_close(actual, torch.tensor(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("length", [11, 60])
def test_stride_runs_batches_of_one_shape(length, monkeypatch):
    """A batch of another shape, such as the first window alone, would be compiled separately."""
    model, shapes = tiny(), []
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda tokens: shapes.append(tuple(tokens.shape)) or hidden(tokens))
    sliding_losses(model, torch.randint(50, (length,)), window=11, stride=4, batch_size=4)
    assert set(shapes) == {(1, 10)} if length == 11 else {(4, 11)}
    assert len(shapes) == (1 if length == 11 else 4)


def test_invalid_windows_raise():
    model, tokens = tiny(), torch.randint(50, (20,))
    for settings, message in (
        ({"stride": 0}, "stride"),
        ({"window": 5, "stride": 6}, "stride"),
        ({"window": 0}, "window"),
    ):
        with pytest.raises(ValueError, match=message):
            sliding_losses(model, tokens, **settings)
    with pytest.raises(ValueError, match="tokens"):
        sliding_losses(model, tokens[:1])
    with pytest.raises(ValueError, match="eval mode"):
        sliding_losses(model.train(), tokens)
