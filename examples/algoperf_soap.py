"""A submission to AlgoPerf under the self-tuning rules: SOAP, whose matrices have owners.

All devices have the parameters, as AlgoPerf's workloads want it, and of the state of SOAP each has
that of its own matrices. The hyper-parameters are SOAP's own, and have not been tuned. This file is
a submission.py of AlgoPerf.
"""

import functools

import jax
import optax
from algoperf import jax_sharding_utils, spec

import optzoo

SIZES = {"criteo1tb": 262_144, "fastmri": 32, "ogbg": 512, "wmt": 128, "finewebedu_lm": 64}
SIZES |= {"imagenet_resnet": 1024, "imagenet_resnet_silu": 512, "imagenet_resnet_gelu": 512}
SIZES |= {"imagenet_vit": 1024, "librispeech_conformer": 256, "librispeech_deepspeech": 256}
SIZES |= {"mnist": 1024, "cifar": 1024}


def is_matrix(x):
    """Whether SOAP is for it: not for tables, nor for vectors."""
    return x.ndim > 1 and max(x.shape) <= 8192


def optimizer(steps):
    warm_up = max(steps // 20, 1)
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, warm_up, max(steps, warm_up + 1))
    given = {"block_size": 1024, "merge_dims": True, "owners": "batch"}
    matrices = optzoo.soap(rate, weight_decay=0.01, **given)
    kinds = {True: matrices, False: optax.adamw(rate, 0.95, 0.95, weight_decay=0.01)}
    return optax.partition(kinds, lambda params: jax.tree.map(is_matrix, params))


def init_optimizer_state(workload, model_params, *_):
    params, tx = jax_sharding_utils.replicate(model_params), optimizer(workload.step_hint)
    return jax.jit(tx.init, out_shardings=optzoo.state_sharding(tx, params))(params), None


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2, 3))
def train_step(workload, params, state, model_state, batch, rng):
    def loss(params):
        mode = spec.ForwardPassMode.TRAIN
        logits, new = workload.model_fn(params, batch, model_state, mode, rng, True)
        found = workload.loss_fn(batch["targets"], logits, batch.get("weights"))
        return found["summed"] / found["n_valid_examples"], new

    grads, model_state = jax.grad(loss, has_aux=True)(params)
    updates, state = optimizer(workload.step_hint).update(grads, state, params)
    return optax.apply_updates(params, updates), state, model_state


def update_params(workload, params, types, model_state, hyperparameters, batch, *args):
    _, (state, _), _, _, rng, *_ = args
    params = jax_sharding_utils.replicate(params)  # already there after the first step
    params, state, model_state = train_step(workload, params, state, model_state, batch, rng)
    return (state, None), params, model_state


def prepare_for_eval(workload, params, types, model_state, hyperparameters, loss, state, *_):
    return state, params, model_state


def get_batch_size(workload_name):
    return SIZES[workload_name]


def data_selection(workload, input_queue, *_):
    return next(input_queue)
