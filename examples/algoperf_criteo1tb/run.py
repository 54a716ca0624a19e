"""Runs the submission beside the same one with dense gradients: time of a step, and memory.

    python examples/algoperf_criteo1tb/run.py                     # 262,144 rows, 1,024 examples
    python examples/algoperf_criteo1tb/run.py --rows 4194304      # AlgoPerf's table
    python examples/algoperf_criteo1tb/run.py --batch 256 1024    # several sizes of a batch

The dense one is ``optax.adamw`` with dense gradients, in the same train step. Both run in turns,
each in a process of its own, of which the peak memory is known: on Linux that of the steps, and
elsewhere also that of the start. With AlgoPerf's table both together need 20 GiB. The script uses
the submission as AlgoPerf's runner does, on the stand-in of ``workload.py``; with ``--algoperf`` on
AlgoPerf's own workload, if it is installed. The data are random in any case.
"""

import argparse
import collections
import multiprocessing
import pathlib
import resource
import sys
import time

import jax
import numpy as np
import optax
import submission
from workload import Workload, algoperfs

Hyperparameters = collections.namedtuple(
    "Hyperparameters", "learning_rate one_minus_beta1 beta2 weight_decay warmup_factor"
)
HYPERPARAMETERS = Hyperparameters(1e-3, 0.1, 0.999, 1e-4, 0.02)


def init_dense(workload, model_params, model_state, hyperparameters, rng):
    """As in the submission, with the dense optimizer and dense gradients."""
    del model_state, rng
    tx = optax.adamw(
        submission.schedule(workload, hyperparameters),
        b1=1.0 - hyperparameters.one_minus_beta1,
        b2=hyperparameters.beta2,
        weight_decay=hyperparameters.weight_decay,
    )
    return submission.start(workload, model_params, hyperparameters, tx, sparse="allow")


INIT = {"dense": init_dense, "rows": submission.init_optimizer_state}


class Training:
    """What AlgoPerf's runner keeps of a training."""

    def __init__(self, init, workload, batch_size, hyperparameters=HYPERPARAMETERS, seed=0):
        self.workload, self.hyperparameters = workload, hyperparameters
        self.rng = jax.random.key(seed)
        self.queue = workload.input_queue(seed, batch_size)
        self.params, self.model_state = workload.init_model_fn(self.rng)
        self.state = init(workload, self.params, self.model_state, hyperparameters, self.rng)
        self.global_step = 0

    def select(self):
        """The next batch."""
        return submission.data_selection(
            self.workload,
            self.queue,
            self.state,
            self.params,
            self.model_state,
            self.hyperparameters,
            self.global_step,
            self.rng,
        )

    def update(self, batch):
        """One step."""
        self.state, self.params, self.model_state = submission.update_params(
            workload=self.workload,
            current_param_container=self.params,
            current_params_types=self.workload.model_params_types,
            model_state=self.model_state,
            hyperparameters=self.hyperparameters,
            batch=batch,
            loss_type=self.workload.loss_type,
            optimizer_state=self.state,
            eval_results=[],
            global_step=self.global_step,
            rng=jax.random.fold_in(self.rng, self.global_step),
        )
        self.global_step += 1

    def temporaries(self, batch):
        """The bytes that the compiler plans for a step beside its arguments and results."""
        state, step = self.state
        lowered = step.lower(self.params, state, batch, self.model_state, self.rng)
        return lowered.compile().memory_analysis().temp_size_in_bytes


def contender(pipe, name, make_workload, num_rows, batch_size):
    """A process: waits for a message, makes a step, and answers with its seconds."""
    training = Training(INIT[name], make_workload(num_rows), batch_size)
    batch = training.select()
    training.update(batch)
    jax.block_until_ready(training.params)
    ids = np.asarray(batch["inputs"])[:, 13:].astype(np.int64) % num_rows
    distinct = len(np.unique(ids))
    pipe.send({"temporaries": training.temporaries(batch), "distinct": distinct})
    if sys.platform == "linux":  # the peak from here on: making the parameters may take more
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    while pipe.recv():
        batch = jax.block_until_ready(training.select())
        start = time.perf_counter()
        training.update(batch)
        jax.block_until_ready(training.params)
        pipe.send(time.perf_counter() - start)
    pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def measure(make_workload, num_rows, batch_size, steps):
    """For each contender its memory, and the seconds of all steps."""
    context, found, processes = multiprocessing.get_context("spawn"), {}, {}
    for name in INIT:  # one after the other: each compiles alone
        here, there = context.Pipe()
        given = there, name, make_workload, num_rows, batch_size
        process = context.Process(target=contender, args=given)
        process.start()
        there.close()
        found[name], processes[name] = here.recv() | {"seconds": []}, (process, here)
    for t in range(steps):
        for name in sorted(INIT, reverse=bool(t % 2)):
            processes[name][1].send(True)
            found[name]["seconds"].append(processes[name][1].recv())
    for name, (process, pipe) in processes.items():
        pipe.send(False)
        found[name]["peak"] = pipe.recv()
        process.join()
    return found


def report(found, batch_size):
    """A line for each contender, and one of their ratios."""
    numbers = {
        name: [min(of["seconds"]), np.median(of["seconds"]), of["temporaries"], of["peak"]]
        for name, of in found.items()
    }
    units = np.array([1, 1, 2**30, 2**30])
    lines = {name: of / units for name, of in numbers.items()}
    lines["ratio"] = np.divide(numbers["rows"], numbers["dense"])
    return [
        f"{batch_size:>8,} {found['rows']['distinct']:>13,} {name:>6}"
        + "".join(f"{x:>11.3f}" for x in line)
        for name, line in lines.items()
    ]


def main():
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2**18, help="of the table")
    parser.add_argument("--batch", type=int, nargs="+", default=[1024], help="examples of a step")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--algoperf", action="store_true", help="its own workload")
    args = parser.parse_args()
    make_workload = algoperfs if args.algoperf else Workload
    print(f"{args.rows:,} rows of 128, {args.steps} steps in turns, {jax.default_backend()}")
    print("examples  distinct ids          least, s  median, s  temp., GiB  peak, GiB")
    for batch_size in args.batch:
        lines = report(measure(make_workload, args.rows, batch_size, args.steps), batch_size)
        print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
