"""Optimizers that others published for TensorFlow 1, written anew from papers and names of slots.

For ``make_records.py`` and ``make_checkpoints.py``, with TensorFlow 1.15.5. The originals compute in
float32; these take the dtype of the variables, so that a run in float64 shows what rounding costs.
"""

import re

import tensorflow as tf


def _as(dtype, value):
    """A number or a tensor in a dtype; ``tf.cast`` alone would round a number to float32."""
    return tf.cast(value, dtype) if tf.is_tensor(value) else tf.constant(value, dtype)


class _Published(tf.train.Optimizer):
    """An optimizer whose slots are variables by names of their own."""

    def __init__(self, name, between, **settings):
        super().__init__(False, name)
        self.between = between  # the name of a parameter and that of a slot
        self.settings = settings
        self.kept = {}  # slot, variable: where it is

    def slot(self, parameter, name, shape=None):
        """A variable of zeros beside a parameter, by default of its shape."""
        shape = parameter.shape.as_list() if shape is None else shape
        if self.between is None:  # as TensorFlow does: w/Adafactor, w/Adafactor_1
            zeros = tf.zeros(shape, parameter.dtype.base_dtype)
            found = self._get_or_make_slot(parameter, zeros, name, self._name)
        else:
            found = tf.get_variable(
                parameter.op.name + self.between + name,
                shape,
                parameter.dtype.base_dtype,
                tf.zeros_initializer(),
                trainable=False,
            )
        self.kept[name, parameter.op.name] = found
        return found

    def apply_gradients(self, pairs, global_step=None, name=None):
        """One step, after which the global step is one more."""
        pairs = [(tf.convert_to_tensor(g), x) for g, x in pairs]
        changes = []
        for gradient, parameter in pairs:
            step = tf.cast(global_step, gradient.dtype)
            # The convention of all of them: the new parameter is the old one less a step.
            down, new = self.change(gradient, parameter, step)
            changes += [(parameter, parameter - down), *new]
        values = [tf.identity(value) for _, value in changes]
        with tf.control_dependencies(values):  # all are read before one is written
            writes = [v.assign(value) for (v, _), value in zip(changes, values)]
            return tf.group(*writes, global_step.assign_add(1), name=name)


def _means(settings, gradient, m, v):
    """The means of Adam after one more gradient."""
    keep_m, keep_v = settings["beta_1"], settings["beta_2"]
    new_m = keep_m * m + (1.0 - keep_m) * gradient
    new_v = keep_v * v + (1.0 - keep_v) * gradient * gradient
    return new_m, new_v


def _decay(settings, parameter):
    """The share of a parameter in its direction."""
    excluded = settings["exclude_from_weight_decay"] or ()
    if any(re.search(pattern, parameter.op.name) for pattern in excluded):
        return 0.0
    return settings["weight_decay_rate"] * parameter


class AdamWeightDecayOptimizer(_Published):
    """Of BERT."""

    def __init__(
        self,
        learning_rate,
        weight_decay_rate=0.0,
        beta_1=0.9,
        beta_2=0.999,
        epsilon=1e-6,
        exclude_from_weight_decay=None,
        name="AdamWeightDecayOptimizer",
    ):
        super().__init__(
            name,
            "/",
            learning_rate=learning_rate,
            weight_decay_rate=weight_decay_rate,
            beta_1=beta_1,
            beta_2=beta_2,
            epsilon=epsilon,
            exclude_from_weight_decay=exclude_from_weight_decay,
        )

    def direction(self, m, v, step):
        """Without bias correction."""
        return m / (tf.sqrt(v) + self.settings["epsilon"])

    def scale(self, parameter, direction):
        """The length of a step."""
        return _as(direction.dtype, self.settings["learning_rate"])

    def change(self, gradient, parameter, step):
        """How far down a parameter goes, and the new slots."""
        m, v = self.slot(parameter, "adam_m"), self.slot(parameter, "adam_v")
        new_m, new_v = _means(self.settings, gradient, m, v)
        direction = self.direction(new_m, new_v, step) + _decay(self.settings, parameter)
        return self.scale(parameter, direction) * direction, [(m, new_m), (v, new_v)]


class LAMBOptimizer(AdamWeightDecayOptimizer):
    """Of NVIDIA's BERT, whose global step is one more before the update."""

    def __init__(self, learning_rate, name="LAMBOptimizer", **settings):
        super().__init__(learning_rate, name=name, **settings)

    def direction(self, m, v, step):
        """With bias correction, whose powers are computed anew in each step."""
        t = step + 1.0
        m = m / (1.0 - self.settings["beta_1"] ** t)
        v = v / (1.0 - self.settings["beta_2"] ** t)
        return super().direction(m, v, step)

    def scale(self, parameter, direction):
        """As long as the parameter, unless one of the norms is zero."""
        of_parameter, of_direction = tf.norm(parameter), tf.norm(direction)
        both = tf.logical_and(of_parameter > 0.0, of_direction > 0.0)
        ratio = tf.where(both, of_parameter / of_direction, tf.ones_like(of_parameter))
        return ratio * super().scale(parameter, direction)


class AdafactorOptimizer(_Published):
    """Of tensor2tensor; of Mesh TensorFlow if it has a ``min_dim_size_to_factor``."""

    def __init__(
        self,
        multiply_by_parameter_scale=True,
        learning_rate=None,
        decay_rate=None,
        beta1=0.0,
        clipping_threshold=1.0,
        factored=True,
        epsilon1=1e-30,
        epsilon2=1e-3,
        min_dim_size_to_factor=None,
        name="Adafactor",
    ):
        super().__init__(
            name, None if min_dim_size_to_factor is None else "_slot_"
        )
        self.by_size = multiply_by_parameter_scale
        self.learning_rate, self.decay_rate = learning_rate, decay_rate
        self.beta1, self.threshold, self.factored = beta1, clipping_threshold, factored
        self.epsilons, self.min_size = (epsilon1, epsilon2), min_dim_size_to_factor

    def axes(self, shape):
        """The two axes that are averaged away, the one of ``vr`` first."""
        if not self.factored or len(shape) < 2:
            return None
        if self.min_size is None:
            return len(shape) - 1, len(shape) - 2
        longest = sorted(range(len(shape)), key=lambda axis: (-shape[axis], axis))[:2]
        return tuple(longest) if shape[longest[1]] >= self.min_size else None

    def rates(self, dtype):
        """The learning rate and the decay of the squares, which the original has in float32."""
        t = tf.cast(tf.train.get_global_step(), tf.float32) + 1.0
        rate, decay = self.learning_rate, self.decay_rate
        if rate is None:
            rate = tf.minimum(tf.rsqrt(t), 0.01) * (1.0 if self.by_size else 0.05)
        if decay is None:
            decay = 1.0 - tf.pow(t, -0.8)
        return _as(dtype, rate), _as(dtype, decay)

    def change(self, gradient, parameter, step):
        """How far down a parameter goes, and the new slots."""
        rate, keep = self.rates(gradient.dtype)
        shape = parameter.shape.as_list()
        m = self.slot(parameter, "m") if self.beta1 else None
        squares, axes, new = tf.square(gradient) + self.epsilons[0], self.axes(shape), []
        if axes is None:
            v = self.slot(parameter, "v")
            squares = keep * v + (1.0 - keep) * squares
            new.append((v, squares))
            scaled = gradient * tf.rsqrt(squares)
        else:
            scaled = gradient
            for name, axis, other in (("vr", axes[0], axes[1]), ("vc", axes[1], axes[0])):
                slot = self.slot(parameter, name, [n for a, n in enumerate(shape) if a != axis])
                mean = keep * slot + (1.0 - keep) * tf.reduce_mean(squares, axis)
                new.append((slot, mean))
                mean = tf.expand_dims(mean, axis)
                if name == "vr":
                    mean /= tf.reduce_mean(mean, other, keepdims=True)
                scaled *= tf.rsqrt(mean)
        root = lambda a: tf.sqrt(tf.reduce_mean(tf.square(a)))
        if self.threshold is not None:
            scaled /= tf.maximum(tf.cast(1.0, gradient.dtype), root(scaled) / self.threshold)
        if self.by_size:
            rate *= tf.maximum(root(parameter), self.epsilons[1])
        down = rate * scaled
        if m is not None:
            down = self.beta1 * m + (1.0 - self.beta1) * down
            new.append((m, down))
        return down, new
