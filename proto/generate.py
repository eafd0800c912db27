"""Regenerates `modelexpress_rl/_pb` from the two .proto files: `python proto/generate.py`.

Output: messages (`*_pb2.py`, `.pyi`), grpc stubs for the control plane's server (`*_pb2_grpc.py`,
`.pyi`), grpclib stubs for every client and the worker endpoint (`*_grpc.py`). With `--check` nothing
is written, and the exit status is 1 where the files there differ.

The compiler is pinned (extra `test`): protoc 26 is the newest whose output neither refuses an older
runtime nor warns on protobuf 6, so one set of files serves protobuf 5.27 to 6.x.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ("refit.proto", "modelexpress_rl.proto")
PACKAGE = "modelexpress_rl/_pb"
OUTPUT = ROOT / PACKAGE
PINS = {"grpcio-tools": "1.65.5", "mypy-protobuf": "3.6.0", "grpclib": None}
PLUGINS = {
    "grpclib_python": "protoc-gen-grpclib_python",
    "mypy": "protoc-gen-mypy",
    "mypy_grpc": "protoc-gen-mypy_grpc",
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Regenerates modelexpress_rl/_pb.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where stale")
    check = parser.parse_args().check
    fresh = generate()
    if check:
        stale = differences(fresh)
        for name in stale:
            print(f"{PACKAGE}/{name} is stale: run python proto/generate.py", file=sys.stderr)
        return 1 if stale else 0
    write(fresh)
    print(f"wrote {len(fresh)} files to {PACKAGE}")
    return 0


def generate() -> dict[str, bytes]:
    """Compiles both files and returns the output by file name.

    Raises:
        RuntimeError: a tool is missing or not at its pinned version, or protoc refused a file.
    """
    _require_pinned_tools()
    with tempfile.TemporaryDirectory() as folder:
        # The virtual path gives the files the import path that the package has.
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PACKAGE}={ROOT / 'proto'}"]
        command += [f"--{out}={folder}" for out in ("python_out", "grpc_python_out", "grpclib_python_out")]
        command += [f"--mypy_out=quiet:{folder}", f"--mypy_grpc_out=quiet:{folder}"]
        command += [f"--plugin=protoc-gen-{name}={_script(script)}" for name, script in PLUGINS.items()]
        command += [f"{PACKAGE}/{name}" for name in PROTOS]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        if done.returncode:
            raise RuntimeError(f"protoc failed: {done.stderr.strip()}")
        produced = sorted((Path(folder) / PACKAGE).iterdir())
        return {path.name: _tidy(path.read_bytes()) for path in produced}


def differences(fresh: dict[str, bytes]) -> list[str]:
    """Names of generated files that are missing, changed or left over."""
    present = {path.name: path.read_bytes() for path in _generated_files()}
    return sorted(name for name in fresh.keys() | present.keys() if fresh.get(name) != present.get(name))


def write(fresh: dict[str, bytes]) -> None:
    """Replaces what is there by `fresh`."""
    for path in _generated_files():
        if path.name not in fresh:
            path.unlink()
    for name, content in fresh.items():
        (OUTPUT / name).write_bytes(content)


def _generated_files() -> list[Path]:
    patterns = ("*_pb2*.py", "*_pb2*.pyi", "*_grpc.py")
    return sorted({path for pattern in patterns for path in OUTPUT.glob(pattern)})


def _require_pinned_tools() -> None:
    for package, pin in PINS.items():
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found = "none"
        if found == "none" or (pin is not None and found != pin):
            raise RuntimeError(f"{package} {pin or ''} is needed, found {found}: pip install -e '.[test]'")


def _script(name: str) -> Path:
    return Path(sysconfig.get_path("scripts")) / name


def _tidy(content: bytes) -> bytes:
    """Strips trailing blanks, so that the output passes the same whitespace checks as our own code."""
    lines = content.decode().splitlines()
    return ("\n".join(line.rstrip() for line in lines).rstrip() + "\n").encode()


if __name__ == "__main__":
    sys.exit(main())
