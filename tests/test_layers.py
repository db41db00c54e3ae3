"""The import graph of the library is the one drawn in CONTRIBUTING.md."""

import ast
import pathlib

import muloco_jax

FOLDER = pathlib.Path(muloco_jax.__file__).parent
LAYERS = {
    "tree": (0, set()),
    "workers": (0, set()),
    "newton_schulz": (0, set()),
    "optimizers": (1, {"tree", "newton_schulz"}),
    "fragments": (1, {"tree"}),
    "compress": (1, {"workers"}),
    "model": (1, {"tree"}),
    "data": (1, set()),
    "algorithm": (2, {"workers", "fragments", "compress"}),
    "metrics": (2, {"workers", "fragments"}),
    "experiment": (3, {
        "tree", "workers", "newton_schulz", "optimizers", "fragments", "compress",
        "model", "data", "algorithm", "metrics",
    }),
    "train": (4, {"experiment", "metrics"}),
}  # fmt: skip


def imported_modules(path):
    """Modules of the library that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            package, *rest = node.module.split(".")
            if package == "muloco_jax":
                yield from rest[:1] or [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                package, *rest = alias.name.split(".")
                assert package != "muloco_jax", (
                    f"{path.name}: from muloco_jax import ..."
                )


def test_every_module_imports_only_from_the_layers_below():
    modules = {path.stem: path for path in FOLDER.glob("*.py")} | {}
    del modules["__init__"]
    assert modules.keys() == LAYERS.keys()
    for name, path in modules.items():
        layer, allowed = LAYERS[name]
        found = set(imported_modules(path))
        assert found <= allowed, name
        assert all(LAYERS[other][0] < layer for other in found), name


def test_no_public_name_is_that_of_another_thing():
    """A name of a module among the public ones is that module."""
    for name in set(muloco_jax.__all__) & LAYERS.keys():
        assert getattr(muloco_jax, name).__name__ == f"muloco_jax.{name}"


def test_every_public_name_is_documented():
    for name in muloco_jax.__all__:
        value = getattr(muloco_jax, name)
        assert isinstance(value, muloco_jax.DION.__class__) or value.__doc__, name
