"""Records what TensorFlow 1.15.5's distributed optimizers do into ``distributed.npz``.

    python3.7 -m pip install tensorflow==1.15.5 'protobuf<3.21' 'numpy<1.19'
    python3.7 tests/golden/make_distributed_records.py [--out FILE]

A parameter server and the workers run in this process, each worker with a graph and a session of
its own. One of them moves at a time, as the events of the case say, so the history is a serial one.
Deterministic: two runs give identical files. ``README.md`` describes the format.
"""

import argparse
import json
import os
import pathlib
import socket
import time
import zlib
from concurrent import futures

import numpy as np
import tensorflow as tf
from tensorflow.contrib import opt as contrib_opt

tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.FATAL)

START = np.array([0.5, -1.0, 2.0, 0.25, -0.75], np.float32)  # w, then b
MAX_WORKERS = 3
PUSH, SYNC = 0, 1
BEGIN, APPLY = 0, 1


# ------------------------------------------------------------------------------- the cases
SGD = {"$opt": "GradientDescent", "kwargs": {"learning_rate": 0.1}}
MOMENTUM = {"$opt": "Momentum", "kwargs": {"learning_rate": 0.05, "momentum": 0.9}}
# Powers that differ much from step to step, so that it shows who counts what.
ADAM = {"$opt": "Adam", "kwargs": {"learning_rate": 0.05, "beta1": 0.8, "beta2": 0.9}}


def cases():
    """One dict for each history."""
    table = []

    def add(optimizer, tag, opt, workers, events, **kwargs):
        more = {k: kwargs.pop(k) for k in ("round_robin", "num_tokens") if k in kwargs}
        case = {
            "case": f"{optimizer}-{tag}-{opt['$opt']}",
            "optimizer": optimizer,
            "kwargs": dict(kwargs, opt=opt),
            "workers": workers,
            "events": events,
        }
        table.append(dict(case, **more))

    def add_periodic(optimizer, tag, opt, workers, events, period, **kwargs):
        kwargs.update(num_worker=workers, communication_period=period)
        add(optimizer, tag, opt, workers, events, **kwargs)

    elastic = "ElasticAverage"
    add_periodic(elastic, "random", SGD, 3, 24, 2, moving_rate=0.3, rho=0.0)
    add_periodic(elastic, "round_robin", MOMENTUM, 3, 18, 2, rho=0.0, round_robin=True)
    add_periodic(elastic, "rho", ADAM, 2, 20, 3, moving_rate=0.4, rho=0.7)

    add_periodic("AGN", "random", SGD, 3, 24, 2)
    add_periodic("AGN", "random", MOMENTUM, 2, 18, 3)
    add_periodic("AGN", "random", ADAM, 2, 18, 2)
    add_periodic("AGN", "round_robin", ADAM, 3, 18, 2, round_robin=True)

    # Two workers: their sum is the same whoever is first.
    for opt in (SGD, MOMENTUM, ADAM):
        add("ModelAverage", "rounds", opt, 2, 12, num_worker=2, interval_steps=3)

    def add_sync(tag, opt, aggregate, workers, events, num_tokens=-1, **kwargs):
        kwargs.update(replicas_to_aggregate=aggregate, total_num_replicas=workers)
        add("SyncReplicas", tag, opt, workers, events, num_tokens=num_tokens, **kwargs)

    averages = {"$ema_of_step": 0.9}
    add_sync("all", MOMENTUM, 2, 2, 15, num_tokens=0)
    add_sync("backup", SGD, 2, 3, 24)
    add_sync("backup-averaged", ADAM, 2, 3, 24, variable_averages=averages)
    add_sync("twice", SGD, 3, 2, 20, num_tokens=1)

    add("DropStaleGradient", "0", SGD, 3, 30, staleness=0)
    add("DropStaleGradient", "1", MOMENTUM, 3, 30, staleness=1)
    add("DropStaleGradient", "1", ADAM, 3, 30, staleness=1)
    return table


# ------------------------------------------------------------------------------- the cluster
class Cluster:
    """A parameter server and workers on free ports."""

    def __init__(self):
        names = ["worker"] * MAX_WORKERS + ["ps"]
        sockets = [socket.socket() for _ in names]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
        for s in sockets:
            s.close()
        spec = tf.train.ClusterSpec({"worker": addresses[:-1], "ps": addresses[-1:]})
        self.servers = [tf.train.Server(spec, "ps", 0)]
        self.servers += [tf.train.Server(spec, "worker", i) for i in range(MAX_WORKERS)]
        self.targets = [server.target for server in self.servers[1:]]

    def reset(self):
        """Forgets all variables and queues."""
        for target in self.targets:
            tf.Session.reset(target)


class Worker:
    """The graph of one worker, and what to fetch from it: what all share, and what it has."""

    def __init__(self, cluster, index, case):
        self.device, self.index = f"/job:worker/task:{index}", index
        self.kwargs = dict(case["kwargs"])
        inner = self.kwargs.pop("opt")
        self.shared, self.own, self.slots_shared, self.slots_own = {}, {}, {}, {}
        setter = tf.train.replica_device_setter(
            worker_device=self.device, ps_device="/job:ps/task:0", ps_tasks=1
        )
        with tf.Graph().as_default() as graph, tf.device(setter):
            self.inner = getattr(tf.train, inner["$opt"] + "Optimizer")(**inner["kwargs"])
            self.shared["global_step"] = self.global_step = tf.train.get_or_create_global_step()
            self.gradient = tf.placeholder(tf.float32, START.shape)
            self.begin = tf.no_op()
            WRAPPERS[case["optimizer"]](self, case)
            everything = tf.global_variables() + tf.local_variables()
            on_ps = [v for v in everything if "/job:ps" in v.device]
            own = [v for v in everything if "/job:ps" not in v.device]
            self.init_shared = tf.variables_initializer(on_ps)
            self.init_own = tf.variables_initializer(own)
        self.session = tf.Session(cluster.targets[index], graph=graph)

    def make_variables(self, getter=None, use_resource=False):
        """The parameters."""
        with tf.variable_scope("", custom_getter=getter, use_resource=use_resource):
            w = tf.get_variable("w", initializer=START[:3])
            b = tf.get_variable("b", initializer=START[3:].reshape(1, 2))
        self.variables = [w, b]

    def pairs(self):
        """The gradients that are fed, with their variables."""
        gradients = [self.gradient[:3], tf.reshape(self.gradient[3:], [1, 2])]
        return [(gradients[i], v) for i, v in enumerate(self.variables)]

    def loss(self):
        """What has these gradients."""
        return tf.add_n([tf.reduce_sum(g * v) for g, v in self.pairs()])

    def slots(self, variables, where, powers_where):
        """Fetches the inner optimizer's slots of these variables, and its powers."""
        kind = "local" if where is self.slots_own else "center"
        for name in self.inner.get_slot_names():
            where[f"slot.{kind}.{name}"] = flat([self.inner.get_slot(v, name) for v in variables])
        if isinstance(self.inner, tf.train.AdamOptimizer):
            beta1_power, beta2_power = self.inner._get_beta_accumulators()
            powers_where.update({"power.beta1": beta1_power, "power.beta2": beta2_power})

    def run(self, what, gradient=None, **feed):
        """Runs it with this gradient."""
        feeds = {} if gradient is None else {self.gradient: gradient}
        return self.session.run(what, dict(feeds, **feed))


def flat(variables):
    """One vector of them all."""
    return tf.concat([tf.reshape(v, [-1]) for v in variables], 0)


# ------------------------------------------------------------------------------- the wrappers
def elastic_average(worker, case):
    getter = contrib_opt.ElasticAverageCustomGetter(worker.device)
    worker.make_variables(getter)
    with tf.device(worker.device):
        opt = contrib_opt.ElasticAverageOptimizer(
            worker.inner, ea_custom_getter=getter, **worker.kwargs
        )
        # Only these gradients have rho in them.
        pairs = opt.compute_gradients(worker.loss(), worker.variables)
        worker.train = opt.apply_gradients(pairs, worker.global_step)
        worker.begin = opt.get_init_op(worker.index)
    worker.shared["center"] = flat([getter._global_map[v] for v in worker.variables])
    worker.own["local"] = flat(worker.variables)
    worker.own["local_center"] = flat([getter._local_map[v] for v in worker.variables])
    worker.own["local_step"] = opt._local_step
    worker.slots(worker.variables, worker.slots_own, worker.slots_own)


def agn(worker, case):
    getter = contrib_opt.AGNCustomGetter(worker.device)
    # With others it pushes the sum in the place of the mean, at random.
    worker.make_variables(getter, use_resource=True)
    with tf.device(worker.device):
        opt = contrib_opt.AGNOptimizer(worker.inner, custom_getter=getter, **worker.kwargs)
        worker.train = opt.apply_gradients(worker.pairs(), worker.global_step)
        worker.begin = opt.get_init_op(worker.index)
    centers = [getter._global_map[v] for v in worker.variables]
    worker.shared["center"] = flat(centers)
    worker.own["local"] = flat(worker.variables)
    worker.own["accumulated"] = flat([getter._grad_map[v] for v in worker.variables])
    worker.own["local_step"] = opt._local_step
    worker.slots(worker.variables, worker.slots_own, worker.slots_own)
    worker.slots(centers, worker.slots_shared, worker.slots_own)


def model_average(worker, case):
    getter = contrib_opt.ModelAverageCustomGetter(worker.device)
    worker.make_variables(getter)
    with tf.device(worker.device):
        opt = contrib_opt.ModelAverageOptimizer(
            worker.inner, is_chief=worker.index == 0, ma_custom_getter=getter, **worker.kwargs
        )
        worker.train = opt.apply_gradients(worker.pairs(), worker.global_step)
        worker.begin = opt.get_init_op()
    worker.shared["center"] = flat([getter._local_2_global[v] for v in worker.variables])
    worker.own["local"] = flat(worker.variables)
    worker.own["local_step"] = opt._local_step
    worker.slots(worker.variables, worker.slots_own, worker.slots_own)


def sync_replicas(worker, case):
    worker.make_variables()
    kwargs, average = dict(worker.kwargs), None
    if "variable_averages" in kwargs:
        decay = kwargs["variable_averages"]["$ema_of_step"]
        average = tf.train.ExponentialMovingAverage(decay, worker.global_step)
        kwargs.update(variable_averages=average, variables_to_average=worker.variables)
    opt = tf.train.SyncReplicasOptimizer(worker.inner, **kwargs)
    worker.train = opt.apply_gradients(worker.pairs(), global_step=worker.global_step)
    worker.sync = opt.get_chief_queue_runner().enqueue_ops[0]
    worker.begin = opt.local_step_init_op
    if worker.index == 0:
        with tf.control_dependencies([opt.chief_init_op]):
            worker.begin = tf.group(opt.get_init_tokens_op(case["num_tokens"]))
    worker.close = opt._sync_token_queue.close(cancel_pending_enqueues=True)
    worker.shared["center"] = flat(worker.variables)
    if average is not None:
        worker.shared["average"] = flat([average.average(v) for v in worker.variables])
    worker.shared["queue_size"] = opt._sync_token_queue.size()
    counts = [accumulator.num_accumulated() for accumulator, _ in opt._accumulator_list]
    worker.shared["num_accumulated"] = tf.stack(counts)
    worker.own["local_step"] = opt._local_step
    worker.slots(worker.variables, worker.slots_shared, worker.slots_shared)


def drop_stale_gradient(worker, case):
    worker.make_variables()
    opt = contrib_opt.DropStaleGradientOptimizer(worker.inner, **worker.kwargs)
    pairs = opt.compute_gradients(worker.loss(), worker.variables)
    worker.train = opt.apply_gradients(pairs, global_step=worker.global_step)
    worker.read_step = opt._local_step
    [counter] = [v for v in tf.global_variables() if v.op.name == "stale_counter"]
    worker.shared.update(center=flat(worker.variables), stale_counter=counter)
    worker.slots(worker.variables, worker.slots_shared, worker.slots_shared)


WRAPPERS = {
    "ElasticAverage": elastic_average,
    "AGN": agn,
    "ModelAverage": model_average,
    "SyncReplicas": sync_replicas,
    "DropStaleGradient": drop_stale_gradient,
}


# ------------------------------------------------------------------------------ the histories
class History:
    """What happened to the workers, and the state before the first event and after each."""

    def __init__(self, case, workers):
        self.case, self.workers = case, workers
        self.random = np.random.RandomState(zlib.crc32(case["case"].encode()))
        shape = (case["events"], *START.shape)
        self.gradients = self.random.normal(size=shape).astype(np.float32)
        self.events, self.rows = [], []
        self.see()

    def see(self, *event):
        """Notes the state after this event."""
        self.events += [event] if event else []
        self.rows.append(self.state("shared", "own"))

    def state(self, shared, own):
        """What all share, and what each worker has in one array for all."""
        row = self.workers[0].run(getattr(self.workers[0], shared))
        each = [worker.run(getattr(worker, own)) for worker in self.workers]
        return dict(row, **{k: np.stack([one[k] for one in each]) for k in each[0]})

    def pick(self, among):
        """A worker, later ones more often."""
        weights = np.array(among) + 1.0
        return int(self.random.choice(among, p=weights / weights.sum()))


def one_by_one(history):
    """Each event is the step of a worker: ``[w]``."""
    everyone = range(len(history.workers))
    for event, gradient in enumerate(history.gradients):
        w = event % len(everyone) if "round_robin" in history.case else history.pick(everyone)
        history.workers[w].run(history.workers[w].train, gradient)
        history.see(w)


def in_rounds(history):
    """Each event is a step of every worker: ``[]`` of all; they wait for one another."""
    size = (len(history.gradients), len(history.workers), *START.shape)
    history.gradients = history.random.normal(size=size).astype(np.float32)
    with futures.ThreadPoolExecutor(MAX_WORKERS) as pool:
        for gradients in history.gradients:
            submit = lambda w, g: pool.submit(w.run, w.train, g)
            steps = [submit(w, gradients[i]) for i, w in enumerate(history.workers)]
            for step in steps:
                step.result(30)
            history.see(-1)


def by_tokens(history):
    """``[PUSH, w]``: a worker's train op, maybe waiting for a token; ``[SYNC, -1]``: the update.

    The update comes as soon as it can, as from the queue runner.
    """
    chief, waiting = history.workers[0], {}
    aggregate = chief.kwargs["replicas_to_aggregate"]
    tokens = max(aggregate, len(history.workers))
    with futures.ThreadPoolExecutor(MAX_WORKERS) as pool:
        for gradient in history.gradients:
            before = history.rows[-1]
            if before["num_accumulated"].min() >= aggregate:
                chief.run(chief.sync)
                for w in list(waiting)[:tokens]:
                    waiting.pop(w).result(30)
                history.see(SYNC, -1)
                continue
            w = history.pick([i for i in range(len(history.workers)) if i not in waiting])
            worker = history.workers[w]
            step = pool.submit(worker.run, worker.train, gradient)
            if before["queue_size"] > 0:
                step.result(30)
            else:
                waiting[w] = step
                is_fresh = before["local_step"][w] >= before["global_step"]
                counts = chief.shared["num_accumulated"]
                while is_fresh and chief.run(counts).min() <= before["num_accumulated"].min():
                    time.sleep(0.001)
                time.sleep(0.1)  # no trace of a stale gradient, nor of who waits for a token
                assert not step.done()
            history.see(PUSH, w)
        chief.run(chief.close)
        for step in waiting.values():
            step.exception(30)


def read_and_apply(history):
    """``[BEGIN, w]``: a worker reads parameters and global step; ``[APPLY, w]``: it goes on."""
    held = {}
    recorded = [np.full(len(history.workers), -1)]
    for gradient in history.gradients:
        w = int(history.random.randint(len(history.workers)))
        worker, steps = history.workers[w], recorded[-1].copy()
        if w in held:
            # What the one run would have computed before it was held up.
            worker.run(worker.train, held.pop(w), **{worker.read_step.name: steps[w]})
            steps[w] = -1
            history.see(APPLY, w)
        else:
            held[w], steps[w] = gradient, worker.run(worker.read_step)
            history.see(BEGIN, w)
        recorded.append(steps)
    for row, steps in enumerate(recorded):
        history.rows[row]["recorded_step"] = steps


HISTORIES = {
    "ElasticAverage": one_by_one,
    "AGN": one_by_one,
    "ModelAverage": in_rounds,
    "SyncReplicas": by_tokens,
    "DropStaleGradient": read_and_apply,
}


def record(cluster, case):
    """The arrays of one case."""
    cluster.reset()
    workers = [Worker(cluster, index, case) for index in range(case["workers"])]
    workers[0].run(workers[0].init_own)
    workers[0].run(workers[0].init_shared)
    for worker in workers[1:]:
        worker.run(worker.init_own)
    for worker in workers:
        worker.run(worker.begin)
    history = History(case, workers)
    HISTORIES[case["optimizer"]](history)
    arrays = {k: np.stack([row[k] for row in history.rows]) for k in history.rows[0]}
    arrays.update(history.state("slots_shared", "slots_own"))
    arrays.update(grad=history.gradients, events=np.array(history.events))
    small = lambda a: a.astype(np.int16) if a.dtype.kind == "i" else a
    arrays = {k: small(np.asarray(a)) for k, a in arrays.items()}
    arrays["meta"] = np.array(json.dumps(dict(case, tf_version=tf.__version__), sort_keys=True))
    for worker in workers:
        worker.session.close()
    return {case["case"] + "/" + k: a for k, a in arrays.items()}


def main():
    """Runs all cases."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default=pathlib.Path(__file__).with_name("distributed.npz"))
    args = parser.parse_args()
    cluster, arrays = Cluster(), {}
    for case in cases():
        arrays.update(record(cluster, case))
        print(case["case"], flush=True)
    np.savez_compressed(args.out, **arrays)
    os._exit(0)  # servers have no end


if __name__ == "__main__":
    main()
