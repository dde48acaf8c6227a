"""The fences of the source tree: sizes, docstrings, what a light module may load, nothing pickled."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("flows", "tasks", "storage", "gpu_workers")
FOLDERS_WITH_PYTHON = {*PACKAGES, "tests", "benchmarks", "docs"}
LIGHT_PACKAGES = ("storage", "gpu_workers/controller")
HEAVY_MODULES = ("torch", "vllm", "ray", "prefect", "transformers")
PICKLE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
PICKLE_CALLS = {"torch.load", "torch.save"}
PICKLE_ARGUMENTS = {("weights_only", False), ("allow_pickle", True)}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def _python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def _all_python_files() -> list[Path]:
    return _python_files(*FOLDERS_WITH_PYTHON)


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_file_is_longer_than_400_lines():
    lengths = {_shown(path): len(path.read_text("utf-8").splitlines()) for path in _all_python_files()}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_no_function_is_longer_than_60_lines():
    too_long = {
        f"{_shown(path)}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for path in _all_python_files()
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    }
    assert too_long == {}


def test_every_module_says_what_it_owns():
    assert [_shown(path) for path in _all_python_files() if not ast.get_docstring(_tree(path))] == []


def test_python_lives_only_in_the_known_folders():
    with_python = {
        folder.name
        for folder in ROOT.iterdir()
        if folder.is_dir() and not folder.name.startswith(".") and any(folder.rglob("*.py"))
    }
    assert with_python - FOLDERS_WITH_PYTHON == set()
    assert [path.name for path in ROOT.glob("*.py")] == []


def test_every_folder_of_a_package_is_a_package():
    folders = {path.parent for path in _python_files(*PACKAGES)}
    assert [_shown(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_tests_are_not_a_package_that_another_wheel_could_shadow():
    assert [_shown(path) for path in (ROOT / "tests").rglob("__init__.py")] == []


def test_our_top_level_packages_are_nobody_elses():
    owners = packages_distributions()
    assert {name: set(owners.get(name, ())) for name in PACKAGES} == {name: {"midflight"} for name in PACKAGES}


def test_storage_and_the_controller_load_nothing_heavy():
    modules = [_module_name(path) for path in _python_files(*LIGHT_PACKAGES)]
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = [module for module in {HEAVY_MODULES!r} if module in sys.modules]\n"
        "    if heavy: sys.exit(f'{name} loads {heavy}')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def _pickling(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                used = {name.name.split(".")[0] for name in names} & PICKLE_MODULES
                yield from ((node.lineno, f"import {name}") for name in used)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in PICKLE_MODULES:
                yield node.lineno, f"from {module}"
            case ast.Call(func=function) if ast.unparse(function) in PICKLE_CALLS:
                yield node.lineno, ast.unparse(function)
            case ast.keyword(arg=argument, value=ast.Constant(value=value)) if (
                argument,
                value,
            ) in PICKLE_ARGUMENTS:
                yield node.value.lineno, f"{argument}={value}"


def test_nothing_of_ours_is_pickled():
    found = [
        f"{_shown(path)}:{line} {what}" for path in _python_files(*PACKAGES) for line, what in _pickling(_tree(path))
    ]
    assert found == []
