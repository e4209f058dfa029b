"""`rd2h probe` with two real processes."""

import json
import select
import subprocess
import sys

import pytest
import zmq

DEADLINE_S = 60


@pytest.fixture
def prefill():
    """Starts the Prefill side; it is stopped by process id at the end."""
    started = []

    def start(*options, timeout_s=30):
        command = [sys.executable, "-m", "rd2h.probe", "prefill", "--size-mib", "3", "--timeout-s", str(timeout_s)]
        process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        ready, _, _ = select.select([process.stdout], [], [], DEADLINE_S)
        assert ready
        return process, json.loads(process.stdout.readline())

    yield start
    for process in started:
        process.kill()
        process.wait(DEADLINE_S)
        process.stdout.close()
        process.stderr.close()


def decode(address, *options):
    command = [sys.executable, "-m", "rd2h.probe", "decode", "--connect", address, "--iterations", "2"]
    return subprocess.run([*command, *options], capture_output=True, text=True, timeout=DEADLINE_S)


def ask(address, *messages):
    context = zmq.Context()
    socket = context.socket(zmq.REQ)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, DEADLINE_S * 1000)
    try:
        socket.connect(f"tcp://{address}")
        answers = []
        for message in messages:
            socket.send(message)
            answers.append(json.loads(socket.recv()))
        return answers
    finally:
        socket.close()
        context.term()


def test_a_good_pair_passes_on_both_sides(prefill):
    process, hello = prefill()
    done = decode(hello["listen"], "--json", "--block-kib", "17")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["passed"] is True
    assert [(row["case"], row["wrong_bytes"]) for row in report["rows"]] == [
        ("whole", 0),
        ("blocks", 0),
        ("scattered", 0),
    ]
    assert [row["descriptors"] for row in report["rows"]] == [1, (3 << 20) // (17 << 10), 4096]
    assert all(row["gb_per_s"] > 0 for row in report["rows"])
    assert process.wait(DEADLINE_S) == 0
    assert json.loads(process.stdout.readline()) == {"role": "prefill", "passed": True}


def test_people_get_a_table_and_a_verdict(prefill):
    _, hello = prefill()
    done = decode(hello["listen"])
    assert done.returncode == 0
    assert "GB/s  bytes equal" in done.stdout
    assert done.stdout.splitlines()[-1] == "verdict: PASSED (host)"


WRONG = """
import sys
from rd2h.engines.host import HostEngine
from rd2h.engines import READ_OK
from rd2h.probe import main
real = HostEngine.batch_transfer_sync_read
def lossy(self, session, local, peer, lengths):
    {body}
HostEngine.batch_transfer_sync_read = lossy
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "body",
    [
        "return READ_OK",
        "return real(self, session, local[:-1], peer[:-1], lengths[:-1]) if local.size > 1 else READ_OK",
        "return real(self, session, local, peer + local.dtype.type(1), lengths - local.dtype.type(1))",
        "return real(self, session, local + local.dtype.type(1), peer, lengths - local.dtype.type(1))",
    ],
    ids=["nothing", "one-missing", "shifted-source", "shifted-destination"],
)
def test_wrong_bytes_fail_on_both_sides(prefill, body):
    process, hello = prefill()
    program = WRONG.format(body=body)
    command = [sys.executable, "-c", program, "decode", "--connect", hello["listen"], "--iterations", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 1, done.stderr
    assert "WRONG BYTES" in done.stdout
    assert "verdict: FAILED" in done.stdout
    assert process.wait(DEADLINE_S) == 1


def test_a_failed_read_is_told_to_both_sides(prefill):
    process, hello = prefill()
    body = "from rd2h.engines import ReadResult; return ReadResult(-1, 'cable cut')"
    command = [sys.executable, "-c", WRONG.format(body=body), "decode", "--connect", hello["listen"]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 2
    assert "cable cut" in done.stderr
    assert process.wait(DEADLINE_S) == 1


def test_strange_requests_change_nothing(prefill):
    process, hello = prefill()
    strange = [b"", b"{", b"[]", b"\xff", b'{"op": "result"}', b'{"op": "result", "passed": 1}', b'{"op": ["x"]}']
    strange.append(b'{"op": "hello", "v": 1, "backend": "memfabric", "protocol": "sdma"}')
    strange.append(b"[" * 20_000)
    for answer in ask(hello["listen"], *strange):
        assert answer["ok"] is False
        assert answer["error"]
    assert process.poll() is None
    assert decode(hello["listen"]).returncode == 0
    assert process.wait(DEADLINE_S) == 0


def test_different_engines_are_refused_by_name(prefill):
    _, hello = prefill()
    (answer,) = ask(hello["listen"], b'{"op": "hello", "v": 1, "backend": "memfabric", "protocol": "sdma"}')
    assert answer["error"] == "backend differs: Prefill has 'host', Decode 'memfabric'"


def test_decode_refuses_an_offer_larger_than_allowed(prefill):
    _, hello = prefill()
    done = decode(hello["listen"], "--max-mib", "2")
    assert done.returncode == 2
    assert "--max-mib allows 2097152" in done.stderr


def test_waits_are_bounded(prefill):
    process, _ = prefill(timeout_s=0.3)
    assert process.wait(DEADLINE_S) == 2
    assert "no Decode has reported a result within 0.3 s" in process.stderr.read()
    context = zmq.Context()
    silent = context.socket(zmq.ROUTER)
    port = silent.bind_to_random_port("tcp://127.0.0.1")
    try:
        done = decode(f"127.0.0.1:{port}", "--timeout-s", "0.3")
    finally:
        silent.close(linger=0)
        context.term()
    assert done.returncode == 2
    assert f"Prefill at 127.0.0.1:{port} has not answered 'hello' within 0.3 s" in done.stderr


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--connect", "nonsense"], "--connect='nonsense' is not allowed"),
        (["--connect", "h:70000"], "--connect='h:70000' is not allowed"),
        (["--connect", "h:1", "--protocol", "tcp"], "--protocol='tcp' is not allowed; expected one of 'sdma'"),
        (["--connect", "h:1", "--iterations", "0"], "--iterations=0 is not allowed"),
        (["--connect", "h:1", "--max-mib", "0"], "--max-mib=0.0 is not allowed"),
        (["--connect", "h:1", "--max-mib", "nan"], "--max-mib=nan is not allowed"),
        (["--connect", "h:1", "--max-mib", "inf"], "--max-mib=inf is not allowed"),
        (["--connect", "h:1", "--timeout-s", "inf"], "--timeout-s=inf is not allowed"),
        (["--connect", "h:1", "--memory", "npu"], "--memory='npu' is not allowed"),
        (["--connect", "h:1", "--seed", "-1"], "--seed=-1 is not allowed"),
    ],
)
def test_wrong_settings_are_one_line(capsys, options, text):
    from rd2h.probe import main

    assert main(["decode", *options]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


def test_the_console_command_knows_the_probe(prefill):
    _, hello = prefill()
    command = [sys.executable, "-m", "rd2h.cli", "probe", "decode", "--connect", hello["listen"], "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["passed"]
