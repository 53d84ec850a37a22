"""Builds the package: pure Python plus the Go library, which is compiled from the clone that this folder is in.

pyproject.toml holds everything that is not code. The library does not depend on the Python version, so the
wheel is tagged py3-none-<platform>.
"""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.errors import SetupError

CLONE = Path(__file__).resolve().parent.parent
LIBRARY = "libautobyte.so"
PREBUILT = ("Or set AUTOBYTE_LIBRARY=/path/to/libautobyte.so while installing, to use a library that was "
            "built elsewhere (make build in a clone leaves it in python/autobyte).")


def version():
    """Returns the version that the Go module states: there is only that one."""
    source = CLONE / "autobyte.go"
    if not source.is_file():
        raise SystemExit(f"error: autobyte: no Go sources in {CLONE}: this folder installs only from within a clone "
                         "(pip install ./python), or from a wheel that was built in one (pip wheel ./python)")
    return re.search(r'^const Version = "(.+)"$', source.read_text(), re.MULTILINE).group(1)


def run_go(go, *arguments):
    # Without -buildvcs=false, a clone that belongs to another user could not be built.
    environment = {**os.environ, "CGO_ENABLED": "1"}
    return subprocess.run([go, *arguments], cwd=CLONE, env=environment, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False)


def find_go():
    """Returns the Go compiler, after checking that it can work on this module; an error says what to install."""
    wanted = re.search(r"^go (\S+)$", (CLONE / "go.mod").read_text(), re.MULTILINE).group(1)
    name = os.environ.get("GO") or "go"
    install = (f"Install Go {wanted} or newer (https://go.dev/dl/, or your system's package golang if it is new enough) "
               "and put it on PATH, or set GO=/path/to/go.")
    go = shutil.which(name)
    if go is None:
        raise SetupError(f"autobyte: no Go compiler: looked for '{name}' on PATH={os.environ.get('PATH', '')}\n"
                         f"{install}\n{PREBUILT}")
    # An old Go either fetches the wanted one by itself or fails here.
    tried = run_go(go, "list", "-m")
    if tried.returncode != 0:
        version = run_go(go, "version").stdout.strip()
        raise SetupError(f"autobyte: {go} cannot build this version of AutoByte, which needs Go {wanted} or newer.\n"
                         f"It is: {version}\nIt said: {tried.stdout.strip()}\n{install}\n{PREBUILT}")
    return go


def provide_library(target):
    """Puts the Go library at the target: a prebuilt one, or one compiled now."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if prebuilt := os.environ.get("AUTOBYTE_LIBRARY"):
        if not Path(prebuilt).is_file():
            raise SetupError(f"autobyte: AUTOBYTE_LIBRARY={prebuilt} is not a file; unset it to build the library here.")
        if not (target.exists() and target.samefile(prebuilt)):
            shutil.copyfile(prebuilt, target)
        return
    go = find_go()
    with tempfile.TemporaryDirectory() as scratch:
        built = Path(scratch) / LIBRARY
        result = run_go(go, "build", "-buildvcs=false", "-buildmode=c-shared", "-o", str(built), "./cmd/libautobyte")
        if result.returncode != 0:
            raise SetupError(f"autobyte: building {LIBRARY} failed:\n{result.stdout.strip()}\n"
                             f"It needs a C compiler too (apt-get install gcc libc6-dev). {PREBUILT}")
        # Renamed into place: a process that has the old library mapped keeps it whole.
        beside = target.with_name(f".{LIBRARY}.{os.getpid()}")
        shutil.copyfile(built, beside)
        beside.replace(target)


class BuildWithLibrary(build_py):
    def run(self):
        super().run()
        provide_library(self.library())

    def library(self):
        folder = Path(self.get_package_dir("autobyte")) if self.editable_mode else Path(self.build_lib) / "autobyte"
        return folder / LIBRARY

    def get_outputs(self, include_bytecode=True):
        return [*super().get_outputs(include_bytecode), str(self.library())]


class PlatformWheel(bdist_wheel):
    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


class PlatformDistribution(Distribution):
    def has_ext_modules(self):
        return True


# A build folder of its own for every build: nothing old gets into a wheel, and two builds don't meet.
with tempfile.TemporaryDirectory(prefix="autobyte-build-") as build_base:
    setup(
        version=version(),
        cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": PlatformWheel},
        distclass=PlatformDistribution,
        options={"build": {"build_base": build_base}},
    )
