"""Sign decays at points with known values."""

import numpy as np
import pytest

import optzoo

N = 8


@pytest.mark.parametrize(
    ("decay", "at"),
    [
        (optzoo.linear_sign_decay(N), {0: 1, N // 2: 0.5, N: 0, 9 * N: 0}),
        (
            optzoo.cosine_sign_decay(N),
            {0: 1, N // 4: (1 + 0.5**0.5) / 2, N // 2: 0.5, N: 0, 9 * N: 0},
        ),
        (optzoo.cosine_sign_decay(N, num_periods=1), {0: 1, N // 2: 0, N: 1, 9 * N: 1}),
        (
            optzoo.cosine_sign_decay(N, num_periods=2, zero_after=1),
            {0: 1, N // 4: 0, N // 2 - 1: 0.5, N // 2: 0, N: 0},
        ),
        # Decays to almost zero, then returns to 1 and is constant.
        (
            optzoo.restart_sign_decay(N),
            {0: 1, N // 2: 0.5, N - 1: (1 + np.cos(np.pi * 7 / 8)) / 2, N: 1, 9 * N: 1},
        ),
        (optzoo.restart_sign_decay(N, num_periods=2), {0: 1, N // 4: 0.5, N // 2: 1, N: 1}),
        (
            optzoo.restart_sign_decay(N, num_periods=2, zero_after=1),
            {0: 1, N // 4: 0.5, N // 2: 0, N: 0},
        ),
    ],
    ids=["linear", "cosine", "wave", "cut wave", "restart", "two restarts", "cut restart"],
)
def test_known_points(decay, at):
    np.testing.assert_allclose([decay(k) for k in at], list(at.values()), atol=1e-6)


@pytest.mark.parametrize("name", ["linear", "cosine", "restart"])
def test_length_must_be_positive(name):
    with pytest.raises(ValueError, match="decay_steps must be positive, got 0"):
        getattr(optzoo, f"{name}_sign_decay")(0)
