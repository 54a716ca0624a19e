"""The table of the primitives of JAX, with their effect on the axes of operands.

They are identified by name, since not every version of JAX has all of them.
"""

import enum
from typing import Any

from ..core.marks import mark_of


class Kind(enum.Enum):
    """The effect of a primitive on the axes of its operands."""

    SAME = "each result equals the operand at its position"
    ELEMENTWISE = "each element is computed from the elements at the same position of the operands"
    MOVE = "the elements of one operand in a shape with other axes of length 1, or repeated"
    REDUCE = "some axes are lost"
    AXES = "one axis may be treated unlike the others; if it is lost, the result shows it"
    MAKE = "elements are computed from a shape, their places or a random key"
    GATHER = "parts of the first operand, by indices"
    SCATTER = "the first operand with other parts, by indices"
    MIX = "an element may depend on others along any axis"
    COLLECTIVE = "an element depends on those of several devices"
    CALL = "runs its first body once"
    BRANCH = "runs one of its bodies"
    LOOP = "runs its body any number of times"
    MAP = "runs its body on a part of each operand"


_NAMES = {
    Kind.SAME: """
        after copy copy_p device_put layout_constraint name optimization_barrier optzoo_placed_as
        pcast pvary reshard sharding_constraint stop_gradient with_memory_space_constraint
    """,
    Kind.ELEMENTWISE: """
        abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil
        clamp clz complex conj convert_element_type cos cosh digamma div eq eq_to erf erf_inv erfc
        exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le le_to
        lgamma log log1p log2 logistic lt lt_to max min mul mulhi ne neg nextafter not
        one_minus_square or polygamma polynomial population_count pow real reciprocal
        reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left
        shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh xor zeta
    """,
    Kind.MOVE: "broadcast_in_dim expand_dims reshape squeeze",
    Kind.REDUCE: """
        argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor
    """,
    Kind.AXES: """
        bitcast_convert_type concatenate dot_general dynamic_slice random_unwrap random_wrap slice
        split stack tile transpose unstack
    """,
    Kind.MAKE: """
        after_all axis_index create_token empty empty2 iota iota_2x32_shape platform_index
        random_bits rng_uniform threefry2x32
    """,
    Kind.GATHER: "gather",
    Kind.SCATTER: """
        scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub scatter_add scatter_max
        scatter_min scatter_mul scatter_sub
    """,
    Kind.MIX: """
        addupdate approx_top_k cholesky conv_general_dilated cumlogsumexp cummax cummin cumprod
        cumsum custom_lin custom_linear_solve debug_callback debug_print dynamic_update_slice eig
        eigh ffi_call fft get hessenberg householder_product io_callback lu pad pallas_call
        pure_callback qr random_fold_in random_gamma random_seed random_split reduce reduce_window
        reduce_window_max reduce_window_min reduce_window_sum rev rng_bit_generator schur
        select_and_gather_add select_and_scatter select_and_scatter_add sort svd swap top_k
        triangular_solve tridiagonal tridiagonal_solve
    """,
    Kind.COLLECTIVE: """
        all_gather all_gather_invariant all_to_all pmax pmin ppermute psum psum_invariant
        psum_scatter ragged_all_to_all reduce_scatter
    """,
    Kind.CALL: """
        call checkpoint closed_call core_call custom_jvp_call custom_vjp_call
        eval_jaxpr jit optzoo_custom_jvp remat remat2
    """,
    Kind.BRANCH: "cond",
    Kind.LOOP: "scan while",
    Kind.MAP: "shard_map xla_pmap",
}
KINDS = {name: kind for kind, names in _NAMES.items() for name in names.split()}

CALLS = {Kind.CALL, Kind.BRANCH, Kind.LOOP}  # their bodies have the shapes of their operands
# Of the calls, those that are no more than their bodies.
PLAIN_CALLS = {"closed_call", "core_call", "jit"}
# The body is the function itself.
WITH_DERIVATIVES = {"custom_jvp_call", "custom_vjp_call", "optzoo_custom_jvp"}

# The public functions of JAX that make an equation.
_FUNCTIONS = {
    "jit": "jax.jit",
    "checkpoint": "jax.checkpoint",
    "remat": "jax.checkpoint",
    "remat2": "jax.checkpoint",
    "scan": "jax.lax.scan",
    "while": "jax.lax.while_loop",
    "cond": "jax.lax.cond",
    "convert_element_type": "jax.lax.convert_element_type",
    "custom_jvp_call": "jax.custom_jvp",
    "custom_vjp_call": "jax.custom_vjp",
    "shard_map": "jax.shard_map",
    "xla_pmap": "jax.pmap",
    "stop_gradient": "jax.lax.stop_gradient",
}


def name_of(eqn: Any) -> str:
    """The name of the primitive of an equation, or of its mark (``core/marks.py``)."""
    return mark_of(eqn) or eqn.primitive.name


def function_of(name: str) -> str:
    """The public JAX function of a primitive, or the name of the primitive."""
    return _FUNCTIONS.get(name, name)
