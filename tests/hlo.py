"""The collectives of a compiled program: what travels, and between which devices.

Everything is read from the text of the program. What cannot be read is an error, so
that a collective in a notation unknown here fails the test instead of passing unseen.
"""

import re
from typing import NamedTuple

import numpy as np

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
_ITEMSIZE = {
    "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s32": 4,
    "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8,
}  # fmt: skip
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?(\S+) = (.+?) ([a-z][\w\-]*)\((.*)$")
_MESH = re.compile(
    r"""replica_groups=mesh\[(?P<axes>[^\]]*)\]
    (,\ device_ids=\(\[(?P<dims>[0-9,]+)\]T\((?P<order>[0-9,]+)\)\))?
    \s*\{(?P<over>('[^',]+',?)+)\}""",
    re.VERBOSE,
)
_SHAPE = re.compile(r"\b([a-z]+[0-9]*)\[([0-9,]*)\]")


class Collective(NamedTuple):
    """One collective.

    Attributes:
        kind: as in `KINDS`.
        operands: `(dtype, shape)` of what each device puts in.
        groups: devices, by their place in the mesh, that exchange among themselves.
        scope: the path of names that it was traced under.
    """

    kind: str
    operands: list[tuple[str, tuple[int, ...]]]
    groups: list[list[int]]
    scope: str

    @property
    def num_bytes(self) -> int:
        """Bytes that each device puts in."""
        return sum(
            _ITEMSIZE[dtype] * int(np.prod(shape, dtype=int))
            for dtype, shape in self.operands
        )

    def crosses(self, mesh, axis: str = "workers") -> bool:
        """Whether it joins devices at different places along an axis of the mesh."""
        where = np.indices(mesh.devices.shape)[mesh.axis_names.index(axis)].ravel()
        return any(
            len({where[device] for device in group}) > 1 for group in self.groups
        )


def collectives(compiled) -> list[Collective]:
    """The collectives of a compiled program, in the order of its text."""
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    partitions = re.search(r"num_partitions=(\d+)", text)
    num_devices = int(partitions[1]) if partitions else 1
    instructions = [m for line in text.splitlines() if (m := _INSTRUCTION.match(line))]
    shapes = {
        name: _shapes(result) for name, result, _, _ in map(_groups, instructions)
    }
    found = []
    for _, _, kind, rest in map(_groups, instructions):
        base = kind.removesuffix("-start")
        if base not in KINDS:
            if any(kind.startswith(known) for known in KINDS) and not kind.endswith(
                "-done"
            ):
                raise ValueError(f"unknown collective: {kind}({rest[:200]}")
            continue
        arguments, attributes = rest.split(")", 1)
        names = re.findall(
            r"%?([\w.\-]+)(?:,|$)", re.sub(r"\S+\[[^\]]*\]\S* ", "", arguments)
        )
        operands = [shape for name in names for shape in shapes[name]]
        scope = re.search(r'op_name="([^"]*)"', attributes)
        found.append(
            Collective(
                kind=base,
                operands=operands,
                groups=replica_groups(attributes, num_devices),
                scope=scope[1] if scope else "",
            )
        )
    return found


def _groups(match):
    return match.groups()


def _shapes(text):
    return [
        (dtype, tuple(int(n) for n in dims.split(",") if n))
        for dtype, dims in _SHAPE.findall(text)
        if dtype in _ITEMSIZE
    ]


def replica_groups(attributes: str, num_devices: int) -> list[list[int]]:
    """Groups of devices, in any of the notations of XLA.

    >>> replica_groups("replica_groups={{0,1},{2,3}}, use", 4)
    [[0, 1], [2, 3]]
    >>> replica_groups("replica_groups=[2,2]<=[2,2]T(1,0)", 4)
    [[0, 2], [1, 3]]
    >>> replica_groups("replica_groups=mesh['a'=2,'b'=2] {'a'}, use", 4)
    [[0, 2], [1, 3]]
    >>> both = "replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}, use"
    >>> replica_groups(both, 4)
    [[0, 1], [2, 3]]
    >>> replica_groups("source_target_pairs={{0,1},{1,0}}", 4)
    [[0, 1], [1, 0]]
    >>> replica_groups("replica_groups={}, use", 3)
    [[0, 1, 2]]
    """
    if m := re.search(
        r"(?:replica_groups|source_target_pairs)=\{(\{[0-9,{}]*\})\}", attributes
    ):
        return [_ints(group) for group in re.findall(r"\{([0-9,]+)\}", m[1])]
    if m := re.search(
        r"replica_groups=\[([0-9,]+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?", attributes
    ):
        devices = np.arange(num_devices).reshape(_ints(m[2]))
        devices = devices.transpose(_ints(m[3])) if m[3] else devices
        return devices.reshape(_ints(m[1])).tolist()
    if m := _MESH.search(attributes):
        axes = re.findall(r"'([^']+)'=(\d+)", m["axes"])
        names, sizes = [name for name, _ in axes], [int(size) for _, size in axes]
        over = [names.index(name) for name in re.findall(r"'([^']+)'", m["over"])]
        devices = np.arange(num_devices)
        if m["dims"]:
            devices = devices.reshape(_ints(m["dims"])).transpose(_ints(m["order"]))
        rest = [i for i in range(len(sizes)) if i not in over]
        devices = devices.reshape(sizes).transpose(rest + over)
        return devices.reshape(-1, int(np.prod([sizes[i] for i in over]))).tolist()
    if re.search(r"replica_groups=\{\}", attributes):
        return [list(range(num_devices))]
    raise ValueError(f"no groups that can be read in: {attributes[:300]}")


def _ints(text):
    return [int(n) for n in text.split(",")]
