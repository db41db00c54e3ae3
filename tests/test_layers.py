"""The layers of the library are those of the table in CONTRIBUTING.md."""

import ast
import pathlib
import re

import muloco_jax

FOLDER = pathlib.Path(muloco_jax.__file__).parent
TABLE = (FOLDER.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
LAYERS = {
    name: int(n) for n, name in re.findall(r"^\| (\d) \| `(\w+)` \|", TABLE, re.M)
}


def imported_modules(path):
    """Modules of the library that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            package, *rest = node.module.split(".")
            if package == "muloco_jax":
                yield from rest[:1] or [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                assert alias.name.split(".")[0] != "muloco_jax", path.name


def test_every_module_imports_only_from_the_layers_below():
    modules = {path.stem: path for path in FOLDER.glob("*.py")}
    del modules["__init__"]
    assert modules.keys() == LAYERS.keys()
    for name, path in modules.items():
        for other in imported_modules(path):
            assert LAYERS[other] < LAYERS[name], f"{name} imports {other}"


def test_a_public_name_of_a_module_is_that_module():
    for name in set(muloco_jax.__all__) & LAYERS.keys():
        assert getattr(muloco_jax, name).__name__ == f"muloco_jax.{name}"
