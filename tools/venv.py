"""Makes the Python environment of python/requirements.lock once, and prints its path.

The environment lies outside the clone, in a folder named after the lock file and the interpreter, so that
clones share it and a changed lock file gets another one. A file `.complete` is written last: a folder
without it was left by a run that was killed, and is made anew. A lock lets one run at a time work on it.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

LOCK_FILE = Path(__file__).resolve().parent.parent / "python" / "requirements.lock"
GIB = 1 << 30
NEEDED_ON_DISK = 8 * GIB  # 5 GiB installed (torch and its CUDA libraries), 3 GiB while pip unpacks
NO_NETWORK = ("NewConnectionError", "NameResolutionError", "Temporary failure in name resolution", "ProxyError",
              "Network is unreachable", "ConnectTimeout", "Connection refused", "Failed to establish a new connection")


def say(line):
    print(f"tools/venv: {line}", file=sys.stderr, flush=True)


def fail(*lines):
    for line in lines:
        say(line)
    sys.exit(1)


def cache_folder():
    if folder := os.environ.get("AUTOBYTE_CACHE"):
        return Path(folder).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "autobyte"


def environment_name(lock_file=LOCK_FILE):
    interpreter = f"{platform.python_version()} {sysconfig.get_platform()}"
    return "venv-" + hashlib.sha256(lock_file.read_bytes() + interpreter.encode()).hexdigest()[:16]


def is_complete(venv):
    """Says whether the environment was finished and its interpreter still runs (a removed Python breaks it)."""
    if not (venv / ".complete").exists():
        return False
    try:
        return subprocess.run([venv / "bin" / "python", "-c", ""], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def check_can_make(cache):
    try:
        import ensurepip  # noqa: F401 (Debian ships Python without it)
        import venv  # noqa: F401
    except ImportError as missing:
        fail(f"this Python ({sys.executable}) has no module {missing.name}, so it cannot make an environment.",
             "Debian and Ubuntu: apt-get install python3-venv. Another Python: PYTHON=/path/to/python3")
    free = shutil.disk_usage(cache).free
    if free < NEEDED_ON_DISK:
        fail(f"{cache} has {free / GIB:.1f} GiB free; {NEEDED_ON_DISK // GIB} GiB are needed "
             "(PyTorch's package brings its CUDA libraries).",
             "Free some space, or set AUTOBYTE_CACHE to a folder on a larger disk.")


def run_showing(command, **options):
    """Runs a command, passes its output on to standard error as it comes, and returns (exit code, last output)."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               errors="replace", **options)
    tail = []
    for line in process.stdout:
        sys.stderr.write(line)
        sys.stderr.flush()
        tail = tail[-200:] + [line]
    return process.wait(), "".join(tail)


def make(venv, lock_fd):
    say(f"making {venv} from {LOCK_FILE.name} with Python {platform.python_version()}")
    say("this downloads about 2 GB, takes a few minutes, and happens once")
    shutil.rmtree(venv, ignore_errors=True)
    # The children inherit the lock: if this process is killed, the next run waits until pip, too, is gone.
    code, _ = run_showing([sys.executable, "-m", "venv", str(venv)], pass_fds=[lock_fd])
    if code != 0:
        fail(f"python -m venv failed with exit code {code}: see above. Debian and Ubuntu: apt-get install python3-venv")
    code, output = run_showing([str(venv / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check",
                                "--require-hashes", "--only-binary", ":all:", "--no-deps", "-r", str(LOCK_FILE)],
                               pass_fds=[lock_fd])
    if code == 0:
        (venv / ".complete").touch()
        return
    if "No space left on device" in output:
        fail("the disk is full: free some space, or set AUTOBYTE_CACHE (and TMPDIR) to folders on a larger disk.")
    if any(sign in output for sign in NO_NETWORK):
        fail("the package index cannot be reached: see above. Check the network, or pip's proxy and index settings",
             "(pip config list; HTTPS_PROXY, PIP_INDEX_URL). Running this again continues with what pip has cached.")
    fail(f"pip failed with exit code {code}: see above.")


def main():
    cache = cache_folder()
    venv = cache / environment_name()
    if not is_complete(venv):
        try:
            cache.mkdir(parents=True, exist_ok=True)
            lock = open(f"{venv}.lock", "w")
        except OSError as error:
            fail(f"cannot write to {cache}: {error.strerror}. Set AUTOBYTE_CACHE to a folder that can be written.")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"another process is making {venv}; waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_complete(venv):
                check_can_make(cache)
                make(venv, lock.fileno())
                say(f"made {venv}")
    if others := sorted(p.name for p in cache.glob("venv-*") if p.is_dir() and p != venv):
        say(f"environments of other lock files in {cache}, which can be deleted: {' '.join(others)}")
    print(venv)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        say("interrupted; the next run makes the environment anew")
        sys.exit(130)
