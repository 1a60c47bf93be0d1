"""The product and the simulator are two packages, neither called `proxy`; the second imports nothing of the first."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_simulator_imports_nothing_of_the_product() -> None:
    imported = {
        name.split(".")[0]
        for path in (ROOT / "proxy/bedrock_simulator").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for name in _names(node)
    }
    assert "bedrock_simulator" in imported
    assert "price_keeper" not in imported


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


def test_no_module_called_proxy_can_be_imported(tmp_path: Path) -> None:
    """Another distribution has a package of that name; installed together they would overwrite each other."""
    code = "import price_keeper, bedrock_simulator, importlib.util as found; print(found.find_spec('proxy'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None"
