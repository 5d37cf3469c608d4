"""Check the size and safety budgets of the code; print one line per offence.

    python tools/check_budgets.py

Every Python file under src/ and tools/ is read, none is imported.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8
# Their public functions keep mlx-lm's argument names, all of them.
WIDE_SIGNATURES = {Path("src/mlx_rewind/generate.py"), Path("src/mlx_rewind/many.py")}
# Restarts the process with a library preloaded, which only the environment can ask for.
MAY_READ_ENVIRONMENT = {Path("src/mlx_rewind/bench/blas.py")}
BROAD = {"Exception", "BaseException"}
Function = ast.FunctionDef | ast.AsyncFunctionDef
Offence = tuple[int, str]


def check_function(node: Function, wide: bool) -> Iterator[Offence]:
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if lines > MAX_FUNCTION_LINES:
        yield node.lineno, f"{node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}"
    arguments = node.args
    given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    names = [a.arg for a in given if a.arg not in ("self", "cls")]
    if len(names) > MAX_PARAMETERS and (node.name.startswith("_") or not wide):
        yield node.lineno, f"{node.name} has {len(names)} parameters, at most {MAX_PARAMETERS}"


def check_handler(node: ast.ExceptHandler) -> Iterator[Offence]:
    if node.type is None:
        yield node.lineno, "bare except"
        return
    for name in ast.walk(node.type):
        if isinstance(name, ast.Name) and name.id in BROAD:
            yield node.lineno, f"broad except: {name.id}"


def reads_environment(node: ast.AST) -> bool:
    """True for os.environ, os.getenv and their `from os import` forms."""
    settings = {"environ", "getenv"}
    if isinstance(node, ast.Attribute):
        return isinstance(node.value, ast.Name) and node.value.id == "os" and node.attr in settings
    if isinstance(node, ast.ImportFrom):
        return node.module == "os" and any(alias.name in settings for alias in node.names)
    return False


def check_file(path: Path) -> Iterator[Offence]:
    source = path.read_text(encoding="utf-8")
    lines = len(source.splitlines())
    if lines > MAX_FILE_LINES:
        yield 1, f"{lines} lines, at most {MAX_FILE_LINES}"
    relative = path.relative_to(ROOT)
    reads = relative.parts[0] == "src" and relative not in MAY_READ_ENVIRONMENT
    for node in ast.walk(ast.parse(source, filename=str(path))):
        if isinstance(node, Function):
            yield from check_function(node, wide=relative in WIDE_SIGNATURES)
        elif isinstance(node, ast.ExceptHandler):
            yield from check_handler(node)
        elif reads and reads_environment(node):
            yield node.lineno, "reads the environment: pass a parameter instead"


def main() -> int:
    offences = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for folder in ("src", "tools")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, what in sorted(check_file(path))
    ]
    print("\n".join(offences) or "budgets: ok")
    return 1 if offences else 0


if __name__ == "__main__":
    sys.exit(main())
