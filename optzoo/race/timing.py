"""The duration of training steps."""

import time
from typing import Any

import jax

# Stretches of one program that differ more than this were disturbed, and are timed again.
DISTURBED = 10


def time_stretches(
    step: Any, params: Any, state: Any, examples: Any, *, steps: int, stretches: int
) -> list[float]:
    """Seconds per step of stretches of consecutive steps of one program, after a warm-up.

    While the slowest stretch took more than 10 times as long as the fastest one, it is timed again,
    at most as many times as there are stretches.
    """
    count = 0

    def stretch(steps):
        nonlocal params, state, count
        begin = time.perf_counter()
        for _ in range(steps):
            params, state, _ = step(params, state, examples, global_step=count)
            count += 1
        jax.block_until_ready(params)
        return (time.perf_counter() - begin) / steps

    stretch(1)  # compiles
    stretch(min(steps, 5))
    seconds = [stretch(steps) for _ in range(stretches)]
    for _ in range(stretches):
        if max(seconds) <= DISTURBED * min(seconds):
            break
        seconds.remove(max(seconds))
        seconds.append(stretch(steps))
    return seconds
