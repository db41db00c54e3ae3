"""A problem small enough for many compiled programs: a two-layer classifier."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import muloco_jax as mj

K, H, B, VOCAB = 4, 3, 8, 16
# The programs of the tests run for milliseconds: compiling them is what takes time.
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
NESTEROV = optax.sgd(0.7, momentum=0.6, nesterov=True)
INNER = {"muon": mj.muon(0.02, weight_decay=0.1), "adamw": optax.adamw(0.01)}
# Over the mesh axis "fsdp", where a test has one.
SPECS = {"embed": P("fsdp"), "up": P(None, "fsdp"), "down": P("fsdp"), "bias": P()}


def params(dtype=jnp.float64):
    shapes = {"embed": (VOCAB, 8), "up": (8, 12), "down": (12, VOCAB), "bias": (VOCAB,)}
    random = np.random.default_rng(0)
    return {
        name: jnp.asarray(0.3 * random.standard_normal(shape), dtype)
        for name, shape in shapes.items()
    }


def loss(params, batch):
    hidden = jax.nn.gelu(params["embed"][batch["x"]] @ params["up"])
    logits = hidden @ params["down"] + params["bias"][None]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def batches(seed, k=K, n=H):
    x = np.random.default_rng(seed).integers(0, VOCAB, (k, n, B))
    return {"x": x, "y": (3 * x + 1) % VOCAB}


def mesh(**shape):
    return jax.make_mesh(
        tuple(shape.values()),
        tuple(shape),
        (AxisType.Auto,) * len(shape),
        devices=jax.devices()[: int(np.prod(list(shape.values())))],
    )


def place(batch, mesh):
    """Puts batches `[K, n, B]` on the mesh, spread over its data axes."""
    inside = tuple(axis for axis in ("data", "fsdp") if axis in mesh.shape)
    return jax.device_put(
        batch, NamedSharding(mesh, P("workers", None, inside or None))
    )


@functools.cache
def algorithm(
    inner="muon",
    num=K,
    shape=(("workers", 1),),
    sequential=True,
    sync_every=H,
    outer=NESTEROV,
):
    """An algorithm and its compiled round, kept for the session."""
    mesh_ = mesh(**dict(shape))
    specs = SPECS if "fsdp" in mesh_.shape else None
    if inner == "muon":  # Devices of a worker share the work.
        axes = [axis for axis in mesh_.shape if axis != "workers"]
        inner = mj.muon(0.02, weight_decay=0.1, ns_axes=axes, specs=specs)
    algo = mj.diloco(
        loss,
        INNER[inner] if isinstance(inner, str) else inner,
        outer,
        workers=mj.Workers(num, mesh_, sequential),
        sync_every=sync_every,
        specs=specs,
    )
    return algo, jax.jit(algo.round, donate_argnums=0, compiler_options=FAST), mesh_


def train(batches_of_round, rounds=2, start=None, **variant):
    """The state after some rounds, and the metrics of the last."""
    algo, round_, mesh_ = algorithm(**variant)
    state, metrics = algo.init(params() if start is None else start), {}
    for r in range(rounds):
        state, metrics = round_(state, place(batches_of_round(r), mesh_))
    return state, metrics


# numpy's default relative tolerance of 1e-7 would hide float32 inside of float64.
assert_near = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-12)


def assert_close(actual, expected, atol=1e-12):
    """Leaves agree, by name, to an absolute tolerance."""

    def leaf(path, a, e):
        np.testing.assert_allclose(
            np.asarray(a, np.float64),
            np.asarray(e, np.float64),
            rtol=0,
            atol=atol,
            err_msg=jax.tree_util.keystr(path),
        )

    jax.tree_util.tree_map_with_path(leaf, actual, expected)
