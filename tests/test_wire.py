"""What travels between workers, read from compiled programs."""

import functools

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from problem import FAST, NESTEROV, mesh

import muloco_jax as mj
from muloco_jax import model, placement

K, H, B, L = 4, 2, 4, 8
CONFIG = model.ModelConfig(
    vocab_size=16, num_layers=2, width=16, head_dim=8, num_kv_heads=2, mlp_ratio=2.5,
    end_of_text=0, remat=True, loss_chunk=4,
)  # fmt: skip
ONLY_WORKERS = (("workers", 4),)
INSIDE = ((("workers", 2), ("data", 2)), (("workers", 2), ("fsdp", 2), ("tensor", 2)))


pytestmark = pytest.mark.slow  # Four programs are compiled per mesh.


class Programs:
    """The compiled parts of the algorithm on one mesh, with the decoder in float32."""

    def __init__(self, shape, sequential):
        self.mesh = mesh(**dict(shape))
        workers = mj.Workers(K, self.mesh, sequential)
        self.reduce = mj.reducer(mj.all_reduce_mean(workers))
        specs = model.partition_specs(CONFIG, self.mesh)
        muon = mj.muon(
            0.02,
            ns_coeffs=mj.DION.rows[:2],  # Two rows compile faster than five.
            ns_axes=[axis for axis in self.mesh.shape if axis != "workers"],
            specs=specs,
        )
        algo = mj.diloco(
            model.next_token_loss(CONFIG),
            optax.chain(optax.clip_by_global_norm(1.0), muon),
            NESTEROV,
            workers=workers,
            sync_every=H,
            reduce=self.reduce,
            specs=specs,
        )
        self.params = model.init(CONFIG, jax.random.key(0))
        state = algo.init(self.params)
        axes = placement.batch_axes(self.mesh)
        batches = jax.ShapeDtypeStruct(
            (K, H, B, L + 1),
            jnp.int32,
            sharding=NamedSharding(self.mesh, P("workers", None, axes or None)),
        )
        compiled = lambda fn, *args, **kwargs: (
            jax.jit(fn, **kwargs).lower(*args).compile(FAST)
        )
        delta = jax.tree.map(lambda x: x.astype(jnp.float32), state.params)
        self.inner = hlo.collectives(compiled(algo.inner, state, batches))
        self.send = hlo.collectives(compiled(algo.send, state, 0, static_argnums=1))
        self.receive = hlo.collectives(
            compiled(algo.receive, state, delta, 0, static_argnums=2)
        )
        self.round = hlo.collectives(compiled(algo.round, state, batches))

    def crossing(self, collectives):
        return [c for c in collectives if c.crosses(self.mesh)]


programs = functools.cache(Programs)
placed = pytest.mark.parametrize(
    "shape, sequential",
    [
        (ONLY_WORKERS, True),
        ((("workers", 2),), False),
        *((shape, True) for shape in INSIDE),
    ],
    ids=str,
)


@placed
def test_the_inner_loop_crosses_no_workers(shape, sequential):
    assert programs(shape, sequential).crossing(programs(shape, sequential).inner) == []


@pytest.mark.parametrize("shape", INSIDE, ids=str)
def test_the_inner_loop_does_communicate_inside_a_worker(shape):
    """So that the test above has something to see on these meshes."""
    found = programs(shape, True).inner
    assert {c.kind for c in found} >= {"all-reduce"}
    if "fsdp" in dict(shape):  # Muon brings matrices together.
        assert {c.kind for c in found} >= {"all-to-all"}
    assert all("inner" in c.scope for c in found if c.scope)


@placed
def test_send_is_one_all_reduce_of_float32_per_leaf(shape, sequential):
    found = programs(shape, sequential).send
    leaves = jax.tree.leaves(programs(shape, sequential).params)
    assert found == programs(shape, sequential).crossing(found)
    assert {c.kind for c in found} == {"all-reduce"}
    assert {dtype for c in found for dtype, _ in c.operands} == {"f32"}
    assert sum(len(c.operands) for c in found) == len(leaves)


@placed
def test_send_moves_the_documented_bytes(shape, sequential):
    """A ring all-reduce of b bytes sends 2 (M - 1) / M b; a device sends its shard."""
    p = programs(shape, sequential)
    num = dict(shape)["workers"]
    specs = model.partition_specs(CONFIG, p.mesh)
    shard = lambda x, s: x.size // int(np.prod([p.mesh.shape[a] for a in s if a]))
    sizes = jax.tree.leaves(jax.tree.map(shard, p.params, specs))
    assert sum(c.num_bytes for c in p.send) == 4 * sum(sizes)
    if (
        shape == ONLY_WORKERS
    ):  # One slice per worker, for which `wire_bytes` is defined.
        sent = 2 * (num - 1) * sum(c.num_bytes for c in p.send) / num
        assert p.reduce.wire_bytes(p.params) == int(sent)


@placed
def test_the_outer_step_communicates_nothing(shape, sequential):
    p = programs(shape, sequential)
    assert p.crossing(p.receive) == []


@placed
def test_a_round_crosses_workers_in_send_alone(shape, sequential):
    """So neither the metrics nor the compiler add anything."""
    p = programs(shape, sequential)
    size = lambda collectives: sum(c.num_bytes for c in p.crossing(collectives))
    assert {c.kind for c in p.crossing(p.round)} == {"all-reduce"}
    assert size(p.round) == size(p.send)
    assert not any("inner" in c.scope for c in p.crossing(p.round))


def test_a_mean_over_workers_in_the_inner_loop_is_seen():
    """The test above can fail: this loop does communicate."""
    workers = mj.Workers(K, mesh(workers=4))
    step = lambda x: jax.lax.pmean(x, "workers")
    program = jax.jit(workers.join(step, (P("workers"),), P())).lower(jnp.ones((4, 2)))
    (found,) = hlo.collectives(program.compile())
    assert found.crosses(workers.mesh)
    assert found.operands == [("f64", (1, 2))]


def test_a_collective_that_cannot_be_read_is_an_error():
    text = """num_partitions=4
      %y = f32[4]{0} parameter(0)
      %x = f32[4]{0} all-reduce(%y), replica_groups=something_new, to_apply=%add"""
    with pytest.raises(ValueError, match="something_new"):
        hlo.collectives(text)
    with pytest.raises(ValueError, match="all-reduce-by-carrier-pigeon"):
        hlo.collectives(text.replace("all-reduce(", "all-reduce-by-carrier-pigeon("))
