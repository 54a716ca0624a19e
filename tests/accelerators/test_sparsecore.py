"""Training steps of jax-tpu-embedding with our optimizers, compiled for SparseCore."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import SingleDeviceSharding
from jax_tpu_embedding.sparsecore.lib.nn import embedding, embedding_spec

import optzoo

DEVICE, SETTINGS = "v6e:2x2", {"global_device_count": 1, "num_sc_per_device": 2}
ROWS, EXAMPLES, IDS = 65536, 256, 64


def features(spec, width):
    """One table."""
    table = embedding_spec.TableSpec(
        name="t",
        vocabulary_size=ROWS,
        embedding_dim=width,
        initializer=jax.nn.initializers.zeros,
        optimizer=spec,
        combiner="sum",
        max_ids_per_partition=IDS,
        max_unique_ids_per_partition=IDS,
    )
    feature = embedding_spec.FeatureSpec(
        name="f", table_spec=table, input_shape=(EXAMPLES, 1), output_shape=(EXAMPLES, width)
    )
    embedding.prepare_feature_specs_for_training({"f": feature}, **SETTINGS)
    return {"f": feature}


def compiled_step(spec, width):
    """A training step, for a table whose rows are padded to a multiple of 8."""
    specs, sharding = (
        features(spec, width),
        SingleDeviceSharding(optzoo.compiled.devices_of(DEVICE)[0]),
    )
    of = lambda shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    pointers, ids = of((16,), jnp.int32), of((16 * IDS,), jnp.int32)
    inputs = embedding.SparseDenseMatmulInput(
        {"t": pointers}, {"t": ids}, {"t": ids}, {"t": of((16 * IDS,))}
    )
    table = of((ROWS, -(-width // 8) * 8))
    slots = jax.tree.map(lambda _: table, spec.slot_variables_initializers())
    variables = {"t": embedding.EmbeddingVariables(table, slots)}

    @jax.jit
    def step(gradients, inputs, num_minibatches, variables, shared):
        inputs = embedding.PreprocessedInput(inputs, num_minibatches)
        new = embedding.tpu_sparse_dense_matmul_grad(
            gradients, inputs, variables, specs, step=shared, **SETTINGS
        )
        return new, spec.next_shared(shared)

    shared = jax.tree.map(lambda x: of(x.shape, x.dtype), spec.first_shared())
    gradients, one = {"f": of((EXAMPLES, width))}, of((1,), jnp.int32)
    return step.lower(gradients, inputs, one, variables, shared).compile()


@pytest.mark.parametrize(
    ("tx", "width", "is_mixed"),
    [
        (optzoo.ftrl(optax.exponential_decay(0.1, 10, 0.5), beta=1.0), 32, False),
        (optzoo.on_rows(optax.nadamw(0.1)), 30, False),
        (optzoo.row_wise_adagrad(0.1), 32, True),
        (optzoo.interop.fbgemm.global_decay_row_wise_adagrad(0.1), 30, True),
        (optzoo.partial_row_wise_lamb(0.1), 32, True),
        (optzoo.row_wise_lamb(0.1), 30, True),
    ],
    ids=["ftrl", "nadamw", "row_wise_adagrad", "global_decay_row_wise_adagrad", "partial", "lamb"],
)
def test_the_compiler_for_sparsecore_accepts(tx, width, is_mixed):
    """Scalars, numbers for each row, sums over columns, and padding."""
    spec = optzoo.interop.sparsecore.sparsecore(tx, width=width if is_mixed else None)
    program = compiled_step(spec, width)
    padded = -(-width // 8) * 8
    arrays = 1 + len(spec.slot_variables_initializers())
    assert program.memory_analysis().output_size_in_bytes >= 4 * ROWS * padded * arrays
    assert "SparseDenseMatmulGradOp" in program.as_text() or "sparse_core" in program.as_text()
