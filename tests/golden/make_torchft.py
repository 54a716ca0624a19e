"""Records of Streaming DiLoCo, for ``test_torchft.py``: the class DiLoCo of torchft, in float64.

    python tests/golden/make_torchft.py tests/golden/torchft SEED FIRST LAST

Needs torch, and ``torchft/local_sgd.py`` of https://github.com/pytorch/torchft at commit 73dafea on
the path. One thread is one replica; only the manager (quorum, all-reduce) is replaced: the
all-reduce is a mean over the threads. README.md describes the files; those kept are the first 8 cases.
"""
import json, pathlib, sys, threading
import numpy as np, torch
from torch import nn
from torchft.local_sgd import DiLoCo

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
STEPS = 30
INNER = {"sgd": lambda p: torch.optim.SGD(p, 0.1), "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
         "adam": lambda p: torch.optim.Adam(p, 0.05, eps=1e-8)}
OUTER = {"nesterov": lambda p: torch.optim.SGD(p, 0.7, momentum=0.9, nesterov=True), "sgd": lambda p: torch.optim.SGD(p, 1.0),
         "adam": lambda p: torch.optim.Adam(p, 0.1, eps=1e-8)}
CASES = [  # replicas, fragments, sync_every, delay, alpha, inner, outer
    (2, 1, 5, 0, 0.0, "sgd", "nesterov"), (2, 2, 6, 0, 0.5, "sgd", "sgd"), (3, 3, 9, 2, 0.0, "adam", "nesterov"),
    (4, 2, 8, 1, 0.5, "momentum", "nesterov"), (2, 3, 6, 1, 0.25, "sgd", "adam"), (3, 1, 4, 3, 0.0, "sgd", "nesterov"),
    (4, 4, 12, 2, 0.75, "adam", "adam"), (2, 2, 10, 4, 1.0, "momentum", "sgd"),
    (3, 2, 6, 2, 0.4, "adam", "nesterov"), (4, 3, 12, 3, 0.1, "sgd", "nesterov"), (2, 4, 8, 1, 0.9, "momentum", "adam"),
    (5, 1, 6, 5, 0.6, "adam", "sgd"), (3, 5, 10, 1, 0.0, "sgd", "adam"), (2, 2, 4, 1, 0.3, "adam", "nesterov"),
    (4, 2, 12, 5, 0.8, "momentum", "nesterov"), (3, 3, 6, 0, 0.2, "adam", "adam"),
]


class Done:
    def wait(self, timeout=None): return True


class Group:
    """The replicas' meeting: a mean over the threads."""
    def __init__(self, n): self.n, self.barrier, self.slots = n, threading.Barrier(n), [None] * n
    def mean(self, rank, tensor):
        self.slots[rank] = tensor.clone(); self.barrier.wait()
        total = sum(self.slots) / self.n; self.barrier.wait(); tensor.copy_(total); return Done()


class Manager:
    _use_async_quorum = False
    def __init__(self, group, rank): self.group, self.rank, self.step = group, rank, 0
    def register_state_dict_fn(self, *a): pass
    def current_step(self): return self.step
    def start_quorum(self): pass
    def allreduce(self, tensor, should_quantize=False): return self.group.mean(self.rank, tensor)
    def should_commit(self): self.step += 1; return True
    def disallow_state_dict_read(self): pass
    def allow_state_dict_read(self): pass


def run(case, seed):
    replicas, fragments, sync_every, delay, alpha, inner, outer = case
    rng = np.random.default_rng(seed)
    start = rng.normal(size=(fragments, 2, 3)); grads = rng.normal(size=(STEPS, replicas, fragments, 2, 3)) + 0.3
    group, history, centers = Group(replicas), np.zeros((STEPS + 1, replicas, fragments, 2, 3)), np.zeros((STEPS + 1, fragments, 2, 3))
    def work(rank):
        layers = nn.ModuleList([nn.Linear(3, 2, bias=False) for _ in range(fragments)])
        for i, layer in enumerate(layers): layer.weight.data.copy_(torch.tensor(start[i]))
        opt = INNER[inner](layers.parameters()); outers = [OUTER[outer](l.parameters()) for l in layers]
        with DiLoCo(Manager(group, rank), list(layers), opt, outers, sync_every=sync_every, backup_device=torch.device("cpu"), pin_memory=False,
                    fragment_sync_delay=delay, fragment_update_alpha=alpha) as diloco:
            def note(t):
                history[t, rank] = np.stack([l.weight.detach().numpy() for l in layers])
                if rank == 0: centers[t] = np.stack([f.original_parameters["weight"].numpy() for f in diloco._fragments])
            note(0)
            for t in range(STEPS):
                for i, layer in enumerate(layers): layer.weight.grad = torch.tensor(grads[t, rank, i])
                opt.step(); note(t + 1)
    threads = [threading.Thread(target=work, args=(r,)) for r in range(replicas)]
    [t.start() for t in threads]; [t.join() for t in threads]
    keys = ("replicas", "fragments", "communication_period", "delay", "mixing", "inner", "outer")
    return dict(zip(keys, case)), {"start": start, "gradients": grads, "parameters": history, "centers": centers}


if __name__ == "__main__":
    folder, seed, first, last = pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:5])
    folder.mkdir(parents=True, exist_ok=True)
    for k in range(first, last):
        meta, arrays = run(CASES[k], seed + k)
        np.savez_compressed(folder / f"{k:02d}.npz", meta=json.dumps(meta), **arrays)
        print(k, meta, np.abs(arrays["parameters"][-1]).max())
