"""What is an echo of another failure, and what only uses the same words."""

from __future__ import annotations

from pathlib import Path

import pytest

from piecegraph.explain.echoes import echo_of
from piecegraph.explain.evidence import Failure, Frame, Raised
from piecegraph.explain.from_logs import explain_logs
from piecegraph.explain.page import compose
from piecegraph.explain.root_cause import triage
from tests.explain.log.test_lines import OTHER, TRACEBACK
from tests.explain.test_page import evidence, failing

SITE = "/opt/venv/lib/python3.11/site-packages/"
PYTHON = "/usr/lib/python3.11/"


def raised(type: str, message: str, *files: str) -> Failure:
    frames = tuple(Frame(file, 3, "f") for file in ("/srv/train.py", *files))
    return Failure(chain=(Raised(type=type, message=message, frames=frames),), line=5)


CAUSES = {
    "a port in use": raised(
        "torch.distributed.DistNetworkError",
        "The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, "
        "name: EADDRINUSE, message: address already in use",
        SITE + "torch/distributed/rendezvous.py",
    ),
    "a name that is unknown": raised(
        "torch.distributed.DistNetworkError",
        "getaddrinfo failed: Name or service not known",
        SITE + "torch/distributed/rendezvous.py",
    ),
    "a setting": raised("ValueError", "heartbeat_interval must be less than 30", SITE + "ray/_private/config.py"),
    "a download": raised(
        "requests.exceptions.ReadTimeout",
        "HTTPSConnectionPool(host='example.org', port=443): Read timed out while reading",
        SITE + "requests/adapters.py",
    ),
    "a download that broke off": raised(
        "ConnectionResetError", "[Errno 104] Connection reset", SITE + "urllib3/response.py", PYTHON + "ssl.py"
    ),
    "a database": raised("ConnectionRefusedError", "[Errno 111] refused", SITE + "redis/asyncio/connection.py"),
    "a lock": raised("Timeout", "Acquiring the file lock timed out after 600 s", SITE + "filelock/_api.py"),
    "a lock of one's own": raised("TimeoutError", "timed out waiting for /scratch/cache.lock"),
}


CHILD = Failure(
    chain=(
        Raised(
            type="ConnectionRefusedError",
            message="[Errno 111] Connection refused",
            frames=(
                Frame(PYTHON + "multiprocessing/process.py", 314, "_bootstrap"),
                Frame("/srv/loader.py", 9, "fetch"),
                Frame(PYTHON + "socket.py", 851, "create_connection"),
            ),
        ),
    )
)


@pytest.mark.parametrize("cause", CAUSES.values(), ids=CAUSES)
def test_what_fails_at_a_server_a_lock_or_the_machine_is_a_cause(cause: Failure) -> None:
    assert echo_of(cause) == ""
    later = failing("KeyError", "step", line=9)
    assert triage(evidence(cause, later)).root is cause


@pytest.mark.parametrize(
    "lost",
    [
        raised("torch.distributed.DistNetworkError", "The client socket has timed out after 600000ms"),
        raised("ConnectionResetError", "Connection lost", PYTHON + "asyncio/streams.py"),
        Failure(chain=(Raised(type="RuntimeError", message="Connection reset by peer", frames=()),), line=5),
        CHILD,
        raised("torch.distributed.elastic.rendezvous.api.RendezvousConnectionError", "The connection has failed"),
    ],
)
def test_what_may_be_an_echo_is_the_cause_where_nothing_else_is(lost: Failure) -> None:
    page = compose(evidence(lost), ())
    assert page.root is not None
    assert not page.who.has_only_echoes
    later = failing("KeyError", "step", line=9)
    assert triage(evidence(lost, later)).root is later


@pytest.mark.parametrize(
    "echo",
    [
        raised("EOFError", "", PYTHON + "multiprocessing/connection.py"),
        raised("RuntimeError", "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:1234"),
        raised("ConnectionResetError", "[Errno 104]", SITE + "torch/distributed/distributed_c10d.py"),
        raised("torch.distributed.DistBackendError", "NCCL communicator was aborted on rank 3."),
        raised(
            "torch.distributed.DistBackendError",
            "[3] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by "
            "store->get('0'), but store->get('0') got error: Socket Timeout",
        ),
        raised("RuntimeError", "Socket Timeout", SITE + "torch/distributed/rendezvous.py"),
        raised("RuntimeError", "[/gloo/transport/tcp/unbound_buffer.cc:84] Application timeout caused pair closure"),
        raised("RuntimeError", "Stop_waiting response is expected"),
        raised("RuntimeError", "cancelled", SITE + "vllm/distributed/device_communicators/shm_broadcast.py"),
        raised("TimeoutError", "RPC call to execute_model timed out.", SITE + "vllm/v1/executor/multiproc_executor.py"),
        raised("zmq.error.ContextTerminated", "Context was terminated"),
        raised("ray.exceptions.RayChannelError", "System error: Channel closed."),
        raised("ray.exceptions.NodeDiedError", "Task failed due to the node (where this task was running) was dead"),
        raised("jaxlib.xla_extension.XlaRuntimeError", "DEADLINE_EXCEEDED: Barrier timed out. Id: [Init]sync_1"),
    ],
)
def test_a_lost_rank_or_worker_is_an_echo_alone_too(echo: Failure) -> None:
    assert compose(evidence(echo), ()).who.has_only_echoes


@pytest.mark.parametrize(
    "style",
    ["2026-05-04 10:{:02}:00,101 INFO a: ", "INFO 05-04 10:{:02}:00 [a.py:3] ", "I0504 10:{:02}:00.101 a.py:3] "],
)
def test_the_first_failure_of_several_logs_is_that_of_the_earliest_time(tmp_path: Path, style: str) -> None:
    def log(name: str, minute: int, text: str, num_lines: int) -> Path:
        path = tmp_path / name
        path.write_text((style.format(minute) + "step\n") * num_lines + text)
        return path

    late, early = log("rank0.log", 20, TRACEBACK, 3), log("rank1.log", 10, OTHER, 30)
    page = explain_logs([late, early])
    assert [group.type for group in page.who.groups] == ["KeyError", "ValueError"]
    assert page.who.is_ordered
    unknown = log("rank1.log", 10, "no time\n" * 40 + OTHER, 30)
    page = explain_logs([late, unknown])
    assert [group.type for group in page.who.groups] == ["ValueError", "KeyError"]
    assert not page.who.is_ordered
