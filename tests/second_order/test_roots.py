"""Inverse roots of matrices by each method, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optzoo
from optzoo import SparseRows
from optzoo.second_order import eigh as module
from optzoo.second_order.shampoo.roots import BY_EIGENVALUES, METHODS, _newton

# Of which "auto" is one: tests/core/test_platforms.py.
EXACT = ["eigh", "newton"]
WITH_RIDGE = [*EXACT, "two_iterations"]
ALL = [*WITH_RIDGE, "pseudo_inverse"]
ROUNDING = 2.0**-24


def matrices(d, low, n=3, dtype="float32"):
    """With eigenvalues from ``10 ** low`` to 1, the next matrices larger, up to ten times."""
    rng = np.random.default_rng(d)
    v = np.linalg.qr(rng.normal(size=(n, d, d)))[0]
    eigenvalues = np.logspace(low, 0, d)[::-1] * np.logspace(0, 1, n)[:, None]
    return ((v * eigenvalues[:, None]) @ v.mT).astype(dtype)


def exact(a, p, epsilon, relative):
    """In float64."""
    eigenvalues, v = np.linalg.eigh(np.asarray(a, "float64"))
    largest = eigenvalues[:, -1:]
    ridge = np.where(largest > 0, epsilon * largest, 1) if relative else epsilon
    powers = np.maximum(eigenvalues + ridge, ridge) ** (-1 / p)
    return (v * powers[:, None]) @ v.mT


@functools.cache
def compiled(method, p, epsilon, relative):
    return jax.jit(lambda a: METHODS[method](a, p, epsilon, relative))


def error(method, a, p, epsilon, relative):
    """Of the worst matrix, relative to its largest element."""
    got, ok = compiled(method, p, epsilon, relative)(a)
    assert got.shape == a.shape and got.dtype == a.dtype and ok.shape == a.shape[:1]
    assert jnp.all(ok)
    want = exact(a, p, epsilon, relative)
    over = lambda x: np.max(np.abs(x), axis=(1, 2))
    return np.max(over(got - want) / over(want))


# Every order and every size, not each with each.
ORDERS = [(1, 5), (2, 33), (3, 2), (4, 5), (4, 1), (6, 2)]


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize(("p", "d"), ORDERS)
def test_relative_ridge(method, p, d):
    assert error(method, matrices(d, -2), p, 1e-6, True) < 300 * ROUNDING
    # The smallest eigenvalue with its ridge is as exact as the largest one allows.
    allowed = 2 * d**0.5 * ROUNDING / 1e-6 / p if d > 1 else 2 * ROUNDING
    assert error(method, matrices(d, -9), p, 1e-6, True) < allowed


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize(("p", "d"), [(2, 5), (4, 2)])
def test_absolute_ridge(method, p, d):
    """One that makes a difference to every eigenvalue."""
    for low in (-2, -9):
        assert error(method, matrices(d, low), p, 0.1, False) < 200 * ROUNDING


@pytest.mark.parametrize(
    ("p", "d", "relative"), [(2, 5, False), (4, 1, True), (4, 2, False), (6, 33, True)]
)
def test_two_iterations(p, d, relative):
    """Not as exact: the square root stops at the iterate before the last, as in the original."""
    assert error("two_iterations", matrices(d, -9), p, 1e-3, relative) < 1e-3


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("p", [2, 3.5])
def test_pseudo_inverse(p, relative, x64):
    """Of rank two, of a full rank and of none; what is below the limit is as zero."""
    with x64(True):
        a = np.concatenate([of_rank_two(), matrices(4, -3, dtype="float64")])
        roots, ok = compiled("pseudo_inverse", p, 0.03, relative)(a)
    assert jnp.all(ok)
    for got, matrix in zip(roots, a, strict=True):
        eigenvalues, v = np.linalg.eigh(matrix)
        kept = eigenvalues > 0.03 * (eigenvalues[-1] if relative else 1)
        v, powers = v[:, kept], eigenvalues[kept] ** (-1 / p)
        np.testing.assert_allclose(got, (v * powers) @ v.T, rtol=0, atol=1e-11)
    assert not np.any(roots[2])


@pytest.mark.parametrize("method", WITH_RIDGE)
def test_zero(method):
    """A relative ridge of nothing is one."""
    roots, ok = compiled(method, 4, 1e-6, True)(np.stack([np.zeros((3, 3)), np.eye(3)]))
    np.testing.assert_allclose(roots, 2 * [np.eye(3)], rtol=1e-4, atol=1e-6)
    assert jnp.all(ok)


@pytest.mark.parametrize("method", ALL)
def test_one_bad_matrix_spoils_no_other(method):
    root, a = compiled(method, 2, 1e-3, True), matrices(5, -1, n=6)
    want, _ = root(a)
    spoilt = a.copy()
    spoilt[1, 0, 0], spoilt[2], spoilt[3, 1, 1], spoilt[4] = np.nan, np.nan, np.inf, np.inf
    got, ok = root(spoilt)
    np.testing.assert_array_equal(ok, [True, False, False, False, False, True])
    np.testing.assert_allclose(got[::5], want[::5], rtol=1e-6, atol=1e-6)


LIES = {
    "swapped vectors": lambda w, v: (w, v[:, :, ::-1]),
    "one wrong vector": lambda w, v: (w, v.at[:, :, -1].multiply(1.1)),
    "no vectors": lambda w, v: (w, jnp.zeros_like(v)),
    "wrong values": lambda w, v: (w.at[:, -1].multiply(0.9), v),
    "values of zero": lambda w, v: (jnp.zeros_like(w), v),
    "another matrix": lambda w, v: (w, jnp.broadcast_to(jnp.eye(5), v.shape)),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=list(LIES))
def test_an_eigh_that_lies_is_found(lie, monkeypatch):
    """About the second matrix only."""
    monkeypatch.setattr(module, "LAPACK_WAITS_FOR_THREADS", False)  # or each is the only one
    eigh = jnp.linalg.eigh

    def lying(a):
        w, v = eigh(a)
        w_lie, v_lie = lie(w, v)
        return w.at[1].set(w_lie[1]), v.at[1].set(v_lie[1])

    monkeypatch.setattr(jnp.linalg, "eigh", lying)
    _, ok = jax.jit(lambda a: METHODS["eigh"](a, 4, 1e-6, True))(matrices(5, -2))
    np.testing.assert_array_equal(ok, [True, False, True])


def test_a_newton_that_does_not_converge_is_found():
    """Of a matrix that is not positive."""
    a = np.stack([np.eye(3), np.diag([1.0, 0.5, -1])]).astype("float32")
    _, ok = compiled("newton", 4, 1e-6, True)(a)
    np.testing.assert_array_equal(ok, [True, False])


@pytest.mark.parametrize("method", EXACT)
def test_size_does_not_matter(method):
    a, root = matrices(3, -2, n=1), compiled(method, 4, 1e-6, True)
    for scale in np.array([1e30, 3, 1e-30], "float32"):
        got, ok = root(np.concatenate([a, scale * a]))
        assert jnp.all(ok)
        want = got[0] * scale**-0.25
        np.testing.assert_allclose(got[1], want, rtol=1e-4, atol=1e-5 * np.max(want))


@pytest.mark.parametrize("method", EXACT)
def test_huge_and_tiny_beside_an_absolute_ridge(method):
    tiny, huge = 1e-30 * np.eye(2, dtype="float32"), 1e30 * np.eye(2, dtype="float32")
    roots, ok = compiled(method, 4, 0.1, False)(np.stack([tiny, huge, 0 * tiny]))
    for got, want in zip(roots, (0.1**-0.25, 10**-7.5, 0.1**-0.25), strict=True):
        np.testing.assert_allclose(got, want * np.eye(2), rtol=1e-5)
    assert jnp.all(ok)


def test_two_iterations_say_where_they_overflow():
    """They do not scale, as the original does not."""
    _, ok = compiled("two_iterations", 2, 1e-3, True)(1e30 * matrices(5, -1))
    assert not jnp.any(ok)


@pytest.mark.parametrize("method", EXACT)
def test_opposite_rows(method):
    """Gradients of the logits of two classes are opposite: the sums of the rows are zero."""
    a = np.array([[[1, -1], [-1, 1]]], "float32")
    assert error(method, a, 4, 1e-6, True) < 1e-2


def newton_in_float64(a, p, growth=1.2):
    """The inverse root of the paper's iteration, and the errors of its steps."""
    identity = np.eye(len(a))
    z = (1 + p) / (2 * np.linalg.norm(a))
    m, h = z * a, identity * z ** (1 / p)
    errors = [np.inf, np.abs(m - identity).max()]
    while len(errors) < 100 and 1e-6 < errors[-1] < growth * errors[-2]:
        c = (1 + 1 / p) * identity - m / p
        m, h = np.linalg.matrix_power(c, p) @ m, h @ c
        errors.append(np.abs(m - identity).max())
    return h, errors


def test_newton_gives_up_where_the_error_grows_by_a_fifth():
    """As the original does, though the iteration would converge for this matrix."""
    rng = np.random.default_rng(0)
    q = np.linalg.qr(rng.normal(size=(6, 6)))[0]
    a = (q * np.r_[np.ones(5), 1e-3]) @ q.T
    _, errors = newton_in_float64(a, 6)
    assert 1.22 < errors[-1] / errors[-2] < 2 and min(errors) > 0.2
    h, errors = newton_in_float64(a, 6, growth=2.2)
    assert errors[-1] < 1e-6
    np.testing.assert_allclose(np.linalg.matrix_power(h, 6) @ a, np.eye(6), atol=1e-6)
    _, ok = _newton(jnp.asarray(a, jnp.float32), 6)
    assert not ok


@pytest.mark.parametrize(("method", "tolerance"), [("eigh", 1e-12), ("newton", 1e-6)])
def test_float64(method, tolerance, x64):
    with x64(True):
        a = matrices(5, -3, dtype="float64")
        for relative in (False, True):
            roots, ok = compiled(method, 4, 1e-2, relative)(a)
            want = exact(a, 4, 1e-2, relative)
            np.testing.assert_allclose(roots, want, atol=tolerance, rtol=0)
            assert roots.dtype == jnp.float64 and jnp.all(ok)


@pytest.mark.parametrize("method", ALL)
def test_float32_where_float64_is_enabled(method, x64):
    with x64(True):
        a = jax.ShapeDtypeStruct((2, 3, 3), jnp.float32)
        roots, _ = jax.eval_shape(lambda a: METHODS[method](a, 4, 1e-2, True), a)
        assert (roots.shape, roots.dtype) == (a.shape, a.dtype)


# Derivatives


def of_rank_two():
    """Symmetric, with equal eigenvalues; and the zero matrix, a multiple of the identity."""
    x = np.random.default_rng(0).normal(size=(2, 4, 2))
    return np.concatenate([x @ x.mT, np.zeros((1, 4, 4)), 2 * np.eye(4)[None]])


# The square root of "two_iterations" is not as exact as the quotient would need.
@pytest.mark.parametrize(
    ("method", "p"), [("eigh", 3.5), ("pseudo_inverse", 3.5), ("newton", 4), ("auto", 2)]
)
@pytest.mark.parametrize("relative", [False, True])
def test_derivatives_are_difference_quotients(method, p, relative, x64):
    """By the matrix, the order where it is no plain number, and epsilon; also in reverse."""
    with x64(True):
        a, rng = of_rank_two(), np.random.default_rng(1)
        a = np.delete(a, 2, axis=0) if relative else a  # at zero a relative ridge jumps
        towards, weights = rng.normal(size=a.shape) / 10, rng.normal(size=a.shape)
        towards = towards @ towards.mT  # of rank four: the matrices stay semidefinite
        epsilon = 0.01 if relative else 0.1

        def f(at):
            order = p + at[1] if method in BY_EIGENVALUES else p
            moved = a + at[0] * towards
            return jnp.sum(weights * METHODS[method](moved, order, epsilon + at[2], relative)[0])

        all_at_once = jax.jit(lambda at: (f(at), jax.grad(f)(at), jax.jacfwd(f)(at)))
        value, at = lambda at: all_at_once(at)[0], np.array([0.1, 0, 0])
        _, got, forward = all_at_once(at)
        want = [(value(at + h) - value(at - h)) / 2e-5 for h in 1e-5 * np.eye(3)]
        assert np.all(np.isfinite(all_at_once(0 * at)[1]))
    # By the power iteration the largest eigenvalue is not exact.
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(forward, got, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", ALL)
def test_derivatives_where_all_directions_are_one(method):
    """Of a multiple of the identity, and of a matrix that has no root."""
    f = lambda s: METHODS[method](s * jnp.eye(3)[None], 4, 1e-6, True)[0][0]
    slope = jax.jit(jax.jacrev(f))(16.0)
    np.testing.assert_allclose(slope, -0.25 / 32 * np.eye(3), rtol=1e-4, atol=1e-9)
    bad = np.full((1, 3, 3), np.nan, "float32")
    kept = lambda a: sum(jnp.where(ok, r, 0) for r, ok in [METHODS[method](a, 4, 1e-6, True)])
    slope = jax.jit(jax.grad(lambda a: jnp.sum(kept(a))))(bad)
    np.testing.assert_array_equal(slope, np.zeros(bad.shape))


@pytest.mark.parametrize("method", sorted(BY_EIGENVALUES, reverse=True))
def test_the_derivative_by_the_order(method):
    """Of ``a ** (-1 / p)`` it is ``a ** (-1 / p) * log(a) / p**2``."""
    a, p = np.array([16, 4], "float32"), 2.5
    roots = lambda p: METHODS[method](jnp.diag(a)[None], p, 1e-7, False)[0][0]
    slope = jax.jit(jax.jacfwd(roots))(p)
    np.testing.assert_allclose(slope, np.diag(a ** (-1 / p) * np.log(a) / p**2), 1e-4, 1e-6)


@pytest.mark.parametrize("method", ALL)
def test_a_second_derivative_is_refused(method):
    f = lambda s: jnp.sum(METHODS[method](s * jnp.eye(3)[None], 4, 1e-6, True)[0])
    with pytest.raises(NotImplementedError, match="shampoo has first derivatives only"):
        jax.eval_shape(jax.hessian(f), 16.0)


# Precision: on accelerators anything less would compute in bfloat16.


def products(jaxpr):
    """The precisions of all matrix products, in branches and loops as well."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation.params["precision"]
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(inner):
                yield from products(getattr(inner, "jaxpr", inner))


def is_jaxpr(x):
    return isinstance(x, jax.extend.core.Jaxpr | jax.extend.core.ClosedJaxpr)


def assert_all_highest(f, *args, least):
    found = list(products(jax.make_jaxpr(f)(*args).jaxpr))
    highest = jax.lax.Precision.HIGHEST
    assert len(found) >= least and set(found) == {(highest, highest)}


@pytest.mark.parametrize(
    ("method", "least"),
    [("eigh", 4), ("pseudo_inverse", 4), ("newton", 6), ("auto", 10), ("two_iterations", 10)],
)
@pytest.mark.parametrize("relative", [False, True])
def test_products_in_full_precision(method, least, relative):
    least -= 2 * (not relative and method not in BY_EIGENVALUES)  # power iteration
    f = lambda a: METHODS[method](a, 6, 1e-6, relative)
    assert_all_highest(f, jnp.zeros((2, 3, 3)), least=least)


OPTIMIZERS = {
    "shampoo": optzoo.shampoo(),
    "by newton": optzoo.shampoo(root="newton", preconditioner_interval=3, statistics_interval=2),
    "blocks": optzoo.shampoo(
        block_size=2, stagger=True, preconditioner_interval=3, merge_dims=True
    ),
    "blocked_shampoo": optzoo.blocked_shampoo(block_size=2, weight_decay=0.1, momentum=0.9),
    "rows": optzoo.shampoo(max_matrix_size=4, grafting="adam"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_products_of_an_update_in_full_precision(name):
    tx, x = OPTIMIZERS[name], {"a": jnp.zeros((5, 4)), "b": jnp.zeros((3, 2, 4))}
    x = jax.tree.map(lambda x: x.astype(jnp.bfloat16), x)
    rows = SparseRows(jnp.array([1, 1]), jnp.ones((2, 4), jnp.bfloat16), 5)
    grads = {**x, "a": rows} if name == "rows" else x
    # Of 4 or 5 dimensions each: the second moments and the product with their root.
    assert_all_highest(tx.update, grads, tx.init(x), x, least=8)
