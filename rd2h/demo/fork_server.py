"""A process that has imported vLLM once and forks engines from itself: `python -m rd2h.demo.fork_server FD`.

Importing vLLM takes most of an engine's start; here it is paid once. The other end (fork_client.py) talks to it over a
socket, one JSON object a line: {"start": {"arguments", "environment", "log"}} answers {"pid"}; {"poll": pid} answers
{"code"}, null while the process runs. The end of the connection ends the server and every engine it forked.
"""

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rd2h.demo import engine_main
from rd2h.demo.lifetime import die_with_parent


@dataclass(frozen=True)
class Job:
    """What a forked child has to run."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    log: str


class ForkServer:
    """Answers the requests of one connection. Children are reaped only when asked for, so their ids stay theirs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._running: set[int] = set()
        self._ended: dict[int, int] = {}

    def run(self) -> Job | None:
        """Serves until the connection ends (then None, all children killed); in a forked child returns its job."""
        self._answer({"ready": True})
        for line in self._stream:
            request = json.loads(line)
            if "start" in request:
                job = Job(**request["start"])
                pid = os.fork()
                if pid == 0:
                    return job
                self._running.add(pid)
                self._answer({"pid": pid})
            else:
                self._answer({"code": self._poll(request["poll"])})
        for pid in self._running:
            os.kill(pid, signal.SIGKILL)
        return None

    def _poll(self, pid: int) -> int | None:
        if pid in self._running:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found == 0:
                return None
            self._running.discard(pid)
            self._ended[pid] = os.waitstatus_to_exitcode(status)
        return self._ended[pid]

    def _answer(self, message: Mapping[str, Any]) -> None:
        self._stream.write(json.dumps(message) + "\n")
        self._stream.flush()


def become(job: Job) -> None:
    """Turns a freshly forked child into an engine with a session, a log and an environment of its own."""
    os.setsid()
    log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.close(log)
    os.environ.update(job.environment)
    engine_main.serve(job.arguments)


def main() -> None:
    """Imports vLLM, then serves the connection whose file descriptor is the only argument."""
    server_pid = os.getpid()
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    engine_main.prepare()
    absent = engine_main.preload()
    if absent:
        print(f"fork server: not installed here: {', '.join(absent)}", flush=True)
    with connection.makefile("rw", encoding="utf-8") as stream:
        job = ForkServer(stream).run()
        if job is None:
            return
        # In the child. Closing the stream's copy here leaves the server's own open.
        die_with_parent(server_pid)
    connection.close()
    become(job)


if __name__ == "__main__":
    main()
