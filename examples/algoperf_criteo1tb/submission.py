"""An AlgoPerf submission for criteo1tb, with row-sparse gradients of the embedding table.

It has the functions that AlgoPerf asks of a submission, and uses its workload as it is: AdamW with
a warm-up and a cosine decay, as in AlgoPerf's own ``adamw``, but rows that a batch does not read
keep their values and moments (``optzoo.sparse_adamw``), so a step costs what the batch reads. On
several devices each has the whole table and a part of the batch, and gets the rows of all.

The batch decides whether this is worth it: see ``run.py``.
"""

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import optzoo

try:
    from algoperf import spec
except ModuleNotFoundError:
    import workload as spec

TABLE = "embedding_table"


def schedule(workload, hyperparameters):
    """A warm-up, then a cosine decay."""
    warm_up = int(hyperparameters.warmup_factor * workload.step_hint)
    return optax.warmup_cosine_decay_schedule(
        0.0, hyperparameters.learning_rate, warm_up, max(workload.step_hint, warm_up + 1)
    )


def on_all_devices():
    """The sharding of what each device has as a whole."""
    return NamedSharding(Mesh(jax.devices(), ("batch",)), PartitionSpec())


def every_device_gets_all():
    """A transformation: gradients, or their rows, are sent to all devices before the update."""
    everywhere = on_all_devices()
    return optax.stateless(lambda g, _: jax.lax.with_sharding_constraint(g, everywhere))


def loss_of(workload, hyperparameters):
    """``loss(params, batch, model_state, rng)``: the mean loss, and the new state of the model."""
    dropout_rate = getattr(hyperparameters, "dropout_rate", 0.0)

    def loss(params, batch, model_state, rng):
        logits, model_state = workload.model_fn(
            params,
            batch,
            model_state,
            spec.ForwardPassMode.TRAIN,
            rng,
            update_batch_norm=True,
            dropout_rate=dropout_rate,
        )
        found = workload.loss_fn(
            label_batch=batch["targets"],
            logits_batch=logits,
            mask_batch=batch.get("weights"),
        )
        return found["summed"] / found["n_valid_examples"], model_state

    return loss


def start(workload, model_params, hyperparameters, tx, **options):
    """The state of an optimizer on all devices, and the train step."""
    grad_clip = getattr(hyperparameters, "grad_clip", None)
    clip = [] if grad_clip is None else [optzoo.clip_by_global_norm(grad_clip)]
    tx = optax.chain(every_device_gets_all(), *clip, tx)
    step = optzoo.minimize(loss_of(workload, hyperparameters), tx, has_aux=True, **options)
    return jax.jit(tx.init, out_shardings=on_all_devices())(model_params), step


def init_optimizer_state(workload, model_params, model_state, hyperparameters, rng):
    """The state of the optimizer, and the train step."""
    del model_state, rng
    tx = optzoo.sparse_adamw(
        schedule(workload, hyperparameters),
        b1=1.0 - hyperparameters.one_minus_beta1,
        b2=hyperparameters.beta2,
        weight_decay=hyperparameters.weight_decay,
    )
    return start(workload, model_params, hyperparameters, tx, sparse={TABLE: "require"})


def update_params(
    workload,
    current_param_container,
    current_params_types,
    model_state,
    hyperparameters,
    batch,
    loss_type,
    optimizer_state,
    eval_results,
    global_step,
    rng,
    train_state=None,
):
    """One step: the new state of the optimizer, parameters, and state of the model."""
    del current_params_types, hyperparameters, loss_type, eval_results, train_state
    state, step = optimizer_state
    params, state, loss, model_state = step(current_param_container, state, batch, model_state, rng)
    if global_step % 100 == 0 and workload.metrics_logger is not None:
        workload.metrics_logger.append_scalar_metrics({"loss": loss.item()}, global_step)
    return (state, step), params, model_state


def prepare_for_eval(
    workload,
    current_param_container,
    current_params_types,
    model_state,
    hyperparameters,
    loss_type,
    optimizer_state,
    eval_results,
    global_step,
    rng,
):
    """Nothing is to do before an evaluation."""
    del workload, current_params_types, hyperparameters, loss_type, eval_results, global_step, rng
    return optimizer_state, current_param_container, model_state


def get_batch_size(workload_name):
    """The examples of a step, on all devices together."""
    if workload_name != "criteo1tb":
        raise ValueError(f"this submission is for criteo1tb, got {workload_name!r}")
    return 16_384


def data_selection(
    workload,
    input_queue,
    optimizer_state,
    current_param_container,
    model_state,
    hyperparameters,
    global_step,
    rng,
):
    """The next batch."""
    del workload, optimizer_state, current_param_container, model_state
    del hyperparameters, global_step, rng
    return next(input_queue)
