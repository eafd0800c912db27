"""Packages import in any order, and importing the top one loads nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import modelexpress_rl

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "nixl", "megatron", "vllm", "redis", "boto3")

# Each of our modules is the first of ours to be imported in a fork of its own. What is not ours is
# imported before the forks, because it is slow and its order is not what is asked here.
FIRST = """
import importlib, os, sys, traceback, warnings
from pathlib import Path

for name in "torch numpy grpc.aio grpclib.client grpclib.server anyio transitions rich".split():
    try:
        importlib.import_module(name)
    except ImportError:
        pass
warnings.simplefilter("error")
root = Path.cwd()
names = sorted(
    str(path.relative_to(root).with_suffix("")).replace("/", ".").removesuffix(".__init__")
    for package in ("modelexpress_rl", "statemachines")
    for path in (root / package).rglob("*.py")
    if path.name != "__main__.py"
)
failed = []
for name in names:
    assert not any(module.split(".")[0] in ("modelexpress_rl", "statemachines") for module in sys.modules)
    child = os.fork()
    if child == 0:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name == "vllm" and ".engines.vllm." in name:
                os._exit(0)  # its classes are subclasses of vLLM's, and only vLLM imports them
            if error.name == "verl" and name.endswith(".frameworks.verl"):
                os._exit(0)  # as above
            traceback.print_exc()
            os._exit(1)
        except BaseException:
            print("import", name, "first:", flush=True)
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        failed.append(name)
print(len(names), "modules; failed:", failed)
sys.exit(bool(failed) or len(names) < 50)
"""


def run(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_module_may_be_imported_first() -> None:
    run(FIRST)


@pytest.mark.parametrize(
    "statement",
    [
        "import modelexpress_rl",
        "from modelexpress_rl import ModelExpressControlClient, WeightVersionRef, ReadinessMonitor",
        "import modelexpress_rl.server.app, modelexpress_rl.cli.main",
    ],
)
def test_nothing_heavy_is_loaded(statement: str) -> None:
    run(f"{statement}\nimport sys\nassert not [name for name in {HEAVY} if name in sys.modules], sys.modules")


def test_importing_the_package_loads_nothing_of_it() -> None:
    run(
        "import modelexpress_rl, sys\nassert not [n for n in sys.modules if n.startswith('modelexpress_rl.')]"
    )


@pytest.mark.parametrize("name", sorted(modelexpress_rl.__all__))
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(modelexpress_rl, name).__name__ == name
    assert name in dir(modelexpress_rl)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = modelexpress_rl.Nothing  # type: ignore[attr-defined]


def test_type_checkers_see_the_names_that_run_time_has() -> None:
    tree = ast.parse((ROOT / "modelexpress_rl" / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        f"{node.module} {alias.asname}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == {
        f"modelexpress_rl.{module} {name}" for name, module in modelexpress_rl._MODULE_OF_NAME.items()
    }
