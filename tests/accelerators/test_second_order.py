"""What second-order optimizers compile to for TPUs that are not there."""

import re

import jax
import jax.numpy as jnp
import pytest

import optzoo
from optzoo.compiled.report import lowered_for

of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)


def report_of(tx, shapes, device="v5e:2x2"):
    params = [of(*shape) for shape in shapes]
    update = jax.jit(tx.update, donate_argnums=1)
    state = jax.eval_shape(tx.init, params)
    return optzoo.compile_report(update, params, state, params, device=device)


LEAVES = [(2, 512), (512, 3), (4, 512)]  # three matrices of 512 x 512, and one of each other size


@pytest.mark.parametrize("name", ["shampoo", "soap"])
def test_eigenvectors_of_a_size_are_one_kernel(name):
    """JAX's own way above 256, QDWH, is 15 loops and 15,000 lines, which compile for 30 s."""
    text = report_of(getattr(optzoo, name)(1e-3), LEAVES).text
    assert text.count('custom_call_target="EighTpu"') == 3 and "qdwh" not in text


def test_a_qr_decomposition_is_of_one_matrix():
    """That of three at once compiles four times as long."""
    text = report_of(optzoo.soap(1e-3), LEAVES).text
    of_blocks = r"f32\[([\d,]+)\]\S*, \S+\) custom-call\(.*QrDecompositionBlock"
    large = {shape for shape in re.findall(of_blocks, text) if len(shape) > 5}
    assert large == {"512,128", "384,128", "256,128", "128,128"}


@pytest.mark.parametrize("name", ["shampoo", "blocked_shampoo", "soap", "ggt"])
def test_products_in_full_precision(name):
    """TPUs multiply in bfloat16 by default."""
    params = [of(24, 32), of(16), of(3, 3, 8, 8)]
    tx = optzoo.CATALOG[name].make()
    args = params, jax.eval_shape(tx.init, params), params
    text = lowered_for(jax.jit(tx.update), args, {}, "v5e:2x2").as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) > 2
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)
