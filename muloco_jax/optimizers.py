"""Muon on the hidden matrices of a model and another optimizer on the rest.

This module hides how the two sides share a tree.

References:
    Jordan et al., `Muon <https://kellerjordan.github.io/posts/muon>`_, 2024
    Liu et al., `Muon is Scalable for LLM Training <https://arxiv.org/abs/2502.16982>`_,
    2025 (Moonlight)
    Therien et al., `MuLoCo <https://arxiv.org/abs/2505.23725>`_, 2025
"""

import functools
import inspect
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.typing import DTypeLike

from muloco_jax import coefficients, newton_schulz, routing, tree
from muloco_jax import momentum as momenta

PyTree = Any
Mask = PyTree | Callable[[PyTree], PyTree] | None


def muon(
    learning_rate: optax.ScalarOrSchedule,
    ns_coeffs: coefficients.CoefficientsLike = coefficients.DION,
    ns_steps: int | None = None,
    beta: optax.ScalarOrSchedule = 0.9,
    eps: float = 0.0,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Mask = None,
    mu_dtype: DTypeLike | None = None,
    *,
    muon_weight_dimension_numbers: routing.Numbers = routing.hidden_matrices,
    scale: momenta.Factor = momenta.spectral,
    consistent_rms: float | None = None,
    nesterov: bool = False,
    momentum: momenta.Momentum = "heavy_ball",
    adaptive: bool = False,
    update_norm: bool = False,
    preconditioning: newton_schulz.Preconditioning = "frobenius",
    adam_b1: float = 0.9,
    adam_b2: float = 0.99,
    adam_eps: float = 1e-8,
    adam_eps_root: float = 0.0,
    adam_nesterov: bool = False,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_weight_decay: optax.ScalarOrSchedule | None = None,
    fallback: optax.GradientTransformation | None = None,
    ns_dtype: DTypeLike | None = None,
    ns_precision: jax.lax.PrecisionLike = newton_schulz.HIGHEST,
    ns_method: newton_schulz.Method = "auto",
    ns_axes: str | Sequence[str] = (),
    specs: PyTree | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Muon on the hidden matrices and AdamW on everything else.

    The defaults are the MuLoCo paper's (but `eps`, which its code has at 1e-8):
    heavy-ball momentum, the coefficients of Dion, the factor `sqrt(fan_out / fan_in)`,
    and one learning rate and one decoupled weight decay (scaled by the learning rate
    alone) for both sides. Other published settings are `MOONLIGHT`, `JORDAN_2024` and
    `OPTAX`, as in `muon(0.02, **MOONLIGHT)`.

    `optax.inject_hyperparams` takes every callable for a schedule and makes an array of
    every number; `static_args=STATIC_ARGS` says what is neither.

    >>> import jax.numpy as jnp, optax
    >>> params = {"kernel": jnp.eye(2), "bias": jnp.zeros(2)}
    >>> optimizer = muon(0.1)
    >>> state = optimizer.init(params)
    >>> updates, state = optimizer.update(params, state, params)

    Args:
        learning_rate: of both sides, a float or a schedule over updates.
        ns_coeffs: rows of the Newton-Schulz iteration, see `orthogonalize`.
        ns_steps: None, or the number of rows, which repeats or cuts them only if all
            are equal, as those of `JORDAN`.
        beta: decay of Muon's momentum, in [0, 1), or a schedule.
        eps: added to the norm before the iteration.
        weight_decay: decoupled weight decay of both sides, or a schedule.
        weight_decay_mask: which parameters decay, see `optax.adamw`; None: all.
        mu_dtype: of both sides' first moment; by default that of the parameters.
        muon_weight_dimension_numbers: what Muon gets: `hidden_matrices`, `by_ndim`,
            `rules`, any function of the parameters or a tree, of
            `MuonDimensionNumbers`, `SplitDimensionNumbers` or None (the other side).
        scale: Muon's factor of `(fan_in, fan_out)`.
        consistent_rms: as in optax, `consistent_rms * sqrt(max(fan_in, fan_out))`
            instead of `scale`.
        nesterov: whether Muon's momentum looks ahead by one gradient.
        momentum: "heavy_ball", `M <- beta M + G`; "ema", `M <- beta M + (1 - beta) G`;
            or "debiased", the same divided by `1 - beta^t` at step t, as in optax.
        adaptive: whether to multiply by the dual norm, `<M, orthogonalize(M)>`: updates
            then grow with gradients, and need another learning rate (Bernstein et al.,
            2024).
        update_norm: whether to divide by the RMS of what the iteration gives, so that
            `scale` is exactly that of updates (Moonlight, section 2.2); not together
            with `adaptive`.
        preconditioning: see `orthogonalize`.
        adam_b1: decay of Adam's first moment.
        adam_b2: decay of Adam's second moment.
        adam_eps: added to the root of Adam's second moment.
        adam_eps_root: added to Adam's second moment.
        adam_nesterov: whether the other side is NAdam, as `nesterov` makes it in optax.
        adam_learning_rate: of the Adam side; None: `learning_rate`.
        adam_weight_decay: of the Adam side; None: `weight_decay`.
        fallback: optimizer of what Muon does not get, instead of AdamW and all that
            the arguments above say of it.
        ns_dtype: of the iteration, see `orthogonalize`.
        ns_precision: of its products.
        ns_method: of the iteration.
        ns_axes: mesh axes inside a worker along which parameters are replicated and
            devices shall share the work, by one all-gather per shape.
        specs: `PartitionSpec` or `NamedSharding` per parameter (a tree like them, or
            one for a subtree): matrices that are sharded are each brought together on
            one device, by an all-to-all per shape and one back. Not needed on mesh axes
            of type Explicit. Without, XLA communicates within the iteration.

    Raises:
        ValueError: at construction for a number out of range, another number of
            `ns_steps` than of rows, or an unknown name; at `init` for a parameter that
            cannot be routed or if none is for Muon; at `update` for gradients or a
            state of other parameters, or a mesh that lacks an axis.
    """
    if learning_rate is None:
        raise ValueError(
            "learning_rate must be a number or a schedule, got None; for directions "
            "alone use scale_by_muon()"
        )
    if not (fallback is None or hasattr(fallback, "update")):
        raise ValueError(
            f"fallback must be an optax.GradientTransformation, got {fallback!r}"
        )
    if fallback is not None and (adam_learning_rate, adam_weight_decay) != (None, None):
        raise ValueError(
            "fallback replaces AdamW, with a learning rate and a decay of its own: "
            "leave out adam_learning_rate and adam_weight_decay"
        )
    if adam_learning_rate is None:
        adam_learning_rate = learning_rate
    decays = _decays(weight_decay, adam_weight_decay)
    for name, value, below in (
        ("learning_rate", learning_rate, math.inf),
        ("adam_learning_rate", adam_learning_rate, math.inf),
        ("weight_decay", weight_decay, math.inf),
        ("adam_weight_decay", decays["adam"], math.inf),
        ("adam_b1", adam_b1, 1),
        ("adam_b2", adam_b2, 1),
        ("adam_eps", adam_eps, math.inf),
        ("adam_eps_root", adam_eps_root, math.inf),
    ):
        if not (callable(value) and name in _DYNAMIC):
            momenta.check_range(name, value, below)
    momenta.check_flags(adam_nesterov=adam_nesterov)
    matrices = functools.partial(
        momenta.scale_by_muon,
        beta,
        nesterov,
        ns_coeffs,
        _factor(scale, consistent_rms),
        ns_steps=ns_steps,
        eps=eps,
        mu_dtype=mu_dtype,
        momentum=momentum,
        adaptive=adaptive,
        update_norm=update_norm,
        preconditioning=preconditioning,
        ns_dtype=ns_dtype,
        ns_precision=ns_precision,
        ns_method=ns_method,
        ns_axes=ns_axes,
    )
    matrices()  # To refuse bad values now.
    adam = optax.scale_by_adam(
        adam_b1, adam_b2, adam_eps, adam_eps_root, mu_dtype, nesterov=adam_nesterov
    )

    def optimizer(params):
        """For a tree of parameters, which says what goes where."""
        entries = routing.resolve(muon_weight_dimension_numbers, params)
        numbers = tree.by_name(entries, params)
        mask = _mask(weight_decay_mask, params)
        side = lambda direction, label, rate: optax.chain(
            direction,
            _decay(decays[label], mask),
            optax.scale_by_learning_rate(rate),
        )
        muon_side = matrices(weight_dimension_numbers=numbers, specs=specs)
        sides: dict[Hashable, optax.GradientTransformation] = {
            "muon": side(muon_side, "muon", learning_rate),
            "adam": fallback or side(adam, "adam", adam_learning_rate),
        }
        labels = {name: _side(entry) for name, entry in entries.items()}
        return optax.partition(sides, tree.by_name(labels, params))

    def init(params):
        if (leaves := routing.route(muon_weight_dimension_numbers, params)) and not any(
            leaf.layout for leaf in leaves
        ):
            raise ValueError(
                f"no parameter is for Muon; say which are with "
                f"muon_weight_dimension_numbers, as mj.by_ndim or mj.rules (under "
                f"optax.inject_hyperparams with static_args=mj.STATIC_ARGS), of "
                f"{tree.listed([leaf.path for leaf in leaves])}"
            )
        return optimizer(params).init(params)

    def update(updates, state, params=None, **extra):
        if params is not None:
            tree.check_like(updates, params, "parameters")
        elif not all(map(_is_zero, decays.values())):
            raise ValueError(
                "weight_decay needs the parameters: update(grads, state, params)"
            )
        like = updates if params is None else params
        updates, new_state = optimizer(like).update(updates, state, params, **extra)
        same = lambda new, old: jax.tree.map(_as, new, old)
        return same(updates, like), same(new_state, state)

    return optax.GradientTransformationExtraArgs(init, update)


_DYNAMIC = ("learning_rate", "adam_learning_rate", "weight_decay", "adam_weight_decay")
# For `optax.inject_hyperparams(muon, static_args=STATIC_ARGS)`: functions, names, and
# numbers that a cast to the dtype of the parameters would spoil, as beta, which may be
# a schedule all the same.
STATIC_ARGS = tuple(n for n in inspect.signature(muon).parameters if n not in _DYNAMIC)


class Route(NamedTuple):
    """What `muon` does to a parameter.

    Attributes:
        path: of the parameter in the tree.
        shape: of the parameter.
        side: "muon" or "adam", which may be the `fallback`.
        fan_in: of the matrix that Muon sees; None for Adam.
        fan_out: of the matrix that Muon sees, or of each where there are splits; None
            for Adam.
        factor: of the learning rate, or one per split; 1 for Adam.
        decay: weight decay, to be multiplied by the learning rate alone; of a schedule
            its first value; nan where a `fallback` has one of its own, or none.
    """

    path: str
    shape: tuple[int, ...]
    side: str
    fan_in: int | None
    fan_out: int | tuple[int, ...] | None
    factor: float | tuple[float, ...]
    decay: float


def routing_table(
    params: PyTree,
    *,
    scale: momenta.Factor = momenta.spectral,
    consistent_rms: float | None = None,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Mask = None,
    adam_weight_decay: optax.ScalarOrSchedule | None = None,
    fallback: optax.GradientTransformation | None = None,
    muon_weight_dimension_numbers: routing.Numbers = routing.hidden_matrices,
    **others: Any,
) -> list[Route]:
    """What `muon` with the same keywords would do to each parameter.

    >>> import jax.numpy as jnp
    >>> params = {"embed": jnp.ones((9, 4)), "up": jnp.ones((4, 16))}
    >>> for route in routing_table(params, weight_decay=0.1):
    ...     print(*route)
    embed (9, 4) adam None None 1.0 0.1
    up (4, 16) muon 4 16 2.0 0.1

    Args:
        params: arrays or their shapes.
        scale: see `muon`, as all that follow.
        consistent_rms: instead of `scale`.
        weight_decay: of both sides.
        weight_decay_mask: which parameters decay; None: all.
        adam_weight_decay: of the Adam side; None: `weight_decay`.
        fallback: instead of AdamW.
        muon_weight_dimension_numbers: what Muon gets.
        **others: all other arguments of `muon`, as a preset has them.

    Returns:
        One row per parameter, in the order of the tree.

    Raises:
        TypeError: for what is no argument of `muon`.
        ValueError: for a parameter that cannot be routed, or a decay out of range.
    """
    if unknown := others.keys() - inspect.signature(muon).parameters.keys():
        raise TypeError(f"muon has no arguments {', '.join(sorted(unknown))}")
    decays = _decays(weight_decay, adam_weight_decay)
    for side, decay in decays.items():
        decays[side] = decay(0) if callable(decay) else decay
        momenta.check_range(f"weight decay of the {side} side", decays[side])
    if fallback is not None:
        decays["adam"] = math.nan
    mask = _mask(weight_decay_mask, params)
    mask = jax.tree.map(lambda _: True, params) if mask is None else mask
    scale = _factor(scale, consistent_rms)
    table = []
    leaves = routing.route(muon_weight_dimension_numbers, params)
    for leaf, may_decay in zip(leaves, jax.tree.leaves(mask), strict=True):
        side = _side(leaf.layout)
        fan_in, fan_out, factor = None, None, 1.0
        if leaf.layout is not None:
            fans = leaf.layout.fans(leaf.x.shape)
            factors = tuple(momenta.factor(scale, *pair) for pair in fans)
            fan_in, outs = fans[0][0], tuple(out for _, out in fans)
            fan_out, factor = (
                (outs, factors) if len(fans) > 1 else (outs[0], factors[0])
            )
        table.append(
            Route(
                path=leaf.path,
                shape=leaf.x.shape,
                side=side,
                fan_in=fan_in,
                fan_out=fan_out,
                factor=factor,
                decay=float(decays[side]) if may_decay else 0.0,
            )
        )
    return table


def _side(routed):
    return "adam" if routed is None else "muon"


def _factor(scale, consistent_rms):
    if consistent_rms is None:
        return scale
    momenta.check_range("consistent_rms", consistent_rms)
    return lambda fan_in, fan_out: consistent_rms * math.sqrt(max(fan_in, fan_out))


def _decays(weight_decay, adam_weight_decay) -> dict[str, Any]:
    adam = weight_decay if adam_weight_decay is None else adam_weight_decay
    return {"muon": weight_decay, "adam": adam}


def _decay(weight_decay, mask):
    if _is_zero(weight_decay):  # Which then needs no parameters.
        return optax.identity()
    return optax.add_decayed_weights(weight_decay, mask)


def _is_zero(x):
    return isinstance(x, int | float) and x == 0


def _mask(mask, params):
    """Which parameters decay, a tree like them; None for all."""
    if mask is None:
        return None
    if callable(mask):
        mask = mask(params)
    if not tree.is_leaf(params) and tree.is_leaf(mask):
        raise ValueError(
            f"weight_decay_mask must be a tree of booleans, or a function of the "
            f"parameters that returns one, got {mask!r}; under "
            f"optax.inject_hyperparams pass static_args=mj.STATIC_ARGS"
        )
    entries = tree.match(mask, params, lambda x: False, "weight_decay_mask")
    return tree.by_name(entries, params)


def _as(new, old):
    """With the dtype of what it replaces, without which loops do not type-check."""
    return new.astype(old.dtype) if hasattr(old, "dtype") else new
