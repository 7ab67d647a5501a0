from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hcsim.config import (
    Attachment,
    LinkChange,
    Machine,
    Partition,
    Scenario,
    Thunderbolt,
    Wifi,
    idealised,
    load_scenario,
    parse_scenario,
    shipped_scenarios,
)
from hcsim.config.scenario import first_nodes
from hcsim.errors import ConfigError

HOME = """
name = "home"
[[medium]]
kind = "ethernet"
name = "switch"
rate = "1 Gb/s"
[[medium]]
kind = "wifi"
name = "air"
[[node]]
name = "a"
machine = "M1"
links = ["switch"]
[[node]]
name = "b"
machine = { name = "tower", peak = "1 TFLOPS", memory = "50 GB/s" }
links = [{ medium = "air", rate = "433 Mb/s" }]
"""
DESK = """
name = "desk"
[[medium]]
kind = "thunderbolt"
name = "tb"
[[medium.cable]]
between = ["m-1", "m-2"]
forward = "16 Gb/s"
[[medium.cable]]
between = ["m-2", "m-3"]
forward = "16 Gb/s"
backward = "5 Gb/s"
[[node]]
name = "m"
machine = "M1"
count = 3
"""
WAN = '[[wan]]\nhome = "{}"\nup = "40 Mb/s"\ndown = "250 Mb/s"\nlatency = "12 ms"\n'


def parse(text: str) -> Scenario:
    return parse_scenario(text, "t.toml")


def complaint(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    return str(caught.value)


def changed(old: str, new: str, text: str = HOME) -> str:
    assert old in text
    return text.replace(old, new, 1)


def test_a_scenario_is_read_with_its_units_and_defaults() -> None:
    scenario = parse(HOME)
    switch, air = scenario.media
    assert (switch.name, switch.rate_bps, switch.latency_s, switch.mtu) == ("switch", 1e9, 0.0001, 1500)
    assert isinstance(air, Wifi)
    assert (air.phy_rate_bps, air.latency_s, air.jitter_s, air.loss) == (1.2e9, 0.0012, 0.001, 0.0012)
    assert scenario.nodes[0].links == (Attachment("switch"),)
    assert scenario.nodes[1].links == (Attachment("air", rate_bps=433e6),)
    assert scenario.nodes[1].machine == Machine("tower", 1e12, 5e10)
    assert (scenario.seed, scenario.tcp.window_bytes, scenario.job.size_bytes) == (1, 4 << 20, 16 << 20)


def test_a_wifi_standard_gives_what_the_file_leaves_out() -> None:
    air = parse(changed('name = "air"', 'name = "air"\nstandard = "wifi5"\nlatency = "9 ms"')).media[1]
    assert isinstance(air, Wifi)
    assert (air.phy_rate_bps, air.latency_s, air.jitter_s) == (866e6, 0.009, 0.001)


def test_copies_are_numbered_and_cables_attach_their_nodes() -> None:
    scenario = parse(DESK)
    assert [node.name for node in scenario.nodes] == ["m-1", "m-2", "m-3"]
    assert all(node.links == (Attachment("tb"),) and node.count == 1 for node in scenario.nodes)
    (desk,) = scenario.media
    assert isinstance(desk, Thunderbolt)
    assert [cable.backward_bps for cable in desk.cables] == [16e9, 5e9]


def test_a_node_stands_in_the_home_of_its_media() -> None:
    scenario = load_scenario("two-homes-wan")
    assert [node.home for node in scenario.nodes] == ["anna", "anna", "ben", "ben"]


def test_an_ideal_scenario_keeps_latency_and_bandwidth_alone() -> None:
    text = (
        changed('name = "home"', 'name = "home"\neffects = "ideal"')
        + WAN.format("home")
        + 'loss = 0.01\nbuffer = "1 MiB"'
    )
    scenario = parse(text)
    switch, air = scenario.media
    assert isinstance(air, Wifi)
    assert (air.jitter_s, air.loss, air.gate) == (0, 0, False)
    assert (air.latency_s, air.phy_rate_bps, switch.rate_bps) == (0.0012, 1.2e9, 1e9)
    assert (scenario.wan[0].loss, scenario.wan[0].buffer_bytes, scenario.wan[0].up_bps) == (0, None, 40e6)
    tcp = scenario.tcp
    assert (tcp.slow_start, tcp.ack_share, tcp.headers, tcp.loss_model) == (False, 0, False, "none")
    assert [node.machine for node in scenario.nodes] == ["ideal", "ideal"]
    assert idealised(scenario) == scenario


@pytest.mark.parametrize("name", shipped_scenarios())
def test_a_shipped_scenario_loads_by_name_and_by_path(name: str) -> None:
    scenario = load_scenario(name)
    assert scenario.name == name
    assert scenario.description
    assert load_scenario(shipped_scenarios()[name]) == scenario


def test_the_scenarios_people_ask_for_are_shipped() -> None:
    sizes = {name: len(load_scenario(name).nodes) for name in shipped_scenarios()}
    assert sizes == {
        "two-macs-wifi": 2, "four-macs-1gbe": 4, "four-macs-faulty": 4,
        "four-macs-churn": 4, "mixed-home": 4, "eight-macs-2.5gbe": 8, "two-homes-wan": 4,
    }  # fmt: skip


def test_every_fault_of_the_showcase_heals() -> None:
    faults = load_scenario("four-macs-faulty").faults
    assert all(fault.duration_s for fault in faults)
    assert any(isinstance(fault, Partition) and fault.oneway for fault in faults)
    assert any(isinstance(fault, LinkChange) for fault in faults)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("rate =", "rat =", "medium[0].rat: unknown key (did you mean rate?); valid: kind, name, rate, home"),
        ('"1 Gb/s"', '"3 MiB"', 'medium[0].rate = "3 MiB": MiB is not a unit of a rate (did you mean MiB/s?)'),
        ('"1 Gb/s"', "nan", "medium[0].rate = NaN: expected text with a unit"),
        ('"1 Gb/s"', '"0 b/s"', "must be more than zero"),
        ('rate = "1 Gb/s"', "", "medium[0]: the key rate is missing"),
        ('"ethernet"', '"x - at `$.y`"', "medium[0].kind = "),
        ('"ethernet"', '"ethernt"', 'medium[0].kind = "ethernt": not known here (did you mean ethernet?); valid: eth'),
        ('kind = "ethernet"', "", "medium[0]: the key kind is missing; valid: ethernet, wifi, thunderbolt"),
        ('name = "air"', 'name = "air"\nstandard = "wifi8"', 'medium[1].standard = "wifi8": not known'),
        ('name = "air"', 'name = "air"\nloss = nan', "medium[1].loss = NaN: expected a number from 0 to 1"),
        ('name = "air"', 'name = "air"\ngate_min = "2 s"', "medium[1]: gate_min (2.0 s) is longer than gate_max"),
        ('name = "air"', 'name = "air"\nmtu = 100', "medium[1].mtu = 100: expected a whole number, at least 576"),
        ('name = "air"', 'name = "air"\ngate_every = "1 ns"', "medium[1]: gate_every (1e-09 s) must be at least"),
        ('name = "air"', 'name = "switch"', 'medium[1].name = "switch": medium[0].name is the same'),
        ('name = "b"', 'name = "a"', 'node[1].name = "a": node[0].name is the same'),
        ('name = "b"', 'name = "b b"', 'node[1].name = "b b": expected a name: letters, digits, dots, dashes'),
        ('name = "b"', 'name = "b\\n"', 'node[1].name = "b\\n"'),
        ('name = "home"', "", "the file: the key name is missing"),
        ('name = "home"', 'name = "home"\nnods = 1', "nods: unknown key (did you mean node?); valid: name, node"),
        ('name = "home"', "name =", "this is not TOML: Invalid value (at line 2"),
        ('["switch"]', '["swich"]', 'node[0].links[0] = "swich": there is no such medium (did you mean switch?)'),
        ('["switch"]', "[]", 'node[0]: "a" has no links; known media: switch, air'),
        ('["switch"]', "[3]", "node[0].links[0] = 3: expected a table"),
        ('["switch"]', '"switch"', 'node[0].links = "switch": expected a list'),
        ('["switch"]', '["switch", "switch"]', 'node[0].links[1] = "switch": node[0].links[0] is the same'),
        ("rate = \"433", "speed = \"433", "node[1].links[0].speed: unknown key; valid: medium, rate, up, down"),
        ("peak =", "peek =", "node[1].machine.peek: unknown key (did you mean peak?)"),
        ('"1 TFLOPS"', '"1 TFLOP"', "node[1].machine.peak"),
        ('machine = "M1"', "machine = 1", "node[0].machine = 1"),
        ('machine = "M1"', 'machine = "m1"', 'node[0].machine = "m1": there is no such machine (did you mean M1'),
        ('machine = "M1"', 'machine = "M1"\ncount = 0', "node[0].count = 0"),
        ('machine = "M1"', 'machine = "M1"\ncount = 1_000_000',
         "node[0].count = 1000000: expected a whole number, at most 4096"),
        ('machine = "M1"', 'machine = "M1"\nhome = "shed"', 'node[0].links[0]: "switch" is in home, but "a" in shed'),
        ('name = "air"', 'name = "air"\nhome = "shed"', 'node[0], node[1]: there is no route between "a" and "b"'),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_place_and_what_would_be_valid(old: str, new: str, says: str) -> None:
    text = complaint(changed(old, new))
    assert text.startswith("t.toml: ")
    assert says in text


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ('kind = "crash"\nnode = "c"', 'fault[0].node = "c": there is no such node; known: a, b'),
        ('kind = "crsh"\nnode = "a"', "did you mean crash?"),
        ('kind = "pause"\nnode = "a"\nduration = "0 s"', "fault[0].duration"),
        ('kind = "partition"\nduration = "1 s"\nsides = [["a"], ["a"]]', "no node can be on both"),
        ('kind = "partition"\nduration = "1 s"\nsides = [["a"], []]', "need nodes"),
        ('kind = "partition"\nduration = "1 s"\nsides = [["a"], ["z"]]', 'fault[0].sides[1][0] = "z"'),
        ('kind = "link_change"\nmedium = "air"', "at least one of rate, latency and loss"),
        ('kind = "link_change"\nmedium = "wire"\nloss = 0.1', 'fault[0].medium = "wire"'),
        ('kind = "link_change"\nmedium = "air"\nnode = "a"\nloss = 0.1', "no such link of a; known: switch"),
        ('kind = "reset"\nbetween = ["a", "a"]', "two different nodes"),
        ('kind = "reset"\nbetween = ["a"]', "fault[0].between: expected a list, of length 2, not 1"),
        ('kind = "throttle"\nnode = "a"\nduration = "1 s"\nfactor = 0', "fault[0].factor = 0"),
        ('kind = "clock_jump"\nnode = "z"\nby = "-3 s"', 'fault[0].node = "z"'),
        ('kind = "clock_drift"\nnode = "a"\nrate = 3.0', "fault[0].rate = 3.0: expected a number, at most 2.0"),
        (
            'kind = "restart"\nnode = "a"\nstate = "new"',
            'fault[0].state = "new": not known here; valid: kept, lost, stale',
        ),
        ('kind = "restart"\nnode = "a"\nas_of = "0 s"', 'as_of is for a restart with state = "stale"'),
        ('kind = "restart"\nnode = "a"\nstate = "stale"\nas_of = "2 s"', "cannot be later than at"),
        ('kind = "restart"\nnode = "a"\nslow = 0.5', "needs both slow (less than 1) and slow_for"),
        ('kind = "lid"\nnode = "z"\nduration = "1 s"', 'fault[0].node = "z"'),
        ('kind = "clog"\nbetween = ["a", "z"]\nduration = "1 s"', 'fault[0].between[1] = "z"'),
        ('kind = "datagrams"\nmedium = "air"\nduration = "1 s"', "one of loss, delay, duplicate and reorder"),
        ('kind = "wifi_gate"\nmedium = "switch"\nduration = "1 s"', "no such Wi-Fi medium; known: air"),
        ('kind = "cable_pulled"\nnode = "b"\nmedium = "air"\nduration = "1 s"', "no such wire of b; known: none"),
        (
            'kind = "cable_pulled"\nnode = "a"\nmedium = "switch"\nto = "b"\nduration = "1 s"',
            'fault[0].to = "b": there is no such end of a Thunderbolt cable',
        ),
        ('kind = "interface_change"\nnode = "a"\nmedium = "air"\nto = "switch"', "no such Ethernet or Wi-Fi link of a"),
        ('kind = "interface_change"\nnode = "a"\nmedium = "switch"\nto = "switch"', "two different media"),
        ('kind = "interface_change"\nnode = "a"\nmedium = "switch"\nto = "wire"', "Ethernet or Wi-Fi medium in home"),
        ('kind = "router_reboot"\nhome = "anna"\nduration = "1 s"', "no such home with a medium; known: home"),
        ('kind = "flipped_bit"\nbetween = ["a", "b"]\nof = "bits"', "valid: any, control, data"),
        ('kind = "wrong_size"\nbetween = ["a", "b"]\nby = "0 B"', "fault[0].by"),
        ('kind = "wrong_size"\nbetween = ["a", "b"]\nby = "1000 TB"', "fault[0]: by (1000000000000000 B) is more than"),
        ('kind = "nan_gradient"\nnode = "a"\nnth = 0', "fault[0].nth = 0"),
        ('kind = "multicast_loss"\nnode = "a"\nshare = 0\nduration = "1 s"', "fault[0].share = 0"),
        ('kind = "copied_identity"\nnode = "a"\nof = "a"', "a node cannot be a copy of itself"),
        ('kind = "copied_identity"\nnode = "a"\nof = "z"', 'fault[0].of = "z"'),
    ],
)
def test_a_fault_that_cannot_happen_is_refused(fault: str, says: str) -> None:
    assert says in complaint(f'{HOME}[[fault]]\nat = "1 s"\n{fault}\n')


@given(st.text("xy`$.[0]- at\n") | st.sampled_from(["x` - at `$.y", "x` - at `$.node[7]"]), st.booleans())
def test_any_unknown_key_is_named_as_it_is_written(key: str, within_node: bool) -> None:
    entry = f"{json.dumps(key)} = 1\n"
    text, path = (HOME + entry, f"node[1].{key}") if within_node else (entry + HOME, key)
    assert complaint(text).startswith(f"t.toml: {path}: unknown key")


def test_every_kind_of_fault_is_read() -> None:
    faults = """
[[fault]]
kind = "crash"
at = "1 s"
node = "a"
[[fault]]
kind = "reset"
at = "1 s"
between = ["a", "b"]
[[fault]]
kind = "clock_jump"
at = "1 s"
node = "a"
by = "-3 s"
[[fault]]
kind = "throttle"
at = "0 s"
node = "b"
factor = "40 %"
duration = "10 s"
[[fault]]
kind = "link_change"
at = "2 s"
medium = "air"
node = "b"
rate = "54 Mb/s"
"""
    crash, reset, jump, throttle, change = parse(HOME + faults).faults
    assert (crash.at_s, crash.clean, reset.between, reset.mid_frame) == (1.0, False, ("a", "b"), True)
    assert (jump.by_s, throttle.factor, throttle.duration_s) == (-3.0, 0.4, 10.0)
    assert (change.rate_bps, change.latency_s, change.duration_s) == (54e6, None, None)


@given(
    st.sampled_from([path.read_text(encoding="utf-8").splitlines() for path in shipped_scenarios().values()]),
    st.integers(min_value=0),
    st.sampled_from(["3", "-1", "nan", "true", '"x"', "[]", "{}", '[["a"]]', '"1 s"', '"1 MiB"', "[[node]]", ""]),
)
def test_any_line_spoilt_gives_a_scenario_or_a_config_error(lines: list[str], place: int, value: str) -> None:
    place %= len(lines)
    key, equals, _ = lines[place].partition("=")
    spoilt = "\n".join([*lines[:place], f"{key if equals else ''}{equals}{value}", *lines[place + 1 :]])
    try:
        answer = parse(spoilt)
    except ConfigError as error:
        answer = str(error)
    assert isinstance(answer, Scenario) or answer.startswith("t.toml: ")


def test_a_wan_line_needs_a_home_and_each_home_has_one() -> None:
    assert 'wan[0].home = "hom": there is no such home' in complaint(HOME + WAN.format("hom"))
    assert 'wan[1].home = "home": wan[0].home is the same' in complaint(HOME + WAN.format("home") * 2)


def test_two_homes_reach_each_other_when_both_have_a_wan_line() -> None:
    apart = changed('name = "air"', 'name = "air"\nhome = "shed"')
    assert "no route" in complaint(apart + WAN.format("home"))
    assert len(parse(apart + WAN.format("home") + WAN.format("shed")).wan) == 2


def test_headers_have_to_leave_room_in_every_packet() -> None:
    tcp = '[tcp]\nheader = "{} B"\n'
    assert parse(HOME + tcp.format(1499)).tcp.header_bytes == 1499
    says = (
        "tcp.header: 1500 B of headers fill the packets of 1500 B that medium[0].mtu says; less than 1500 B would fit"
    )
    assert says in complaint(HOME + tcp.format(1500))
    line = WAN.format("home")
    assert "of 600 B that wan[0].mtu says" in complaint(HOME + tcp.format(600) + line + "mtu = 600")
    assert "that wan[0].tunnel.mtu says" in complaint(HOME + tcp.format(600) + line + "tunnel = { mtu = 600 }")


def test_cables_join_only_the_nodes_they_lead_to() -> None:
    assert 'cable[1].between[1] = "m-4": there is no such node' in complaint(changed('"m-3"', '"m-4"', DESK))
    assert 'node[0].links[0] = "tb": none of its cables goes to "m-3"' in complaint(
        changed('between = ["m-2", "m-3"]', 'between = ["m-2", "m-1"]', DESK) + 'links = ["tb"]\n'
    )
    islands = changed("count = 3", "count = 4", DESK) + '[[medium]]\nkind = "ethernet"\nname = "s"\nrate = "1 Gb/s"\n'
    assert 'node[0]: "m-4" has no links' in complaint(islands)
    separate = changed('["m-2", "m-3"]', '["m-3", "m-4"]', changed("count = 3", "count = 4", DESK))
    assert 'no route between "m-1" and "m-3"' in complaint(separate)


@pytest.mark.parametrize("again", ['["m-1", "m-2"]', '["m-2", "m-1"]'])
def test_two_nodes_are_joined_by_one_cable_of_a_medium(again: str) -> None:
    ring = DESK.replace('["m-2", "m-3"]', '["m-1", "m-3"]')
    cable = f'[[medium.cable]]\nbetween = {again}\nforward = "1 Gb/s"\n'
    says = 'medium[0].cable[2].between: medium[0].cable[0].between joins "m-1" and "m-2" already'
    assert says in complaint(changed("[[node]]", f"{cable}[[node]]", ring))
    parse(changed("[[node]]", f'[[medium]]\nkind = "thunderbolt"\nname = "tb-2"\n{cable}[[node]]', ring))


HOMES = "name = 'homes'\n" + "".join(
    f"[[medium]]\nkind = 'ethernet'\nname = '{home}-switch'\nhome = '{home}'\nrate = '1 Gb/s'\n"
    f"[[wan]]\nhome = '{home}'\nup = '20 Mb/s'\ndown = '100 Mb/s'\nlatency = '10 ms'\n"
    f"[[node]]\nname = '{home}'\nmachine = 'M1'\nlinks = ['{home}-switch']\n"
    for home in ("anna", "ben")
)
"""Two, and their lines."""


def of_line(line: str, figures: str, kind: str = "link_change") -> str:
    return f"{HOMES}[[fault]]\nat = '1 s'\nkind = '{kind}'\nmedium = '{line}'\n{figures}"


@pytest.mark.parametrize("way", ["anna.wan", "anna.wan.up", "ben.wan.down"])
def test_a_fault_can_change_a_line(way: str) -> None:
    assert parse(of_line(way, "rate = '1 Mb/s'")).faults == (LinkChange(1.0, way, rate_bps=1e6),)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (of_line("wan", "rate = '1 Mb/s'"), 'fault[0].medium = "wan": there is no such medium or line'),
        (
            of_line("carl.wan", "loss = 0.1"),
            "known: anna-switch, ben-switch, anna.wan, anna.wan.up, anna.wan.down, ben",
        ),
        (of_line("anna.wan", "node = 'anna'\nloss = 0.1"), "no such link of anna; known: anna-switch"),
        (of_line("anna.wan", ""), "at least one of rate, latency and loss"),
        (of_line("anna.wan", "loss = 2"), "fault[0].loss = 2"),
        (of_line("anna.wan.up", "rate = '1 Mb/s'\nloss = 0.1"), 'latency and loss are those of "anna.wan"'),
        (of_line("anna.wan.down", "latency = '1 s'"), 'latency and loss are those of "anna.wan"'),
        (
            of_line("anna.wan", "loss = 0.1\nduration = '1 s'", "datagrams"),
            "no such medium; known: anna-switch, ben-sw",
        ),
        (of_line("anna.wan", "loss = 0.1").replace("ben-switch", "anna.wan"), "a medium and a line are called so"),
    ],
)
def test_what_a_line_cannot_have_is_refused(text: str, wanted: str) -> None:
    assert wanted in complaint(text)


def test_what_a_thunderbolt_cable_cannot_have_is_refused() -> None:
    change = '[[fault]]\nat = "1 s"\nkind = "link_change"\nmedium = "tb"\n'
    assert 'fault[0].loss: "tb" is Thunderbolt, whose cables lose nothing' in complaint(DESK + change + "loss = 0.1")
    assert "fault[0].loss" in complaint(DESK + change + 'node = "m-1"\nrate = "1 Gb/s"\nloss = 0.1')
    assert parse(DESK + change + 'node = "m-1"\nrate = "1 Gb/s"').faults
    assert parse(DESK + 'links = ["tb"]').nodes[0].links == (Attachment("tb"),)
    for figure in ('rate = "1 Gb/s"', 'latency = "1 ms"', "loss = 0.1"):
        text = complaint(DESK + f'links = [{{ medium = "tb", {figure} }}]')
        assert 'node[0].links[0]: "tb" is Thunderbolt: rate and latency are those of its cables' in text


def test_an_ideal_scenario_forgets_the_losses_of_single_links() -> None:
    lossy = changed('rate = "433 Mb/s"', "loss = 0.1")
    assert parse(lossy).nodes[1].links == (Attachment("air", loss=0.1),)
    assert idealised(parse(lossy)).nodes[1].links == (Attachment("air"),)


def test_a_host_does_not_route_between_thunderbolt_and_ethernet() -> None:
    lan = '[[medium]]\nkind = "ethernet"\nname = "s"\nrate = "1 Gb/s"\n'
    both = '[[node]]\nname = "gate"\nmachine = "M1"\nlinks = ["s"]\n'
    far = '[[node]]\nname = "far"\nmachine = "M1"\nlinks = ["s"]\n'
    text = changed('"m-3"', '"gate"', changed("count = 3", "count = 2", DESK)) + lan + both
    assert [link.medium for link in parse(text).nodes[2].links] == ["s", "tb"]
    assert 'no route between "m-1" and "far"' in complaint(text + far)


def test_a_scenario_with_fewer_nodes_has_only_what_can_happen_to_them() -> None:
    nodes = "".join(f'[[node]]\nname = "{name}"\nmachine = "M1"\nlinks = ["switch"]\n' for name in "abcd")
    faults = (
        'kind = "crash"\nnode = "b"',
        'kind = "crash"\nnode = "c"',
        'kind = "reset"\nbetween = ["a", "b"]',
        'kind = "reset"\nbetween = ["a", "d"]',
        'kind = "copied_identity"\nnode = "a"\nof = "d"',
        'kind = "flipped_bit"\nbetween = ["b", "a"]',
        'kind = "link_change"\nmedium = "switch"\nrate = "1 Mb/s"',
        'kind = "partition"\nsides = [["a", "c"], ["b", "d"]]\nduration = "1 s"',
        'kind = "partition"\nsides = [["a", "b"], ["c", "d"]]\nduration = "1 s"',
    )
    medium = '[[medium]]\nkind = "ethernet"\nname = "switch"\nrate = "1 Gb/s"\n'
    text = f'name = "four"\n{medium}{nodes}' + "".join(f'[[fault]]\nat = "1 s"\n{fault}\n' for fault in faults)
    scenario = parse_scenario(text, "four")
    two = first_nodes(scenario, 2)
    assert [node.name for node in two.nodes] == ["a", "b"]
    kept = [scenario.faults[i] for i in (0, 2, 5, 6)]
    assert [*two.faults[:-1]] == kept
    assert isinstance(two.faults[-1], Partition)
    assert two.faults[-1].sides == (("a",), ("b",))
    assert first_nodes(scenario, 4) == scenario


def test_members_talk_and_compute_at_ports_of_their_own() -> None:
    with pytest.raises(ConfigError, match=r"cluster.*discovery_port and gradient_port .* 7000"):
        parse_scenario('name = "x"\n[cluster]\ndiscovery_port = 7000\ngradient_port = 7000\n', "x")


def test_one_node_alone_needs_no_link() -> None:
    assert parse('name = "solo"\n[[node]]\nname = "a"\nmachine = "M1"\n').nodes[0].home == "home"


def test_a_missing_file_is_answered_with_the_shipped_scenarios(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_scenario("two-macs-wify")
    assert "did you mean two-macs-wifi?" in str(caught.value)
    assert all(name in str(caught.value) for name in shipped_scenarios())
    with pytest.raises(ConfigError, match="no such file"):
        load_scenario(tmp_path / "gone.toml")


def test_a_file_that_is_nested_without_end_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="nested too deeply"):
        parse_scenario(f"name = {'[' * 5000}{']' * 5000}", "deep.toml")


def test_a_number_of_thousands_of_digits_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"long\.toml: this is not TOML"):
        parse_scenario(f"seed = {'9' * 5000}", "long.toml")


def test_a_file_that_cannot_be_read_is_a_config_error(tmp_path: Path) -> None:
    noise = tmp_path / "noise.toml"
    noise.write_bytes(b"\xff\xfe\x00")
    for path in (noise, tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_scenario(path)


def test_reading_a_scenario_needs_no_heavy_library() -> None:
    heavy = "import sys, hcsim.config; print([m for m in ('numpy', 'torch', 'simpy', 'pandas') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.strip() == "[]"
