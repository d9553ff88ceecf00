"""The import directions that keep the parts apart, read from the source with ast."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# folder -> top-level modules it must not import
FORBIDDEN = {
    "radix": {"torch", "transformers", "runtime", "kernels", "frontend_lang"},
    "kernels": {"runtime", "radix", "frontend_lang"},
    "runtime": {"frontend_lang"},
    "frontend_lang": {"torch", "radix", "kernels"},
}
RADIX_MAY = {"radix", "numpy"} | set(sys.stdlib_module_names)
TORCH_MAY = ("kernels/", "runtime/execute/", "runtime/models/")


def _sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module `path` imports, wherever in the file, with its line."""
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def _offences(folder: str, wrong: set[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in _sources(folder)
        for module, line in _imports(path)
        if module.split(".")[0] in wrong
    ]


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_a_folder_imports_only_downwards(folder: str) -> None:
    assert _sources(folder)
    assert _offences(folder, FORBIDDEN[folder]) == []


def test_radix_needs_numpy_and_the_standard_library_only() -> None:
    foreign = {module.split(".")[0] for path in _sources("radix") for module, _ in _imports(path)} - RADIX_MAY
    assert foreign == set()


def test_only_kernels_execute_and_models_import_torch() -> None:
    offences = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in _sources("runtime")
        for module, line in _imports(path)
        if module.split(".")[0] == "torch" and not str(path.relative_to(ROOT)).startswith(TORCH_MAY)
    ]
    assert offences == []


def test_nothing_imports_relatively() -> None:
    """Import names equal folder names; a relative import hides the direction."""
    relative = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for folder in FORBIDDEN
        for path in _sources(folder)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.level > 0
    ]
    assert relative == []


def test_importing_the_face_is_quick() -> None:
    """`import ramet` loads none of the heavy libraries; they come with the first use."""
    heavy = ("torch", "transformers", "fastapi", "zmq", "numpy")
    code = f"import sys, ramet; print([name for name in {heavy} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert out.stdout.strip() == "[]"


def test_every_public_name_exists() -> None:
    import ramet as rt

    assert [name for name in rt.__all__ if not hasattr(rt, name)] == []


@pytest.mark.parametrize("package", ["radix", "runtime", "kernels", "frontend_lang"])
def test_a_package_that_shadows_ours_is_named(package: str, tmp_path: Path) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import ramet"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    last = out.stderr.strip().splitlines()[-1]
    assert out.returncode == 1
    assert last.startswith(f"ImportError: `import {package}` finds {tmp_path / package}")
    assert "virtual environment" in last
