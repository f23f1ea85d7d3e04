"""Starts scripts as ``subprocess.Popen`` does, but for the seconds in which Lightning is imported.

A server that has imported PyTorch and Lightning, and nothing of this package, forks a process for
each script. What a script starts by Lightning's launcher are its children, as they must be: at its
own beginning it has put processes aside that have imported just as little, for these to become.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy

_ASIDE = 2  # processes that a script may start
_MESSAGE = 1 << 18  # bytes
_TICK_S = 0.02
_server: socket.socket | None = None
_processes: list[subprocess.Popen[bytes]] = []  # the server's
_ended: dict[int, int] = {}


def run(command: list[str], timeout: float, **options: Any) -> tuple[int, str]:
    """Run a script to its end.

    Returns:
        Its exit code, and what it printed.
    """
    printed = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with Script(command, **printed, **options) as script:
        try:
            screen = script.communicate(timeout=timeout)[0]
        finally:
            script.kill()
    return script.returncode, screen


class Script(subprocess.Popen[str]):
    """A script: ``[sys.executable, file or "-m", …]``, and the options of ``subprocess.Popen``."""

    def _execute_child(self, args: Any, *options: Any) -> None:
        """Called by ``subprocess.Popen`` to start the process."""
        cwd, env, written, errors, own = (options[i] for i in (4, 5, 12, 14, 20))
        start = {
            "arguments": args[1:],
            "folder": str(cwd or os.getcwd()),
            "environment": dict(env or os.environ),
            "own_session": bool(own),
        }
        screens = [1 if written == -1 else written, 2 if errors == -1 else errors]
        self.pid: int = _fork(start, screens)
        self._child_created = True
        self._close_pipe_fds(*options[9:15])  # type: ignore[attr-defined]

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        while self.returncode is None and _server and select.select([_server], [], [], 0)[0]:
            pid, code = json.loads(_server.recv(_MESSAGE))
            _ended[pid] = code
        if self.returncode is None:
            self.returncode = _ended.pop(self.pid, None)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        end = time.monotonic() + (1e9 if timeout is None else timeout)
        while (code := self._internal_poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(_TICK_S)
        return code


def _fork(start: dict[str, Any], screens: list[int]) -> int:
    """Let the server start a script; returns its process."""
    global _server
    server = _the_server()
    try:
        socket.send_fds(server, [json.dumps(start).encode()], screens)
        while True:
            message = server.recv(_MESSAGE)
            if not message:
                raise RuntimeError("The server of scripts has ended.")
            pid, *code = json.loads(message)
            if not code:
                return int(pid)
            _ended[pid] = code[0]
    except BaseException:  # its answer may still come: it must not be taken for another's
        server.close()
        _server = None
        raise


def _the_server() -> socket.socket:
    global _server
    if _server is None:
        _server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.scripts", str(theirs.fileno())],
            cwd=Path(__file__).parents[1],
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        _processes.append(process)
        theirs.close()
    return _server


def _serve(requests: socket.socket) -> dict[str, Any]:
    """Fork for every request until the tests have ended. Returns in the forked processes."""
    running: set[int] = set()
    while True:
        if select.select([requests], [], [], _TICK_S)[0]:
            try:
                message, screens, _, _ = socket.recv_fds(requests, _MESSAGE, 2)
            except ConnectionError:
                message = b""
            if not message:
                for script in running:
                    os.kill(script, signal.SIGKILL)
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                requests.close()
                for own, screen in enumerate(screens, 1):
                    os.dup2(screen, own)
            for screen in screens:
                os.close(screen)
            if pid == 0:
                start: dict[str, Any] = json.loads(message)
                if start["own_session"]:
                    os.setsid()
                return start
            running.add(pid)
            requests.send(json.dumps([pid]).encode())
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            continue
        if pid:
            running.discard(pid)
            requests.send(json.dumps([pid, os.waitstatus_to_exitcode(status)]).encode())


def _put_aside() -> tuple[list[tuple[int, int]], dict[str, Any]]:
    """Fork the processes that a script may start.

    Returns:
        Each process and where to write what it becomes; in these processes themselves, what they
        shall become, when they shall.
    """
    aside: list[tuple[int, int]] = []
    for _ in range(_ASIDE):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid:
            os.close(reader)
            aside.append((pid, writer))
            continue
        for end in (writer, *(end for _, end in aside)):
            os.close(end)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a word
        message = os.read(reader, _MESSAGE)
        if not message:
            os._exit(0)  # the script has ended
        os.close(reader)
        return [], json.loads(message)
    return aside, {}


def _main() -> None:
    """Serve; in a forked process, become the script."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lightning.pytorch.strategies.launchers.subprocess_script as launcher
    gc.freeze()
    atexit.register(gc.unfreeze)  # what is left at the end is told of as leaked
    start = _serve(socket.socket(fileno=int(sys.argv[1])))
    aside, instead = _put_aside()
    start = instead or start
    numpy.random.seed()  # as a process that has imported it itself

    class Started(subprocess.Popen[str]):
        def _execute_child(self, args: Any, *options: Any) -> None:
            self.pid, writer = aside.pop(0)
            self._child_created = True
            child = {**start, "arguments": args[1:], "environment": dict(options[5])}
            os.write(writer, json.dumps(child).encode())
            os.close(writer)

    class Subprocess:
        Popen = Started

    launcher.subprocess = Subprocess  # type: ignore[assignment]
    os.chdir(start["folder"])
    os.environ.clear()
    os.environ.update(start["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    script, *arguments = start["arguments"]
    if script == "-m":
        sys.path[0] = start["folder"]
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(script).parent)
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    _main()
