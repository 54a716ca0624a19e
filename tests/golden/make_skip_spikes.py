"""Records of the original ``SkipStepOptimizer``, for ``test_skip_spikes.py``.

    python tests/golden/make_skip_spikes.py OLMO_CORE_FOLDER

The folder is a copy of https://github.com/allenai/OLMo-core at commit fa6c501 (version 2.5.0).
Needs NumPy and PyTorch for the CPU: the records were made with torch 2.14.1 and numpy 2.4.6, in
float32. The class is run as it is; of ``olmo_core.utils``, which needs the rest of the package, it
reads two functions that place a tensor on a device, here the CPU.

``skip_spikes.npz`` has for each case ``NAME/losses`` and ``NAME/norms`` (empty if the original was
given none), one value for each step; ``NAME/skipped``, whether the original skipped the step, if it
was given the steps with finite values alone (False for the others); ``NAME/skipped_all``, the same
if it was given all steps; and ``NAME/arguments``, the interval and the factor.
"""

import importlib.util
import pathlib
import sys
import types

import numpy as np
import torch

FILE = pathlib.Path(__file__).with_name("skip_spikes.npz")
STEPS = 400
# The interval, the factor, and whether there are norms.
CASES = {
    "usual": (128, 6, True),
    "short": (16, 3, True),
    "odd": (33, 2.5, True),
    "losses": (24, 4, False),
}


def original(folder):
    utils = types.ModuleType("olmo_core.utils")
    utils.get_default_device = lambda: torch.device("cpu")
    utils.move_to_device = lambda x, device: x.to(device)
    sys.modules["olmo_core"], sys.modules["olmo_core.utils"] = types.ModuleType("olmo_core"), utils
    path = pathlib.Path(folder) / "src/olmo_core/optim/skip_step_optimizer.py"
    spec = importlib.util.spec_from_file_location("skip_step_optimizer", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SkipStepOptimizer


def history(rng, interval, factor):
    """A falling loss with noise, a level that rises and stays, spikes, and what is not finite.

    There are spikes before and at the first step that is judged, and losses which are a spike or
    not by the divisor of the variance.
    """
    t = np.arange(STEPS)
    losses = 2 + 4 * np.exp(-t / 90) + 0.1 * rng.normal(size=STEPS)
    norms = np.exp(0.2 * rng.normal(size=STEPS)) * (1 + (t > 300))
    for values, scale in ((losses, 1.0), (norms, 2.0)):
        at = rng.choice(STEPS, 40, replace=False)
        values[at] += scale * rng.exponential(size=40) * rng.choice([1, -0.3], size=40)
        values[rng.choice(STEPS, 6, replace=False)] *= 10
        values[rng.choice(np.arange(70, STEPS), 6, replace=False)] = [*3 * [np.nan], *3 * [np.inf]]
    losses[rng.integers(250, STEPS)] = -np.inf
    first = interval // 2 - 1
    losses[first - 1], losses[first] = 10 * losses[0], 1000 * losses[0]
    both = np.isfinite(losses) & np.isfinite(norms)
    for t in (180, 230, 280, 330, 380):
        before = losses[:t][both[:t]][-interval:]
        if both[t]:
            deviation = (np.std(before) + np.std(before, ddof=1)) / 2
            losses[t], norms[t] = np.mean(before) + factor * deviation, 1.0
    return np.float32(losses), np.float32(np.abs(norms))


def skipped(make, losses, norms, steps):
    tx, found = make(), np.zeros(len(losses), bool)
    for i in np.flatnonzero(steps):
        tx.latest_loss = torch.tensor(losses[i])
        if len(norms):
            tx.latest_grad_norm = torch.tensor(norms[i])
        found[i] = bool(tx.step_skipped)
    return found


def main(folder):
    kind, arrays = original(folder), {}
    for k, (name, (interval, factor, has_norms)) in enumerate(CASES.items()):
        losses, norms = history(np.random.default_rng([8, k]), interval, factor)
        norms = norms if has_norms else norms[:0]
        of = [torch.nn.Parameter(torch.zeros(1))]
        make = lambda of=of, n=interval, f=factor: kind(of, {}, n, f)
        finite = np.isfinite(losses) & (np.isfinite(norms) if has_norms else True)
        every = skipped(make, losses, norms, np.ones(STEPS, bool))
        some = skipped(make, losses, norms, finite)
        arrays |= {
            f"{name}/losses": losses,
            f"{name}/norms": norms,
            f"{name}/skipped": some,
            f"{name}/skipped_all": every,
            f"{name}/arguments": np.array([interval, factor]),
        }
        print(name, "not finite", (~finite).sum(), "skipped", some.sum(), "of all", every.sum())
    np.savez_compressed(FILE, **arrays)


if __name__ == "__main__":
    main(sys.argv[1])
