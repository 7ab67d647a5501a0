"""A scenario: the homes, machines, links, faults and the job of one run, as one tree of frozen structs.

It is written in TOML. A quantity is text with its unit there (`latency = "0.15 ms"`); here the
attribute's name carries the unit (`latency_s`), so a key is its attribute without the suffix.
Shorthands (a link by its medium's name, a Wi-Fi standard, `count`, `effects = "ideal"`) are spelled
out while loading: who reads the tree never meets one. Every mistake is a `ConfigError` that names
the file, the place, what was found, and what would be valid there.

Whatever needs more than one table to be checked is checked here, machines excepted: their catalogue
belongs to the virtual world.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, field
from msgspec.structs import replace

from hcsim.errors import ConfigError, UsageError
from hcsim.units import (
    BitRate,
    ByteRate,
    Bytes,
    FlopRate,
    Flops,
    PositiveBytes,
    PositiveSeconds,
    PositiveShare,
    Seconds,
    Share,
    SignedSeconds,
    decode_quantity,
    did_you_mean,
    explain,
)

_SCENARIOS = Path(__file__).parent / "scenarios"

Name: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Mtu: TypeAlias = Annotated[int, Meta(ge=576, le=65535)]
Count: TypeAlias = Annotated[int, Meta(ge=1)]


def _key(attribute: str) -> str:
    return re.sub(r"_(bps|Bps|s|bytes|flops)$", "", attribute)


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename=_key):
    pass


class Ethernet(_Table, frozen=True, tag_field="kind", tag="ethernet"):
    """A full-duplex switch; media of one home are bridged by its router."""

    name: Name
    rate_bps: BitRate
    home: Name = "home"
    latency_s: Seconds = Seconds(0.1e-3)
    """One way."""
    jitter_s: Seconds = Seconds(0)
    """Mean of an exponential extra delay."""
    loss: Share = Share(0)
    """Probability per packet."""
    mtu: Mtu = 1500


class Wifi(_Table, frozen=True, tag_field="kind", tag="wifi"):
    """One access point, whose stations share its airtime; the standard gives what the file leaves out."""

    name: Name
    phy_rate_bps: BitRate
    latency_s: Seconds
    jitter_s: Seconds
    loss: Share
    home: Name = "home"
    standard: Literal["wifi5", "wifi6", "wifi6e", "wifi7"] = "wifi6"
    efficiency: PositiveShare = PositiveShare(0.65)
    """TCP throughput over PHY rate."""
    fairness: Literal["throughput", "airtime"] = "throughput"
    """What the stations get equal parts of; with "throughput" a slow one slows all."""
    gate: bool = True
    """Now and then the medium closes (scans, power save, roaming), then flushes."""
    gate_every_s: PositiveSeconds = PositiveSeconds(33)
    gate_min_s: Seconds = Seconds(0.1)
    gate_max_s: Seconds = Seconds(0.25)
    mtu: Mtu = 1500

    def __post_init__(self) -> None:
        if self.gate_min_s > self.gate_max_s:
            raise UsageError(f"gate_min ({self.gate_min_s} s) is longer than gate_max ({self.gate_max_s} s)")


# Latency 1.2 ms and an exponential jitter of mean 1 ms, each way, give a round trip with median
# 4.1 ms and 95th percentile 7.1 ms; the longer tail is the gate's.
_AIR = {"latency": "1.2 ms", "jitter": "1 ms", "loss": "0.12 %"}
_STANDARDS = {
    "wifi5": {"phy_rate": "866 Mb/s", **_AIR},
    "wifi6": {"phy_rate": "1.2 Gb/s", **_AIR},
    "wifi6e": {"phy_rate": "2.4 Gb/s", **_AIR},
    "wifi7": {"phy_rate": "1.44 Gb/s", **_AIR},
}


class Cable(_Table, frozen=True):
    """One Thunderbolt cable; its two directions can differ, and without `backward` they do not."""

    between: tuple[str, str]
    forward_bps: BitRate
    backward_bps: BitRate
    latency_s: Seconds = Seconds(0.2e-3)


class Thunderbolt(_Table, frozen=True, tag_field="kind", tag="thunderbolt"):
    """A network of cables between hosts, which forward for each other; not bridged to other media.

    The rates known for Thunderbolt are TCP throughputs already. A large MTU keeps the
    headers, which every medium pays, from being taken off a second time (1 %, not 6 %)."""

    name: Name
    cables: Annotated[tuple[Cable, ...], Meta(min_length=1)] = field(name="cable")
    forwarding_bps: BitRate | None = None
    """What one host can forward for others; None: as much as its cables carry."""
    mtu: Mtu = 9000


class Tunnel(_Table, frozen=True):
    """A VPN or relay on the way out of a home."""

    mtu: Mtu = 1280
    cap_bps: BitRate | None = None
    delay_s: Seconds = Seconds(0)


class Wan(_Table, frozen=True):
    """A home's line to the internet's core, which joins all homes that have one."""

    home: Name
    up_bps: BitRate
    down_bps: BitRate
    latency_s: Seconds
    """One way, from the home to the core."""
    jitter_s: Seconds = Seconds(0)
    loss: Share = Share(0)
    buffer_bytes: Bytes | None = None
    """The queue in front of the line; full, it adds buffer / rate to the round trip."""
    tunnel: Tunnel | None = None
    mtu: Mtu = 1500


class Machine(_Table, frozen=True):
    """What a node computes with; efficiencies are the parts of the data-sheet figures that are reached."""

    name: str
    peak_flops: FlopRate
    memory_Bps: ByteRate  # noqa: N815 (bytes, not bits)
    efficiency_compute: PositiveShare = PositiveShare(0.8)
    efficiency_memory: PositiveShare = PositiveShare(0.8)  # not verified
    overhead_s: Seconds = Seconds(10e-6)  # not verified
    fanless: bool = False
    sustained: PositiveShare = PositiveShare(0.6)
    """The part of its speed that a fanless machine keeps when it is hot."""


class Attachment(_Table, frozen=True):
    """One of a node's interfaces. None: as the medium says. On Wi-Fi the rate is the station's PHY rate."""

    medium: str
    rate_bps: BitRate | None = None
    latency_s: Seconds | None = None


class Node(_Table, frozen=True):
    """One machine. In a file, `count = 3` makes three: name-1, name-2 and name-3."""

    name: Name
    machine: str | Machine
    home: str = ""
    """Where it stands; left out, it is the home of its media."""
    links: tuple[Attachment, ...] = ()
    count: Annotated[int, Meta(ge=1, le=4096)] = 1


class Tcp(_Table, frozen=True):
    """How the modelled TCP behaves, on every host.

    The default loss model is "bbr" (capacity × (1 − loss)), the only one under which the loss and the
    throughput that are measured on Wi-Fi hold together: "mathis" caps a stream at 0.1 Gb/s there."""

    window_bytes: PositiveBytes = PositiveBytes(4 << 20)
    slow_start: bool = True
    initial_window_segments: Count = 10
    ack_share: Share = Share(0.03)
    """Part of a stream's rate that its acknowledgements take of the way back."""
    restart_after_idle: bool = False
    loss_model: Literal["mathis", "cubic", "bbr", "none"] = "bbr"
    headers: bool = True
    """Goodput is rate × (mtu − header) / (mtu + framing)."""
    header_bytes: Bytes = Bytes(52)
    framing_bytes: Bytes = Bytes(38)
    send_buffer_bytes: PositiveBytes = PositiveBytes(4 << 20)


class _Fault(_Table, frozen=True, tag_field="kind"):
    at_s: Seconds


class Crash(_Fault, frozen=True, tag="crash"):
    """The node is gone; `clean`: its connections are reset, otherwise they fall silent."""

    node: str
    clean: bool = False


class Pause(_Fault, frozen=True, tag="pause"):
    """The node is alive and does nothing."""

    node: str
    duration_s: PositiveSeconds


class Partition(_Fault, frozen=True, tag="partition"):
    """Nothing passes between the two sides; `oneway`: nothing from the first to the second."""

    sides: tuple[tuple[str, ...], tuple[str, ...]]
    duration_s: PositiveSeconds
    oneway: bool = False

    def __post_init__(self) -> None:
        if not all(self.sides) or any(node in self.sides[1] for node in self.sides[0]):
            raise UsageError("the two sides of a partition need nodes, and no node can be on both")


class LinkChange(_Fault, frozen=True, tag="link_change"):
    """A medium, or one node's attachment to it, gets other properties."""

    medium: str
    node: str | None = None
    rate_bps: BitRate | None = None
    latency_s: Seconds | None = None
    loss: Share | None = None
    duration_s: PositiveSeconds | None = None
    """None: for good."""

    def __post_init__(self) -> None:
        if self.rate_bps is None and self.latency_s is None and self.loss is None:
            raise UsageError("a link_change needs at least one of rate, latency and loss")


class Reset(_Fault, frozen=True, tag="reset"):
    """The connections between two nodes are reset; `mid_frame`: when part of a frame has arrived."""

    between: tuple[str, str]
    mid_frame: bool = True


class ClockJump(_Fault, frozen=True, tag="clock_jump"):
    """The node's clock is set forwards or backwards."""

    node: str
    by_s: SignedSeconds


class Throttle(_Fault, frozen=True, tag="throttle"):
    """The node computes at a part of its speed."""

    node: str
    factor: PositiveShare
    duration_s: PositiveSeconds


class Job(_Table, frozen=True):
    """What the nodes do together."""

    operation: Literal[
        "all_reduce",
        "reduce",
        "broadcast",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "gather",
        "scatter",
        "barrier",
    ] = "all_reduce"
    algorithm: str = "auto"
    size_bytes: Bytes = Bytes(16 << 20)
    dtype: Literal["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64"] = "float32"
    payload: Literal["data", "phantom"] = "data"
    repeat: Count = 3
    compute: Flops | None = None
    """Work that every node does before each repeat."""
    timeout_s: PositiveSeconds = PositiveSeconds(60)


AnyMedium: TypeAlias = Ethernet | Wifi | Thunderbolt
AnyFault: TypeAlias = Crash | Pause | Partition | LinkChange | Reset | ClockJump | Throttle


class Scenario(_Table, frozen=True):
    """The root of the tree."""

    name: Name
    nodes: Annotated[tuple[Node, ...], Meta(min_length=1)] = field(name="node")
    description: str = ""
    seed: int = 1
    effects: Literal["all", "ideal"] = "all"
    """With "ideal" only latency and bandwidth are left: see `idealised`."""
    media: tuple[AnyMedium, ...] = field(name="medium", default=())
    wan: tuple[Wan, ...] = ()
    tcp: Tcp = Tcp()
    faults: tuple[AnyFault, ...] = field(name="fault", default=())
    job: Job = Job()


def shipped_scenarios() -> dict[str, Path]:
    """The scenarios that come with hcsim, by name."""
    return {path.stem: path for path in sorted(_SCENARIOS.glob("*.toml"))}


def load_scenario(where: str | Path) -> Scenario:
    """Read a scenario from a file, or a shipped one by its name."""
    shipped = shipped_scenarios()
    path = shipped.get(str(where), Path(where))
    try:
        return parse_scenario(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        hint = did_you_mean(str(where), shipped)
        raise ConfigError(f"{where}: no such file{hint}; shipped scenarios: {', '.join(shipped)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def parse_scenario(text: str, source: str) -> Scenario:
    """Read a scenario from TOML; `source` names it in errors."""
    try:
        raw = msgspec.toml.decode(text)
        _spell_out(raw)
        scenario = _complete(msgspec.convert(raw, Scenario, dec_hook=decode_quantity))
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {explain(error, raw, Scenario)}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{source}: this is not TOML: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    return idealised(scenario) if scenario.effects == "ideal" else scenario


def idealised(scenario: Scenario) -> Scenario:
    """The same with latency and bandwidth as the only effects, for comparison with closed forms.

    Faults stay: they are an explicit list."""
    quiet = {"jitter_s": Seconds(0), "loss": Share(0)}
    media = tuple(
        replace(medium, **quiet, **({"gate": False} if isinstance(medium, Wifi) else {}))
        if not isinstance(medium, Thunderbolt) else medium
        for medium in scenario.media
    )  # fmt: skip
    tcp = replace(
        scenario.tcp, window_bytes=PositiveBytes(1 << 60), slow_start=False, ack_share=Share(0),
        restart_after_idle=False, loss_model="none", headers=False,
    )  # fmt: skip
    wan = tuple(replace(line, **quiet, buffer_bytes=None) for line in scenario.wan)
    nodes = tuple(replace(node, machine="ideal") for node in scenario.nodes)
    return replace(scenario, effects="ideal", media=media, wan=wan, tcp=tcp, nodes=nodes)


def _tables(parent: dict[str, Any], key: str) -> list[dict[str, Any]]:
    found = parent.get(key)
    return [table for table in found if isinstance(table, dict)] if isinstance(found, list) else []


def _spell_out(raw: dict[str, Any]) -> None:
    """Replace shorthands by what they stand for; what is malformed is left for the decoder to refuse."""
    for node in _tables(raw, "node"):
        if isinstance(links := node.get("links"), list):
            node["links"] = [{"medium": link} if isinstance(link, str) else link for link in links]
    for medium in _tables(raw, "medium"):
        if medium.get("kind") == "wifi":
            # An unknown standard gets some figures too, so that the decoder complains about it and not about them.
            figures = _STANDARDS.get(str(medium.get("standard")), _STANDARDS["wifi6"])
            medium.update({key: value for key, value in figures.items() if key not in medium})
        for cable in _tables(medium, "cable"):
            if "forward" in cable:
                cable.setdefault("backward", cable["forward"])


def _complete(scenario: Scenario) -> Scenario:
    """Check what needs more than one table; give each node its copies, its home and its cables."""
    media = {medium.name: medium for medium in scenario.media}
    _refuse_twice("medium", [medium.name for medium in scenario.media])
    placed = [_place(node, f"node[{i}]", media) for i, node in enumerate(scenario.nodes)]
    copies = [
        replace(node, name=f"{node.name}-{i}", count=1) if node.count > 1 else node
        for node in placed for i in range(1, node.count + 1)
    ]  # fmt: skip
    names = [node.name for node in copies]
    _refuse_twice("node", names)
    for i, medium in enumerate(scenario.media):
        for j, cable in enumerate(medium.cables if isinstance(medium, Thunderbolt) else ()):
            _check_pair(f"medium[{i}].cable[{j}].between", cable.between, names)
    nodes = tuple(_plug_in(node, scenario.media) for node in copies)
    homes = list(dict.fromkeys(m.home for m in scenario.media if not isinstance(m, Thunderbolt)))
    _refuse_twice("wan", [line.home for line in scenario.wan])
    for i, line in enumerate(scenario.wan):
        _check_known(f"wan[{i}].home", line.home, homes, "home with a medium")
    attached = {node.name: [link.medium for link in node.links] for node in nodes}
    for i, fault in enumerate(scenario.faults):
        _check_fault(f"fault[{i}]", fault, attached, media)
    complete = replace(scenario, nodes=nodes)
    _check_routes(complete)
    return complete


def _refuse_twice(what: str, names: list[str]) -> None:
    if len(names) != len(counts := Counter(names)):
        raise ConfigError(f'{what}: "{counts.most_common(1)[0][0]}" is there twice; each can be there once')


def _check_known(path: str, name: str, known: Collection[str], what: str) -> None:
    if name not in known:
        valid = ", ".join(known) or "none"
        raise ConfigError(f'{path} = "{name}": there is no such {what}{did_you_mean(name, known)}; known: {valid}')


def _place(node: Node, path: str, media: dict[str, AnyMedium]) -> Node:
    """The node with its home, which must be that of its media."""
    homes: list[str] = [node.home] if node.home else []
    for i, link in enumerate(node.links):
        _check_known(f"{path}.links[{i}]", link.medium, media, "medium")
        medium = media[link.medium]
        if not isinstance(medium, Thunderbolt):
            homes.append(medium.home)
        if homes and homes[-1] != homes[0]:
            raise ConfigError(f'{path}.links[{i}]: "{link.medium}" is in {homes[-1]}, but "{node.name}" in {homes[0]}')
    _refuse_twice(f"{path}.links", [link.medium for link in node.links])
    return replace(node, home=homes[0] if homes else "home")


def _plug_in(node: Node, media: tuple[AnyMedium, ...]) -> Node:
    """The node attached to each Thunderbolt network that has a cable to it."""
    linked = [link.medium for link in node.links]
    plugged = list(node.links)
    for medium in media:
        if isinstance(medium, Thunderbolt):
            cabled = any(node.name in cable.between for cable in medium.cables)
            if cabled and medium.name not in linked:
                plugged.append(Attachment(medium.name))
            if medium.name in linked and not cabled:
                raise ConfigError(f'node "{node.name}": no cable of "{medium.name}" goes to it')
    return replace(node, links=tuple(plugged))


def _check_pair(path: str, pair: tuple[str, str], names: Collection[str]) -> None:
    for name in pair:
        _check_known(path, name, names, "node")
    if pair[0] == pair[1]:
        raise ConfigError(f'{path}: "{pair[0]}" is there twice; two different nodes are needed')


def _check_fault(path: str, fault: AnyFault, attached: dict[str, list[str]], media: dict[str, AnyMedium]) -> None:
    if isinstance(fault, Reset):
        _check_pair(f"{path}.between", fault.between, attached)
    elif isinstance(fault, Partition):
        for name in fault.sides[0] + fault.sides[1]:
            _check_known(f"{path}.sides", name, attached, "node")
    elif fault.node is not None:
        _check_known(f"{path}.node", fault.node, attached, "node")
    if isinstance(fault, LinkChange):
        _check_known(f"{path}.medium", fault.medium, media, "medium")
        if fault.node is not None:
            _check_known(f"{path}.medium", fault.medium, attached[fault.node], f"link of {fault.node}")


def _check_routes(scenario: Scenario) -> None:
    """Every two nodes need a network that both are on; hosts forward within Thunderbolt only."""
    networks: dict[tuple[str, ...], str] = {}
    for node in scenario.nodes:
        networks.setdefault(_networks_of(node, scenario), node.name)
    if len(scenario.nodes) > 1 and () in networks:
        media = ", ".join(medium.name for medium in scenario.media) or "none"
        raise ConfigError(f'node "{networks[()]}" has no links; known media: {media}')
    for mine, name in networks.items():
        for theirs, other in networks.items():
            if mine != theirs and not any(network in theirs for network in mine):
                raise ConfigError(
                    f'node: there is no route between "{name}" and "{other}": they need a common medium, '
                    "media of one home, or a [[wan]] line for each home"
                )


def _networks_of(node: Node, scenario: Scenario) -> tuple[str, ...]:
    """The separate networks that a node is on: its home's or the internet, and islands of cables."""
    online = any(line.home == node.home for line in scenario.wan)
    networks = []
    media = {medium.name: medium for medium in scenario.media}
    for link in node.links:
        medium = media[link.medium]
        if isinstance(medium, Thunderbolt):
            networks.append(f"{medium.name} of {_island(medium, node.name)[0]}")
        else:
            networks.append("internet" if online else f"home {medium.home}")
    return tuple(sorted(networks))


def _island(medium: Thunderbolt, node: str) -> list[str]:
    """All nodes that cables join to this one, sorted."""
    island = [node]
    for member in island:  # grows while it is read
        for a, b in (cable.between for cable in medium.cables):
            if member in (a, b):
                island.extend(end for end in (a, b) if end not in island)
    return sorted(island)
