"""Trainings of optzoo that continue in FBGEMM.

With optzoo, from the root of the project; then with FBGEMM (see make_fbgemm.py), from this folder::

    python -m tests.golden.fbgemm.make_continued --write DIR
    v/bin/python make_continued.py --resume DIR

The first writes the state of each case after half of the record's steps, as optzoo saves it. The
second puts it into FBGEMM's tables, makes the other steps, and writes ``states/continued.npz``.
"""

import argparse
import json
import pathlib

import numpy as np

HALF = 4
CASES = (
    "sgd-default", "adagrad-default", "rowwise-lr0.1", "rowwise-two-tables", "rowwise-fp16",
    "rowwise-decouple-global-nobag", "counter-adagradw-half3", "counter-lr-increase", "cowclip-l2",
    "ema-in-place-every2",
)  # fmt: skip


def write(folder):
    """What optzoo saves after half of the steps."""
    from optzoo.interop.fbgemm import save_fbgemm_state

    from .follow import by_name, load, run, start

    for case in CASES:
        arrays, meta = load(case)
        tx = by_name(meta, arrays)
        begin = start(tx, meta, arrays, meta["dtype"])
        if meta["max_counter"] != 1:
            begin = begin[0], begin[1]._replace(max_counter=np.float32(meta["max_counter"]))
        _, (params, state) = run(tx, meta, arrays, begin, slice(HALF))
        save_fbgemm_state(folder / f"{case}.npz", params, state)


def resume(folder):
    """How FBGEMM continues from that."""
    import make_fbgemm as theirs
    import torch

    out = {}
    for c in theirs.CASES:
        if c["name"] not in CASES:
            continue
        saved = dict(np.load(folder / f"{c['name']}.npz"))
        z = dict(np.load(pathlib.Path(__file__).with_name(f"{c['name']}.npz")))
        meta = json.loads(str(z["meta"]))
        module = theirs.Module({**c, "max_counter": 1.0}, meta["feature_table_map"])
        names = ["momentum1", "prev_iter", "row_counter"]
        split = list(zip(meta["var_names"], module.weights(), module.states(), strict=True))
        for table, weights, states in split:
            weights.copy_(torch.tensor(saved[f"{table}/weights"]))
            for name, state in zip(names, states.values(), strict=False):
                state.copy_(torch.tensor(saved[f"{table}/{name}"]))
        module.m.iter.fill_(int(saved["iter"][0]))
        if "max_counter" in saved:
            module.m.max_counter[0] = float(saved["max_counter"][0])
        path = {}
        for step in range(HALF, meta["steps"]):
            ids, offsets = (z[f"bag/{k}"][step].astype(np.int64) for k in ("indices", "offsets"))
            module.step(ids, offsets, None, z["bag/grad"][step])
            for table, weights, states in split:
                path.setdefault(f"param/{table}", []).append(weights.float().numpy().copy())
                for name, state in states.items():
                    path.setdefault(f"slot/{table}/{name}", []).append(state.numpy().copy())
        out |= {f"{c['name']}/saved/{key}": value for key, value in saved.items()}
        out |= {f"{c['name']}/{key}": np.stack(value) for key, value in path.items()}
    np.savez_compressed(pathlib.Path(__file__).with_name("states") / "continued.npz", **out)
    print(len(out), "arrays")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", type=pathlib.Path)
    parser.add_argument("--resume", type=pathlib.Path)
    args = parser.parse_args()
    if args.write:
        write(args.write)
    if args.resume:
        resume(args.resume)


if __name__ == "__main__":
    main()
