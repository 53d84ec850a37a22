"""What `pip install ./python` makes, and what it says when it cannot.

Everything is built in a copy of the clone, so the clone stays as it is. Nothing is downloaded: pip uses this
environment's setuptools, and the wheel goes into an empty environment, one without PyTorch.
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CLONE = Path(__file__).resolve().parents[2]
VERSION = re.search(r'const Version = "(.+)"', (CLONE / "autobyte.go").read_text()).group(1)
BUILT_HERE = shutil.ignore_patterns(".git", "bin", "demo", "*.so", "__pycache__", "*.egg-info", "build", "dist")

pytestmark = pytest.mark.slow


def run(*command, check=True, **options):
    """Runs a command without AUTOBYTE_* and PYTHONPATH, and returns its output with its errors in it."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("AUTOBYTE", "PYTHONPATH"))}
    environment.update(options.pop("env", {}))
    result = subprocess.run([str(part) for part in command], env=environment, stdin=subprocess.DEVNULL, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300, check=False, **options)
    if check:
        assert result.returncode == 0, result.stdout
    return result


def pip_wheel(clone, folder, **options):
    return run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index",
               "--wheel-dir", folder, clone / "python", **options)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    copy = tmp_path_factory.mktemp("copy") / "clone"
    shutil.copytree(CLONE, copy, ignore=BUILT_HERE)
    return copy


@pytest.fixture(scope="module")
def wheel(clone, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip_wheel(clone, folder)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The interpreter of an environment that holds the wheel and nothing else."""
    venv = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    python = venv / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    return python


def test_wheel_is_for_any_python_on_this_platform(wheel):
    assert re.fullmatch(rf"autobyte-{re.escape(VERSION)}-py3-none-(linux|macosx)_\w+\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    sources = {str(p.relative_to(CLONE / "python")) for p in (CLONE / "python" / "autobyte").rglob("*.py")}
    assert {n for n in names if n.endswith(".py")} == sources
    assert [n for n in names if n.endswith((".so", ".h"))] == ["autobyte/libautobyte.so"]
    assert any(n.endswith("/LICENSE") for n in names)


def test_installed_package_works_without_torch(installed, tmp_path):
    script = ("import sys, autobyte; assert 'torch' not in sys.modules; "
              "print(autobyte.__version__, autobyte.library_path())")
    version, library = run(installed, "-I", "-c", script, cwd=tmp_path).stdout.split()
    assert version == VERSION
    assert Path(library).is_relative_to(installed.parents[1])
    without = run(installed, "-I", "-c", "import autobyte.torch", cwd=tmp_path, check=False)
    assert without.returncode != 0
    assert "torch" in without.stdout.splitlines()[-1]


def test_build_leaves_nothing_in_the_clone(clone, wheel):
    run("git", "init", "--quiet", clone)
    status = run("git", "-C", clone, "status", "--porcelain", "--untracked-files=all").stdout.splitlines()
    found = {line[3:] for line in status}
    before = {str(p.relative_to(clone)) for p in clone.rglob("*") if (CLONE / p.relative_to(clone)).exists()}
    assert "go.mod" in found
    assert found - before == set()


@pytest.mark.parametrize("go", ["missing", "old"])
def test_without_a_usable_go_one_error_says_what_to_do(clone, tmp_path, go):
    path, wanted = tmp_path / "path", re.search(r"^go (\S+)$", (CLONE / "go.mod").read_text(), re.MULTILINE).group(1)
    path.mkdir()
    if go == "old":
        script = path / "go"
        script.write_text("#!/bin/sh\ncase $1 in version) echo go version go1.21.0 linux/amd64;;\n"
                          "*) echo go.mod requires a newer one; exit 1;; esac\n")
        script.chmod(0o755)
    failed = pip_wheel(clone, tmp_path / "out", check=False, env={"PATH": str(path), "GO": ""})
    assert failed.returncode != 0
    for part in ["looked for 'go' on PATH" if go == "missing" else "It is: go version go1.21.0",
                 f"Go {wanted} or newer", "https://go.dev/dl/", "AUTOBYTE_LIBRARY=/path/to/libautobyte.so"]:
        assert part in failed.stdout
    assert "Traceback" not in failed.stdout


def test_prebuilt_library_needs_no_go(clone, wheel, tmp_path):
    with zipfile.ZipFile(wheel) as built:
        built.extract("autobyte/libautobyte.so", tmp_path)
    prebuilt = tmp_path / "autobyte" / "libautobyte.so"
    pip_wheel(clone, tmp_path / "out", env={"PATH": "", "AUTOBYTE_LIBRARY": str(prebuilt)})
    (made,) = (tmp_path / "out").iterdir()
    assert zipfile.ZipFile(made).read("autobyte/libautobyte.so") == prebuilt.read_bytes()

    failed = pip_wheel(clone, tmp_path / "out", check=False, env={"AUTOBYTE_LIBRARY": str(tmp_path / "absent.so")})
    assert failed.returncode != 0
    assert f"AUTOBYTE_LIBRARY={tmp_path}/absent.so is not a file" in failed.stdout


def test_folder_without_its_clone_says_so(clone, tmp_path):
    shutil.copytree(clone / "python", tmp_path / "alone" / "python", ignore=BUILT_HERE, symlinks=True)
    failed = pip_wheel(tmp_path / "alone", tmp_path / "out", check=False)
    assert failed.returncode != 0
    assert f"no Go sources in {tmp_path}/alone" in failed.stdout
    assert "Traceback" not in failed.stdout
