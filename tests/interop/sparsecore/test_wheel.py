"""The training step of jax-tpu-embedding, lowered for a TPU: needs its wheel."""

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax_tpu_embedding.sparsecore.lib.nn import embedding, embedding_spec

import optzoo

from . import lowered

SETTINGS = {"global_device_count": 1, "num_sc_per_device": 4}
ROWS, WIDTH, PADDED = 64, 6, 8
SHARD = ROWS // SETTINGS["num_sc_per_device"]


def features(spec):
    """One table of rows of 6 numbers, which are padded to 8."""
    table = embedding_spec.TableSpec(
        name="t",
        vocabulary_size=ROWS,
        embedding_dim=WIDTH,
        initializer=jax.nn.initializers.zeros,
        optimizer=spec,
        combiner="sum",
        max_ids_per_partition=16,
        max_unique_ids_per_partition=16,
    )
    feature = embedding_spec.FeatureSpec(
        name="f", table_spec=table, input_shape=(16, 1), output_shape=(16, WIDTH)
    )
    embedding.prepare_feature_specs_for_training({"f": feature}, **SETTINGS)
    return {"f": feature}


def lowered_step(spec):
    """A training step as StableHLO for a TPU."""
    specs, (ids, gains) = features(spec), (jax.ShapeDtypeStruct((256,), t) for t in ("int32", "f4"))
    table = jax.ShapeDtypeStruct((SHARD, PADDED), jnp.float32)
    of_table = lambda a: {"t": a}
    inputs = embedding.SparseDenseMatmulInput(
        of_table(jax.ShapeDtypeStruct((32,), jnp.int32)),
        of_table(ids),
        of_table(ids),
        of_table(gains),
    )
    slots = spec.slot_variables_initializers()
    variables = of_table(embedding.EmbeddingVariables(table, jax.tree.map(lambda _: table, slots)))
    gradients = {"f": jax.ShapeDtypeStruct((16, WIDTH), jnp.float32)}

    def step(gradients, inputs, num_minibatches, variables, shared):
        inputs = embedding.PreprocessedInput(inputs, num_minibatches)
        new = embedding.tpu_sparse_dense_matmul_grad(
            gradients, inputs, variables, specs, step=shared, **SETTINGS
        )
        return new, spec.next_shared(shared)

    one = jax.ShapeDtypeStruct((1,), jnp.int32)
    traced = jax.jit(step).trace(gradients, inputs, one, variables, spec.first_shared())
    return traced.lower(lowering_platforms=("tpu",)).as_text()


def without_tuple(function):
    """Version 0.1.0 returns a tuple, which a module for the CPU must not."""
    for elements in re.findall(r"stablehlo\.tuple (.*?) :", function):
        types = ", ".join([f"tensor<1x{PADDED}xf32>"] * len(elements.split(",")))
        function = re.sub(r"\n.*stablehlo\.tuple .*", "", function)
        function = re.sub(r"-> tuple<.*>> ?{", f"-> ({types}) {{", function)
        function = re.sub(r"return %.*", f"return {elements} : {types}", function)
    return function


CASES = {
    "lazy_adam": (optzoo.lazy_adam(optax.exponential_decay(0.1, 10, 0.5)), None, 2, 2),
    "ftrl": (optzoo.ftrl(0.1, l1_regularization_strength=0.1, beta=1.0), None, 2, 1),
    "gradient_descent": (optzoo.gradient_descent(0.1), None, 0, 1),
    "row_wise_adagrad": (optzoo.row_wise_adagrad(0.1), WIDTH, 1, 1),
    "on_rows(adamw)": (optzoo.on_rows(optax.adamw(0.1)), None, 2, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_a_training_step_is_lowered(name):
    """Its module holds the function of a row, which computes what our lowering computes."""
    tx, width, num_slots, num_scalars = CASES[name]
    spec = optzoo.interop.sparsecore.sparsecore(tx, width=width, name="ours")
    text = lowered_step(spec)
    config = json.loads(re.search(r'backend_config = "(.*?)"[,}]', text)[1].replace(r"\22", '"'))
    assert config["sparse_dense_matmul_config"]["num_slot_variables"] == num_slots
    assert config["sparse_dense_matmul_config"]["num_hyperparameters"] == num_scalars

    functions = re.split(r"\n(?=  func\.func )", text.rstrip().removesuffix("}"))
    [mine] = [f for f in functions if re.match(r'  func\.func private @"?ours-t', f)]
    others = [f for f in functions if f.startswith("  func.func private") and f != mine]
    renamed = re.sub(r'private @"?ours-t\S*?"?\(', "public @main(", mine)
    run = lowered.compiled("module {\n" + "\n".join([without_tuple(renamed), *others]) + "}\n")
    want = lowered.compiled(lowered.lower(spec, PADDED))
    random = np.random.default_rng(0)
    shape = (2 + num_slots + num_scalars, 1, PADDED)
    arguments = list(random.uniform(0.1, 0.9, shape).astype(np.float32))
    for a, b in zip(run(*arguments), want(*arguments), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_slots_are_those_of_the_table():
    spec = optzoo.interop.sparsecore.sparsecore(optzoo.ftrl(0.1))
    table = features(spec)["f"].table_spec
    slots = table.optimizer.slot_variables_initializers()
    values = [f(jax.random.key(0), (SHARD, PADDED)) for f in slots]
    assert [v.shape for v in values] == [(SHARD, PADDED)] * 2


def test_specs_are_equal_to_themselves_alone():
    """Tables are stacked if their specs are equal."""
    one, two = (optzoo.interop.sparsecore.sparsecore(optzoo.adagrad(0.1)) for _ in range(2))
    assert one == one and one != two and hash(one) != hash(two)


def test_the_code_of_the_page_runs():
    """``docs/sparsecore.md``, whose code needs the wheel."""
    page = pathlib.Path(__file__).parents[3] / "docs" / "sparsecore.md"
    [code] = re.findall(r"```py\n(.*?)```", page.read_text(), re.DOTALL)
    names = {}
    exec(compile(code, page.name, "exec"), names)
    assert names["table"].optimizer.slot_variables_initializers()._fields == ("m", "v")
    assert callable(names["update"]) and names["shared"].step == 0
