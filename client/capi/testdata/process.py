"""Checks that libpenstock does not disturb a Python process. Usage: process.py LIBRARY"""

import ctypes
import os
import signal
import subprocess
import sys

FORKED = 3
UNTOUCHED = [s for s in signal.valid_signals() if s not in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGPIPE, signal.SIGURG)]


class Error(ctypes.Structure):
    _fields_ = [("code", ctypes.c_int32), ("message", ctypes.c_char * 508)]


def caught():
    """Return the kernel's masks of blocked, ignored and caught signals of this process."""
    fields = dict(line.split(":\t") for line in open("/proc/self/status") if line.startswith("Sig"))
    return {k: int(fields[k], 16) for k in ("SigBlk", "SigIgn", "SigCgt")}


def bits(masks):
    return {k: [s for s in UNTOUCHED if m >> (s - 1) & 1] for k, m in masks.items()}


def in_child(f):
    """Run f in a forked child and return its exit status. An alarm ends a child that hangs."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        try:
            os._exit(f())
        except BaseException as e:
            print(type(e), e, file=sys.stderr)
            os._exit(99)
    return os.waitpid(pid, 0)[1]


def close(lib):
    e = Error()
    return lib.penstock_close(ctypes.c_uint64(1), ctypes.byref(e)), e


def main(path):
    # A child may load and use the library itself if its parent has not loaded it.
    assert in_child(lambda: close(ctypes.CDLL(path))[0] != 2) == 0, "a child that loads the library"

    got = []
    signal.signal(signal.SIGINT, lambda *_: got.append("int"))
    signal.signal(signal.SIGCHLD, lambda *_: got.append("chld"))
    signal.signal(signal.SIGTERM, lambda *_: got.append("term"))
    before = bits(caught())
    lib = ctypes.CDLL(path)
    code, e = close(lib)
    assert code == 2 and b"not an open store" in e.message, (code, e.message)
    after = bits(caught())
    assert before == after, (before, after)

    # Signals still reach Python's handlers.
    for s in (signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), s)
    subprocess.run(["true"], check=True)
    assert {"int", "term", "chld"} <= set(got), got
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            signal.pause()
    except KeyboardInterrupt:
        pass

    # A broken pipe raises an exception, and does not end the process.
    r, w = os.pipe()
    os.close(r)
    try:
        os.write(w, b"x")
        raise AssertionError("the write to a broken pipe succeeded")
    except BrokenPipeError:
        os.close(w)

    # A forked child gets FORKED, and otherwise works.
    def refused():
        code, e = close(lib)
        return not (code == FORKED and b"fork" in e.message)

    assert in_child(refused) == 0, "a child of a process with the library"
    assert close(lib)[0] == 2, "the parent after the fork"

    # A segmentation fault ends the process, and faulthandler prints its place. faulthandler
    # may be enabled before or after the library is loaded.
    for order in ("faulthandler.enable(); lib()", "lib(); faulthandler.enable()"):
        program = "import ctypes, faulthandler\n" f"def lib(): ctypes.CDLL({path!r}).penstock_close(ctypes.c_uint64(1), None)\n" f"{order}\n" "ctypes.string_at(0)\n"
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert run.returncode == -signal.SIGSEGV, (order, run.returncode, run.stderr[-2000:])
        assert "Fatal Python error: Segmentation fault" in run.stderr, (order, run.stderr[-2000:])


main(sys.argv[1])
