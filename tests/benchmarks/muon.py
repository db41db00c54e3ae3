"""Muon against optax.contrib.muon: seconds of a step, of compiling, and memory.

    python tests/benchmarks/muon.py            # two CPU cores: about ten minutes
    python tests/benchmarks/muon.py --gpu      # one accelerator

Both sides have the same coefficients, momentum and factors (`**muloco_jax.OPTAX`), the
same tree and the same inputs, and their second updates, of other gradients than the
first, are compared before anything is timed.
Steps are interleaved, and the median of the repeats counts. Each case runs in a process
of its own.
"""

import argparse
import statistics
import subprocess
import sys
import time

CPU = ["d256", "d768", "d256-stacked", "d768-stacked", "compile"]
CPU_DEVICES = ["replicated", "fsdp", "mixed-replicated", "mixed-fsdp"]
GPU = ["d768", "d768-stacked", "d2048", "d2048-stacked", "compile"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="sizes of an accelerator")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--case", help="run this one, in this process")
    arguments = parser.parse_args()
    if arguments.case:
        run(arguments.case, arguments.repeats)
        return
    print("| case | step, ours | optax | ratio | compile | ratio | temp MB | ratio |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for case in GPU if arguments.gpu else CPU + CPU_DEVICES:
        command = [sys.executable, __file__, f"--case={case}"]
        subprocess.run([*command, f"--repeats={arguments.repeats}"], check=True)


def run(case, repeats):
    import jax

    if case in CPU_DEVICES:
        jax.config.update("jax_num_cpu_devices", 8)
    import optax
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P
    from optax.contrib import MuonDimensionNumbers

    import muloco_jax as mj

    numbers = MuonDimensionNumbers(-2, -1)
    shapes, keywords = {}, {}
    match case.split("-"):
        case ["compile"]:
            shapes = {f"w{i}": (128, 128) for i in range(100)}
        case ["replicated" | "fsdp"]:
            shapes = {f"w{i}": (256, 1024) for i in range(8)}
        case ["mixed", _]:
            shapes = blocks(4, 256, stacked=False)
        case [size, *rest]:
            layers = {"d256": 8, "d768": 12, "d2048": 24}[size]
            shapes = blocks(layers, int(size[1:]), stacked=bool(rest))
    if case in CPU_DEVICES:
        mesh = jax.make_mesh((8,), ("x",), (AxisType.Auto,))
        fsdp = case.endswith("fsdp")
        sharding = NamedSharding(mesh, P("x") if fsdp else P())
        keywords = {"specs": sharding} if fsdp else {"ns_axes": "x"}
    else:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    draw = lambda seed: {
        name: jax.device_put(jax.random.normal(jax.random.key(seed + i), s), sharding)
        for i, (name, s) in enumerate(shapes.items())
    }
    params, grads = draw(0), draw(1000)
    peers = {
        "ours": mj.muon(
            0.02, **mj.OPTAX | {"muon_weight_dimension_numbers": numbers}, **keywords
        ),
        "optax": optax.contrib.muon(0.02, muon_weight_dimension_numbers=numbers),
    }
    whole = NamedSharding(mesh, P()) if keywords else sharding
    place = lambda x: jax.device_put(x, sharding if x.ndim > 1 else whole)
    states = {
        name: jax.tree.map(place, optimizer.init(params))
        for name, optimizer in peers.items()
    }
    steps, seconds, temp = {}, {name: [] for name in peers}, {}
    for repeat in range(4):  # The first, which loads the compiler, does not count.
        for name, optimizer in peers.items():
            jax.clear_caches()
            arguments = grads, states[name], params
            pins = jax.tree.map(lambda x: x.sharding, (params, states[name]))
            start = time.perf_counter()
            step = jax.jit(optimizer.update, out_shardings=pins)
            steps[name] = step.lower(*arguments).compile()
            seconds[name] += [time.perf_counter() - start] if repeat else []
            temp[name] = steps[name].memory_analysis().temp_size_in_bytes / 1e6
    step = lambda name: jax.block_until_ready(steps[name](grads, states[name], params))
    second = lambda name: steps[name](params, step(name)[1], params)[0]
    difference = jax.tree.map(
        lambda a, b: abs(a - b).max() / abs(b).max(), second("ours"), second("optax")
    )
    worst = max(jax.tree.leaves(difference))
    assert worst < 1e-4, difference
    times = {name: [] for name in peers}
    for _ in range(repeats):
        for name in peers:
            start = time.perf_counter()
            step(name)
            times[name].append(time.perf_counter() - start)
    median = lambda samples, name: statistics.median(samples[name])
    ratio = lambda samples: median(samples, "optax") / median(samples, "ours")
    print(
        f"| {case} | {1e3 * median(times, 'ours'):.0f} ms "
        f"| {1e3 * median(times, 'optax'):.0f} ms | **{ratio(times):.2f}x** "
        f"| {median(seconds, 'ours'):.1f} s | {ratio(seconds):.1f}x "
        f"| {temp['ours']:.0f} | {temp['ours'] / temp['optax']:.2f} |",
        flush=True,
    )


def blocks(layers, d, stacked):
    """The matrices of a decoder, one by one or one stack of layers per kernel."""
    kernels = {
        **{name: (d, d) for name in ("query", "key", "value", "out")},
        "up": (d, 4 * d),
        "down": (4 * d, d),
    }
    if stacked:
        return {name: (layers, *shape) for name, shape in kernels.items()}
    return {
        f"{i}_{name}": shape for i in range(layers) for name, shape in kernels.items()
    }


if __name__ == "__main__":
    main()
