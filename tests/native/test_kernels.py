"""Which kernel computes a native call, and what happens where there is none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optzoo
from optzoo.native import cpu_kernels, tpu_kernels
from optzoo.native.groups import LeafGroup, Unsupported

X, GRADIENT = jnp.arange(6.0), jnp.ones(6)


class Kernel:
    """A kernel that a contributor adds: XLA's operations, and one more."""

    divides = False

    def __init__(self, kind=LeafGroup, reason=None):
        self.kind, self.reason = kind, reason

    def match(self, group):
        return isinstance(group, self.kind)

    def lower(self, call):
        if self.reason is not None:
            raise Unsupported(self.reason)
        return lambda *args: tuple(x + 100 for x in call.reference(*args))


def lowered(platform, *, required=False):
    tx = optzoo.momentum(0.5, 0.9)
    step = optzoo.native_step(tx, required=required)
    traced = jax.jit(lambda x, g: step(x, tx.init(x), g)[0]).trace(X, GRADIENT)
    return traced.lower(lowering_platforms=(platform,))


def use(monkeypatch, room, *kernels):
    monkeypatch.setattr(room, "KERNELS", (*kernels, *room.KERNELS))


def test_the_first_that_matches_is_used(monkeypatch):
    plain = np.asarray(lowered("cpu").compile()(X, GRADIENT))
    np.testing.assert_array_equal(plain, X - 0.5)
    use(monkeypatch, cpu_kernels, Kernel(kind=int), Kernel(), Kernel(reason="it is the second"))
    np.testing.assert_array_equal(lowered("cpu", required=True).compile()(X, GRADIENT), plain + 100)


@pytest.mark.parametrize(("platform", "room"), [("cpu", cpu_kernels), ("tpu", tpu_kernels)])
def test_without_one_xla_computes_it_or_the_reason_is_raised(monkeypatch, platform, room):
    use(monkeypatch, room, Kernel(reason="this kernel has no time"))
    assert "custom_call" not in lowered(platform).as_text()
    error = (
        r"native code is required, but XLA updates 2 arrays: 'params': this kernel has no time; "
        "'state 0/slots/momentum': this kernel has no time$"
    )
    with pytest.raises(RuntimeError, match=error):
        lowered(platform, required=True)


class Float32Kernel(Kernel):
    """A kernel that computes arrays of float32 alone."""

    def lower(self, call):
        if (dtype := call.outs[0].dtype) != "float32":
            raise Unsupported(f"this kernel does not compute in {dtype}")
        return super().lower(call)


def test_the_error_has_all_calls_without_a_kernel(monkeypatch):
    use(monkeypatch, tpu_kernels, Float32Kernel())

    def lower(tx, params):
        step = optzoo.native_step(tx, required=True)
        traced = jax.jit(lambda params: step(params, tx.init(params), params)).trace(params)
        return traced.lower(lowering_platforms=("tpu",))

    tx, no = optzoo.gradient_descent(0.5), "': this kernel does not compute in "
    params = {"a": X.astype("bfloat16"), "b": X, "c": X.astype("float16"), "d": GRADIENT}
    error = f"XLA updates 2 arrays: 'params a{no}bfloat16; 'params c{no}float16$"
    with pytest.raises(RuntimeError, match=error):
        lower(tx, params)
    # In a branch the arrays have other names.
    with pytest.raises(RuntimeError, match=rf"XLA updates 2 arrays: 'bfloat16\[6\]{no}bfloat16; "):
        lower(optzoo.accumulate(tx, 2), params)
    lower(tx, {name: params[name] for name in "bd"})


def test_arrays_that_no_kernel_matches_are_left_to_xla(monkeypatch):
    monkeypatch.setattr(tpu_kernels, "KERNELS", ())
    assert "custom_call" not in lowered("tpu", required=True).as_text()
