"""AlgoPerf's self-tuning submission "single-worker DiLoCo" (June 2026), with one optimizer.

AdamW inside, Nesterov outside, slow weights on the host. This file is a submission.py of AlgoPerf.
"""

import functools

import jax
import optax
from algoperf import spec

import optzoo

SIZES = {"criteo1tb": 262_144, "fastmri": 32, "ogbg": 512, "wmt": 128, "finewebedu_lm": 64}
SIZES |= {"imagenet_resnet": 1024, "imagenet_resnet_silu": 512, "imagenet_resnet_gelu": 512}
SIZES |= {"imagenet_vit": 1024, "librispeech_conformer": 256, "librispeech_deepspeech": 256}


def optimizer(steps):
    rate = optax.cosine_decay_schedule(9.55e-4, steps)
    inner = optax.adamw(rate, 0.99, 0.995, weight_decay=0.2424)
    outer = optax.sgd(0.3006, momentum=0.7675, nesterov=True)
    period, where = 75, "pinned_host"
    return optzoo.diloco(inner, outer, axis_name=None, communication_period=period, placement=where)


def init_optimizer_state(workload, model_params, *_):
    return optimizer(workload.step_hint).init(model_params), None


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
    _, (state, trained), _, _, rng, *_ = args
    params = params if trained is None else trained  # between them was an evaluation
    params, *state = train_step(workload, params, state, model_state, batch, rng)
    return (state[0], None), params, state[1]


def prepare_for_eval(workload, params, types, model_state, hyperparameters, loss, states, *_):
    return (states[0], params), optzoo.eval_params(params, states[0]), model_state


def get_batch_size(workload_name):
    return SIZES[workload_name]


def data_selection(workload, input_queue, *_):
    return next(input_queue)
