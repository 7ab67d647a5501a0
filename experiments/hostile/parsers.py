"""Everything that reads bytes from outside, with inputs that are right.

A parser takes an input or refuses it by an `HcsimError`. Whatever else it raises is a finding, and so is a number that
is not finite where none may be.
"""

from __future__ import annotations

import hashlib
import random
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import safetensors.numpy
from zeroconf import DNSIncoming, DNSOutgoing, DNSPointer, ServiceInfo
from zeroconf._cache import DNSCache

from experiments.hostile import mutations
from experiments.hostile.mutations import Mutation
from hcsim.cluster import joining, messages, probe
from hcsim.cluster.agreement import Abstained, Accept, Accepted, AcceptorState, Declined, Prepare, Promise, Refused
from hcsim.cluster.diagnosis import Accusation, Findings
from hcsim.cluster.discovery import Candidate, DialQueue, place_of
from hcsim.cluster.membership import AdoptView, Membership, SendMessage
from hcsim.cluster.view import Member, MembershipRules, View
from hcsim.compressors.base import Ident, TensorShape
from hcsim.compressors.powersgd import PowerSGD
from hcsim.compressors.registry import make
from hcsim.config import Training
from hcsim.config.file import parse_scenario, shipped_scenarios
from hcsim.errors import UNDECODABLE, HcsimError
from hcsim.identity.handshake import Credentials, Handshake, HandshakeFault, HandshakeRole, HandshakeState
from hcsim.identity.keys import ClusterSecret, NodeKey
from hcsim.identity.trust_list import TrustList, TrustRecord, decode_record, phrase_key
from hcsim.identity.trust_store import StoredTrust, TrustStore
from hcsim.real.hardware import MemoryStore
from hcsim.real.mdns import SERVICE_TYPE, cached
from hcsim.rng import generator, stream
from hcsim.runtime.frame import HEADER_BYTES, Header, Kind, decode_header, encode_header
from hcsim.runtime.host import Chip, Readings, packed, unpacked
from hcsim.telemetry.history import HistoryMessage, HistoryStep
from hcsim.training import trainer
from hcsim.training.elastic import checkpoint
from hcsim.training.elastic.progress import NOTHING_YET, Provenance
from hcsim.training.elastic.transfer import PIECE_BYTES, StateArrays, _Taking
from hcsim.training.parameter_server import messages as ps
from hcsim.transport import groups
from hcsim.transport.admission_queue import one_line
from hcsim.transport.groups import Wire
from hcsim.transport.messages import Schema
from hcsim.transport.rpc import messages as rpc

Parse = Callable[[bytes], None]
"""Returns when it takes the input; raises `HcsimError` when it refuses it."""
PEER = "a stranger"
_RESPONSE = 0x8400
"""The flags of an mDNS packet that announces."""


class Finding(Exception):
    """What must not be."""


class Parser(NamedTuple):
    """One reader of bytes, with its inputs."""

    name: str
    valid: Sequence[bytes]
    open: Callable[[], AbstractContextManager[Parse]]
    mutation: Mutation = mutations.bytewise
    share: int = 8
    """Of all inputs, relative to the others': those that need a connection take longer."""


def pure(
    name: str, valid: Sequence[bytes], parse: Callable[[bytes], object], mutation: Mutation = mutations.bytewise
) -> Parser:
    """One that needs nothing but the bytes."""

    def run(data: bytes) -> None:
        parse(data)

    return Parser(name, valid, partial(nullcontext, run), mutation)


def _messages(name: str, schema: Schema[Any], valid: Sequence[msgspec.Struct]) -> Parser:
    return pure(name, list(map(schema.encode, valid)), lambda data: schema.decode(data, PEER), mutations.msgpack)


def pure_parsers() -> Iterator[Parser]:
    """Those that need neither a network nor a disk."""
    yield pure("frame header", _HEADERS, _header, mutations.sealed(mutations.bytewise, _with_crc))
    yield from map(_handshake, HandshakeRole)
    yield pure("control message", [msgspec.msgpack.encode(each) for each in CONTROL], _control, mutations.msgpack)
    yield pure("announcement", [_announced()], _announcement)
    yield pure("group hello", [msgspec.msgpack.encode(_HELLO)], _hello, mutations.msgpack)
    yield _messages("invitation talk", joining.SCHEMA, _TALK)
    yield pure("measurement", list(map(msgspec.msgpack.encode, _MEASURED)), _measurement, mutations.msgpack)
    yield _messages("remote call", rpc.SCHEMA, RPC)
    yield _messages("worker's question", ps.QUESTIONS, _QUESTIONS)
    yield _messages("server's answer", ps.ANSWERS, _ANSWERS)
    yield pure("settings", [msgspec.json.encode(_INTENT, enc_hook=float)], _settings, mutations.json)
    yield pure("handed-over state", [_PARCEL.packed()[0]], _snapshot, mutations.msgpack)
    yield pure("trust list", _TRUST, _trust, mutations.msgpack)
    yield pure("phrase", _PHRASES, lambda data: _phrase(data.decode(errors="replace")))
    record = mutations.sealed(mutations.bytewise, _with_record_crc)
    yield pure(
        "record on disk", [packed(AcceptorState(VIEW))], lambda data: unpacked(data, AcceptorState, "here"), record
    )
    yield pure("checkpoint", [checkpoint.encode(_PARCEL)], _checkpoint,
               mutations.sealed(headed, _with_digest))  # fmt: skip
    yield pure("scenario", _SCENARIOS, _scenario, mutations.text)
    for spec in CODECS:
        yield pure(f"codec {spec}", [_encoded(spec, shape) for shape in SHAPES], partial(_decode, spec))
    yield pure("powersgd's sums", [_factors(shape) for shape in SHAPES[:2]], _powersgd_rounds)


# Frames and greetings.

_HEADERS = [
    encode_header(Header(100, Kind.DATA, 1, 2, 3, 4, 5, 6, 7, 8, 200)),
    encode_header(Header(0, Kind.BYE, sender=1)),
]
_HELLO = groups.GroupHello("hcsim", 1, 3, Wire().segment_bytes, 1, 2)
_US = groups.GroupMembership(0, ("a:1", "b:1", "c:1"), epoch=1)


def _with_crc(data: bytes) -> bytes:
    return data[: HEADER_BYTES - 4] + zlib.crc32(data[: HEADER_BYTES - 4]).to_bytes(4, "big")


def _header(data: bytes) -> None:
    if len(data) != HEADER_BYTES:
        raise HcsimError("channels read whole headers")
    encode_header(decode_header(data, max_length=1 << 24, peer=PEER))


def _hello(data: bytes) -> None:
    theirs = groups.decode_hello(data, PEER)
    if objection := groups.objection(_US, theirs, _Nobody()):  # type: ignore[arg-type]
        raise HcsimError(objection)


class _Nobody:
    """A channel to a machine that has proved nothing."""

    identity = ""


def _phrase(text: str) -> None:
    ClusterSecret.from_invitation(text)


_SECRET = ClusterSecret(bytes(range(16)))
_PHRASES = [_SECRET.phrase().encode(), _SECRET.invitation().encode(), f"{_SECRET.phrase()}-{_SECRET.phrase()}".encode()]


# The handshake.


def _key(name: str) -> NodeKey:
    return NodeKey(hashlib.sha256(name.encode()).digest())


def _stored(name: str) -> TrustStore:
    return TrustStore(_SECRET, _key(name), name, StoredTrust(MemoryStore()))


def _side(role: HandshakeRole, name: str) -> Handshake:
    draw = stream(1, "handshake", name)
    return Handshake(role, Credentials(_key(name), _SECRET, 1, draw.randbytes, _stored(name)), b"")


def _handshake(role: HandshakeRole) -> Parser:
    """Both sides are made of the same random numbers each time, so what was once said fits."""
    other = HandshakeRole.LISTENER if role is HandshakeRole.CALLER else HandshakeRole.CALLER
    said: list[bytes] = []
    one, two = _side(other, "other"), _side(role, "us")
    message, hears = (one.first(), two) if other is HandshakeRole.CALLER else (two.first(), one)
    while message is not None:
        if hears is two:
            said.append(message)
        message, hears = hears.receive(message), one if hears is two else two
    assert two.state is HandshakeState.ADMITTED

    def parse(data: bytes) -> None:
        us = _side(role, "us")
        us.first()
        for piece in _cut(data, [len(each) for each in said]):
            us.receive(piece)
            if us.state in (HandshakeState.ADMITTED, HandshakeState.REFUSED):
                break
        if us.state is not HandshakeState.ADMITTED:
            raise HcsimError("refused")
        if data != b"".join(said) and us.theirs is not None and us.theirs.node_id != _key("other").node_id:
            raise Finding("somebody is admitted who has not proved its key")

    return pure(f"handshake, {role.name.lower()}", [b"".join(said)], parse)


def _cut(data: bytes, sizes: Sequence[int]) -> Iterator[bytes]:
    at = 0
    for size in sizes[:-1]:
        yield data[at : at + size]
        at += size
    yield data[at:]


# What nodes of a cluster tell each other.

_A, _B, _C = (Member(f"{name}1", 1, name, f"{name}:2") for name in "abc")
VIEW = View("a1.1", 3, (_A, _B, _C), 2, formed=True, reason="c joined")
_NEXT = View("a1.1", 4, (_A, _B), 3, formed=True, abrupt=True, left=("c1",), reason="c lost")
_STATUS = messages.Status(_B, "b:1", "a1.1", 3, 3, True, reaches=("a1", "c1"), contacts=("a:1", "c:1"),
                          past=(("b1.1", 0),))  # fmt: skip
CONTROL: tuple[messages.ControlMessage, ...] = (
    messages.NodeHello(_STATUS, {"wire.stripes": "2"}),
    messages.HeartbeatMessage(7, _STATUS),
    messages.HeartbeatMessage(
        8, msgspec.structs.replace(_STATUS, broken=3, reason="b was lost", joins="a1.1", leaving=True)
    ),
    messages.HeartbeatReply(7),
    messages.Decided(_NEXT),
    messages.Goodbye("it has finished or left"),
    messages.StatusRequest("c1"),
    messages.StatusRequest(since_s=1.5),
    messages.ProbeRequest(),
    messages.StatusReply(_STATUS, VIEW, (messages.LinkStatus("a1", "a", "a:1", "a:2", 0.1, ""),), ()),
    messages.StatusReply(
        _STATUS,
        VIEW,
        (),
        (),
        messages.Details(
            2.0,
            Chip("M4", 2**34),
            Readings(2**33, 61.0, 8.5, 0.9),
            "digits by ddp",
            9,
            2,
            (HistoryStep(1.0, 1, 2.5, 2, 64, held_out=2.4),),
            (HistoryMessage(0.5, "view 1: a, b (b joined)"),),
        ),
    ),
    messages.Qualified("a1.1", 1),
    messages.LastCall("a1.1"),
    messages.TrustUpdate(TrustRecord()),
    Prepare((9, "b1"), VIEW),
    Promise((9, "b1"), _B, ("a1",), ((8, "c1"), _NEXT)),
    Abstained((9, "b1"), _B, ("a1",)),
    Accept((9, "b1"), "a1.1", 3, _NEXT),
    Accepted((9, "b1")),
    Refused((9, "b1"), (10, "c1")),
    Declined("a1.1", 3),
    Findings("a1.1", 3, 1, True, True, True, "c1", False, 0.1, (Accusation("c1", "it does not answer"),)),
)
_DAY_S = 86400.0


def _control(data: bytes) -> None:
    """A message by b, which a node takes in that is in a view with it; what it then says must be readable."""
    message = messages.SCHEMA.decode(data, PEER)
    node = Membership(_A, "a:1", MembershipRules(3), AcceptorState(VIEW), lambda record: None)
    for member in (_B, _C):
        node.heard(msgspec.structs.replace(_STATUS, us=member), 0.0)
        node.found(member.node, 0.0)
    if isinstance(message, messages.NodeHello | messages.HeartbeatMessage):
        if message.status.us.node != "b1":
            raise HcsimError("a channel's node speaks for itself alone")
        node.heard(message.status, 1.0)
    else:
        node.message("b1", message, 1.0)
    for now in (2.0, 20.0, _DAY_S):
        node.tick(now)
    node.heard(node.status, now)
    try:
        for effect in node.effects:
            if isinstance(effect, SendMessage):
                messages.SCHEMA.decode(messages.SCHEMA.encode(effect.message), PEER)
            elif isinstance(effect, AdoptView):
                encode_header(Header(0, epoch=effect.view.epoch))
    except HcsimError as error:
        raise Finding(f"a node cannot go on after it: {type(error).__name__}") from error


_TALK = (
    joining.Knock(_key("b").public, "b", bytes(32)),
    joining.Welcome(_SECRET.data, TrustRecord()),
    joining.Denied("the invitation has expired"),
    joining.Thanks(),
)


_MEASURED = (
    probe.ProbeTurn("b"),
    probe.Ping(),
    probe.Burst(16, 4096, True),
    probe.Took(0.1),
    probe.Found(probe.LinkSpeed(0.1, 1e8, 1e8)),
)


def _measurement(data: bytes) -> None:
    match probe.SCHEMA.decode(data, PEER):
        case probe.Took(seconds) if not seconds >= 0:
            raise Finding("it takes a time that is none")
        case probe.Found(line) if not (line.latency_s >= 0 and line.there_Bps > 0 and line.back_Bps > 0):
            raise Finding("it takes a line that is none")


# What the local network announces.


def _announced() -> bytes:
    name = f"mini-b1.{SERVICE_TYPE}"
    said = {"node": "b1", "namespace": _SECRET.namespace.hex(), "boot": "1f", "at": "192.168.1.9|[fd00::9]:52415"}
    at = ["192.168.1.9"]
    info = ServiceInfo(SERVICE_TYPE, name, 52415, properties=said, server="mini.local.", parsed_addresses=at)
    packet = DNSOutgoing(_RESPONSE)
    for record in (info.dns_pointer(), info.dns_service(), info.dns_text(), *info.dns_addresses()):
        packet.add_answer_at_time(record, 0)
    return packet.packets()[0]


class _Heard:
    """As much of a `Zeroconf` as looks services up."""

    def __init__(self) -> None:
        self.cache = DNSCache()


def _announcement(data: bytes) -> None:
    """What a packet announces, until its address is about to be dialled and its name told."""
    packet, heard = DNSIncoming(data), _Heard()
    if not packet.valid:
        raise HcsimError("zeroconf drops it")
    records = packet.answers()
    heard.cache.async_add_records(records)
    candidates = DialQueue(lambda node: False)
    found = False
    for record in records:
        service = cached(heard, record.alias) if isinstance(record, DNSPointer) else None  # type: ignore[arg-type]
        if service is not None:
            found = True
            candidates.add(Candidate(service.properties.get("node", ""), place_of(service)))
            one_line(service.name, 80).encode()
    if not found:
        raise HcsimError("nothing is announced")


# Remote calls, the parameter server and the coordinator.

_ARGUMENTS = rpc.EncodedValue(
    msgspec.msgpack.encode([{"worker": "b", "life": 7, "address": "b:1"}]),
    (rpc.ArraySpec("float32", (2, 3)),),
    (rpc.ReferenceSpec(1, "thing"),),
    (2,),
)
RPC: tuple[rpc.RpcMessage, ...] = (
    rpc.CallRequest(1, "coordinator.register", _ARGUMENTS, 5.0, 1),
    rpc.CallRequest(2, "coordinator.heartbeat", rpc.EncodedValue(msgspec.msgpack.encode([0]))),
    rpc.CallResult(1, _ARGUMENTS),
    rpc.CallFailure(1, "ValueError", "no"),
    rpc.CancelCall(1),
    rpc.ReleaseReference(1, 1),
)
_QUESTIONS = (
    ps.Join("job", "b", 7, "digest"),
    ps.Pull(-1),
    ps.Push(1, 0, 16, "int8+ef", (100, 200)),
    ps.AwaitEnd(),
    ps.LeaveRequest("done"),
)
_ANSWERS = (
    ps.JoinReply(1, 1, 7),
    ps.ModelReply(1, 400),
    ps.PushAccepted(1, 1),
    ps.PushStale(1, 1),
    ps.RequestRefused(1, "no"),
    ps.KeepAlive(),
    ps.TrainingDone(3),
)
_INTENT = trainer.Intent(Training(task="convex"), 1, "digest")


def _settings(data: bytes) -> None:
    try:
        trainer.difference(msgspec.json.encode(_INTENT, enc_hook=float), data, "here", "there")
    except UNDECODABLE as error:
        raise HcsimError("refused as its callers do") from error


# What is handed over, or lies on a disk.


_PARCEL = StateArrays(
    msgspec.msgpack.encode(NOTHING_YET),
    {"parameters": np.arange(12, dtype=np.float32), "optimizer/m": np.ones((3, 4)), "empty": np.zeros(0, np.float32)},
)


def _snapshot(data: bytes) -> None:
    taking = _Taking(data, 1, 1)
    assert taking.piece(0).nbytes <= PIECE_BYTES
    taking.snapshot().told(Provenance)


def _with_record_crc(data: bytes) -> bytes:
    mark = packed(None)[:-5]
    body = data[len(mark) + 4 :]
    return mark + zlib.crc32(body).to_bytes(4, "big") + body


def _checkpoint(data: bytes) -> None:
    checkpoint.decode(data).snapshot.told(Provenance)


def headed(draw: random.Random, valid: Sequence[bytes]) -> bytes:
    """Of safetensors, every second time the header changes, with the length that it then has."""
    data = draw.choice(valid)
    if draw.random() < 0.5:
        return mutations.bytewise(draw, valid)
    end = 8 + int.from_bytes(data[:8], "little")
    header = mutations.json(draw, [data[8:end]])
    return struct.pack("<Q", len(header)) + header + data[end:]


def _with_digest(data: bytes) -> bytes:
    """As somebody would save it who means harm."""
    try:
        end = 8 + int.from_bytes(data[:8], "little")
        says = msgspec.json.decode(data[8:end])["__metadata__"]
        snapshot = StateArrays(bytes.fromhex(says["about"]), safetensors.numpy.load(data))
        return checkpoint.encode(
            snapshot, checkpoint.CheckpointOrigin(says["task"], says["fingerprint"]), int(says["number"])
        )
    except Exception:  # then there is nothing to make a digest of
        return data


def _trusted() -> TrustList:
    known, phrase = TrustList.of(_SECRET), phrase_key(_SECRET)
    for name in "abc":
        known = known.merged([known.listing(_key(name).public, name, phrase)])
    return known.merged([known.rotation([_key("c").node_id], _key("new phrase").public, _key("a"))])


_KNOWN = _trusted()
_TRUST = [msgspec.msgpack.encode(TrustRecord(_KNOWN.statements, bytes(16)))]


def _trust(data: bytes) -> None:
    heard = TrustList.of(_SECRET).merged(decode_record(data, PEER).statements)
    if not set(heard.statements) <= set(_KNOWN.statements):
        raise Finding("a statement counts that nobody has signed")


_SCENARIOS = [path.read_bytes() for path in shipped_scenarios().values()]


def _scenario(data: bytes) -> None:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise HcsimError("a file that is no text is refused when it is read") from None
    parse_scenario(text, "here")


# Compressors.

CODECS = (
    "none", "topk:0.3", "randomk:0.3", "fp16", "bf16", "int8", "int8:block=16", "onebit", "powersgd:2", "zstd",
)  # fmt: skip
SHAPES: tuple[TensorShape, ...] = ((12, 10), (40, 30), (37,))
_OF = Ident("layer.weight", 3)


def _encoded(spec: str, shape: TensorShape) -> bytes:
    tensor = generator(1, spec, *shape).standard_normal(shape).astype(np.float32)
    return make(spec, seed=1, rank=0).encode(tensor, _OF).tobytes()


def _decode(spec: str, data: bytes) -> None:
    """By each way; what is taken is finite. Elements are taken or refused whatever the shape that they announce."""
    payload = np.frombuffer(data, np.uint8)
    shape = next((each for each in SHAPES if int(np.prod(each)).to_bytes(8, "little") == data[8:16]), SHAPES[0])
    coder = make(spec, seed=1, rank=0)
    out = np.zeros(shape, np.float32)
    coder.decode(payload, out, _OF)
    if not np.isfinite(out).all():
        raise Finding("it decodes to what is not finite")
    coder.add(payload, np.zeros(shape, np.float32), _OF)
    coder.subtract(payload, np.zeros(shape, np.float32), _OF)


def _factors(shape: TensorShape) -> bytes:
    """What crosses the wire for one matrix: the sums of both factors."""
    coder = PowerSGD(2, seed=1)
    values = generator(2, *shape).standard_normal(sum(coder.round_bytes(shape)) // 4).astype(np.float32)
    return shape[0].to_bytes(4, "little") + values.tobytes()


def _powersgd_rounds(data: bytes) -> None:
    shape = next((each for each in SHAPES[:2] if each[0].to_bytes(4, "little") == data[:4]), SHAPES[0])
    coder = PowerSGD(2, seed=1)
    first, second = (size // 4 for size in coder.round_bytes(shape))
    values = np.zeros(first + second, np.float32)
    heard = np.frombuffer(data[4 : 4 + (len(data) - 4) // 4 * 4], np.float32)[: values.size] if len(data) > 4 else []
    values[: len(heard)] = heard
    tensor = generator(3, *shape).standard_normal(shape).astype(np.float32)
    rounds = coder.rounds(tensor, _OF)
    next(rounds)
    rounds.send(values[:first].copy())
    with suppress(StopIteration):
        rounds.send(values[first:].copy())
    coder.commit(_OF.step)
    if not (np.isfinite(tensor).all() and all(np.isfinite(array).all() for array in coder.state().values())):
        raise Finding("the total or what is remembered is not finite")


REFUSALS = (HcsimError, HandshakeFault)
